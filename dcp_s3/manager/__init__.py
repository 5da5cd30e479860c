"""The checkpoints of one training run: save, restore, and retention in the background."""
