"""Staging: the training-safe copy that an asynchronous save uploads."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from dcp_s3.checkpoint._torch import StateDictStager


class S3Stager(AsyncStager):
    """Copies the state to CPU memory before `dcp.async_save` returns; every call copies into memory of its own.

    torch's DefaultStager keeps its buffers and overwrites them at the next call, also while an upload still
    reads them; here the copy belongs to the save and goes when the save ends. Tensors that share a storage
    share it in the copy too.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` in CPU memory; blocks until it is complete."""
        staged: dict[str, Any] = StateDictStager(pin_memory=False, share_memory=False).stage(state_dict)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` is complete when it returns."""

    def close(self) -> None:
        """Nothing to release: each copy belongs to its save."""

    def __enter__(self) -> S3Stager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
