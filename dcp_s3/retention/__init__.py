"""What lies under a root: the catalog of its checkpoints, on which retention policies decide."""
