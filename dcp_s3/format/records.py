"""Shortcuts for what metadata mostly consists of: its tensors, their chunks, and where those lie.

The unpickler takes a third of a microsecond per opcode, and a chunk has about 100. Each pattern here is the run of
opcodes by which pickle writes one object, after the reference to its class; what matches is made at once, with the
same effect, on the memo too, as its opcodes one by one. What does not match is left to the unpickler.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3.format.metadata_globals import CONSTRUCTORS, build_of
from dcp_s3.format.unpickle import Constructor, MalformedPickleError, NoShortcutError, Shortcut
from dcp_s3.torch_private import StorageInfo

# Every opcode has one length, or says it in its first bytes: there is one way only to take a pickle apart. Names are
# those of pickletools.
_GET = rb"(?:h.|j.{4})"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))"  # BININT1, BININT2, BININT, LONG1
# A torch.Size of up to 3 or 64 dimensions: the tuple of the numbers, in a tuple of arguments. REDUCE.
_SIZE_OF = (
    rb"(?:\)|(?:" + _INT + rb"\x85|" + _INT * 2 + rb"\x86|" + _INT * 3 + rb"\x87|\((?:" + _INT + rb"){4,64}t)\x94)"
    rb"\x85\x94R\x94"
)
_SHAPE = rb"(" + _GET + rb"(?:" + _SIZE_OF + rb")?)"
_KEY = rb"(" + _GET + rb")"
_BEGIN = rb"\)\x81\x94}\x94\("  # NEWOBJ of no arguments, then a dict that is its state
_END = rb"ub"
_BOOL = rb"[\x88\x89]"

_INTS = re.compile(_INT, re.DOTALL)
_SIZE_PATTERN = re.compile(_SIZE_OF, re.DOTALL)
_CHUNK = _BEGIN + (_KEY + _SHAPE) * 2 + _END
_PROPERTIES = rb"\)\x81\x94\(" + _GET * 2 + _BOOL + _GET + _BOOL + rb"t\x94b"
_CHUNK_PATTERN = re.compile(_CHUNK, re.DOTALL)
_PROPERTIES_PATTERN = re.compile(_PROPERTIES, re.DOTALL)
# Of one chunk.
_TENSOR_PATTERN = re.compile(
    _BEGIN
    + _KEY
    + _KEY
    + rb"("
    + _PROPERTIES
    + rb")"
    + _KEY
    + _SHAPE
    + _KEY
    + rb"\]\x94"
    + _KEY
    + _CHUNK
    + rb"a"
    + _END,
    re.DOTALL,
)
_INDEX_PATTERN = re.compile(
    _BEGIN + _KEY + _KEY + _KEY + rb"(" + _INT + rb"|N|" + _GET + rb")(?:" + _KEY + _SHAPE + rb")?" + _END, re.DOTALL
)
_NUMBER = rb"(" + _INT + rb")"
# The path, then numbers; and bytes, whose length follows their opcode (SHORT_BINBYTES, BINBYTES).
_INFO_PATTERN = re.compile(
    _BEGIN + _KEY * 2 + (_KEY + _NUMBER) * 2 + (rb"(?:" + _KEY + _NUMBER) * 3 + rb")?" * 3
    + rb"(?:ub|" + _KEY + rb"(C.|B.{4}))",
    re.DOTALL,
)  # fmt: skip


def _constructor(cls: type) -> Constructor:
    module = cls.__module__ if cls is not torch.Size else "torch"
    return CONSTRUCTORS[module, cls.__name__]


_SIZE = _constructor(torch.Size)
_CHUNK_CLASS = _constructor(ChunkStorageMetadata)
_PROPERTIES_CLASS = _constructor(TensorProperties)
_new = object.__new__


class _Referred(dict[bytes, Any]):
    """GET -> what is at its place of the memo, which never changes."""

    def __init__(self, memo: list[Any]) -> None:
        self._memo = memo

    def __missing__(self, token: bytes) -> Any:
        place = int.from_bytes(token[1:], "little")
        if place >= len(self._memo):
            raise NoShortcutError
        self[token] = value = self._memo[place]
        return value


class _Numbers(dict[bytes, int]):
    """Opcodes of a number -> the number; for such as occur often."""

    def __missing__(self, token: bytes) -> int:
        self[token] = value = _read_int(token)
        return value


class _Names(dict[bytes, str]):
    """GET -> the string at its place."""

    def __init__(self, referred: _Referred) -> None:
        self._referred = referred

    def __missing__(self, token: bytes) -> str:
        value = self._referred[token]
        if type(value) is not str:
            raise NoShortcutError
        self[token] = value
        return value


class _Shapes(dict[bytes, tuple[Any, tuple[Any, ...]]]):
    """GET, or opcodes of a torch.Size -> the value, and what is added to the memo.

    Equal sizes are one: they can not be changed.
    """

    def __init__(self, referred: _Referred) -> None:
        self._referred = referred

    def __missing__(self, token: bytes) -> tuple[Any, tuple[Any, ...]]:
        length = 2 if token[0] == 0x68 else 5
        value, added = self._referred[token[:length]], ()
        if len(token) > length:
            if value is not _SIZE:
                raise NoShortcutError
            value, added = _make_size(token[length:])
        self[token] = value, added
        return value, added


def _make_size(opcodes: bytes) -> tuple[torch.Size, tuple[Any, ...]]:
    # The opcode of a tuple of more than three stands before the numbers, and no number begins with it.
    numbers = tuple(map(_read_int, _INTS.findall(opcodes, 1 if opcodes[:1] == b"(" else 0)))
    try:
        size = torch.Size(numbers)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise NoShortcutError from None
    return size, ((numbers, (numbers,), size) if numbers else ((numbers,), size))


def _read_int(token: bytes) -> int:
    op = token[0]
    if op == 0x4B:
        return token[1]
    if op == 0x8A:
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=op == 0x4A)


def make_shortcuts(data: bytes, memo: list[Any]) -> dict[str, Shortcut]:
    """Shortcuts for one pickle, by the names of the constructors.

    Args:
        data: holds the pickle.
        memo: of the unpickler; only ever added to, as long as the shortcuts are used.
    """
    referred = _Referred(memo)
    names, shapes, numbers = _Names(referred), _Shapes(referred), _Numbers()
    properties: dict[bytes, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def make_properties(opcodes: bytes) -> tuple[TensorProperties, tuple[Any, ...]]:
        """The instance and its state; most tensors have the same opcodes."""
        instance = _new(TensorProperties)
        if opcodes not in properties:
            tokens = re.findall(_GET + rb"|" + _BOOL, opcodes[4:-3], re.DOTALL)
            state = tuple(token == b"\x88" if token in (b"\x88", b"\x89") else referred[token] for token in tokens)
            build = build_of(TensorProperties)
            try:
                if build is not None:
                    build(instance, state)
            except MalformedPickleError:
                raise NoShortcutError from None
            properties[opcodes] = state, dict(vars(instance))
        state, attributes = properties[opcodes]
        instance.__dict__.update(attributes)
        return instance, state

    def size(position: int) -> tuple[Any, int]:
        match = _SIZE_PATTERN.match(data, position)
        if match is None:
            raise NoShortcutError
        value, added = _make_size(match[0])
        memo.extend(added)
        return value, match.end()

    def chunk(position: int) -> tuple[Any, int]:
        match = _CHUNK_PATTERN.match(data, position)
        if match is None:
            raise NoShortcutError
        name_1, shape_1, name_2, shape_2 = match.groups()
        value_1, added_1 = shapes[shape_1]
        value_2, added_2 = shapes[shape_2]
        state = {names[name_1]: value_1, names[name_2]: value_2}
        instance = _new(ChunkStorageMetadata)
        instance.__dict__.update(state)
        memo.extend((instance, state, *added_1, *added_2))
        return instance, match.end()

    def tensor(position: int) -> tuple[Any, int]:
        match = _TENSOR_PATTERN.match(data, position)
        if match is None:
            raise NoShortcutError
        name_p, class_p, of_p, name_s, shape, name_c, class_c, name_1, shape_1, name_2, shape_2 = match.groups()
        if referred[class_p] is not _PROPERTIES_CLASS or referred[class_c] is not _CHUNK_CLASS:
            raise NoShortcutError
        value, added = shapes[shape]
        value_1, added_1 = shapes[shape_1]
        value_2, added_2 = shapes[shape_2]
        held, held_state = make_properties(of_p)
        chunk_state = {names[name_1]: value_1, names[name_2]: value_2}
        part = _new(ChunkStorageMetadata)
        chunks = [part]
        state = {names[name_p]: held, names[name_s]: value, names[name_c]: chunks}
        part.__dict__.update(chunk_state)
        instance = _new(TensorStorageMetadata)
        instance.__dict__.update(state)
        memo.extend((instance, state, held, held_state, *added, chunks, part, chunk_state, *added_1, *added_2))
        return instance, match.end()

    def index(position: int) -> tuple[Any, int]:
        match = _INDEX_PATTERN.match(data, position)
        if match is None:
            raise NoShortcutError
        name_1, token_1, name_2, token_2, name_3, shape = match.groups()
        op, value_2 = token_2[0], None
        if op == 0x68 or op == 0x6A:
            value_2 = referred[token_2]
        elif op != 0x4E:
            value_2 = numbers[token_2]
        place = int.from_bytes(token_1[1:], "little")  # of a name: none occurs often
        if place >= len(memo):
            raise NoShortcutError
        state = {names[name_1]: memo[place], names[name_2]: value_2}
        added: tuple[Any, ...] = ()
        if name_3 is not None:
            state[names[name_3]], added = shapes[shape]
        instance = _new(MetadataIndex)
        instance.__dict__.update(state)
        memo.extend((instance, state, *added))
        return instance, match.end()

    def info(position: int) -> tuple[Any, int]:
        match = _INFO_PATTERN.match(data, position)
        if match is None:
            raise NoShortcutError
        (path_name, path, name_1, n_1, name_2, n_2, name_3, n_3, name_4, n_4, name_5, n_5, last, length) = (
            match.groups()
        )
        end = match.end()
        state = {names[path_name]: referred[path], names[name_1]: _read_int(n_1), names[name_2]: numbers[n_2]}
        if n_3 is not None:
            state[names[name_3]] = numbers[n_3]
            if n_4 is not None:
                state[names[name_4]] = _read_int(n_4)
                if n_5 is not None:
                    state[names[name_5]] = numbers[n_5]
        instance = _new(StorageInfo)
        added: tuple[Any, ...] = ()
        if last is not None:
            start = end
            end += int.from_bytes(length[1:], "little")
            if data[end : end + 3] != b"\x94ub":
                raise NoShortcutError
            state[names[last]] = found = data[start:end]
            end += 3
            added = (found,)
        instance.__dict__.update(state)
        memo.extend((instance, state, *added))
        return instance, end

    made: dict[type, Shortcut] = {
        torch.Size: size,
        ChunkStorageMetadata: chunk,
        TensorStorageMetadata: tensor,
        MetadataIndex: index,
        StorageInfo: info,
    }
    return {_constructor(cls).name: shortcut for cls, shortcut in made.items()}
