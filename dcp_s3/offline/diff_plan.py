"""What differs between two checkpoints, according to their metadata alone. Pure.

Tensors are compared by the CRC-64/NVME that each chunk has in ``.metadata``. Equal CRCs of as many bytes count as equal
bytes: two states that training has made have the same one with a probability of 2^-64. It is no proof against somebody
who wants them to look alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3.checksum import crc64nvme_linear, shift_crc64nvme
from dcp_s3.collector import collector_paused
from dcp_s3.format.blocks import Blocks, get_blocks, get_crc, get_raw_offset
from dcp_s3.offline.shared_parts import Chunk, Part, find_shared_parts, overlap
from dcp_s3.reprs import one_line
from dcp_s3.torch_private import StorageInfo

Status = Literal["same", "changed", "unknown", "only in A", "only in B"]

_Box = tuple[tuple[int, ...], tuple[int, ...]]
_Infos = Mapping[tuple[int, ...] | None, StorageInfo]


@dataclass(frozen=True)
class EntryDiff:
    """How one entry of the saved states compares.

    >>> found = diff("s3://bucket/run/step-00001000", "s3://bucket/run/step-00002000")
    >>> [(entry.fqn, entry.status) for entry in found.entries]
    [('weight', 'same'), ('step', 'changed')]
    """

    fqn: str
    """FQN (fully qualified name) of the entry."""
    kind: str
    """``tensor``, or ``bytes`` for any other object; of A if they differ."""
    status: Status
    """``unknown``: the checksums that are stored do not tell."""
    what: str = ""
    """What changed (``shape``, ``dtype``, ``kind``: old -> new; ``values``; ``bytes`` of an object, whose value may be
    equal), or why it is not known. Empty if nothing did."""
    size: int = 0
    """Bytes of the values of a tensor, or of the stored object; in A, or in B where only that has it."""

    def __repr__(self) -> str:
        return one_line("EntryDiff", repr(self.fqn), self.status, what=self.what or None)


def compare(a: Metadata, b: Metadata, wanted: Callable[[str], bool] = lambda _: True) -> list[EntryDiff]:
    """Compare two checkpoints.

    A tensor is ``same`` if all of its bytes are shown to be, and ``changed`` if some are shown not to be, or if its
    shape or dtype is another. Chunks may be cut differently, see `find_shared_parts`. An object is ``changed`` if its
    stored bytes are not the same.

    Args:
        a: metadata of one checkpoint.
        b: metadata of the other.
        wanted: tells which names to compare.

    Returns:
        The entries in the order of ``a``, then those that only ``b`` has.
    """
    with collector_paused():
        infos_a, infos_b = _infos_by_name(a), _infos_by_name(b)
        found = []
        for fqn, saved in a.state_dict_metadata.items():
            if not wanted(fqn):
                continue
            other, infos = b.state_dict_metadata.get(fqn), infos_a.get(fqn, {})
            size = _size_of(saved, infos)
            if other is None:
                found.append(EntryDiff(fqn, _kind(saved), "only in A", size=size))
                continue
            status, what = _compare_entries(saved, other, infos, infos_b.get(fqn, {}))
            found.append(EntryDiff(fqn, _kind(saved), status, what, size))
        for fqn, saved in b.state_dict_metadata.items():
            if fqn not in a.state_dict_metadata and wanted(fqn):
                found.append(EntryDiff(fqn, _kind(saved), "only in B", size=_size_of(saved, infos_b.get(fqn, {}))))
        return found


def _infos_by_name(metadata: Metadata) -> dict[str, dict[tuple[int, ...] | None, StorageInfo]]:
    """Where the items lie: by name, then by offsets."""
    found: dict[str, dict[tuple[int, ...] | None, StorageInfo]] = {}
    for index, info in (metadata.storage_data or {}).items():
        infos = found.get(index.fqn)
        if infos is None:
            infos = found[index.fqn] = {}
        infos[index.offset] = info
    return found


def _kind(saved: Any) -> str:
    return "tensor" if isinstance(saved, TensorStorageMetadata) else "bytes"


def _size_of(saved: Any, infos: _Infos) -> int:
    if isinstance(saved, TensorStorageMetadata):
        return math.prod(saved.size) * saved.properties.dtype.itemsize
    return sum(info.length for info in infos.values())


def _compare_entries(a: Any, b: Any, infos_a: _Infos, infos_b: _Infos) -> tuple[Status, str]:
    if _kind(a) != _kind(b):
        return "changed", f"kind {_kind(a)} -> {_kind(b)}"
    if not isinstance(a, TensorStorageMetadata):
        return _compare_objects(next(iter(infos_a.values()), None), next(iter(infos_b.values()), None))
    changes = []
    if a.size != b.size:
        changes.append(f"shape {_shape(a)} -> {_shape(b)}")
    if a.properties.dtype != b.properties.dtype:
        changes.append(f"dtype {_dtype(a)} -> {_dtype(b)}")
    if changes:
        return "changed", ", ".join(changes)
    return _compare_tensors(a, b, infos_a, infos_b)


def _shape(saved: TensorStorageMetadata) -> str:
    return "x".join(map(str, saved.size)) or "scalar"


def _dtype(saved: TensorStorageMetadata) -> str:
    return str(saved.properties.dtype).removeprefix("torch.")


def _compare_objects(a: StorageInfo | None, b: StorageInfo | None) -> tuple[Status, str]:
    if a is None or b is None:
        return "unknown", "its metadata does not say where it lies"
    if encoding_of(a) != encoding_of(b):
        return "unknown", _ENCODED
    crc_a, crc_b = get_crc(a), get_crc(b)
    if a.length != b.length or (crc_a is not None and crc_b is not None and crc_a != crc_b):
        return ("unknown", _ENCODED) if encoding_of(a) else ("changed", "bytes")
    return ("unknown", _unchecked(crc_a is None, crc_b is None)) if crc_a is None or crc_b is None else ("same", "")


_ENCODED = "it was encoded before it was stored"
_GAPS = "its chunks do not cover it, each element once"


def encoding_of(info: StorageInfo) -> tuple[str, ...]:
    """How an item was encoded before it was stored; empty if it was not."""
    return tuple(getattr(info, "transform_descriptors", None) or ())


def _unchecked(a: bool, b: bool) -> str:
    return f"no checksum in {'A and B' if a and b else 'A' if a else 'B'}"


# --- tensors ----------------------------------------------------------------------------------------


def _compare_tensors(
    a: TensorStorageMetadata, b: TensorStorageMetadata, infos_a: _Infos, infos_b: _Infos
) -> tuple[Status, str]:
    """Compare tensors of one shape and dtype."""
    if 0 in a.size:
        return "same", ""
    itemsize = a.properties.dtype.itemsize
    chunks_a, chunks_b = _chunks(a, infos_a), _chunks(b, infos_b)
    doubt = ""
    left_a: dict[_Box, StorageInfo | None] = {}
    left_b = chunks_b.copy()
    for box, info in chunks_a.items():
        if box not in left_b:
            left_a[box] = info
            continue
        other = left_b.pop(box)
        nbytes = math.prod(box[1]) * itemsize
        equal = _are_equal(info, other, nbytes)
        if equal is False:
            return "changed", "values"
        if equal is None:
            doubt = doubt or _why(info, other, nbytes)
    numel = math.prod(a.size)
    if sum(math.prod(sizes) for _, sizes in chunks_a) < numel:
        return "unknown", _GAPS
    if left_a or left_b:
        for chunks in (chunks_a, chunks_b):
            fit = all(_fits(box, a.size) for box in chunks)
            if not fit or sum(math.prod(sizes) for _, sizes in chunks) != numel or overlap(tuple(chunks)):
                return "unknown", _GAPS
        equal, why = _compare_cuts(left_a, left_b, itemsize)
        if equal is False:
            return "changed", "values"
        doubt = doubt or why
    return ("unknown", doubt) if doubt else ("same", "")


def _chunks(saved: TensorStorageMetadata, infos: _Infos) -> dict[_Box, StorageInfo | None]:
    """The chunks that have elements, and where they lie."""
    found: dict[_Box, StorageInfo | None] = {}
    for chunk in saved.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if 0 not in sizes:
            info = infos.get(offsets)
            if info is None and not any(offsets):
                info = infos.get(None)
            found[offsets, sizes] = info
    return found


def _fits(box: _Box, shape: Sequence[int]) -> bool:
    """Whether a chunk lies in a tensor."""
    offsets, sizes = box
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= first < first + count <= length for first, count, length in zip(offsets, sizes, shape, strict=True)
    )


def _raw_crc(info: StorageInfo | None, nbytes: int) -> int | None:
    """CRC of the elements of a chunk; None if it is not known."""
    if info is None or encoding_of(info):
        return None
    raw_offset = get_raw_offset(info)
    return get_crc(info) if raw_offset is not None and raw_offset + nbytes <= info.length else None


def _are_equal(a: StorageInfo | None, b: StorageInfo | None, nbytes: int) -> bool | None:
    """Whether the elements of two chunks at one place are equal; None if that is not known."""
    raw_a, raw_b = _raw_crc(a, nbytes), _raw_crc(b, nbytes)
    if raw_a is not None and raw_b is not None:
        return raw_a == raw_b
    if a is None or b is None or get_raw_offset(a) is not None or get_raw_offset(b) is not None:
        return None
    # Serialised or encoded: equal bytes are equal elements, but others may be, too.
    whole = get_crc(a)
    same = whole is not None and (whole, a.length, encoding_of(a)) == (get_crc(b), b.length, encoding_of(b))
    return True if same else None


def _why(a: StorageInfo | None, b: StorageInfo | None, nbytes: int) -> str:
    """Why nothing is known of two chunks."""
    without = [info is None or get_crc(info) is None for info in (a, b)]
    return _unchecked(*without) if any(without) else _ENCODED


def _compare_cuts(
    a: Mapping[_Box, StorageInfo | None], b: Mapping[_Box, StorageInfo | None], itemsize: int
) -> tuple[bool | None, str]:
    """Compare chunks that cover the same elements, and are cut differently."""
    side_a, side_b = _Side(a, itemsize), _Side(b, itemsize)
    shared = find_shared_parts(side_a.chunks(), side_b.chunks(), itemsize)
    if not shared.complete and (side_a.has_blocks or side_b.has_blocks):
        shared = find_shared_parts(side_a.chunks(blocks=True), side_b.chunks(blocks=True), itemsize)
    for part in shared.parts:
        if side_a.crc_of(part.a) != side_b.crc_of(part.b):
            return False, ""
    if shared.complete:
        return True, ""
    without = [any(info is None or get_crc(info) is None for info in side.infos) for side in (side_a, side_b)]
    if any(without):
        return None, _unchecked(*without)
    if None in side_a.crcs or None in side_b.crcs:
        return None, _ENCODED
    return None, "its chunks are cut such that their checksums do not combine"


class _Side:
    """The chunks of one checkpoint."""

    def __init__(self, chunks: Mapping[_Box, StorageInfo | None], itemsize: int) -> None:
        self.boxes = list(chunks)
        self.infos = list(chunks.values())
        self.nbytes = [math.prod(sizes) * itemsize for _, sizes in self.boxes]
        self.crcs = [_raw_crc(info, size) for info, size in zip(self.infos, self.nbytes, strict=True)]

    @functools.cached_property
    def _blocks(self) -> list[Blocks | None]:
        """The recorded blocks of each chunk; None if its CRC is not known."""
        return [
            None if crc is None else get_blocks(info, size)
            for info, crc, size in zip(self.infos, self.crcs, self.nbytes, strict=True)
        ]

    @property
    def has_blocks(self) -> bool:
        """Whether some chunk has more than one block."""
        return any(blocks is not None and blocks.crcs for blocks in self._blocks)

    def chunks(self, *, blocks: bool = False) -> tuple[Chunk, ...]:
        """The chunks, each as one block or with the blocks that are recorded."""
        sizes: list[int | None] = [
            None if crc is None else size for crc, size in zip(self.crcs, self.nbytes, strict=True)
        ]
        if blocks:
            sizes = [None if found is None else found.size for found in self._blocks]
        return tuple(Chunk(*box, size) for box, size in zip(self.boxes, sizes, strict=True))

    def crc_of(self, parts: Sequence[Part]) -> int:
        """The common CRC of some parts."""
        total = 0
        for number, start, stop, shift in parts:
            crc = self.crcs[number] or 0
            if stop - start != self.nbytes[number] and (blocks := self._blocks[number]) is not None:
                crc = blocks.crc_between(start, stop, self.nbytes[number])
            total ^= shift_crc64nvme(crc64nvme_linear(crc, stop - start), shift)
        return total


# --- names ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renaming:
    """A prefix that all names of one kind have, where those of the other checkpoint have another."""

    a: str
    """Prefix in A; may be empty."""
    b: str
    """Prefix in B; may be empty."""
    names: int
    """Number of names that would be equal."""

    def __str__(self) -> str:
        return f"{self.names} names would be equal if the prefix {self.a!r} in A were {self.b!r}"

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def find_renaming(only_a: Iterable[str], only_b: Iterable[str]) -> Renaming | None:
    """The prefixes by which all names that only one side has would be equal to names that only the other has.

    All of A's are looked for in B's, or all of B's in A's, whichever are fewer. None: there are no such prefixes.
    """
    names_a, names_b = sorted(only_a), sorted(only_b)
    if not names_a or not names_b:
        return None
    if len(names_a) > len(names_b):
        found = find_renaming(names_b, names_a)
        return None if found is None else Renaming(found.b, found.a, found.names)
    first, others = names_a[0].split("."), set(names_b)
    for kept in range(len(first), 0, -1):
        suffix = ".".join(first[-kept:])
        old = names_a[0].removesuffix(suffix)
        if not all(name.startswith(old) for name in names_a):
            continue
        for name in names_b:
            if name != suffix and not name.endswith(f".{suffix}"):
                continue
            new = name.removesuffix(suffix)
            if new != old and all(new + each[len(old) :] in others for each in names_a):
                return Renaming(old, new, len(names_a))
    return None
