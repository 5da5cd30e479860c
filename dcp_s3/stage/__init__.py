"""Staging: training-safe copies of a state in pooled host memory."""
