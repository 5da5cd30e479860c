"""How torch.save pickles a tensor: a call of a function of ``torch._utils`` on a storage, which is a persistent id.

It only makes a description of the tensor, and checks that: a tensor must lie within its storage.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from dcp_s3.format.unpickling import Allowed, MalformedPickleError

MAX_COUNT = 2**62
"""Maximum number of elements."""


class _StorageType(NamedTuple):
    """The type of a storage, like ``torch.FloatStorage``: its dtype, or None if it holds mere bytes."""

    dtype: torch.dtype | None


class PickledStorage(NamedTuple):
    """A storage, whose bytes are elsewhere."""

    key: str
    """Name of the storage in its archive."""
    nbytes: int
    """Size in bytes."""
    dtype: torch.dtype | None
    """Dtype of its elements; None if it consists of mere bytes."""


class PickledTensor(NamedTuple):
    """A tensor, or a parameter."""

    storage: PickledStorage
    """Storage that holds its elements."""
    dtype: torch.dtype
    """Dtype of the elements."""
    offset: int
    """Offset of the first element, in elements."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    strides: tuple[int, ...]
    """Strides in elements."""
    is_unusual: bool
    """Whether something must still be done with it: it is a conjugate, for example."""


def load_storage(found: Any) -> PickledStorage:
    """The storage that a persistent id describes.

    Raises:
        MalformedPickleError: it does not describe a storage.
    """
    # ("storage", type, key, location, number of elements), and a view's place in the format before archives.
    if type(found) is not tuple or len(found) not in (5, 6) or found[0] != "storage":
        raise MalformedPickleError("a storage is not described as torch does")
    _, kind, key, location, numel = found[:5]
    if type(kind) is not _StorageType or type(key) is not str or type(location) is not str or not _is_count(numel):
        raise MalformedPickleError("a storage is not described as torch does")
    return PickledStorage(key, numel * (kind.dtype.itemsize if kind.dtype else 1), kind.dtype)


def _make_tensor(*arguments: Any) -> PickledTensor:
    """`_rebuild_tensor_v2`: storage, offset, shape, strides, requires_grad, hooks, and anything unusual."""
    if len(arguments) not in (6, 7) or type(arguments[0]) is not PickledStorage or arguments[0].dtype is None:
        raise MalformedPickleError("a tensor that is not an ordinary one")
    return _check(arguments, arguments[0].dtype, is_unusual=len(arguments) > 6)


def _make_typed_tensor(*arguments: Any) -> PickledTensor:
    """`_rebuild_tensor_v3`: like v2, but with a storage of bytes, and a dtype after the hooks."""
    if (
        len(arguments) not in (7, 8)
        or type(arguments[0]) is not PickledStorage
        or arguments[0].dtype is not None
        or not isinstance(arguments[6], torch.dtype)
    ):
        raise MalformedPickleError("a tensor that is not an ordinary one")
    return _check(arguments, arguments[6], is_unusual=len(arguments) > 7)


def _make_quantized_tensor(*arguments: Any) -> PickledTensor:
    """`_rebuild_qtensor`: storage, offset, shape, strides, the quantizer's parameters, requires_grad, hooks."""
    if len(arguments) != 7 or type(arguments[0]) is not PickledStorage or arguments[0].dtype is None:
        raise MalformedPickleError("a quantized tensor that is not an ordinary one")
    return _check((*arguments[:4], *arguments[5:]), arguments[0].dtype, is_unusual=True)


def _make_bare_tensor(*arguments: Any) -> PickledTensor:
    """`_rebuild_tensor`: storage, offset, shape, strides."""
    if len(arguments) != 4:
        raise MalformedPickleError("a tensor that is not an ordinary one")
    return _make_tensor(*arguments, False, OrderedDict())._replace(is_unusual=True)


def _check(arguments: tuple[Any, ...], dtype: torch.dtype, *, is_unusual: bool) -> PickledTensor:
    storage, offset, shape, strides, requires_grad, hooks = arguments[:6]
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise MalformedPickleError("a tensor without a shape")
    if type(requires_grad) is not bool or type(hooks) is not OrderedDict:
        raise MalformedPickleError("a tensor that is not an ordinary one")
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    end = offset if 0 in shape else offset + last + 1
    if end * dtype.itemsize > storage.nbytes:
        raise MalformedPickleError("a tensor that is larger than its storage")
    return PickledTensor(storage, dtype, offset, tuple(shape), tuple(strides), is_unusual)


def _make_parameter(*arguments: Any) -> PickledTensor:
    """`_rebuild_parameter`: tensor, requires_grad, hooks."""
    if len(arguments) != 3 or type(arguments[0]) is not PickledTensor:
        raise MalformedPickleError("a parameter without a tensor")
    if type(arguments[1]) is not bool or type(arguments[2]) is not OrderedDict:
        raise MalformedPickleError("a parameter that is not an ordinary one")
    return arguments[0]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _are_counts(values: object) -> bool:
    return type(values) in (tuple, torch.Size) and all(map(_is_count, values))  # type: ignore[call-overload]


_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8, "QInt8": torch.qint8, "QInt32": torch.qint32, "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}  # fmt: skip
STORAGE_TYPES: dict[tuple[str, str], Any] = {
    **{
        (module, f"{name}Storage"): _StorageType(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in _STORAGES.items()
    },
    ("torch.storage", "UntypedStorage"): _StorageType(None),
}
"""Stand-ins for the types of storages."""

TENSORS: dict[tuple[str, str], Any] = {
    ("torch._utils", name): Allowed(f"torch._utils.{name}", call)
    for name, call in {
        "_rebuild_tensor_v2": _make_tensor,
        "_rebuild_tensor_v3": _make_typed_tensor,
        "_rebuild_parameter": _make_parameter,
    }.items()
}
"""Stand-ins for the functions that make ordinary tensors."""

UNUSUAL_TENSORS: dict[tuple[str, str], Any] = {
    ("torch._utils", name): Allowed(f"torch._utils.{name}", call)
    for name, call in {"_rebuild_qtensor": _make_quantized_tensor, "_rebuild_tensor": _make_bare_tensor}.items()
}
"""Stand-ins for further functions, which only torch itself may judge."""
