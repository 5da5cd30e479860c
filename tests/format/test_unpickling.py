"""What a damaged pickle may ask of memory."""

from __future__ import annotations

import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.unpickling import MalformedPickleError, check_opcodes

_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=300)),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text(), inner), st.builds(bytearray, st.binary())
    ),
)


@given(_VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_what_pickle_writes_is_taken(value: object, protocol: int) -> None:
    check_opcodes(pickle.dumps(value, protocol))


def test_classes_and_long_values_are_taken() -> None:
    value = [torch.Size([2]), torch.float32, "x" * 70_000, b"y" * 70_000, *({"a": n} for n in range(300)), 1 << 5000]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_opcodes(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr" + struct.pack("<I", 2**31) + b".",
        b"\x80\x02Np123456789\n.",
        b"\x80\x04X" + struct.pack("<I", 2**31) + b"abc.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**43) + b"abc.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**43) + b"abc.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**43) + b"abc.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**43) + b"N.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"abc.",
    ],
    ids=["LONG_BINPUT", "PUT", "BINUNICODE", "BINUNICODE8", "BINBYTES8", "BYTEARRAY8", "FRAME", "LONG4"],
)
def test_lengths_and_numbers_beyond_the_pickle(data: bytes) -> None:
    with pytest.raises(MalformedPickleError):
        check_opcodes(data)
