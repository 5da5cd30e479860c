"""export: the files it writes, to a directory and to S3, and what is there when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_s3
from benchmarks.measure import measure
from dcp_s3 import errors
from dcp_s3.offline import export
from dcp_s3.offline import place as places
from tests.end_to_end.states import assert_same, random_tensor
from tests.offline.conftest import model, read, save, save_sharded
from tests.ranks import run_ranks
from tests.retention.making import get, keys, put

pytestmark = pytest.mark.servers("memory")

MIB = 2**20
INDEX = "model.safetensors.index.json"


class Place:
    def __init__(self, where: str) -> None:
        self.where = where

    def _files(self) -> places.Place:
        return places.Place.of(self.where, dcp_s3.Settings())

    def files(self) -> list[str]:
        return sorted(self._files().objects())

    def get(self, name: str) -> bytes:
        return self._files().store.get(self._files().key(name)).data

    def put(self, name: str, data: bytes) -> None:
        self._files().store.put(self._files().key(name), data)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = [read(self.get(name)) for name in self.files() if name.endswith(".safetensors")]
        return {name: tensor for tensors in found for name, tensor in tensors.items()}


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, root: str, tmp_path: Path) -> Place:
    return Place(f"{root}/out" if request.param == "s3" else str(tmp_path / "out"))


def test_every_dtype_and_shape(root: str, place: Place) -> None:
    save({"model": model(), "step": 7}, f"{root}/x")
    result = dcp_s3.export(f"{root}/x", place.where, rename={"^model[.]": ""})
    assert result == dcp_s3.ExportResult(("model.safetensors",), len(model()), result.size, 1)
    assert place.files() == ["model.safetensors"]
    assert_same(place.tensors(), model())


def test_shards_and_their_index(root: str, place: Place) -> None:
    save({"model": model()}, f"{root}/x")
    moved: list[int] = []
    totals: list[int] = []
    result = dcp_s3.export(
        f"{root}/x", place.where, max_shard_size="100KB", on_total=totals.append, on_progress=moved.append
    )
    assert [result.size] == totals == [sum(moved)]
    shards = [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    assert result.files == (*shards, INDEX)
    assert place.files() == sorted(result.files)
    index = json.loads(place.get(INDEX))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model().values())
    for shard in shards:
        inside = read(place.get(shard))
        assert {name for name, file in index["weight_map"].items() if file == shard} == inside.keys()
        assert sum(tensor.nbytes for tensor in inside.values()) <= 100_000
    assert_same(place.tensors(), {f"model.{name}": tensor for name, tensor in model().items()})


def test_floating_point_tensors_are_converted(root: str, place: Place) -> None:
    whole = {"i": torch.arange(5), "b": torch.tensor([True]), "c": torch.zeros(3, dtype=torch.complex64)}
    wide = {"w": torch.randn(export._CONVERTED + 77), "h": torch.randn(3).half(), "scalar": torch.tensor(2.5)}
    save(whole | wide, f"{root}/x")
    dcp_s3.export(f"{root}/x", place.where, dtype="bf16")
    assert_same(place.tensors(), whole | {name: tensor.bfloat16() for name, tensor in wide.items()})
    place.where += "-double"
    dcp_s3.export(f"{root}/x", place.where, dtype=torch.float64)
    assert_same(place.tensors(), whole | {name: tensor.double() for name, tensor in wide.items()})


def test_sharded_tensors_in_small_pieces(root: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and parts that end anywhere: within rows, within elements' neighbours, within files."""
    monkeypatch.setattr(export, "BATCH", 4096)
    monkeypatch.setattr(export, "_PIECE", 500)
    run_ranks(4, save_sharded, f"{root}/x", 130)
    dcp_s3.export(f"{root}/x", place.where, max_shard_size=60_000, dtype="fp32")
    full = torch.arange(130 * 22 * 3).view(130, 22, 3)
    assert_same(place.tensors(), dict.fromkeys(["rows", "columns", "replicated", "grid", "hybrid"], full))


def test_a_file_on_s3_of_several_parts(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_PART", 5 * MIB)
    state = {"w": random_tensor((23 * MIB,), torch.uint8, 1)}
    save(state, f"{root}/x")
    place = Place(f"{root}/out")
    dcp_s3.export(f"{root}/x", place.where)
    assert_same(place.tensors(), state)


def test_attachments_become_files(root: str, place: Place) -> None:
    writer = dcp_s3.S3StorageWriter(f"{root}/x")
    writer.attach("config.json", b"{}")
    writer.attach("tokenizer/vocab.txt", b"a")
    torch.distributed.checkpoint.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)
    dcp_s3.export(f"{root}/x", place.where)
    assert place.files() == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]
    assert place.get("config.json") == b"{}"


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "modle.*"}, errors.EntryNotFoundError, r"no entry 'modle\.\*'.*'model\.a'"),
        ({"include": ["step"]}, errors.WeightsError, "no tensor to export"),
        ({"rename": {"modle": ""}}, errors.WeightsError, r"'modle' matches no name.*'model\.[ab]'"),
        ({"rename": {r"model\.a": "__metadata__"}}, errors.WeightsError, "__metadata__"),
        ({}, errors.WeightsError, r"no dtype for 'odd', which is torch\.complex128"),
        ({"dtype": "bf61"}, errors.WeightsError, "'bf61' is no floating-point type: expected bf16"),
        ({"max_shard_size": "5 apples"}, errors.WeightsError, "max_shard_size = '5 apples'"),
        ({"max_shard_size": 0}, errors.WeightsError, "at least 1 byte"),
    ],
)  # fmt: skip
def test_nothing_is_written_if_it_cannot_be(
    root: str, place: Place, arguments: Any, error: type[Exception], message: str
) -> None:
    state = {"model": {"a": torch.ones(1), "b": torch.ones(1)}, "odd": torch.ones(1, dtype=torch.complex128), "step": 7}
    save(state, f"{root}/x")
    with pytest.raises(error, match=message):
        dcp_s3.export(f"{root}/x", place.where, **arguments)
    assert place.files() == []


def test_only_an_empty_place_is_written_to(root: str, place: Place, s3: Any) -> None:
    writer = dcp_s3.S3StorageWriter(f"{root}/x")
    writer.attach("model.safetensors", b"x")
    torch.distributed.checkpoint.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)
    with pytest.raises(errors.WeightsError, match=r"attachment model\.safetensors"):
        dcp_s3.export(f"{root}/x", place.where)
    assert place.files() == []
    save({"w": torch.ones(1)}, f"{root}/y")
    place.put("sub/x", b"old")
    for where in (place.where, f"{root}/y"):
        with pytest.raises(errors.WeightsError, match="is not empty"):
            dcp_s3.export(f"{root}/y", where)
    assert place.files() == ["sub/x"]
    with pytest.raises(errors.CheckpointNotFoundError):
        dcp_s3.export(f"{root}/z", f"{root}/out")
    put(s3, f"{root}/folder", "", b"")  # as consoles make an empty one
    dcp_s3.export(f"{root}/y", f"{root}/folder")


def test_a_lease_keeps_prune_away(root: str, s3: Any, tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, f"{root}/x")
    seen: set[str] = set()
    dcp_s3.export(
        f"{root}/x",
        tmp_path,
        settings={"reader_lease": 60},
        on_progress=lambda _: seen.update(keys(s3, f"{root}/x")),
    )
    assert [path for path in seen if "lease" in path]
    assert not [path for path in keys(s3, f"{root}/x") if "lease" in path]


def test_a_failed_export_leaves_whole_files_without_an_index(root: str, place: Place, s3: Any) -> None:
    save({name: random_tensor((1000,), torch.float32, n) for n, name in enumerate("abc")}, f"{root}/x")
    (path,) = (path for path in keys(s3, f"{root}/x") if path.endswith(".distcp"))
    data = bytearray(get(s3, f"{root}/x", path))
    data[-2000] ^= 1
    put(s3, f"{root}/x", path, bytes(data))
    with pytest.raises(errors.CorruptCheckpointError, match="'c'"):
        dcp_s3.export(f"{root}/x", place.where, max_shard_size=4000)
    assert set(place.files()) <= {f"model-0000{n}-of-00003.safetensors" for n in (1, 2)}


def test_memory_is_bounded_whatever_the_size_of_a_tensor(root: str, tmp_path: Path) -> None:
    size = 5 * export.BATCH
    tensor = torch.empty(size, dtype=torch.uint8).fill_(7)
    save({"a": tensor}, f"{root}/x")
    sample = measure(lambda: dcp_s3.export(f"{root}/x", tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size > size
    assert sample.peak_bytes < 4 * export.BATCH  # two of them are the buffers
