"""Pinned host memory for synchronous saves: tensors on a device are copied through a few blocks, used in turn."""

from __future__ import annotations

import queue
import threading
import weakref

import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.tensor_memory import copy_to_host, view_bytes

BLOCK_SIZE = 16 * 2**20
_MIN_SIZE = 2**20  # bytes; a smaller tensor would leave a block mostly empty


class PinnedRing:
    """Blocks of pinned memory into which tensors are copied piece by piece, while earlier pieces are uploaded.

    A block is free again when nothing refers to its bytes. If none is free, the copy goes to ordinary memory rather
    than wait; the upload's limit on parts in flight bounds that memory.

    Args:
        blocks: most blocks. They are made when first needed, and kept.
        block_size: size of a block in bytes.
        pin: whether to register the blocks with CUDA; otherwise they are ordinary memory.
    """

    def __init__(self, blocks: int, *, block_size: int = BLOCK_SIZE, pin: bool) -> None:
        self.block_size = block_size
        self._pin = pin
        self._missing = blocks
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        self._local = threading.local()

    def copy(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of a small ``tensor`` in row-major order, in host memory. Returns when they are there."""
        block = self._take() if _MIN_SIZE <= tensor.nbytes <= self.block_size else None
        if block is None:
            return copy_to_host(tensor)
        lease = block.lease()
        weakref.finalize(lease, self._free.put, block).atexit = False
        target = torch.frombuffer(lease, dtype=torch.uint8, count=tensor.nbytes)
        del lease
        stream = self._stream(tensor.device)
        if stream is None:
            _copy(tensor, target)
        else:
            stream.wait_stream(torch.accelerator.current_stream(tensor.device))  # on which the planner worked
            with stream:
                _copy(tensor, target)
            stream.synchronize()
        return view_bytes(target)

    def _take(self) -> HostBuffer | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            if not self._missing:
                return None
            self._missing -= 1
        try:
            block = HostBuffer(self.block_size, "private")
        except StagingError:
            with self._lock:
                self._missing += 1
            return None
        if self._pin:
            block.pin()
        return block

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """A stream for each thread and device, so that copies of several threads overlap."""
        if device.type == "cpu":
            return None
        streams: dict[torch.device, torch.Stream] | None = getattr(self._local, "streams", None)
        if streams is None:
            streams = self._local.streams = {}
        if device not in streams:
            streams[device] = torch.Stream(device)
        return streams[device]


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    target.copy_(plain.view(-1).view(torch.uint8), non_blocking=True)


_rings: dict[int, PinnedRing] = {}
_rings_lock = threading.Lock()


def shared_ring(memory: int) -> PinnedRing:
    """This process's ring of about ``memory`` bytes."""
    with _rings_lock:
        if memory not in _rings:
            _rings[memory] = PinnedRing(max(1, memory // BLOCK_SIZE), pin=torch.cuda.is_available())
        return _rings[memory]
