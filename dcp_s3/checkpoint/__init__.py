"""A checkpoint as it lies on S3: its directory, metadata, commit, deletion and leases."""
