"""Checkpoints as earlier versions wrote them without collectives: each rank commits one for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dcp_s3 import ranks
from dcp_s3.save.save import Save, SaveOptions
from dcp_s3.url import CheckpointURL


def _begin(url: CheckpointURL, save_id: str, options: SaveOptions, *_: Any, **__: Any) -> Save:
    return Save(url, save_id, options, rank=ranks.rank(), is_coordinator=False, use_collectives=False)


@contextlib.contextmanager
def committing_alone() -> Iterator[None]:
    """Saves without collectives in the body are those of single ranks."""
    with mock.patch("dcp_s3.save.writer.begin_joint_save", _begin):
        yield
