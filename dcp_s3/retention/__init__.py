"""The catalog of the checkpoints under a root, and the retention policies that decide on them."""
