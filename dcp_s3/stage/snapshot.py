"""A copy of a state: its structure at once, then the bytes of its tensors, from CPU memory or accelerators."""

from __future__ import annotations

import copy
import ctypes
import queue
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from dcp_s3 import torch_private
from dcp_s3.errors import StagingError
from dcp_s3.process import collector_paused
from dcp_s3.stage.memory import BufferPool, HostBuffer, Slot
from dcp_s3.workers import Workers

_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SMALL = 2**20  # bytes; smaller copies are made at once, not shared among threads
_PIECE = 8 * 2**20  # bytes
_MAX_THREADS = 8  # more do not copy faster: they share the memory's bandwidth
_Build = Callable[[Sequence[torch.Tensor]], Any]

_MemoryCopy = tuple[int, int, int]
"""A copy within host memory: address of the target, of the source, and bytes."""


class _Region(NamedTuple):
    """The bytes of a tensor."""

    tensors: list[int]
    """Its number in the snapshot, and those of tensors that are the same view of the same memory (tied weights)."""
    start: int
    """First byte in the storage."""
    size: int
    """Bytes in the copy."""
    gathered: bool = False
    """Whether the tensor is copied element by element into row-major order, because it uses less than seven eighths of
    the bytes that it spans. Otherwise all of these are copied, and the copy has its strides."""


class _Hole:
    """The place of a value in which there are tensors: ``build`` makes it from the staged plain tensors, once."""

    def __init__(self, build: _Build) -> None:
        self._build, self._made = build, None

    def fill(self, staged: Sequence[torch.Tensor]) -> Any:
        if self._made is None:
            self._made = self._build(staged)
        return self._made


class Snapshot:
    """A state without its tensors' bytes, which `copy` adds: what they hold after all work queued so far on the
    caller's streams.

    Args:
        state: containers (dicts, lists, tuples and subclasses) of tensors and other values. The other values are copied
            by `copy.deepcopy`; tensors inside them are copied to CPU memory at once.
        watched: whether `copy` rejects tensors that were changed in place, or freed, since now.
    """

    def __init__(self, state: dict[str, Any], *, watched: bool = False) -> None:
        # The plain tensors, each once, including those inside DTensor, ShardedTensor and other wrappers.
        self._tensors: list[torch.Tensor] = []
        # And the wrappers: a change to a DTensor does not change the version of its local tensor.
        self._watched: list[torch.Tensor] = []
        self._regions: dict[Any, _Region] = {}
        self._holes: dict[int, tuple[_Hole, torch.Tensor]] = {}  # by the tensor's id; kept, so that the id stays unique
        self._places: list[tuple[Any, Any]] = []  # containers and keys of holes, the inner ones first
        self._memo: dict[int, Any] = {}
        self._path: list[Any] = []
        with torch.no_grad(), collector_paused():
            self._structure: Any = self._copy(state)
        self._memo.clear()
        self._holes.clear()
        self._versions = self._read_versions() if watched else None
        devices = sorted({tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}, key=str)
        self._streams = {device: torch.Stream(device) for device in devices}
        self._events = {device: torch.Event(device) for device in devices}
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))
        self._device = torch.accelerator.current_device_index() if devices else None

    # --- the bytes of the tensors -------------------------------------------------------------------------

    def copy(self, pool: BufferPool) -> tuple[dict[str, Any], list[torch.Tensor], list[HostBuffer]]:
        """Copy the tensors to memory from ``pool``: once, in any thread. Returns the copied state, its plain tensors,
        and the buffers that hold them."""
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a new thread would make a context on device 0
        regions = list(self._regions.values())
        slots = pool.acquire([r.size for r in regions], pin=any(device.type == "cuda" for device in self._streams))
        for device, stream in self._streams.items():
            stream.wait_event(self._events[device])
        staged: dict[int, torch.Tensor] = {}
        pending: list[_MemoryCopy] = []
        with torch.no_grad():
            try:
                for region, slot in zip(regions, slots, strict=True):
                    with self._streams.get(self._tensors[region.tensors[0]].device) or nullcontext():
                        staged.update(dict.fromkeys(region.tensors, self._copy_region(region, slot, pending)))
                _run_copies(pending)
            finally:
                for stream in self._streams.values():
                    stream.synchronize()  # also after an error: the buffers go back while copies may be under way
            for number, tensor in enumerate(self._tensors):
                if number not in staged:  # it has no bytes
                    staged[number] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if self._versions is not None and self._versions != self._read_versions():
                raise StagingError(
                    "tensors were changed in place while they were staged in the background, so the copy may mix old "
                    "and new values and is not saved. Remedy: wait for staging_completion of async_save's response "
                    "before the next optimizer step, or use a blocking stager: S3Stager(asynchronous=False)"
                )
            tensors = [staged[number] for number in range(len(self._tensors))]
            for container, key in self._places:
                container[key] = container[key].fill(tensors)
        filled, self._structure = self._structure, None
        self._places.clear()
        return filled, tensors, list({id(slot.buffer): slot.buffer for slot in slots}.values())

    def _copy_region(self, region: _Region, slot: Slot, pending: list[_MemoryCopy]) -> torch.Tensor:
        """Copy one region, enqueue its copy, or add it to ``pending``. Returns its staged tensor."""
        source = self._tensors[region.tensors[0]]
        storage = source.untyped_storage()
        if not region.gathered and storage.nbytes() < region.start + region.size:
            raise StagingError(
                "the memory of a tensor was freed before it was staged. Remedy: wait for staging_completion of "
                "async_save's response before the state is changed or resharded"
            )
        is_host = source.device.type == "cpu"
        if is_host and region.size < _SMALL and region.size == source.nbytes and source.is_contiguous():
            ctypes.memmove(slot.address, source.data_ptr(), region.size)  # by far the most frequent case: kept short
            copied = torch.frombuffer(slot.lease, dtype=source.dtype, count=source.numel(), offset=slot.offset)
            # Not a view: that would keep the memory when `StagedState` releases it.
            return copied.resize_(source.shape)
        target = torch.frombuffer(slot.lease, dtype=torch.uint8, count=region.size, offset=slot.offset)
        strides = source.stride()
        if region.gathered:
            bits = _BITS[source.element_size()]  # torch cannot copy every dtype
            gathered = target.view(bits).view(source.shape)
            gathered.copy_(source.view(bits), non_blocking=True)
            strides = gathered.stride()
        elif is_host:
            pending.append((slot.address, storage.data_ptr() + region.start, region.size))
        else:
            raw = torch.empty(0, dtype=torch.uint8, device=source.device)
            raw.set_(storage, region.start, (region.size,), (1,))
            target.copy_(raw, non_blocking=True)
        return torch.empty(0, dtype=source.dtype).set_(target.untyped_storage(), 0, source.shape, strides)

    def _read_versions(self) -> list[int]:
        """Values that change with the bytes of the tensors, and when a storage is freed or moved."""
        versions = [0 if each.is_inference() else each._version for each in self._watched]
        return [*versions, *(each.untyped_storage().data_ptr() for each in self._tensors)]

    # --- the structure ----------------------------------------------------------------------------------

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMIC:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, (dict, list)):
            copied: Any = copy.copy(value)  # for the attributes of a subclass
            copied.clear()
            self._memo[id(value)] = copied
            if isinstance(value, list):
                copied += [None] * len(value)
            for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
                self._put(copied, key, entry)
            return copied
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            entries, make = [None] * len(value), tuple if kind is tuple else kind._make
            for number, entry in enumerate(value):
                self._put(entries, number, entry)
            return _Hole(lambda _: make(entries)) if _Hole in map(type, entries) else make(entries)
        try:
            if isinstance(value, torch.Tensor):  # the same hole for every occurrence
                if id(value) not in self._holes:
                    self._holes[id(value)] = _Hole(self._build(value)), value
                return self._holes[id(value)][0]
            with _OffloadCopies():
                return copy.deepcopy(value, self._memo)
        except StagingError:
            raise
        except Exception as error:
            name = ".".join(map(str, self._path))
            raise StagingError(
                f"{name!r} is a {kind.__module__}.{kind.__qualname__} that cannot be copied ({error}), so an "
                "asynchronous save of it would not be safe from changes. Remedy: leave it out of the state"
            ) from error

    def _put(self, container: Any, key: Any, value: Any) -> None:
        """Put a copy of an entry of a container in its place."""
        if type(value) not in _ATOMIC:
            self._path.append(key)
            value = self._copy(value)
            self._path.pop()
            if type(value) is _Hole:
                self._places.append((container, key))
        container[key] = value

    def _build(self, tensor: Any) -> _Build:
        if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor: the result of a collective under way
            return self._build(tensor.wait())
        if isinstance(tensor, torch_private.ShardedTensor):
            shards = [self._build(shard.tensor) for shard in tensor.local_shards()]
            return lambda staged: torch_private.rebuild_sharded_tensor(tensor, [build(staged) for build in shards])
        if torch_private.is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            values = {name: getattr(tensor, name) for name in names}
            self._watched.append(tensor)
            inner = {n: self._build(value) for n, value in values.items() if isinstance(value, torch.Tensor)}
            others = {n: value for n, value in values.items() if n not in inner}
            cls, size, stride = type(tensor), tensor.size(), tensor.stride()

            def build(staged: Sequence[torch.Tensor]) -> Any:
                parts = {**others, **{name: make(staged) for name, make in inner.items()}}
                return cls.__tensor_unflatten__(parts, context, size, stride)

            return build
        if not _is_memory(tensor):  # sparse, quantized, nested: copied outside the pool
            apart = tensor if tensor.device.type == "meta" else tensor.detach().to("cpu", copy=True)
            return lambda _: apart
        region, stop = _region(tensor)
        storage = tensor.untyped_storage()
        if region.size and storage.nbytes() < stop:
            name = ".".join(map(str, self._path))
            raise StagingError(
                f"{name!r} (shape {tuple(tensor.shape)}) has no memory: its storage was freed, as FSDP does "
                "outside of its own state_dict. Remedy: take the state with "
                "torch.distributed.checkpoint.state_dict.get_state_dict"
            )
        if tensor.is_conj():
            conjugated = self._build(tensor.conj())
            return lambda staged: conjugated(staged).conj()
        number = len(self._tensors)
        self._tensors.append(tensor.detach())
        self._watched.append(self._tensors[-1])
        if region.size:
            key = (tensor.device, storage.data_ptr(), region.start, tensor.dtype, tensor.shape, tensor.stride())
            self._regions.setdefault(key, region).tensors.append(number)
        return lambda staged: staged[number]


class _OffloadCopies(TorchFunctionMode):
    """Makes `copy.deepcopy` of a tensor on a device return a copy in CPU memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].device.type not in ("cpu", "meta"):
            tensor, memo = args
            memo[id(tensor)] = copied = tensor.detach().cpu()
            return copied
        return func(*args, **(kwargs or {}))


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but strided elements in a storage."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    if tensor.is_quantized or tensor.is_neg() or tensor.is_nested:
        return False
    if type(tensor) in _PLAIN or not tensor.numel():
        return True
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a subclass without memory of its own
        return False


def _region(tensor: torch.Tensor) -> tuple[_Region, int]:
    """What to copy of a strided tensor, and the byte of its storage after the last that it uses."""
    size, nbytes = tensor.element_size(), tensor.nbytes
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous() or not nbytes:
        return _Region([], start, nbytes), start + nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = size * (1 + sum(int(length - 1) * int(stride) for length, stride in steps))
    is_sparse = 8 * nbytes < 7 * reach  # such as columns of a tensor whose others are saved, too
    return _Region([], start, nbytes if is_sparse else reach, gathered=is_sparse), start + reach


def _run_copies(copies: Sequence[_MemoryCopy]) -> None:
    """Carry out ``copies``, which must not overlap. Each thread takes the next piece: torch's own copy splits each
    tensor among its threads, and waits for the slowest of them with each."""
    pieces: queue.SimpleQueue[_MemoryCopy] = queue.SimpleQueue()
    for target, source, size in copies:
        for start in range(0, size, _PIECE):
            pieces.put((target + start, source + start, min(_PIECE, size - start)))

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                ctypes.memmove(*pieces.get_nowait())  # releases the interpreter's lock

    helpers = min(_MAX_THREADS, torch.get_num_threads(), pieces.qsize()) - 1
    if helpers < 1:
        run()
        return
    workers = Workers(helpers, "dcp_s3-copy")
    try:
        futures = [workers.submit(run) for _ in range(helpers)]
        run()
        for future in futures:
            future.result()
    finally:
        workers.close()
