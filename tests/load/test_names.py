"""Names and shapes in which a state and a checkpoint differ: all of them in one error, with what to do about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3LoadPlanner, S3StorageReader, S3StorageWriter, errors

_LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("weight", "bias")]


def _named(prefix: str) -> list[str]:
    return [prefix + name for name in _LAYERS]


def _load(root: str, state: dict[str, Any], **arguments: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=S3StorageReader(f"{root}/step-1", allow_dtype_cast=False), **arguments)
    ((cause, _),) = caught.value.failures.values()
    return cause


@pytest.fixture
def saved(root: str, memory_server: Any) -> str:
    state = {"train": {"model": {name: torch.ones(2, 3) for name in _LAYERS}}, "epoch": 3}
    dcp.save(state, storage_writer=S3StorageWriter(f"{root}/step-1"))
    return root


def test_all_missing_names_are_in_one_error(saved: str) -> None:
    error = _load(saved, {"model": {name: torch.zeros(2, 3) for name in _LAYERS}}, planner=S3LoadPlanner())
    assert isinstance(error, errors.MissingKeysError)
    assert isinstance(error, (errors.EntryNotFoundError, RuntimeError))
    assert error.missing == _named("model.")
    assert sorted(error.unexpected) == sorted([*_named("train.model."), "epoch"])
    assert str(error).startswith("Missing key in checkpoint state_dict: model.layers.0.weight and 23 more (")
    assert f"{saved}/step-1" in str(error)
    assert "Remedy: " in str(error)
    assert len(str(error)) < 1000


def test_all_other_shapes_are_in_one_error(saved: str) -> None:
    state = {"train": {"model": {name: torch.zeros(3, 2) for name in _LAYERS}, "more": 1}}
    error = _load(saved, state, planner=S3LoadPlanner())
    assert isinstance(error, errors.TensorMismatchError)
    assert len(error.shapes) == 24
    assert error.shapes[error.fqn] == ((2, 3), (3, 2))
    assert str(error).startswith(
        "Size mismatch between saved (2, 3) and current (3, 2) for train.model.layers.0.weight"
    )
    assert "and for 23 more: " in str(error)
    assert "also not saved: 1 name of the state (train.more)" in str(error)


def test_a_partial_load_may_lack_names_but_not_differ_in_shape(saved: str) -> None:
    partial = S3LoadPlanner(allow_partial_load=True)
    dcp.load({"new": torch.zeros(1)}, storage_reader=S3StorageReader(f"{saved}/step-1"), planner=partial)
    for other in (torch.zeros(1), 7):
        state = {"train": {"model": {_LAYERS[0]: other}}, "new": 1}
        error = _load(saved, state, planner=S3LoadPlanner(allow_partial_load=True))
        assert isinstance(error, errors.TensorMismatchError)
        assert f"{saved}/step-1" in str(error)
        assert "not saved" not in str(error)
