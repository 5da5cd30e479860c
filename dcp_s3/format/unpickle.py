"""An unpickler for data that anybody may have written: plain values, and what a table of constructors makes.

The standard library's unpickler is no sandbox, even with an allow-list of globals: it sets attributes of the classes
that a pickle names, copies and hashes without limit, and allocates a memo as large as five bytes ask for. This one
reads the opcodes of protocols 2 to 5. Classes and functions are never on its stack, only `Constructor`s; what it
builds is bounded by the length of the pickle.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

# What may be a key of a dict or a member of a set, beyond strings: hashing the same tuple in a tuple in a tuple takes
# exponential time, and numbers, or tuples of them, can be chosen to have one hash.
_KEY_NODES = 1000
_KEY_INT = 2**60
_EQUAL_HASHES = 100


class MalformedPickleError(Exception):
    """Truncated, damaged, not a pickle, or more than data of this kind needs."""


class UnsafeGlobalError(Exception):
    """A pickle names a global that is not allowed. ``args[0]`` is its name."""


@dataclass(frozen=True)
class Constructor:
    """What stands on the stack for a class or function.

    Attributes:
        name: for messages.
        call: makes the value of a REDUCE from the argument tuple and `Limits`; None where it must not be called.
        new: makes an instance, whose state may follow, from the argument tuple; None if there are none.
    """

    name: str
    call: Callable[[tuple[Any, ...], Limits], Any] | None = None
    new: Callable[[tuple[Any, ...]], Any] | None = None


class NoShortcutError(Exception):
    """The opcodes are not those of a `Shortcut`."""


Shortcut = Callable[[int], tuple[Any, int]]
"""Makes at once what a run of opcodes behind a reference to a `Constructor` makes, given where the run begins: the
value that takes the constructor's place on the stack, and where the run ends. Adds to the memo what the opcodes would.
Raises `NoShortcutError` and changes nothing if other opcodes are there."""


class Limits:
    """How many elements may still be copied: usually as many as a pickle has bytes."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._by_hash: dict[int, object] = {}
        self._equal_hashes = 0

    def spend(self, count: int) -> None:
        """Raises `MalformedPickleError` when more is copied than the pickle has bytes."""
        self._left -= count
        if self._left < 0:
            raise MalformedPickleError("it copies its values again and again")

    def check_key(self, key: Any) -> None:
        """Raises `MalformedPickleError` if ``key`` is nothing that should be hashed."""
        kind: Any = type(key)
        if kind is str:
            return
        if _is_record(kind):
            _check_fields(key)
        else:
            self._check_parts(key)
        first = self._by_hash.setdefault(hash(key), key)
        if first is not key and first != key:
            self._equal_hashes += 1
            if self._equal_hashes > _EQUAL_HASHES:
                raise MalformedPickleError("keys that were chosen to have equal hashes")

    def _check_parts(self, key: Any) -> None:
        nodes, level = 1, [key]
        while level:
            deeper: list[Any] = []
            for part in level:
                if isinstance(part, tuple):
                    nodes += len(part)
                    if nodes > _KEY_NODES:
                        raise MalformedPickleError(f"a key of more than {_KEY_NODES} parts")
                    deeper += part
                elif isinstance(part, int):
                    if not -_KEY_INT < part < _KEY_INT:
                        raise MalformedPickleError("a key that is a huge integer")
                elif type(part).__hash__ is None:
                    raise MalformedPickleError(f"a key of type {type(part).__name__}")
                elif is_dataclass(part) and not isinstance(part, Constructor):
                    _check_fields(part)
            level = deeper


@functools.cache
def _is_record(kind: type) -> bool:
    """Whether instances can be keys that hash what a pickle put into them."""
    return kind.__hash__ is not None and is_dataclass(kind) and kind is not Constructor


def _check_fields(part: object) -> None:
    """A dataclass hashes its fields: they must be simple ones."""
    for value in vars(part).values():
        if value is None or isinstance(value, (str, int)):
            continue
        if not isinstance(value, tuple) or len(value) > _KEY_NODES:
            raise MalformedPickleError(f"a key of type {type(part).__name__} with a {type(value).__name__}")
        for item in value:
            if not isinstance(item, int):
                raise MalformedPickleError(f"a key of type {type(part).__name__} with a {type(item).__name__}")


def unpickle(
    data: bytes,
    find_global: Callable[[str, str], Any],
    build_of: Callable[[type], Callable[[Any, Any], None] | None],
    load_persistent: Callable[[Any], Any] | None = None,
    *,
    start: int = 0,
    max_protocol: int = 5,
    make_shortcuts: Callable[[bytes, list[Any]], Mapping[str, Shortcut]] | None = None,
    limits: Limits | None = None,
) -> tuple[Any, int]:
    """The value of a pickle, and where it ends.

    Time and memory are proportional to the length of ``data``. The value may refer to itself and may be nested
    deeply; see `nesting.check_nesting`.

    Args:
        data: holds a pickle of protocol 2 to 5.
        find_global: what stands for a global, given its module and name: a `Constructor` or a constant.
        build_of: sets the state of instances of a type; None if they have none.
        load_persistent: what stands for a persistent id; without it there must be none.
        start: where the pickle begins.
        max_protocol: at least 2.
        make_shortcuts: for the constructors, by their names, given ``data`` and the memo. They save time, and change
            nothing else.
        limits: how much may be copied; by default an element for each byte of ``data``.

    Raises:
        MalformedPickleError: damaged, or more than data of this kind needs.
        UnsafeGlobalError: from ``find_global``.
    """
    try:
        return _run(
            data,
            start,
            find_global,
            build_of,
            load_persistent,
            max_protocol,
            limits or Limits(len(data)),
            make_shortcuts,
        )
    except (MalformedPickleError, UnsafeGlobalError):
        raise
    except IndexError:
        raise MalformedPickleError(f"it ends or breaks within its {len(data)} bytes") from None
    except Exception as error:
        raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _run(
    data: bytes,
    position: int,
    find_global: Callable[[str, str], Any],
    build_of: Callable[[type], Callable[[Any, Any], None] | None],
    load_persistent: Callable[[Any], Any] | None,
    max_protocol: int,
    limits: Limits,
    make_shortcuts: Callable[[bytes, list[Any]], Mapping[str, Shortcut]] | None,
) -> tuple[Any, int]:
    stack: list[Any] = []
    marks: list[int] = []
    # Places from 0 on, in order; others (any four bytes) in ``scattered``, which no pickler writes.
    memo: list[Any] = []
    scattered: dict[int, Any] = {}
    shortcuts = make_shortcuts(data, memo) if make_shortcuts is not None else {}
    push, pop = stack.append, stack.pop
    check_key = limits.check_key

    def take(length: int) -> bytes:
        nonlocal position
        start, position = position, position + length
        if position > len(data):
            raise MalformedPickleError(f"it ends before {length} bytes that should be at {start}")
        return data[start:position]

    def put(place: int, value: Any) -> None:
        nonlocal shortcuts
        if place == len(memo) and place not in scattered:
            memo.append(value)
            return
        shortcuts = {}  # which add to the memo, and rely on what they found there
        if place < len(memo):
            memo[place] = value
        else:
            scattered[place] = value

    def pop_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def set_items(target: Any, items: list[Any]) -> None:
        if type(target) not in (dict, OrderedDict, defaultdict, Counter):
            raise MalformedPickleError(f"items are set in a {type(target).__name__}")
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            raise MalformedPickleError("a key has no value")
        for key in keys:
            if type(key) is not str:
                check_key(key)
        if type(target) is dict:
            target.update(zip(keys, values, strict=True))
        else:
            for key, value in zip(keys, values, strict=True):
                target[key] = value

    while True:
        op = data[position]
        position += 1
        if op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
            if op == 0x68:
                place = data[position]
                position += 1
            else:
                place = int.from_bytes(take(4), "little")
            value = memo[place] if place < len(memo) else scattered[place]
            if type(value) is Constructor and value.name in shortcuts:
                try:
                    value, position = shortcuts[value.name](position)
                except NoShortcutError:
                    pass
            push(value)
        elif op == 0x94:  # MEMOIZE
            if scattered:
                put(len(memo) + len(scattered), stack[-1])
            else:
                memo.append(stack[-1])
        elif op == 0x8C:  # SHORT_BINUNICODE
            length = data[position]
            position += 1
            push(str(take(length), "utf-8", "surrogatepass"))
        elif op == 0x4B:  # BININT1
            push(data[position])
            position += 1
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x85:  # TUPLE1
            push((pop(),))
        elif op == 0x86:  # TUPLE2
            last = pop()
            push((pop(), last))
        elif op == 0x52:  # REDUCE
            arguments, function = pop(), pop()
            if not isinstance(function, Constructor) or function.call is None or type(arguments) is not tuple:
                raise MalformedPickleError(f"{_describe(function)} is called")
            push(function.call(arguments, limits))
        elif op == 0x75:  # SETITEMS
            items = pop_mark()
            set_items(stack[-1], items)
        elif op == 0x73:  # SETITEM
            value = pop()
            key = pop()
            set_items(stack[-1], [key, value])
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif op == 0x81:  # NEWOBJ
            arguments, function = pop(), pop()
            if not isinstance(function, Constructor) or function.new is None or type(arguments) is not tuple:
                raise MalformedPickleError(f"an instance of {_describe(function)} is made")
            push(function.new(arguments))
        elif op == 0x62:  # BUILD
            state = pop()
            build = build_of(type(stack[-1]))
            if build is None:
                raise MalformedPickleError(f"the state of a {type(stack[-1]).__name__} is set")
            build(stack[-1], state)
        elif op == 0x93:  # STACK_GLOBAL
            name, module = pop(), pop()
            if type(name) is not str or type(module) is not str:
                raise MalformedPickleError("a global whose name is no string")
            push(find_global(module, name))
        elif op == 0x4D:  # BININT2
            push(int.from_bytes(take(2), "little"))
        elif op == 0x4A:  # BININT
            push(int.from_bytes(take(4), "little", signed=True))
        elif op == 0x8A:  # LONG1
            length = data[position]
            position += 1
            push(int.from_bytes(take(length), "little", signed=True))
        elif op == 0x4E:
            push(None)
        elif op == 0x88:
            push(True)
        elif op == 0x89:
            push(False)
        elif op == 0x87:  # TUPLE3
            last, middle = pop(), pop()
            push((pop(), middle, last))
        elif op == 0x74:  # TUPLE
            push(tuple(pop_mark()))
        elif op == 0x5D:  # EMPTY_LIST
            push([])
        elif op == 0x61 or op == 0x65:  # APPEND, APPENDS
            items = [pop()] if op == 0x61 else pop_mark()
            if type(stack[-1]) not in (list, deque):
                raise MalformedPickleError(f"a {type(stack[-1]).__name__} is appended to")
            stack[-1].extend(items)
        elif op == 0x71:  # BINPUT
            put(data[position], stack[-1])
            position += 1
        elif op == 0x72:  # LONG_BINPUT
            put(int.from_bytes(take(4), "little"), stack[-1])
        elif op == 0x58:  # BINUNICODE
            push(str(take(int.from_bytes(take(4), "little")), "utf-8", "surrogatepass"))
        elif op == 0x8D:  # BINUNICODE8
            push(str(take(int.from_bytes(take(8), "little")), "utf-8", "surrogatepass"))
        elif op == 0x95:  # FRAME: how much to read ahead
            take(8)
        elif op == 0x47:  # BINFLOAT
            push(struct.unpack(">d", take(8))[0])
        elif op == 0x43:  # SHORT_BINBYTES
            length = data[position]
            position += 1
            push(take(length))
        elif op == 0x42:  # BINBYTES
            push(take(int.from_bytes(take(4), "little")))
        elif op == 0x8E:  # BINBYTES8
            push(take(int.from_bytes(take(8), "little")))
        elif op == 0x96:  # BYTEARRAY8
            push(bytearray(take(int.from_bytes(take(8), "little"))))
        elif op == 0x8F:  # EMPTY_SET
            push(set())
        elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
            items = pop_mark()
            for item in items:
                check_key(item)
            if op == 0x91:
                push(frozenset(items))
            elif type(stack[-1]) is set:
                stack[-1].update(items)
            else:
                raise MalformedPickleError(f"items are added to a {type(stack[-1]).__name__}")
        elif op == 0x63:  # GLOBAL
            first = data.index(b"\n", position)
            second = data.index(b"\n", first + 1)
            module, name = data[position:first].decode(), data[first + 1 : second].decode()
            position = second + 1
            push(find_global(module, name))
        elif op == 0x30:  # POP: ends a tuple that contains itself
            pop()
        elif op == 0x31:  # POP_MARK
            pop_mark()
        elif op == 0x80:  # PROTO
            if not 2 <= data[position] <= max_protocol:
                raise MalformedPickleError(f"its protocol is {data[position]}, expected 2 to {max_protocol}")
            position += 1
        elif op == 0x2E:  # STOP
            return pop(), position
        elif op == 0x51 and load_persistent is not None:  # BINPERSID
            push(load_persistent(pop()))
        else:
            raise MalformedPickleError(f"byte {position - 1} is {op:#04x}, not an opcode of data")


def _describe(function: object) -> str:
    return function.name if isinstance(function, Constructor) else f"a {type(function).__name__}"
