"""Staged states go to the checkpoint process as file descriptors; the bytes of the tensors are not pickled.

`AsyncCheckpointerType.PROCESS` sends the state through a pipe with multiprocessing's pickler. There, and only there, a
`StagedState` is pickled as its structure plus one descriptor for each of its buffers.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage.buffers import HostBuffer, map_shared
from dcp_s3.stage.failure import FailedStaging, forget
from dcp_s3.stage.memcpy import MemoryCopy, run_copies
from dcp_s3.stage.pool import BufferPool
from dcp_s3.stage.process_saves import wait_for_pipe
from dcp_s3.stage.release import release_when_over
from dcp_s3.stage.turns import StagedDict


class StagedState(StagedDict):
    """A staged state dict, and the buffers that hold its tensors.

    Args:
        state: the state.
        buffers: buffers of the staged tensors.
        pool: the pool that the buffers came from.
    """

    def __init__(self, state: dict[str, Any], buffers: Sequence[HostBuffer], pool: BufferPool) -> None:
        super().__init__(state)
        self.buffers = list(buffers)
        self.pool = weakref.ref(pool)

    def items(self) -> Any:
        """The items, as of any dict. DCP calls this in the thread of the save, so the end of the save can be
        watched."""
        release_when_over()
        return super().items()

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


def _reduce(state: StagedState) -> tuple[Any, ...]:
    state.begin()
    wait_for_pipe()
    release_when_over()
    file = io.BytesIO()
    try:
        _BufferPickler(file, state.buffers).dump(dict(state))
        shared = [_share(buffer, state.pool()) for buffer in state.buffers]
        descriptors = [(DupFd(buffer.fileno()), buffer.size) for buffer in shared]
    except Exception as error:  # noqa: BLE001 - it goes to all ranks
        # Raised here, it would reach only this rank, and the others would wait for its checkpoint process.
        return _reduce_failed(
            FailedStaging(StagingError(f"the state cannot be sent to the checkpoint process: {error!r}"))
        )
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
    state: dict[str, Any] = _BufferUnpickler(io.BytesIO(structure), buffers).load()
    return state


def _reduce_failed(state: FailedStaging) -> tuple[Any, ...]:
    state.begin()
    wait_for_pipe()
    forget(state)
    return FailedStaging, (state.error,)


ForkingPickler.register(StagedState, _reduce)
ForkingPickler.register(FailedStaging, _reduce_failed)
