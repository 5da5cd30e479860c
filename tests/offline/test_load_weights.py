"""Weights of safetensors files on S3 loaded into a state, and slices of checkpoints read by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import dcp_s3
from dcp_s3 import errors
from dcp_s3.cli.main import app
from dcp_s3.format.safetensors import INDEX, SINGLE_FILE, TensorEntry, make_header, make_index, plan_shards
from dcp_s3.load import fetch
from tests.end_to_end.loads import failure, load
from tests.end_to_end.states import assert_same, bits, blank, random_tensor
from tests.memory_s3 import fetch_counters, reset_counters
from tests.offline.conftest import Saved
from tests.offline.weights import model
from tests.ranks import run_ranks
from tests.retention.making import delete, put

pytestmark = pytest.mark.servers("memory")

MIB = 2**20


@pytest.fixture
def weights(s3: Any, root: str) -> Callable[..., str]:
    """A function that puts a model on S3, in files of at most so many bytes, and returns the URL."""

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
def test_every_dtype_and_shape(weights: Callable[..., str], most: int) -> None:
    url, expected = weights(model(), most), model()
    assert_same(load(blank(expected), url), expected)
    assert_same(dcp_s3.read_tensors(url), expected)
    state = blank(expected)
    dcp_s3.load_safetensors(url, state)
    assert_same(state, expected)


def test_files_without_an_index(weights: Callable[..., str], root: str, s3: Any) -> None:
    one, two = {"a": torch.arange(5.0)}, {"b": torch.arange(3)}
    for number, tensors in enumerate((one, two)):
        url = weights(tensors)
        data = s3.get_object(Bucket=root.split("/")[2], Key=f"run/hf/{SINGLE_FILE}")["Body"].read()
        put(s3, url, f"part-{number}.safetensors", data)
    s3.delete_object(Bucket=root.split("/")[2], Key=f"run/hf/{SINGLE_FILE}")
    assert_same(load(blank(one | two), url), one | two)


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


def test_entries_that_no_file_has_stay_if_allowed(weights: Callable[..., str]) -> None:
    state = {"a": torch.zeros(3), "b": torch.full((2,), 7.0)}
    dcp_s3.load_safetensors(weights({"a": torch.ones(3)}), state, allow_partial_load=True)
    assert_same(state, {"a": torch.ones(3), "b": torch.full((2,), 7.0)})


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
    """As after an export that was cut off: the index is written last."""
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


def load_on_meshes(url: str) -> None:
    for shape, columns, rows in MESHES:
        load_on_mesh(url, shape, columns, rows)


def load_on_mesh(url: str, shape: tuple[int, ...], columns: list[Any], rows: list[Any]) -> None:
    mesh, expected = init_device_mesh("cpu", shape), llm()
    placed = {
        fqn: distribute_tensor(tensor, mesh, columns if fqn.endswith("down") else rows, src_data_rank=None)
        for fqn, tensor in expected.items()
        if tensor.ndim == 2
    }
    state: dict[str, Any] = {
        fqn: torch.zeros_like(placed[fqn]) if fqn in placed else torch.zeros_like(tensor)
        for fqn, tensor in expected.items()
    }
    dcp_s3.load_safetensors(url, state)
    local = {fqn: each.to_local() if isinstance(each, DTensor) else each for fqn, each in state.items()}
    right = {fqn: placed[fqn].to_local() if fqn in placed else tensor for fqn, tensor in expected.items()}
    assert_same(local, right)


def test_each_rank_gets_its_part_and_bytes_are_fetched_once(weights: Callable[..., str], s3_env: Any) -> None:
    """Sharded, with tensor parallelism, both, and replicated."""
    size = sum(tensor.nbytes for tensor in llm().values())
    url = weights(llm(), size // 3)
    reset_counters(s3_env.endpoint_url)
    run_ranks(4, load_on_meshes, url)
    headers = 4 * 4 * 32 * 1024  # of each file on each rank, at most
    assert fetch_counters(s3_env.endpoint_url).bytes_out <= len(MESHES) * (1.02 * size + headers)


# --- slices ------------------------------------------------------------------------------------------


def test_slices_of_a_checkpoint_by_name(root: str) -> None:
    up, down = random_tensor((64, 32), torch.float32, 1), random_tensor((32, 64), torch.bfloat16, 2)
    state = {"up": up, "down": down, "step": 7}
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(f"{root}/x"))
    columns = slice(8, 16)
    parts: dict[str, Any] = {"up": columns, "down": (slice(None), columns), "step": None}
    found = dcp_s3.read_tensors(f"{root}/x", parts)
    assert_same(found, {"up": up[columns], "down": down[:, columns], "step": 7})
    for name, index in (("up", 99), ("step", 1), ("none", 1)):
        with pytest.raises(errors.EntryNotFoundError, match=name):
            dcp_s3.read_tensors(f"{root}/x", {name: index})


def test_show_says_what_the_files_hold(weights: Callable[..., str]) -> None:
    url = weights({"a.weight": torch.ones(3, 2), "b": torch.ones(4).bfloat16()})
    shown = CliRunner().invoke(app, ["show", url])
    assert shown.exit_code == 0, shown.output
    assert "safetensors files: 2 tensors, without checksums" in shown.output
    assert "a.weight" in shown.output
    assert CliRunner().invoke(app, ["show", f"{url}-none"]).exit_code == 3
