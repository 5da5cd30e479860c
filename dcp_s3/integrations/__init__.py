"""Adapters to frameworks, each importable only with its framework installed."""

from __future__ import annotations

from importlib import metadata

from dcp_s3.process import release, require_torch


def require(package: str, at_least: str, below: str) -> None:
    """Raise ImportError, which says what to install, unless a framework is in a version that its adapter knows."""
    require_torch()
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "not installed"
    if not release(at_least) <= release(found) < release(below):
        wanted = f"{package}>={at_least},<{below}"
        raise ImportError(f"{package} is {found}, and {wanted} is needed. Remedy: pip install '{wanted}'", name=package)
