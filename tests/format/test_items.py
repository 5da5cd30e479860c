"""Items that are no tensors: what a load takes, what it refuses, how that is allowed, and what a save warns of.

What trainers keep beside tensors is taken, and none of it can do harm (test_hostile_items.py).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import io
import logging
import pathlib
import pickle
import random
import warnings
import zipfile
import zoneinfo
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format import safe_items
from dcp_s3.format.safe_items import check_item, warn_of_unsafe_item
from tests import hostile
from tests.end_to_end.loads import failure, load
from tests.hostile import archive, call, decode_item, name, plain, save, stream, text

pytestmark = pytest.mark.servers("memory")

UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")


class Config:
    unpickled = 0

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        Config.unpickled += 1
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Config({self.value})"


class Colour(enum.Enum):
    RED = 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_items, "_inspected", set())
    monkeypatch.setattr(Config, "unpickled", 0)


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **{kind: np.arange(6).astype(kind).reshape(2, 3) for kind in ("b1", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8",
       "c16", "longdouble", "clongdouble", ">i4", ">f8", "S5", "U7")},
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(20)[::3], "scalar": np.array(1.5), "empty": np.zeros((3, 0, 2)), "zeros": np.zeros(3000, "u1"),
    "many": np.full((4, 500), 200, np.uint8),
}  # fmt: skip
_SHARED = torch.arange(12.0).reshape(3, 4)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated
    _QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
VALUES: dict[str, Any] = {
    "bytes": b"", "array": bytearray(b"xyz"),
    "numpy state": np.random.RandomState(3).get_state(),
    "numpy state, as a dict": np.random.RandomState(3).get_state(legacy=False),
    "generator's state": np.random.default_rng(3).bit_generator.state,
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.float16("nan"), np.complex64(1j), np.str_("läuft"),
                np.bytes_(b"x"), np.longdouble(2)],
    "dtypes": [np.dtype("f4"), np.dtype(">i8")], "shared": [np.ones(3)] * 2,
    "date": datetime.date(2026, 2, 28), "datetime": datetime.datetime(2026, 2, 28, 23, 59, 58, 999_999),  # noqa: DTZ001
    "aware": datetime.datetime(1, 1, 1, tzinfo=UTC), "east": datetime.datetime(9999, 12, 31, 1, tzinfo=EAST),
    "time": datetime.time(23, 59, 58, 7), "time, east": datetime.time(1, tzinfo=EAST), "zones": [UTC, EAST],
    "delta": datetime.timedelta(-3, 7, 9), "path": pathlib.Path("/data/läuft"), "here": pathlib.Path(),
    "pure": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\a\\b")],
    "deque": collections.deque([1, [2], "x"]), "bounded": collections.deque(range(5), maxlen=3),
    "counter": collections.Counter("abracadabra"), "ordered": collections.OrderedDict(b=1, a=np.ones(2)),
    **{f"by {factory.__name__}": collections.defaultdict(factory, {"a": factory()})
       for factory in (int, float, list, dict, set, str, bool, tuple)},
    "frozen": frozenset([1, "x"]), "range": range(3, 30, 4), "slice": slice(1, None, 2),
    "keys": {datetime.date(2020, 1, 1): 1, np.float64(2): 2, (1, "x"): 4, torch.float32: 2, 1.5: 3,
             pathlib.PurePosixPath("a"): 5, np.str_("z"): 7, frozenset([2]): 8},
    "nested": collections.deque([{"when": datetime.date(2020, 1, 1), "seen": {"x": np.arange(3)}}]),
    "beside tensors": (np.ones(2), torch.ones(2, 2).t(), torch.nn.Parameter(torch.zeros(1)), torch.bfloat16,
                       torch.Size([1]), torch.device("cpu"), 1j, {1}, torch.ones(2, dtype=torch.complex64).conj()),
    "random": random.getstate(), "generator": torch.get_rng_state(), "text": "läuft", "nothing": None, "number": 2**100,
    "views": [_SHARED, _SHARED.t(), _SHARED[1:, ::2], _SHARED[:0], torch.ones(1).expand(5), torch.tensor(1)],
    "layer": torch.nn.Linear(2, 2).state_dict(),
    "sparse": torch.eye(3).to_sparse(), "quantized": _QUANTIZED,  # for torch to accept
}  # fmt: skip


def same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        order = (found.flags.f_contiguous, expected.flags.f_contiguous)
        return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()) and (
            order[0] == order[1] or not expected.flags.contiguous
        )
    if isinstance(expected, dict):
        factories = [getattr(each, "default_factory", None) for each in (found, expected)]
        return list(found) == list(expected) and factories[0] is factories[1] and same([*found.values()],
                                                                                     [*expected.values()])  # fmt: skip
    if isinstance(expected, (list, tuple, collections.deque)):
        bounds = [getattr(each, "maxlen", None) for each in (found, expected)]
        return len(found) == len(expected) and bounds[0] == bounds[1] and all(map(same, found, expected))
    return repr(found) == repr(expected)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_state_of_all_of_them_loads_and_the_save_is_silent(root: str, caplog: pytest.LogCaptureFixture) -> None:
    # A tuple is one entry; of lists and dicts DCP makes an entry for each item.
    state = {"w": torch.ones(3), "values": {label: (value,) for label, value in {**VALUES, **ARRAYS}.items()}}
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        dcp.save(state, storage_writer=S3StorageWriter(root))
    assert not caplog.records
    found: dict[str, Any] = {"w": torch.zeros(3), "values": dict.fromkeys(state["values"], ())}
    dcp.load(found, storage_reader=S3StorageReader(root))
    for label, value in state["values"].items():
        # numpy itself makes arrays of this machine's byte order of others.
        assert same(found["values"][label], pickle.loads(pickle.dumps(value, 2))), label
    names = [f"values.{label}" for label in ("range", "date", "deque")]
    read = dcp_s3.read_tensors(root, names)
    assert same([read[each] for each in names], [(VALUES[each.partition(".")[2]],) for each in names])
    assert dcp_s3.verify(root, full=True).ok


def test_what_other_versions_write_is_taken() -> None:
    """Names of numpy 1; paths of Python 3.13, which has moved them; other arguments."""
    numpy_1 = [pickle.dumps(value, 2).replace(b"numpy._core.", b"numpy.core.") for value in (np.ones(3), np.float32(1))]
    paths = [
        stream(call(module, kind, text("/"), text("a")))
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ]
    others = [call("collections", "deque", b"]", b"K\x05") + b"K\x01a", call("collections", "defaultdict", b"N")]
    for pickled in (*numpy_1, *paths, *map(stream, others)):
        check_item(io.BytesIO(archive(pickled)), fqn="x", url=hostile.URL, verified=True)


def test_python_imports_what_the_check_takes_it_for() -> None:
    """In pickles of protocol 2, Python's unpickler translates the names of Python 2."""
    for known in safe_items.ITEMS:
        module, _, qualified = known.rpartition(".")
        assert (module, qualified) not in NAME_MAPPING
        assert module not in IMPORT_MAPPING
        pickled = stream(name("__builtin__", qualified)) if module == "builtins" else b""
        if pickled:
            assert pickle.loads(pickled) is pickle.loads(stream(name(module, qualified)))
    for old, today in (("xrange", range), ("long", int), ("unicode", str)):
        assert pickle.loads(stream(name("__builtin__", old))) is today


NOT_TAKEN: dict[str, tuple[Any, str]] = {
    "objects": (np.array([1, "x"], object), "'O8'"),
    "records": (np.zeros(2, [("a", "i4")]), "'V4'"),
    "dates": (np.array(["2020-01-01"], "M8[ns]"), "'M8'"),
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
def test_a_save_warns_of_what_a_load_refuses(label: str, caplog: pytest.LogCaptureFixture) -> None:
    value, reason = NOT_TAKEN[label]
    data = save((value,))
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        warn_of_unsafe_item("x", io.BytesIO(data))
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "weights_only=False" in record.getMessage()
    with pytest.raises(errors.UnsafeItemError) as refused:
        decode_item(data)
    assert reason in str(refused.value)


def test_what_the_user_allows_may_hold_them() -> None:
    value = {"job": Config([np.arange(3), datetime.date(2020, 1, 1), Config(3)])}
    with pytest.raises(errors.UnsafeItemError, match="Config"):
        decode_item(save(value))
    with torch.serialization.safe_globals([Config]):
        assert same(decode_item(save(value)), value)
    with torch.serialization.safe_globals([(Config, f"{__name__}.Config")]):
        assert same(decode_item(save(value)), value)
    with torch.serialization.safe_globals([Config, Colour]):
        assert decode_item(save((Colour.RED, np.ones(1))))[0] is Colour.RED


_KEPT = Config(0)


def always_the_same(*_: Any) -> Config:
    return _KEPT


def test_what_an_allowed_function_gives_is_not_changed() -> None:
    changed = archive(stream(call(__name__, "always_the_same") + plain({"value": 1}) + b"b"))
    with torch.serialization.safe_globals([always_the_same]), pytest.raises(errors.UnsafeItemError):
        decode_item(changed)
    assert _KEPT.value == 0


@pytest.mark.parametrize("checksum", ["crc64nvme", "none"])
def test_a_class_is_refused_and_both_remedies_work(root: str, checksum: str) -> None:
    writer = S3StorageWriter(root, settings={"checksum": checksum})
    dcp.save({"t": torch.ones(3), "job": {"config": Config(7)}}, storage_writer=writer)

    def target() -> dict[str, Any]:
        return {"t": torch.zeros(3), "job": {"config": None}}

    error: errors.UnsafeItemError = failure(lambda: load(target(), root), errors.UnsafeItemError)
    assert (error.fqn, error.url) == ("job.config", root)
    for part in ("'job.config'", root, f"{__name__}.Config", "add_safe_globals", "S3StorageReader(weights_only=False)"):
        assert part in str(error)
    assert Config.unpickled == 0
    with torch.serialization.safe_globals([Config]):
        assert load(target(), root)["job"]["config"].value == 7
    assert load(target(), root, weights_only=False)["job"]["config"].value == 7


# --- when saving ---------------------------------------------------------------------------------------


def test_a_save_says_once_what_a_load_will_need(root: str, caplog: pytest.LogCaptureFixture) -> None:
    def warned(state: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dcp_s3"):
            dcp.save(state, storage_writer=S3StorageWriter(root, overwrite=True))
        return sorted(record.getMessage() for record in caplog.records)

    state = {"config": Config(1), "colour": Colour.RED, "when": datetime.timedelta(1), "step": 3, "t": torch.ones(2)}
    for message, kind in zip(warned(state), ("Colour", "Config"), strict=True):
        assert message.startswith(f"'{kind.lower()}' ")
        assert f"add_safe_globals([{__name__}.{kind}])" in message
    assert warned(state) == []
    assert len(warned({"other": Config(1)})) == 1


def test_a_save_looks_at_each_item_once_and_at_no_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(safe_items, "_find_refusal", lambda stream, ask_torch: seen.append(stream) or ([], None))
    small, large = io.BytesIO(b"x"), io.BytesIO(bytes(safe_items.MAX_INSPECTED + 1))
    for _ in range(3):
        warn_of_unsafe_item("small", small)
        warn_of_unsafe_item("large", large)
    assert seen == [small]


@pytest.mark.parametrize(
    "data", [b"", b"what a planner of one's own writes", bytes(1000), b"PK\x03\x04", pickle.dumps(3)]
)
def test_a_save_takes_items_that_are_no_archives(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.BytesIO(data)
    stream.seek(0, io.SEEK_END)
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        warn_of_unsafe_item("x", stream)
    assert not caplog.records
    assert stream.tell() == len(data)


def _with_entry(name: str, content: bytes) -> bytes:
    data = io.BytesIO(save({"a": 1, "t": torch.ones(3)}))
    with zipfile.ZipFile(data, "a") as file:
        (root, *_) = file.namelist()[0].split("/")
        file.writestr(f"{root}/{name}", content)
    return data.getvalue()


def test_what_torch_would_load_is_what_is_checked() -> None:
    """torch.load gives an archive with constants.pkl to torch.jit.load, and its reader ignores case."""
    with pytest.raises(errors.UnsafeItemError, match="TorchScript"):
        decode_item(_with_entry("constants.pkl", b"x"))
    trip = stream(call("tests.hostile", "trip"))
    for name_, content in (("DATA.pkl", trip), ("Data.pkl", trip), ("Data/0", b"x"), ("DATA/0", bytes(12))):
        with contextlib.suppress(errors.UnsafeItemError):
            assert decode_item(_with_entry(name_, content))["a"] == 1
        assert not hostile.was_tripped()
