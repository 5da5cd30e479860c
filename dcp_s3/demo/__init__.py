"""The demo: `run` kills a training run in the middle of a save and restarts it; `train` is the training script."""
