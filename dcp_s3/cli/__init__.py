"""``dcp-s3``: look at checkpoints on S3 and copy them."""
