"""A checkpoint as it lies on S3: commit, completeness, metadata, leases."""
