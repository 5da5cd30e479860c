"""Benchmarks of dcp_s3 and the in-memory S3 server that they, and the tests, run against."""
