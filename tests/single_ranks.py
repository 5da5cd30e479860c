"""Checkpoints as earlier versions wrote them without collectives: each rank commits one for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import ranks
from dcp_s3.checkpoint.commit_state import SaveIdentity
from dcp_s3.save.save import Save
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL


class _SaveAlone(Save):
    def __init__(
        self, url: CheckpointURL, save_id: str, settings: Settings, *, replicas: Any, counted: Any, step: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(url, save_id, settings, rank=ranks.rank(), **{**options, "overwrite": False})
        self._identity = SaveIdentity(url, save_id, self.rank)
        self._committer._identity = self._identity

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [*results, *([] for _ in range(ranks.world_size() - 1))])


@contextlib.contextmanager
def committing_alone() -> Iterator[None]:
    """Saves without collectives in the body are those of single ranks."""
    with mock.patch("dcp_s3.save.writer.begin_joint_save", _SaveAlone):
        yield
