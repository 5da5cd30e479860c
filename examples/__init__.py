"""A training script that checkpoints to S3 (`train`), and a demo that kills and restarts it (`demo`)."""
