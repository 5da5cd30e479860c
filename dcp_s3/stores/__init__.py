"""Stores other than S3: memory, a directory, one store in front of another."""
