"""Adapters to frameworks, each importable only with its framework installed."""

from __future__ import annotations

from importlib import metadata

from dcp_s3.process import release, require_torch


def require(package: str, at_least: str, below: str) -> None:
    """Check that a framework is installed in a version that its adapter knows.

    Raises:
        ImportError: it is missing or of another version; the message says what to install.
    """
    require_torch()
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "not installed"
    if not release(at_least) <= release(found) < release(below):
        wanted = f"{package}>={at_least},<{below}"
        raise ImportError(f"{package} is {found}, and {wanted} is needed. Remedy: pip install '{wanted}'", name=package)
