"""Staged states on their way: to the thread of the save, to the checkpoint process, and failures to the other ranks.

`AsyncCheckpointerType.PROCESS` sends the state through a pipe with multiprocessing's pickler. There, and only there, a
`StagedState` is pickled as its structure plus one file descriptor for each of its buffers; the bytes of the tensors are
not pickled.

If `stage` raised on one rank, the others would wait forever for it in the collectives of the save. So with several
ranks it returns a `FailedStaging` instead of a copy. This looks like a state until the save is in its first collective
step. There it raises on its rank, and the save fails on all ranks with the cause.
"""

from __future__ import annotations

import io
import logging
import pickle
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NoReturn
from uuid import uuid4

import torch

from dcp_s3.errors import StagingError
from dcp_s3.failures import portable, without_tracebacks
from dcp_s3.stage.buffers import HostBuffer, map_shared
from dcp_s3.stage.copier import MemoryCopy, run_copies
from dcp_s3.stage.pool import BufferPool
from dcp_s3.stage.turns import PIPE, StagedDict, Turn, take_turn

logger = logging.getLogger(__name__)

MARK = "__dcp_s3_staging_failed__"

_failures: dict[str, BaseException] = {}


class StagedState(StagedDict):
    """A staged state dict, and the memory of its tensors."""

    def __init__(
        self, state: dict[str, Any], tensors: list[torch.Tensor], buffers: list[HostBuffer], pool: BufferPool
    ) -> None:
        super().__init__(state)
        self.buffers = buffers
        self.pool = weakref.ref(pool)
        self._tensors = tensors
        self._released = False

    def begin(self, *, sent: bool = False) -> None:
        """The state is taken up, see `Turn.begin`.

        Raises:
            StagingError: its save has ended.
        """
        if self._released:
            raise StagingError(
                "the save of this staged state has ended, and its memory is free. Remedy: stage the state again; a "
                "copy for several saves comes from S3Stager.stage_now"
            )
        super().begin(sent=sent)

    def release(self) -> None:
        """Take the memory from the tensors. Who keeps the error of a save that failed keeps only their shells; a view
        of one still keeps its memory."""
        self._released = True
        with torch.inference_mode():  # else tensors that were made in it cannot be changed
            for tensor in self._tensors:
                tensor.set_()  # type: ignore[call-overload]
        self.clear()
        self._tensors, self.buffers = [], []

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _BufferPickler(ForkingPickler):
    """Writes a tensor that lies in one of ``buffers`` as a position in it."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[HostBuffer]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._buffers = buffers

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return None
        storage = value.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        for number, buffer in enumerate(self._buffers):
            if buffer.address <= address < buffer.address + buffer.size:
                place = (number, address - buffer.address, size)
                view = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
                return place, view, value.is_conj()
        return None


class _BufferUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[memoryview]) -> None:
        super().__init__(file)
        self._buffers = buffers
        self._storages: dict[tuple[int, int, int], torch.UntypedStorage] = {}

    def persistent_load(self, found: Any) -> torch.Tensor:
        place, (dtype, offset, shape, stride), conjugate = found
        storage = self._storages.get(place)
        if storage is None:
            number, start, size = place
            raw = torch.frombuffer(self._buffers[number], dtype=torch.uint8, count=size, offset=start)
            storage = self._storages[place] = raw.untyped_storage()
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        return torch._conj(tensor) if conjugate else tensor


def _reduce(state: StagedState | FailedStaging) -> tuple[Any, ...]:
    state.begin(sent=True)
    take_turn(PIPE)
    if isinstance(state, FailedStaging):
        forget(state)
        return _rebuild_failed, (state.error,)
    file = io.BytesIO()
    try:
        _BufferPickler(file, state.buffers).dump(dict(state))
        shared = [_share(buffer, state.pool()) for buffer in state.buffers]
        descriptors = [(DupFd(buffer.fileno()), buffer.size) for buffer in shared]
    except Exception as error:  # noqa: BLE001 - it goes to all ranks
        # Raised here, it would reach only this rank, and the others would wait for its checkpoint process.
        failed = FailedStaging(StagingError(f"the state cannot be sent to the checkpoint process: {error!r}"))
        forget(failed)
        return _rebuild_failed, (failed.error,)
    return _rebuild, (file.getvalue(), descriptors)


def _share(buffer: HostBuffer, pool: BufferPool | None) -> HostBuffer:
    """The buffer, or a copy of it if it is private memory, which another process cannot map."""
    if buffer.kind != "private":
        return buffer
    # stage() learns of PROCESS saves only from the first one. From now on its memory is shared from the start.
    if pool is not None:
        pool.shared = True
    shared = HostBuffer(buffer.size, "shared")
    run_copies([MemoryCopy(shared.address, buffer.address, buffer.size)])
    return shared


def _rebuild(structure: bytes, descriptors: Sequence[tuple[Any, int]]) -> dict[str, Any]:
    buffers = [map_shared(descriptor.detach(), size) for descriptor, size in descriptors]
    state = StagedDict(_BufferUnpickler(io.BytesIO(structure), buffers).load())
    Turn().go_with(state)
    return state


class _RaiseWhenSaved:
    """Raises the cause when it is pickled, by any planner or writer."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        logger.error("a state could not be staged: %s: %s", type(self._error).__name__, self._error)
        raise self._error


class FailedStaging(StagedDict):
    """The state returned for a staging that failed."""

    def __init__(self, error: BaseException) -> None:
        if portable(error) is None:
            error = StagingError(f"{type(error).__name__}: {error}")
        without_tracebacks(error)
        self.error = error
        # Unique: a plan that DCP cached for one failure must not be taken for that of another.
        self.name = f"{MARK}{uuid4().hex}"
        super().__init__({self.name: _RaiseWhenSaved(error)})
        _failures[self.name] = error


def forget(state: FailedStaging) -> None:
    """Drop a failure that is raised elsewhere."""
    _failures.pop(state.name, None)


def raise_if_failed(names: Iterable[str]) -> None:
    """Raise the cause if one of ``names``, the FQNs of a plan, marks a failed staging of this process."""
    for name in names:
        if name.startswith(MARK):
            error = _failures.pop(name, None)
            if error is not None:
                raise error


def _rebuild_failed(error: BaseException) -> FailedStaging:
    state = FailedStaging(error)
    Turn().go_with(state)
    return state


ForkingPickler.register(StagedState, _reduce)
ForkingPickler.register(FailedStaging, _reduce)
