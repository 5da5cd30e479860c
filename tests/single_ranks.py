"""Checkpoints as earlier versions wrote them without collectives: each rank commits one for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import process
from dcp_s3.checkpoint.commit_state import SaveIdentity
from dcp_s3.save.save import Save, SaveOptions
from dcp_s3.spill.saving import open_for_save
from dcp_s3.url import CheckpointURL


class _SaveAlone(Save):
    def __init__(self, url: CheckpointURL, save_id: str, options: SaveOptions, *_: Any, **__: Any) -> None:
        rank = process.rank()
        super().__init__(url, save_id, options, rank=rank, is_coordinator=True)
        self._identity = SaveIdentity(url, save_id, rank)
        self._base_store, self._committer = open_for_save(
            self._s3, self._identity, self._beginning, rank=rank, overwrite=False, spills=True, on_event=None
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [*results, *([] for _ in range(process.world_size() - 1))])


@contextlib.contextmanager
def committing_alone() -> Iterator[None]:
    """Saves without collectives in the body are those of single ranks."""
    with mock.patch("dcp_s3.save.writer.begin_joint_save", _SaveAlone):
        yield
