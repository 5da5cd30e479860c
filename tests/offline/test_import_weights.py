"""import_weights: checkpoints made of safetensors files."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dcp_s3
from benchmarks.measure import measure
from dcp_s3 import errors
from dcp_s3.offline import weights as import_weights
from dcp_s3.offline.copy import copy as download
from tests.end_to_end.states import assert_same, random_tensor
from tests.killing import new_process, running
from tests.memory_s3 import MemoryS3Process
from tests.offline.weights import lengthen, model, write
from tests.retention.making import keys, put

pytestmark = pytest.mark.servers("memory")

MIB = 2**20


@pytest.fixture(params=["directory", "s3"])
def source(request: pytest.FixtureRequest, root: str, s3: Any, tmp_path: Path) -> Any:
    """A function that gives the place of files that were written to a directory."""

    def place(directory: Path) -> str:
        if request.param == "directory":
            return str(directory)
        for path in directory.rglob("*"):
            if path.is_file():
                put(s3, f"{root}/source", path.relative_to(directory).as_posix(), path.read_bytes())
        return f"{root}/source"

    return place


def test_every_dtype_and_shape(root: str, tmp_path: Path, source: Any) -> None:
    write(tmp_path / "model.safetensors", model())
    result = dcp_s3.import_weights(source(tmp_path), f"{root}/x", prefix="model.")
    size = sum(tensor.nbytes for tensor in model().values())
    assert result == dcp_s3.ImportResult(len(model()), size)
    assert_same(dcp_s3.read_tensors(f"{root}/x"), {f"model.{name}": tensor for name, tensor in model().items()})
    assert dcp_s3.verify(f"{root}/x", full=True).ok
    (info,) = dcp_s3.list_checkpoints(root)
    assert (info.committed, info.world_size) == (True, 1)


def test_it_is_loaded_as_any_other(root: str, tmp_path: Path) -> None:
    """By dcp.load into nested states, by torch's own reader and tools."""
    weights = {name: tensor for name, tensor in model().items() if name.startswith("dtypes")}
    write(tmp_path / "model.safetensors", weights)
    dcp_s3.import_weights(tmp_path, f"{root}/x", prefix="model.")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(state, storage_reader=dcp_s3.S3StorageReader(f"{root}/x"), no_dist=True)
    assert_same(state, {"model": weights})
    download(f"{root}/x", tmp_path / "copy")
    dcp_to_torch_save(tmp_path / "copy", tmp_path / "torch.pt")
    assert_same(torch.load(tmp_path / "torch.pt", weights_only=True), {"model": weights})


def test_shards_by_their_index(root: str, tmp_path: Path, source: Any) -> None:
    names = sorted(model())
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        write(tmp_path / file, {name: tensor for name, tensor in model().items() if places[name] == file})
    write(tmp_path / "unrelated.safetensors", {"other": torch.ones(1)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    dcp_s3.import_weights(source(tmp_path), f"{root}/x", rename={r"^dtypes\.": "d."})
    expected = {name.replace("dtypes.", "d.", 1): tensor for name, tensor in model().items()}
    assert_same(dcp_s3.read_tensors(f"{root}/x"), expected)


def test_one_file_and_files_without_an_index(root: str, tmp_path: Path, source: Any) -> None:
    write(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    write(tmp_path / "b.safetensors", {"b": torch.ones(3)})
    (tmp_path / "config.json").write_text("{}")
    place = source(tmp_path)
    dcp_s3.import_weights(place, f"{root}/x")
    assert_same(dcp_s3.read_tensors(f"{root}/x"), {"a": torch.ones(2), "b": torch.ones(3)})
    dcp_s3.import_weights(f"{place}/b.safetensors", f"{root}/x", overwrite=True)
    assert_same(dcp_s3.read_tensors(f"{root}/x"), {"b": torch.ones(3)})


def test_large_tensors_become_chunks(root: str, tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_weights, "PIECE", 5 * MIB)
    monkeypatch.setattr(import_weights, "_MAPPED", MIB)
    state = {"a": random_tensor((30, 11, 70_000), torch.uint8, 1), "b": random_tensor((2, 9 * MIB), torch.bfloat16, 2)}
    write(tmp_path / "model.safetensors", state)
    dcp_s3.import_weights(source(tmp_path), f"{root}/x")
    saved = dcp_s3.S3StorageReader(f"{root}/x").read_metadata().state_dict_metadata
    for name, tensor in state.items():
        chunks = saved[name].chunks
        assert len(chunks) >= math.ceil(tensor.nbytes / (5 * MIB))
        assert all(math.prod(chunk.sizes) * tensor.itemsize <= 5 * MIB for chunk in chunks)
    assert_same(dcp_s3.read_tensors(f"{root}/x"), state)
    assert dcp_s3.verify(f"{root}/x", full=True).ok


def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.full((400 * MIB,), 7, dtype=torch.uint8)})
    with MemoryS3Process() as server:
        for name, value in {
            "ENDPOINT_URL": server.endpoint_url,
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        sample = measure(lambda: dcp_s3.import_weights(tmp_path, "s3://bucket/x"))
    assert sample.peak_bytes < 256 * MIB


def _import_slowly(environment: dict[str, str], path: str, url: str, reached: Any) -> None:
    """Stop when half of the tensors are read."""
    os.environ.update(environment)  # the fork server has that of when it began

    def moved(_: int) -> None:
        if next(calls) == 10:
            reached.set()
            threading.Event().wait()

    calls = itertools.count()
    dcp_s3.import_weights(path, url, on_progress=moved)


def test_a_killed_import_is_no_checkpoint(root: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", model())
    reached = multiprocessing.get_context("forkserver").Event()
    with running([new_process(_import_slowly, dict(os.environ), str(tmp_path), f"{root}/x", reached)]) as (process,):
        assert reached.wait(120)
        process.kill()
        process.join()
    assert dcp_s3.list_checkpoints(root) == []
    dcp_s3.import_weights(tmp_path, f"{root}/x")
    assert_same(dcp_s3.read_tensors(f"{root}/x"), model())


# --- what is refused ------------------------------------------------------------------------------------


def _write_index(path: Path, places: dict[str, str]) -> None:
    write(path.parent / "x.safetensors", {"a": torch.ones(1)})
    path.write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("readme.txt", lambda path: path.write_text("x"), "has no weights"),
        ("model.safetensors", lambda path: path.write_text("x"), "no safetensors file"),
        ("model.safetensors", lambda path: (write(path, model()), lengthen(path)), "header would have"),
        ("model.safetensors", lambda path: write(path, {}), "has no entries"),
        ("x.pt", lambda path: torch.save({"a": torch.ones(1)}, path), "has no weights.*torch file"),
        ("model.safetensors.index.json", lambda path: path.write_text("{}"), "no weight_map"),
        ("model.safetensors.index.json", lambda path: _write_index(path, {"a": "y.safetensors"}), "no file y.safeten"),
        ("model.safetensors.index.json", lambda path: _write_index(path, {"b": "x.safetensors"}), "index says None"),
        (
            "model.safetensors.index.json",
            lambda path: _write_index(path, {"a": "x.safetensors", "b": "x.safetensors"}),
            "'b' is in no file",
        ),
    ],
)
def test_what_cannot_be_imported(root: str, s3: Any, tmp_path: Path, name: str, make: Any, message: str) -> None:
    make(tmp_path / name)
    with pytest.raises(errors.WeightsError, match=message):
        dcp_s3.import_weights(tmp_path, f"{root}/x")
    assert not keys(s3, f"{root}/x")


def test_names_that_do_not_fit(root: str, s3: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(errors.WeightsError, match="'a' and 'b' would both be called 'x'"):
        dcp_s3.import_weights(tmp_path, f"{root}/x", rename={"[ab]": "x"})
    with pytest.raises(errors.WeightsError, match="'c' matches no name"):
        dcp_s3.import_weights(tmp_path, f"{root}/x", rename={"c": "x"})
    write(tmp_path / "b.safetensors", {"a": torch.ones(1)})
    with pytest.raises(errors.WeightsError, match="'a' is in two of the files"):
        dcp_s3.import_weights(tmp_path, f"{root}/x")
    with pytest.raises(errors.WeightsError, match="has no weights"):
        dcp_s3.import_weights(tmp_path / "none", f"{root}/x")
    with pytest.raises(errors.WeightsError, match="has no weights"):
        dcp_s3.import_weights(f"{root}/none", f"{root}/x")
    assert not keys(s3, f"{root}/x")
