"""Measures saves and loads on a user's own bucket, and finds what limits them."""
