"""`weights_only`: what a load refuses, how it is allowed, and what a save says beforehand."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import logging
import pickle
import random
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format import safe_items
from tests.end_to_end import loads
from tests.end_to_end.states import assert_same, blank

pytestmark = pytest.mark.servers("memory")


class Config:
    """A class of the user's own."""

    unpickled = 0

    def __init__(self, width: int = 0) -> None:
        self.width = width

    def __setstate__(self, state: dict[str, Any]) -> None:
        Config.unpickled += 1
        vars(self).update(state)


class Colour(enum.Enum):
    """Another."""

    RED = 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_items, "_inspected", {})
    monkeypatch.setattr(Config, "unpickled", 0)


def load(root: str, state: Any, **arguments: Any) -> Any:
    return loads.load(state, root, **arguments)


def refusal(root: str, state: Any, **arguments: Any) -> errors.UnsafeItemError:
    error: errors.UnsafeItemError = loads.failure(lambda: load(root, state, **arguments), errors.UnsafeItemError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.fqn, str(copy)) == (type(error), error.fqn, str(error))
    return error


@pytest.mark.parametrize("checksum", ["crc64nvme", "none"])
def test_a_class_is_refused_and_both_remedies_work(root: str, checksum: str) -> None:
    writer = S3StorageWriter(root, settings={"checksum": checksum})
    dcp.save({"t": torch.ones(3), "job": {"config": Config(7)}}, storage_writer=writer)

    def target() -> dict[str, Any]:
        return {"t": torch.zeros(3), "job": {"config": None}}

    error = refusal(root, target())
    assert (error.fqn, error.url) == ("job.config", root)
    for part in ("'job.config'", root, f"{__name__}.Config", "add_safe_globals", "S3StorageReader(weights_only=False)"):
        assert part in str(error)
    assert Config.unpickled == 0
    with torch.serialization.safe_globals([Config]):
        assert load(root, target())["job"]["config"].width == 7
    refusal(root, target())
    assert load(root, target(), weights_only=False)["job"]["config"].width == 7


def test_the_planner_sees_only_what_was_checked(root: str) -> None:
    dcp.save({"a": 1, "b": Config(1)}, storage_writer=S3StorageWriter(root))
    seen: list[str] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            assert value.tell() == 0
            seen.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    with pytest.raises(CheckpointException):
        dcp.load({"a": 0, "b": None}, storage_reader=S3StorageReader(root), planner=Planner())
    assert set(seen) <= {"a"}


def test_a_reader_takes_its_choice_along(root: str) -> None:
    dcp.save({"b": Config(3)}, storage_writer=S3StorageWriter(root))
    assert S3StorageReader(root).weights_only
    reader = pickle.loads(pickle.dumps(S3StorageReader(root, weights_only=False)))
    state = {"b": Config()}
    dcp.load(state, storage_reader=reader)
    assert state["b"].width == 3


def test_ordinary_training_states_load(root: str, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        # What StatefulDataLoader keeps is plain containers.
        "loader": {"_snapshot": {"_step": 3, "_workers": [{"worker": None, "fetched": (1, 2.5)}]}, "_yielded": 3},
        "progress": {"step": 10, "loss": 0.5, "done": False, "name": "x", "best": None, "seen": {1, 2}},
        "ordered": collections.OrderedDict(a=1),
        "kinds": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), (torch.ones(2), {"t": torch.ones(1)})],
    }
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        dcp.save(state, storage_writer=S3StorageWriter(root))
    assert not caplog.records
    found = load(root, blank(state))
    assert repr(found["kinds"]) == repr(state["kinds"])
    assert found["rng"]["python"] == state["rng"]["python"]  # type: ignore[index]
    for part in ("model", "optimizer", "scheduler", "loader", "progress"):
        assert_same(found[part], state[part], part)


def test_what_the_user_allows_of_numpy_is_torch_s_to_check(root: str) -> None:
    """As before dcp_s3 knew arrays; those of objects need it still."""
    from numpy._core import multiarray

    state = {"numpy": (np.random.RandomState(3).get_state(), np.array(["x", 1], object))}
    dcp.save(state, storage_writer=S3StorageWriter(root))
    assert "'O8'" in str(refusal(root, {"numpy": None}))
    kinds = [np.dtypes.UInt32DType, np.dtypes.ObjectDType]  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([multiarray._reconstruct, np.ndarray, np.dtype, *kinds]):  # type: ignore[attr-defined]
        found, objects = load(root, {"numpy": None})["numpy"]
    assert found[0] == "MT19937"
    assert (found[1] == state["numpy"][0][1]).all()
    assert objects.tolist() == ["x", 1]


# --- when saving ----------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture, root: str, state: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        dcp.save(state, storage_writer=S3StorageWriter(root, overwrite=True))
    return [record.getMessage() for record in caplog.records]


def test_a_save_says_once_what_a_load_will_need(root: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"config": Config(1), "colour": Colour.RED, "when": datetime.timedelta(1), "step": 3, "t": torch.ones(2)}
    first = sorted(warnings_of(caplog, root, state))
    assert len(first) == 2
    for message, fqn, needed in zip(
        first, ("colour", "config"), (f"{__name__}.Colour", f"{__name__}.Config"), strict=True
    ):
        assert f"'{fqn}'" in message
        assert f"add_safe_globals([{needed}])" in message
        assert "weights_only=False" in message
    assert warnings_of(caplog, root, state) == []
    assert len(warnings_of(caplog, root, {"other": Config(1)})) == 1
    with torch.serialization.safe_globals([Colour]):
        (message,) = warnings_of(caplog, root, state)
        assert "'config'" in message


def test_a_save_looks_at_each_item_once_and_at_no_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(safe_items, "get_unsafe_globals_in_checkpoint", lambda stream: seen.append(stream) or [])
    small, large = io.BytesIO(b"x"), io.BytesIO(bytes(safe_items.MAX_INSPECTED + 1))
    for _ in range(3):
        safe_items.warn_of_unsafe_item("small", small)
        safe_items.warn_of_unsafe_item("large", large)
    assert seen == [small]


@pytest.mark.parametrize(
    "data", [b"", b"what a planner of one's own writes", bytes(1000), b"PK\x03\x04", pickle.dumps(3)]
)
def test_a_save_takes_items_that_are_no_archives(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.BytesIO(data)
    stream.seek(0, io.SEEK_END)
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        safe_items.warn_of_unsafe_item("x", stream)
    assert not caplog.records
    assert stream.tell() == len(data)


@pytest.mark.parametrize(
    ("name", "why"), [("constants.pkl", "TorchScript"), ("DATA.pkl", "two entries"), ("Data/0", "two entries")]
)
def test_entries_that_only_torch_would_see_differently_are_refused(name: str, why: str) -> None:
    """torch.load gives an archive with constants.pkl to torch.jit.load, and its reader ignores case."""
    stream = io.BytesIO()
    torch.save({"a": 1, "t": torch.ones(3)}, stream)
    with zipfile.ZipFile(stream, "a") as archive:
        (root, *_) = archive.namelist()[0].split("/")
        archive.writestr(f"{root}/{name}", b"x")
    stream.seek(0)
    with pytest.raises(errors.UnsafeItemError, match=why):
        safe_items.check_item(stream, fqn="x", url="s3://b/x", verified=True)
