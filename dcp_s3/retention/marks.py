"""Small objects beside a checkpoint that say something about it: metrics that come later, and the pin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_s3.retention.inspect import Root
from dcp_s3.settings import SettingsLike


def annotate(url: Root, metrics: Mapping[str, Any], *, settings: SettingsLike = None) -> dict[str, Any]:
    """Add metrics to a committed checkpoint, or replace single ones. Several processes may do so at a time.

    They lie in ``.dcp_s3/metrics.json`` with the id of the save that they belong to: an overwriting save starts anew.

    Args:
        url: of the checkpoint.
        metrics: finite numbers, NaN, text and bools by name. NaN is stored; `KeepBest` takes it for missing.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Returns:
        All metrics that were added to this checkpoint so far.

    Raises:
        MetricsError: a name or a value that can not be stored.
        CheckpointNotFoundError: no committed checkpoint is there.
        InvalidURLError, SettingsError, StorageError
    """
    raise NotImplementedError


def pin(url: Root, reason: str | None = None, *, settings: SettingsLike = None) -> None:
    """Protect a committed checkpoint from every policy until `unpin`. Pinning it again replaces the reason.

    The pin is of the URL: a save that overwrites the checkpoint leaves it there.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        InvalidURLError, SettingsError, StorageError
    """
    raise NotImplementedError


def unpin(url: Root, *, settings: SettingsLike = None) -> bool:
    """Remove the pin; whether there was one.

    Raises:
        InvalidURLError, SettingsError, StorageError
    """
    raise NotImplementedError
