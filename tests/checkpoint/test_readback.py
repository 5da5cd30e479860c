"""A save that could not be loaded again is not committed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.checkpoint import readback
from dcp_s3.format import allow_list
from tests.retention.making import keys

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "_known", set())


def _save(url: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, overwrite=True), no_dist=True)


def _assert_old_is_there(s3: Any, url: str, before: dict[str, int]) -> None:
    assert before.items() <= keys(s3, url).items()
    state = {"a": torch.zeros(3), "step": 0}
    dcp.load(state, storage_reader=S3StorageReader(url), no_dist=True)
    assert (state["a"].tolist(), state["step"]) == ([1, 1, 1], 1)


def test_metadata_that_its_own_reader_refuses(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{root}/step-1"
    _save(url, {"a": torch.ones(3), "step": 1})
    before = keys(s3, url)
    with monkeypatch.context() as patch:
        patch.setattr(readback, "_known", set())
        patch.delitem(allow_list.METADATA, ("torch.distributed.checkpoint.metadata", "TensorProperties"))
        with pytest.raises(CheckpointException, match="was not committed: what was written cannot be read back"):
            _save(url, {"a": torch.zeros(3), "step": 2})
    _assert_old_is_there(s3, url, before)


def test_tensors_that_torch_makes_something_else_of(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{root}/step-1"
    _save(url, {"a": torch.ones(3), "step": 1})
    before, load = keys(s3, url), torch.load

    def shifted(*arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        return found.roll(1) if isinstance(found, torch.Tensor) else found

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", shifted)
        with pytest.raises(CheckpointException, match="makes another tensor"):
            _save(url, {"a": torch.zeros(3, dtype=torch.int16), "step": 2})
    _assert_old_is_there(s3, url, before)


def test_what_was_read_back_once_is_not_read_again(
    memory_server: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    load = readback.load_metadata

    def counted(data: bytes, **options: Any) -> Any:
        calls.append(len(data))
        return load(data, **options)

    monkeypatch.setattr(readback, "load_metadata", counted)
    _save(f"{root}/step-1", {"a": torch.ones(3), "step": 1})
    _save(f"{root}/step-2", {"b": torch.ones(30), "c": torch.ones(2), "step": 1})
    assert len(calls) == 1
    _save(f"{root}/step-3", {"b": torch.ones(30, dtype=torch.bfloat16)})
    assert len(calls) == 2
