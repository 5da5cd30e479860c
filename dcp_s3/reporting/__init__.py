"""`dcp-s3 report`: a page about the checkpoints under a root."""
