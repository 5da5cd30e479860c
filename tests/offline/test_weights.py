"""Safetensors files: loaded into a state, read by name, and exported to a directory and to S3."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard

import dcp_s3
from benchmarks.measure import measure
from dcp_s3 import errors
from dcp_s3.format.safetensors import INDEX, SINGLE_FILE, TensorEntry, make_index, plan_shards
from dcp_s3.load import fetch
from dcp_s3.offline import export
from dcp_s3.offline import place as places
from dcp_s3.offline.copy import copy as download
from tests.end_to_end.loads import failure, load
from tests.end_to_end.states import assert_same, blank, distribute, random_tensor
from tests.memory_s3 import fetch_counters, reset_counters
from tests.offline.conftest import Saved, as_file, model, read, save, save_sharded
from tests.ranks import run_ranks
from tests.retention.making import delete, keys, put

pytestmark = pytest.mark.servers("memory")

MIB = 2**20


@pytest.fixture
def weights(s3: Any, root: str) -> Callable[..., str]:
    def upload(tensors: Mapping[str, torch.Tensor], most: int = 5 * 10**9) -> str:
        url = f"{root}/hf"
        shards = plan_shards([TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()], most)
        for shard in shards:
            put(s3, url, shard.name, as_file({each.name: tensors[each.name] for each in shard.tensors}))
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


def test_weights_beside_a_save_that_was_cut_off_are_none_and_beside_a_lease_they_are(
    weights: Callable[..., str], s3: Any
) -> None:
    url, expected = weights({"a": torch.ones(3)}), {"a": torch.ones(3)}
    settings = {"reader_lease": 60}
    assert_same(load(blank(expected), url, settings=settings), expected)
    state = blank(expected)
    dcp_s3.load_safetensors(url, state, settings=settings)
    assert_same(state, expected)
    put(s3, url, ".dcp_s3/lease-0123.60", b"{}")  # of a reader that was killed
    assert_same(dcp_s3.read_tensors(url), expected)
    put(s3, url, ".dcp_s3/manifest-0123.json", b"{}")  # they were attached to it
    failure(lambda: load(state, url), errors.CheckpointNotFoundError)


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


# --- ranks ---------------------------------------------------------------------------------------------

MESHES: list[tuple[list[Any], list[Any]]] = [  # placements of columns, of rows
    ([Shard(0)], [Shard(0)]),
    ([Shard(1)], [Shard(0)]),
    ([Shard(0), Shard(1)], [Shard(0), Shard(0)]),
    ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
]


def llm() -> dict[str, torch.Tensor]:
    found = {"embed": random_tensor((1000, 256), torch.bfloat16, 1), "norm": random_tensor((256,), torch.bfloat16, 2)}
    for layer in range(6):
        found[f"{layer}.up"] = random_tensor((1024, 256), torch.bfloat16, 10 + layer)
        found[f"{layer}.down"] = random_tensor((256, 1024), torch.bfloat16, 20 + layer)
        found[f"{layer}.scale"] = random_tensor((16,), torch.float32, 30 + layer)
    return found


def load_on_meshes(url: str) -> None:
    for columns, rows in MESHES:
        expected = llm()
        for fqn, tensor in expected.items():
            if tensor.ndim == 2:
                expected[fqn] = distribute(tensor, *(columns if fqn.endswith("down") else rows))
        state = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
        dcp_s3.load_safetensors(url, state)
        found, wanted = ([getattr(each, "_local_tensor", each) for each in of.values()] for of in (state, expected))
        assert_same(found, wanted)


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


# --- layouts -------------------------------------------------------------------------------------------


def test_the_index_says_which_files_count_and_without_one_all_do(root: str, s3: Any) -> None:
    url, names = f"{root}/x", sorted(model())
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        put(s3, url, file, as_file({name: tensor for name, tensor in model().items() if places[name] == file}))
    put(s3, url, "unrelated.safetensors", as_file({"other": torch.ones(1)}))
    put(s3, url, "config.json", b"{}")
    assert_same(dcp_s3.read_tensors(url), {**model(), "other": torch.ones(1)})
    put(s3, url, INDEX, json.dumps({"metadata": {}, "weight_map": places}).encode())
    assert_same(dcp_s3.read_tensors(url), model())


def test_a_checkpoint_made_of_weights(weights: Callable[..., str], root: str, tmp_path: Path) -> None:
    expected = {name: tensor for name, tensor in model().items() if name.startswith("dtypes")}
    state = {"model": blank(expected)}
    dcp_s3.load_safetensors(weights(expected), state, prefix="model.")
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(f"{root}/x"), no_dist=True)
    assert dcp_s3.verify(f"{root}/x", full=True).ok
    download(f"{root}/x", tmp_path / "copy")
    dcp_to_torch_save(tmp_path / "copy", tmp_path / "torch.pt")
    assert_same(torch.load(tmp_path / "torch.pt", weights_only=True), {"model": expected})


_ONE = as_file({"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("file", "index", "message"),
    [
        (b"x", None, "no safetensors file"),
        (len(_ONE).to_bytes(8, "little") + _ONE[8:], None, "header would have"),
        (_ONE, {}, "no weight_map"),
        (_ONE, {"weight_map": {}}, "has no weights"),
        (_ONE, {"weight_map": {"a": "y.safetensors"}}, "no file y.safeten"),
        (_ONE, {"weight_map": {"b": SINGLE_FILE}}, "index says None"),
        (_ONE, {"weight_map": {"a": SINGLE_FILE, "b": SINGLE_FILE}}, "'b' is in no file"),
    ],
)
def test_what_cannot_be_loaded(root: str, s3: Any, file: bytes, index: Any, message: str) -> None:
    put(s3, f"{root}/x", SINGLE_FILE, file)
    if index is not None:
        put(s3, f"{root}/x", INDEX, json.dumps(index).encode())
    with pytest.raises(errors.WeightsError, match=message):
        dcp_s3.load_safetensors(f"{root}/x", {"a": torch.zeros(1)})


def test_names_that_do_not_fit(root: str, s3: Any) -> None:
    url = f"{root}/x"
    put(s3, url, "a.safetensors", as_file({"a": torch.ones(1), "b": torch.ones(1)}))
    with pytest.raises(errors.WeightsError, match="'a' and 'b' would both be called 'x'"):
        dcp_s3.load_safetensors(url, {"x": torch.zeros(1)}, rename={"[ab]": "x"})
    put(s3, url, "b.safetensors", _ONE)
    with pytest.raises(errors.WeightsError, match="'a' is in two of the files"):
        dcp_s3.load_safetensors(url, {"a": torch.zeros(1)})


# --- exports -------------------------------------------------------------------------------------------


class Place:
    def __init__(self, where: str) -> None:
        self.where, self._place = where, places.Place.of(where, dcp_s3.Settings())

    def files(self) -> list[str]:
        return sorted(self._place.objects())

    def get(self, name: str) -> bytes:
        return self._place.store.get(self._place.key(name)).data

    def put(self, name: str, data: bytes) -> None:
        self._place.store.put(self._place.key(name), data)

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
    moved, totals = [], []  # type: ignore[var-annotated]
    watched: Any = {"on_total": totals.append, "on_progress": moved.append}
    result = dcp_s3.export(f"{root}/x", place.where, max_shard_size="100KB", **watched)
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
    place = Place(f"{place.where}-double")
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
    save({"w": torch.ones(1)}, f"{root}/x", {"config.json": b"{}", "tokenizer/vocab.txt": b"a"})
    dcp_s3.export(f"{root}/x", place.where)
    assert place.files() == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]
    assert place.get("config.json") == b"{}"


# --- exports that are refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "modle.*"}, errors.EntryNotFoundError, r"no entry 'modle\.\*'.*'model\.a'"),
        ({"include": ["step"]}, errors.WeightsError, "no tensor to export"),
        ({"rename": {"modle": ""}}, errors.WeightsError, r"'modle' matches no name.*'model\.[ab]'"),
        ({"rename": {r"model\.a": "__metadata__"}}, errors.WeightsError, "__metadata__"),
        ({"rename": {"[ab]$": "x"}}, errors.WeightsError, "'model.a' and 'model.b' would both be called 'model.x'"),
        ({"rename": {"(": ""}}, errors.WeightsError, "cannot rename: missing"),
        ({"rename": {"a": r"\2"}}, errors.WeightsError, "cannot rename: invalid group reference"),
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
    save({"w": torch.ones(1)}, f"{root}/x", {SINGLE_FILE: b"x"})
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
    options: Any = {"on_progress": lambda _: seen.update(keys(s3, f"{root}/x"))}
    dcp_s3.export(f"{root}/x", tmp_path, settings={"reader_lease": 60}, **options)
    assert [path for path in seen if "lease" in path]
    assert not [path for path in keys(s3, f"{root}/x") if "lease" in path]


def test_a_failed_export_leaves_whole_files_without_an_index(root: str, place: Place, s3: Any) -> None:
    save({name: random_tensor((1000,), torch.float32, n) for n, name in enumerate("abc")}, f"{root}/x")
    saved = Saved(s3, f"{root}/x")
    (path,) = saved.data
    saved.flip(path, saved.sizes[path] - 2000)
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
