"""Versions: of dcp_s3, and of torch, which is checked before anything imports it."""

from __future__ import annotations

import functools
import importlib.util
import re

__version__ = "0.1.0"

TORCH = "2.9"
"""The oldest torch that the tests have run on; pyproject.toml says the same."""

TESTED = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""All that they have run on; README says which tests."""


@functools.cache
def require_torch() -> None:
    """Check the installed torch by its metadata: torch itself, slow to import, is not imported.

    Raises:
        ImportError: torch is missing or too old; the message says what to install.
    """
    from importlib import metadata  # takes as long as the rest of `import dcp_s3`

    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec("torch") is not None:
            return  # built into something that keeps no metadata; it has to be trusted
        raise ImportError(
            f"dcp_s3 needs torch>={TORCH}, and torch is not installed. Remedy: pip install 'torch>={TORCH}' (other "
            "builds, CPU or CUDA: https://pytorch.org/get-started/locally/)",
            name="torch",
        ) from None
    if release(found) < release(TORCH):
        raise ImportError(
            f"dcp_s3 needs torch>={TORCH}, and torch {found} is installed. Remedy: pip install --upgrade "
            f"'torch>={TORCH}' (other builds, CPU or CUDA: https://pytorch.org/get-started/locally/)",
            name="torch",
        )


def is_newer_than_installed(version: str | None) -> bool:
    """Whether a torch that wrote something, by its version, is a later minor than the one here; True if unknown."""
    from importlib import metadata

    try:
        return version is None or release(version)[:2] > release(metadata.version("torch"))[:2]
    except metadata.PackageNotFoundError:
        return True


def is_newer_than_tested(version: str) -> bool:
    """Whether a version of torch is a later minor than all that the tests have run with."""
    return release(version)[:2] > release(TESTED[-1])


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without trailing zeros and what follows them: ``2.6.0rc1`` -> (2, 6)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
