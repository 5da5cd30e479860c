"""What trainers keep beside tensors is loaded by default, and none of it can do harm."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import fractions
import io
import logging
import pathlib
import pickle
import random
import uuid
import zoneinfo
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format import item_values, safe_items
from dcp_s3.format.allow_list import PLAIN
from dcp_s3.format.safe_items import check_item
from tests import hostile
from tests.end_to_end.loads import failure, load
from tests.format.test_hostile_items import mutated_items
from tests.hostile import HOSTILE, TEXT, U1, archive, array, call, dtype, name, plain, save, scalar, stream, text

pytestmark = pytest.mark.servers("memory")

REFUSED = (errors.UnsafeItemError, errors.CorruptCheckpointError)
UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")


class Config:
    """A class of the user's own."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Config({self.value})"


class Colour(enum.Enum):
    """Another."""

    RED = 1


def _stream() -> io.BytesIO:
    made = io.BytesIO(b"some bytes\0\xff")
    made.seek(4)
    return made


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **{kind: np.arange(6).astype(kind).reshape(2, 3) for kind in ("b1", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8",
       "c16", "longdouble", "clongdouble", ">i4", ">f8", "S5", "U7")},
    "dates": np.array(["2020-01-01", "NaT"], "M8[ns]"), "deltas": np.array([1, -3], "m8[15m]"),
    "generic": np.array([1], "m8"), "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(20)[::3], "scalar": np.array(1.5), "empty": np.zeros((3, 0, 2)), "zeros": np.zeros(3000, "u1"),
    "many": np.full((4, 500), 200, np.uint8),
}  # fmt: skip
VALUES: dict[str, Any] = {
    "stream": _stream(), "empty stream": io.BytesIO(), "bytes": b"", "array": bytearray(b"xyz"),
    "numpy state": np.random.RandomState(3).get_state(),
    "numpy state, as a dict": np.random.RandomState(3).get_state(legacy=False),
    "generator's state": np.random.default_rng(3).bit_generator.state,
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.float16("nan"), np.complex64(1j), np.str_("läuft"),
                np.bytes_(b"x"), np.datetime64("2020-01-01T00:00:00", "us"), np.timedelta64(3, "s"), np.longdouble(2)],
    "dtypes": [np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[D]")], "shared": [np.ones(3)] * 2,
    "date": datetime.date(2026, 2, 28), "datetime": datetime.datetime(2026, 2, 28, 23, 59, 58, 999_999),  # noqa: DTZ001
    "aware": datetime.datetime(1, 1, 1, tzinfo=UTC), "east": datetime.datetime(9999, 12, 31, 1, tzinfo=EAST),
    "time": datetime.time(23, 59, 58, 7), "time, east": datetime.time(1, tzinfo=EAST), "zones": [UTC, EAST],
    "delta": datetime.timedelta(-3, 7, 9), "path": pathlib.Path("/data/läuft"), "here": pathlib.Path(),
    "pure": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\a\\b")],
    "deque": collections.deque([1, [2], "x"]), "bounded": collections.deque(range(5), maxlen=3),
    "counter": collections.Counter("abracadabra"), "ordered": collections.OrderedDict(b=1, a=np.ones(2)),
    **{f"by {factory.__name__}": collections.defaultdict(factory, {"a": factory()})
       for factory in (int, float, list, dict, set, str, bool, tuple)},
    "uuid": uuid.UUID(int=2**127 + 5), "decimals": [decimal.Decimal(x) for x in ("1.50", "-0", "NaN", "1E+99")],
    "fractions": [fractions.Fraction(1, 3), fractions.Fraction(-(10**30), 7)],
    "frozen": frozenset([1, "x"]), "range": range(3, 30, 4), "slice": slice(1, None, 2),
    "keys": {datetime.date(2020, 1, 1): 1, np.float64(2): 2, uuid.UUID(int=1): 3, (fractions.Fraction(1, 2), "x"): 4,
             pathlib.PurePosixPath("a"): 5, decimal.Decimal("2.5"): 6, np.str_("z"): 7, frozenset([2]): 8},
    "nested": collections.deque([{"when": datetime.date(2020, 1, 1), "seen": {"x": np.arange(3)}}]),
    "beside tensors": (np.ones(2), torch.ones(2, 2).t(), torch.nn.Parameter(torch.zeros(1)), torch.bfloat16,
                       torch.Size([1]), torch.device("cpu"), 1j, {1}, torch.ones(2, dtype=torch.complex64).conj()),
}  # fmt: skip


def same(found: Any, expected: Any) -> bool:
    """Of one type and value; arrays to the last bit."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        order = (found.flags.f_contiguous, expected.flags.f_contiguous)
        return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()) and (
            order[0] == order[1] or not expected.flags.contiguous
        )
    if isinstance(expected, io.BytesIO):
        return (found.getvalue(), found.tell()) == (expected.getvalue(), expected.tell())
    if isinstance(expected, dict):
        factories = [getattr(each, "default_factory", None) for each in (found, expected)]
        return list(found) == list(expected) and factories[0] is factories[1] and same([*found.values()],
                                                                                     [*expected.values()])  # fmt: skip
    if isinstance(expected, (list, tuple, collections.deque)):
        bounds = [getattr(each, "maxlen", None) for each in (found, expected)]
        return len(found) == len(expected) and bounds[0] == bounds[1] and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    return repr(found) == repr(expected)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_items, "_inspected", {})


def decode(data: bytes) -> Any:
    found = io.BytesIO(data)
    check_item(found, fqn="x", url=hostile.URL, verified=True)
    assert found.tell() == 0
    return torch.load(found, weights_only=False)


@pytest.mark.parametrize("label", [*VALUES, *ARRAYS])
def test_it_is_taken(label: str) -> None:
    value = {**VALUES, **ARRAYS}[label]
    assert same(decode(save(value)), as_unpickled(value))


def as_unpickled(value: Any) -> Any:
    """numpy itself makes arrays of this machine's byte order of others."""
    return pickle.loads(pickle.dumps(value, 2))


def test_a_state_of_all_of_them_loads_and_the_save_is_silent(root: str, caplog: pytest.LogCaptureFixture) -> None:
    # A tuple is one entry; of lists and dicts DCP makes an entry for each item.
    state = {"w": torch.ones(3), "values": {label: (value,) for label, value in {**VALUES, **ARRAYS}.items()}}
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        dcp.save(state, storage_writer=S3StorageWriter(root))
    assert not caplog.records
    found: dict[str, Any] = {"w": torch.zeros(3), "values": dict.fromkeys(state["values"], ())}
    dcp.load(found, storage_reader=S3StorageReader(root))
    for label, value in state["values"].items():
        assert same(found["values"][label], as_unpickled(value)), label
    names = [f"values.{label}" for label in ("stream", "date", "deque")]
    read = dcp_s3.read_tensors(root, names)
    assert same([read[each] for each in names], [(VALUES[each.partition(".")[2]],) for each in names])
    assert dcp_s3.verify(root, full=True).ok


def test_names_of_numpy_1_are_taken() -> None:
    """Readers with numpy 2 still know them."""
    for value in (np.arange(3.0), np.float32(1)):
        pickled = pickle.dumps(value, 2).replace(b"numpy._core.", b"numpy.core.")
        assert b"numpy.core.multiarray" in pickled
        check_item(io.BytesIO(archive(pickled)), fqn="x", url=hostile.URL, verified=True)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"])
def test_paths_by_all_their_names(module: str, kind: str) -> None:
    """Python 3.13 has moved them; which of them can be made here, unpickling says."""
    data = archive(stream(call(module, kind, text("/"), text("a"))))
    check_item(io.BytesIO(data), fqn="x", url=hostile.URL, verified=True)


def test_arguments_as_other_versions_of_python_write_them() -> None:
    for opcodes in (
        call("fractions", "Fraction", text("-1/3")),
        call("collections", "deque", b"]", b"K\x05") + b"K\x01a",
        call("collections", "defaultdict", b"N"),
        name("uuid", "UUID") + b")\x81}(" + text("int") + b"K\x05" + text("is_safe") + b"K\x00ub",
    ):
        check_item(io.BytesIO(archive(stream(opcodes))), fqn="x", url=hostile.URL, verified=True)


def test_python_imports_what_the_check_takes_it_for() -> None:
    """In pickles of protocol 2, Python's unpickler translates the names of Python 2."""
    for module, qualified in (*item_values.VALUES, *PLAIN):
        assert (module, qualified) not in NAME_MAPPING
        assert module not in IMPORT_MAPPING
        pickled = stream(name("__builtin__", qualified)) if module == "builtins" else b""
        if pickled:
            assert pickle.loads(pickled) is pickle.loads(stream(name(module, qualified)))
    for old, today in (("xrange", range), ("long", int), ("unicode", str)):
        assert pickle.loads(stream(name("__builtin__", old))) is today


# --- what is not taken ----------------------------------------------------------------------------------

NOT_TAKEN: dict[str, tuple[Any, str]] = {
    "objects": (np.array([1, "x"], object), "'O8'"),
    "records": (np.zeros(2, [("a", "i4")]), "'V4'"),
    "matrix": (np.ones((2, 2)).view(np.matrix), "numpy.matrix"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), "numpy.ma"),
    "generator": (np.random.default_rng(1), "numpy.random._pickle.__generator_ctor"),
    "state of numpy": (np.random.RandomState(1), "numpy.random._pickle.__randomstate_ctor"),
    "enum": (Colour.RED, f"{__name__}.Colour"),
    "zone": (datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "getattr"),
    "factory": (collections.defaultdict(Config), f"{__name__}.Config"),
    "beside": ((np.ones(2), Config(1)), f"add_safe_globals([{__name__}.Config])"),
    "in a deque": (collections.deque([Config(1)]), f"add_safe_globals([{__name__}.Config])"),
}


@pytest.mark.parametrize("label", NOT_TAKEN)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_save_warns_of_what_a_load_refuses(root: str, label: str, caplog: pytest.LogCaptureFixture) -> None:
    value, reason = NOT_TAKEN[label]
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        dcp.save({"x": (value,)}, storage_writer=S3StorageWriter(root))
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "weights_only=False" in record.getMessage()
    assert reason in str(failure(lambda: load({"x": ()}, root), errors.UnsafeItemError))
    found = load({"x": ()}, root, weights_only=False)
    assert repr(found["x"]).partition(" at 0x")[0] == repr((value,)).partition(" at 0x")[0]


def test_what_the_user_allows_may_hold_them() -> None:
    value = {"job": Config([np.arange(3), datetime.date(2020, 1, 1), Config(3)])}
    with pytest.raises(errors.UnsafeItemError, match="Config"):
        decode(save(value))
    with torch.serialization.safe_globals([Config]):
        assert same(decode(save(value)), value)
    with torch.serialization.safe_globals([(Config, f"{__name__}.Config")]):
        assert same(decode(save(value)), value)
    with torch.serialization.safe_globals([Config, Colour]):
        assert decode(save((Colour.RED, np.ones(1))))[0] is Colour.RED


def test_what_the_user_has_not_allowed_is_not_called() -> None:
    trip = call("tests.hostile", "trip")
    for opcodes in (
        b"(" + call("datetime", "timedelta", b"K\x01", b"K\x02", b"K\x03") + trip + b"t",
        call("collections", "defaultdict", name("tests.hostile", "trip")),
        call("collections", "deque") + trip + b"a",
    ):
        with pytest.raises(errors.UnsafeItemError, match="trip"):
            decode(archive(stream(opcodes)))
    assert not hostile.was_tripped()


# --- hostile --------------------------------------------------------------------------------------------


_BEGIN = call("datetime", "timedelta", b"K\x01", b"K\x02", b"K\x03")


@pytest.mark.parametrize("label", HOSTILE)
@pytest.mark.parametrize("beside", [False, True])
def test_hostile_values_are_refused(label: str, beside: bool) -> None:
    pickled = stream(b"(" + _BEGIN + HOSTILE[label] + b"t" if beside else HOSTILE[label])
    with pytest.raises(REFUSED):
        decode(archive(pickled, ("data/0", bytes(16))))
    assert not hostile.was_tripped()


def test_what_the_hostile_ones_are_made_of_is_taken() -> None:
    """Otherwise they would be refused for the wrong reason."""
    assert same(decode(archive(stream(array((2,), b"xy")))), np.frombuffer(b"xy", "u1"))
    assert same(decode(archive(stream(scalar(dtype("U3", TEXT), b"x\0\0\0y\0\0\0z\0\0\0")))), np.str_("xyz"))
    for unit in (None, {}):
        state = (4, "<", None, None, None, -1, -1, 0, (unit, (b"ns", 1, 1, 1)))
        check_item(io.BytesIO(archive(stream(dtype("M8", state)))), fqn="x", url=hostile.URL, verified=True)


def test_the_extension_registry_is_no_way_around() -> None:
    copyreg.add_extension("datetime", "timedelta", 0x7FFF)
    try:
        with pytest.raises(REFUSED):
            decode(archive(stream(b"\x83\xff\x7f(K\x01K\x02K\x03tR")))
    finally:
        copyreg.remove_extension("datetime", "timedelta", 0x7FFF)


_SEEDS = [
    save(value)
    for value in (
        [np.arange(6.0).reshape(2, 3), np.float32(1), np.array(["x"]), np.datetime64("2020-01-01", "ns")],
        [VALUES[label] for label in ("stream", "aware", "time", "delta", "uuid", "decimals", "fractions", "path")],
        [VALUES[label] for label in ("nested", "bounded", "counter", "by set", "range", "beside tensors", "keys")],
        [np.random.RandomState(1).get_state(), random.getstate()[1][:5], collections.deque([_stream()])],
    )
]
_SNIPPETS = [
    *(HOSTILE[label] for label in sorted(HOSTILE) if len(HOSTILE[label]) < 300),
    U1, dtype("U3", TEXT), array((1,), b"x"), scalar(dtype("f8"), bytes(8)), plain((0,)), b"R", b"\x81", b"b",
    b"h\x01", b"0", b"(", b"]", b"}", b"s", b"u", b"a", b"e", b"\x85", b".", b"N", b"\x88",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning", "ignore::DeprecationWarning:numpy")
@given(mutated_items(_SEEDS, _SNIPPETS))
def test_mutated_values(data: bytes) -> None:
    """Refused, or unpickled by Python without harm."""
    found = io.BytesIO(data)
    with contextlib.suppress(*REFUSED):
        check_item(found, fqn="x", url=hostile.URL, verified=True)
        with contextlib.suppress(ModuleNotFoundError, NotImplementedError):  # a path of another system, or Python
            repr(torch.load(found, map_location="cpu", weights_only=False))
    assert not hostile.was_tripped()
