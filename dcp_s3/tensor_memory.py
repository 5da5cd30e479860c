"""The bytes of tensors: views without copies, and bounded copies where a view is impossible."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense strided memory of its own dtype (not sparse, quantized or a wrapper)."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are one run of CPU memory in row-major order, with no lazy conjugation or negation."""
    return (
        is_plain(tensor)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor for which `is_direct` holds, as a writable memoryview that keeps the tensor alive.

    Made with ctypes, not numpy: torch works without numpy, and numpy has neither bfloat16 nor float8.
    """
    size = tensor.nbytes
    if size == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


@contextlib.contextmanager
def counted_as_change(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Increment the versions of ``tensors`` on entry and on exit, for a block that writes to their memory.

    Received bytes change memory below autograd and staging, which would not notice. Autograd would compute gradients
    from changed values, and staging would accept a copy that is half old and half new. Views share the version of their
    base; tensors of inference mode have none.
    """
    torch.autograd.graph.increment_version(tensors)
    try:
        yield
    finally:
        torch.autograd.graph.increment_version(tensors)


def synchronize_accelerator(tensors: Iterable[torch.Tensor | None]) -> None:
    """Wait for the accelerator if one of ``tensors`` is on it.

    The threads that copy to and from it have streams of their own. What the caller's stream still has to do with a
    tensor must be done before they begin, and their work must be done before the caller goes on.
    """
    if any(tensor is not None and tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        torch.accelerator.synchronize()


def copy_to_host(tensor: torch.Tensor) -> memoryview:
    """The bytes of any plain tensor in row-major order, in CPU memory."""
    return view_bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous())


def iterate_bytes(
    tensor: torch.Tensor, chunk_size: int, copy: Callable[[torch.Tensor], memoryview] = copy_to_host
) -> Iterator[memoryview]:
    """The bytes of any plain tensor in row-major order.

    A tensor for which `is_direct` holds comes as one view, without a copy. Others (on a device, strided, lazily
    conjugated) are copied with ``copy`` as the caller iterates, about ``chunk_size`` bytes at a time.
    """
    if is_direct(tensor):
        yield view_bytes(tensor)
        return
    if tensor.nbytes <= chunk_size or tensor.dim() == 0:
        yield copy(tensor)
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        step = max(1, chunk_size // tensor.element_size())
        for start in range(0, flat.numel(), step):
            yield copy(flat[start : start + step])
        return
    rows = tensor.shape[0]
    step = max(1, rows * chunk_size // tensor.nbytes)
    for start in range(0, rows, step):
        yield from iterate_bytes(tensor[start] if step == 1 else tensor[start : start + step], chunk_size, copy)
