"""Adapters to frameworks, each importable only with its framework installed."""

from __future__ import annotations

from importlib import metadata

from dcp_s3.versions import release, require_torch


def require(adapter: str, package: str, at_least: str, below: str) -> None:
    """Check that a framework is installed in a version that its adapter knows.

    Raises:
        ImportError: it is missing or of another version; the message says what to install.
    """
    require_torch()
    wanted = f"{package}>={at_least},<{below}"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"dcp_s3.integrations.{adapter} needs {wanted}, which is missing. Remedy: pip install '{wanted}'",
            name=package,
        ) from None
    if not release(at_least) <= release(found) < release(below):
        raise ImportError(
            f"dcp_s3.integrations.{adapter} supports {wanted}, and {found} is installed. "
            f"Remedy: pip install '{wanted}'",
            name=package,
        )
