"""Stores other than S3."""
