"""The checkpoints of one training run: save, restore, and retention behind the training."""
