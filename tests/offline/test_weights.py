"""Safetensors files: loaded into a state, and read by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import errors
from dcp_s3.format.safetensors import INDEX, SINGLE_FILE, TensorEntry, make_header, make_index, plan_shards
from dcp_s3.load import fetch
from dcp_s3.offline.copy import copy as download
from tests.end_to_end.loads import failure, load
from tests.end_to_end.states import assert_same, bits, blank, random_tensor
from tests.memory_s3 import fetch_counters, reset_counters
from tests.offline.conftest import Saved, lengthen, model, write
from tests.ranks import run_ranks
from tests.retention.making import delete, put

pytestmark = pytest.mark.servers("memory")


@pytest.fixture
def weights(s3: Any, root: str) -> Callable[..., str]:
    def upload(tensors: Mapping[str, torch.Tensor], most: int = 5 * 10**9) -> str:
        url = f"{root}/hf"
        shards = plan_shards([TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()], most)
        for shard in shards:
            data = make_header(shard.tensors) + b"".join(bits(tensors[each.name]) for each in shard.tensors)
            put(s3, url, shard.name, data)
        if len(shards) > 1:
            put(s3, url, INDEX, make_index(shards))
        put(s3, url, "config.json", b"{}")
        return url

    return upload


@pytest.mark.parametrize("most", [5 * 10**9, 40_000], ids=["one file", "an index"])
def test_every_dtype_and_shape_is_loaded(weights: Callable[..., str], most: int) -> None:
    url, expected = weights(model(), most), model()
    assert_same(load(blank(expected), url), expected)
    assert_same(dcp_s3.read_tensors(url), expected)
    state = blank(expected)
    dcp_s3.load_safetensors(url, state)
    assert_same(state, expected)


def test_names_dtypes_and_what_is_tied(weights: Callable[..., str]) -> None:
    embedding, norm = random_tensor((30, 8), torch.bfloat16, 1), random_tensor((8,), torch.bfloat16, 2)
    url = weights({"transformer.wte.weight": embedding, "transformer.norm": norm})
    head = torch.nn.Parameter(torch.zeros(30, 8))
    state = {"net": {"embed.weight": torch.zeros(30, 8), "norm": torch.zeros(8), "head": head, "copy": head.detach()}}
    rename, tied = {"^transformer[.]": "", "^wte": "embed"}, {"net.copy": "net.embed.weight"}
    dcp_s3.load_safetensors(url, state, prefix="net.", rename=rename, tied=tied)
    assert_same(state["net"]["norm"], norm.float())
    for name in ("embed.weight", "copy", "head"):  # head shares the copy's memory
        assert_same(state["net"][name].detach(), embedding.float())


@pytest.mark.parametrize(
    ("arguments", "state", "error", "says"),
    [
        ({}, {"b": torch.zeros(3)}, errors.MissingKeysError, "'?b'?"),
        ({}, {"a": torch.zeros(4)}, errors.TensorMismatchError, "a"),
        ({"allow_dtype_cast": False}, {"a": torch.zeros(3).double()}, errors.TensorMismatchError, "allow_dtype_cast"),
        ({"rename": {"x": "y"}}, {"a": torch.zeros(3)}, errors.WeightsError, "'x' matches no name"),
        ({"tied": {"b": "c"}}, {"a": torch.zeros(3)}, errors.WeightsError, "'c'"),
    ],
)
def test_what_does_not_fit(
    weights: Callable[..., str], arguments: Any, state: Any, error: type[Exception], says: str
) -> None:
    url = weights({"a": torch.ones(3)})
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(error, match=says):
        dcp_s3.load_safetensors(url, state, **arguments)
    assert_same(state, before)


def test_what_are_no_weights(weights: Callable[..., str], root: str, s3: Any) -> None:
    state = {"a": torch.zeros(3)}
    with pytest.raises(errors.CheckpointNotFoundError, match="nothing"):
        dcp_s3.load_safetensors(f"{root}/nothing", state)
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(f"{root}/dcp"))
    with pytest.raises(errors.WeightsError, match="S3StorageReader"):
        dcp_s3.load_safetensors(f"{root}/dcp", state)
    put(s3, f"{root}/bad", SINGLE_FILE, b"\xff" * 100)
    with pytest.raises(errors.WeightsError, match="bad"):
        dcp_s3.load_safetensors(f"{root}/bad", state)


def test_weights_attached_to_a_save_that_was_cut_off_are_none(weights: Callable[..., str], s3: Any) -> None:
    url = weights({"a": torch.ones(3)})
    put(s3, url, ".dcp_s3/manifest-0123.json", b"{}")
    failure(lambda: load({"a": torch.zeros(3)}, url), errors.CheckpointNotFoundError)


def test_leases_of_readers_are_no_save(weights: Callable[..., str], s3: Any) -> None:
    url, expected = weights({"a": torch.ones(3)}), {"a": torch.ones(3)}
    settings = {"reader_lease": 60}
    assert_same(load(blank(expected), url, settings=settings), expected)
    state = blank(expected)
    dcp_s3.load_safetensors(url, state, settings=settings)
    assert_same(state, expected)
    put(s3, url, ".dcp_s3/lease-0123.60", b"{}")  # of a reader that was killed
    assert_same(dcp_s3.read_tensors(url), expected)


def test_files_of_which_some_are_missing(weights: Callable[..., str], s3: Any) -> None:
    url = weights({"a": torch.ones(3), "b": torch.ones(3)}, most=12)
    for name in (INDEX, "model-00002-of-00002.safetensors"):
        delete(s3, url, name)
    with pytest.raises(errors.WeightsError, match=r"model-00002-of-00002\.safetensors"):
        dcp_s3.read_tensors(url)


def test_metadata_cannot_pretend_to_be_that_of_weights(root: str, s3: Any) -> None:
    saved = Saved(s3, root).save({"a": torch.ones(3)})
    saved.change_metadata(lambda metadata: setattr(metadata, "dcp_s3_etags", 1))
    assert_same(dcp_s3.read_tensors(root), {"a": torch.ones(3)})
    with pytest.raises(errors.WeightsError, match="is a checkpoint"):
        dcp_s3.load_safetensors(root, {"a": torch.zeros(3)})


def test_a_file_that_is_replaced_while_it_is_read(weights: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = weights({"a": torch.ones(3)})
    run = fetch.Fetcher.fetch

    def replace(*args: Any, **kwargs: Any) -> Any:
        weights({"a": torch.zeros(3)})
        return run(*args, **kwargs)

    monkeypatch.setattr(fetch.Fetcher, "fetch", replace)
    state = {"a": torch.full((3,), 5.0)}
    with pytest.raises(errors.CorruptCheckpointError, match="replaced"):
        dcp_s3.load_safetensors(url, state)


# --- ranks -------------------------------------------------------------------------------------------

LAYERS = 6
MESHES: list[tuple[tuple[int, ...], list[Any], list[Any]]] = [  # shape; placements of columns, of rows
    ((4,), [Shard(0)], [Shard(0)]),
    ((4,), [Shard(1)], [Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)], [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
]


def llm() -> dict[str, torch.Tensor]:
    found = {"embed": random_tensor((1000, 256), torch.bfloat16, 1), "norm": random_tensor((256,), torch.bfloat16, 2)}
    for layer in range(LAYERS):
        found[f"layers.{layer}.up"] = random_tensor((1024, 256), torch.bfloat16, 10 + layer)
        found[f"layers.{layer}.down"] = random_tensor((256, 1024), torch.bfloat16, 20 + layer)
        found[f"layers.{layer}.scale"] = random_tensor((16,), torch.float32, 30 + layer)
    return found


def local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {fqn: each.to_local() if isinstance(each, DTensor) else each for fqn, each in state.items()}


def load_on_meshes(url: str) -> None:
    for shape, columns, rows in MESHES:
        mesh, expected = init_device_mesh("cpu", shape), llm()
        for fqn, tensor in expected.items():
            if tensor.ndim == 2:
                placements = columns if fqn.endswith("down") else rows
                expected[fqn] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        state = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
        dcp_s3.load_safetensors(url, state)
        assert_same(local(state), local(expected))


def test_each_rank_gets_its_part_and_bytes_are_fetched_once(weights: Callable[..., str], s3_env: Any) -> None:
    size = sum(tensor.nbytes for tensor in llm().values())
    url = weights(llm(), size // 3)
    reset_counters(s3_env.endpoint_url)
    run_ranks(4, load_on_meshes, url)
    headers = 4 * 4 * 32 * 1024  # of each file on each rank, at most
    assert fetch_counters(s3_env.endpoint_url).bytes_out <= len(MESHES) * (1.02 * size + headers)


def test_slices_of_a_checkpoint_by_name(root: str) -> None:
    up, down = random_tensor((64, 32), torch.float32, 1), random_tensor((32, 64), torch.bfloat16, 2)
    state = {"up": up, "down": down, "step": 7}
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(f"{root}/x"))
    columns = slice(8, 16)
    parts: dict[str, Any] = {"up": columns, "down": (slice(None), columns), "step": None}
    found = dcp_s3.read_tensors(f"{root}/x", parts)
    assert_same(found, {"up": up[columns], "down": down[:, columns], "step": 7})
    for name, index in (("up", 99), ("up", (0, 0, 0)), ("up", (..., ...)), ("step", 1), ("none", 1)):
        with pytest.raises(errors.EntryNotFoundError, match=name):
            dcp_s3.read_tensors(f"{root}/x", {name: index})


def test_weights_are_no_checkpoint(weights: Callable[..., str]) -> None:
    url = weights({"a.weight": torch.ones(3, 2)})
    for work in (dcp_s3.verify, lambda url: dcp_s3.export(url, f"{url}-export")):
        with pytest.raises(errors.CheckpointNotFoundError, match="safetensors weights lie there"):
            work(url)


# --- layouts -----------------------------------------------------------------------------------------


def upload(s3: Any, directory: Path, url: str) -> str:
    for path in directory.iterdir():
        put(s3, url, path.name, path.read_bytes())
    return url


def test_the_index_says_which_files_count_and_without_one_all_do(root: str, s3: Any, tmp_path: Path) -> None:
    names = sorted(model())
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        write(tmp_path / file, {name: tensor for name, tensor in model().items() if places[name] == file})
    write(tmp_path / "unrelated.safetensors", {"other": torch.ones(1)})
    (tmp_path / "config.json").write_text("{}")
    assert_same(dcp_s3.read_tensors(upload(s3, tmp_path, f"{root}/all")), {**model(), "other": torch.ones(1)})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same(dcp_s3.read_tensors(upload(s3, tmp_path, f"{root}/indexed")), model())


def test_a_checkpoint_made_of_weights(weights: Callable[..., str], root: str, tmp_path: Path) -> None:
    expected = {name: tensor for name, tensor in model().items() if name.startswith("dtypes")}
    state = {"model": blank(expected)}
    dcp_s3.load_safetensors(weights(expected), state, prefix="model.")
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(f"{root}/x"), no_dist=True)
    assert dcp_s3.verify(f"{root}/x", full=True).ok
    download(f"{root}/x", tmp_path / "copy")
    dcp_to_torch_save(tmp_path / "copy", tmp_path / "torch.pt")
    assert_same(torch.load(tmp_path / "torch.pt", weights_only=True), {"model": expected})


def _write_index(path: Path, places: dict[str, str]) -> None:
    write(path.parent / "x.safetensors", {"a": torch.ones(1)})
    path.write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("model.safetensors", lambda path: path.write_text("x"), "no safetensors file"),
        ("model.safetensors", lambda path: (write(path, model()), lengthen(path)), "header would have"),
        ("model.safetensors.index.json", lambda path: (_write_index(path, {}), path.write_text("{}")), "no weight_map"),
        ("model.safetensors.index.json", lambda path: _write_index(path, {}), "has no weights"),
        ("model.safetensors.index.json", lambda path: _write_index(path, {"a": "y.safetensors"}), "no file y.safeten"),
        ("model.safetensors.index.json", lambda path: _write_index(path, {"b": "x.safetensors"}), "index says None"),
        (
            "model.safetensors.index.json",
            lambda path: _write_index(path, {"a": "x.safetensors", "b": "x.safetensors"}),
            "'b' is in no file",
        ),
    ],
)
def test_what_cannot_be_loaded(root: str, s3: Any, tmp_path: Path, name: str, make: Any, message: str) -> None:
    make(tmp_path / name)
    with pytest.raises(errors.WeightsError, match=message):
        dcp_s3.load_safetensors(upload(s3, tmp_path, f"{root}/x"), {"a": torch.zeros(1)})


def test_names_that_do_not_fit(weights: Callable[..., str], root: str, s3: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    url = upload(s3, tmp_path, f"{root}/x")
    with pytest.raises(errors.WeightsError, match="'a' and 'b' would both be called 'x'"):
        dcp_s3.load_safetensors(url, {"x": torch.zeros(1)}, rename={"[ab]": "x"})
    write(tmp_path / "b.safetensors", {"a": torch.ones(1)})
    with pytest.raises(errors.WeightsError, match="'a' is in two of the files"):
        dcp_s3.load_safetensors(upload(s3, tmp_path, url), {"a": torch.zeros(1)})
