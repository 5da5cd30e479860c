"""The demo: kills a training run in the middle of a save to S3, restarts it elsewhere, checks every bit, cleans up.

`dcp-s3 demo` runs it. `train` is the training script, complete in itself: FSDP2, the optimizer's state, asynchronous
saves, and resuming on any number of ranks.
"""
