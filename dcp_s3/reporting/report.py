"""`report`: writes a page about the checkpoints under a root."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.reporting.data import ReportData, gather
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.parse import parse_policy, policy_from_settings
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.units import parse_duration, parse_size
from dcp_s3.url import URLLike


def report(
    root: URLLike,
    path: str | os.PathLike[str] | None,
    policy: PolicyFunction | str | None = None,
    *,
    grace: float | str | None = None,
    budget: int | str | None = None,
    settings: SettingsLike = None,
    patterns: str | Sequence[str] | None = None,
) -> ReportData:
    """Write one HTML page about the checkpoints under ``root``: timeline, metrics, retention, growth and problems.

    The page needs no network. Nothing in the bucket is changed. It takes as many requests as a dry run of `prune`: two
    listings, and about five small requests for each checkpoint.

    >>> report("s3://bucket/run", None).policy is None
    True

    Args:
        root: the URL above the checkpoints.
        path: file to write; what is there is replaced. None: only gather what it would show.
        policy: policy whose decisions are shown, as an object or in one line (`parse_policy`). None: the setting
            ``retention``; if that is unset, everything that is committed is kept.
        grace: seconds, or text like ``24h``, for which an uncommitted checkpoint counts as a save in progress. None:
            the setting ``retention_grace``.
        budget: bytes, or text like ``10TiB``, that storage should not exceed: the page says when it would.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        patterns: see `CheckpointCatalog`.

    Returns:
        What the page shows.

    Raises:
        ImportError: bokeh is missing; the message says what to install.
        CheckpointNotFoundError: there is nothing under the root. No file was written.
        PolicyError, InvalidURLError, SettingsError
        StorageError: the root could not be looked at.
        OSError: the file could not be written.
    """
    resolved = resolve_settings(settings)
    keep = parse_policy(policy) if isinstance(policy, str) else policy
    keep = policy_from_settings(resolved) if policy is None else keep
    if path is not None:
        require_bokeh()
    snapshot = CheckpointCatalog(root, settings=resolved, patterns=patterns).scan(deep=True)
    if not snapshot.checkpoints and not snapshot.uploads:
        raise CheckpointNotFoundError(
            f"there are no checkpoints under {snapshot.root}. Remedy: give the URL above the checkpoints, for example "
            "s3://bucket/run for s3://bucket/run/step-1000",
            url=snapshot.root,
        )
    found = gather(
        snapshot,
        keep,
        grace=resolved.retention_grace if grace is None else parse_duration(grace),
        budget=None if budget is None else parse_size(budget),
    )
    if path is not None:
        from dcp_s3.reporting.page import render  # not before: it imports bokeh

        Path(path).write_text(render(found), encoding="utf-8")
    return found


def require_bokeh() -> None:
    """Check that the library that draws the charts is installed.

    Raises:
        ImportError: it is missing; the message says what to install.
    """
    if util.find_spec("bokeh") is None:
        raise ImportError(
            "a report is drawn with bokeh, which is missing. Remedy: pip install 'bokeh>=3.9,<4'", name="bokeh"
        )
