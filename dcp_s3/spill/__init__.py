"""The local-disk tier: objects that wait on disk for S3."""
