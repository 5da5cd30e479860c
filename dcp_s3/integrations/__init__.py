"""Adapters to frameworks, each importable only with its framework installed."""
