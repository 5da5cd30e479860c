"""What one version of torch wrote, another one reads, to the last bit: ours, and what torch's FileSystemWriter wrote.
Metadata of torch 2.1 and 2.2, whose classes later releases call otherwise, and of a torch that is newer.

Every value follows from its name. Archives in this folder hold what other versions wrote. With DCP_S3_TEST_WRITTEN, a
folder, what this version writes is left there, and what others have left there is read: `.ci/torch` does that with each
version.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.metadata import dump_metadata, load_metadata, seal
from dcp_s3.process import release
from dcp_s3.retention.catalog import describe
from tests.end_to_end.states import DTYPES, assert_same, blank, random_tensor
from tests.end_to_end.test_interchange import upload
from tests.hostile import call, decode_metadata, metadata_with, name
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")

WHOLE = (6, 5)
"""Shape of the tensors that ranks save in shards."""


def one_rank() -> dict[str, Any]:
    return {
        "dtypes": {str(dtype): random_tensor((2, 3), dtype, i) for i, dtype in enumerate(DTYPES)},
        "scalar": random_tensor((), torch.bfloat16, 1),
        "empty": torch.empty(3, 0, 2),
        "transposed": random_tensor((4, 3), torch.float32, 2).t(),
        "channels_last": random_tensor((2, 3, 4, 5), torch.float16, 3).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "objects": {"step": 12, "text": "läuft", "none": None, "list": [1, {"x": 2.5}]},
    }


def whole(name: str) -> torch.Tensor:
    return torch.arange(len(name), len(name) + 30, dtype=torch.float32).reshape(WHOLE)


def ranks(blank: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(WHOLE) if blank else whole(name), mesh, [each])
        for name, each in placements.items()
    }
    return {**state, "step": 0 if blank else 7}


_HERE = Path(__file__).parent
_SHARED = os.environ.get("DCP_S3_TEST_WRITTEN")
_ARCHIVES = sorted([*_HERE.glob("*.zip"), *(Path(_SHARED).glob("*.zip") if _SHARED else ())])
_STRIDES = hasattr(TensorProperties(), "strides")  # torch 2.15
_METADATA = "user-metadata.json"


def _save_ranks(url: str, folder: str, run: str) -> None:
    dcp.save(ranks(), storage_writer=S3StorageWriter(f"{url}/ranks"))
    os.environ["DCP_S3_RUN_ID"] = run
    dcp.save(ranks(), storage_writer=S3StorageWriter(f"{url}/merged"), use_collectives=False)
    dcp.save(ranks(), storage_writer=dcp.FileSystemWriter(f"{folder}/ranks"))


def test_what_this_torch_writes_it_reads(s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    dcp.save(one_rank(), storage_writer=S3StorageWriter(f"{root}/one"))
    dcp.save(one_rank(), storage_writer=dcp.FileSystemWriter(tmp_path / "torch/one"))
    run_ranks(2, _save_ranks, root, str(tmp_path / "torch"), "written")
    archive = (Path(_SHARED) if _SHARED else tmp_path) / f"{torch.__version__.partition('+')[0]}.zip"
    metadata = {}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for found in s3.list_objects_v2(Bucket=bucket)["Contents"]:
            stored = s3.get_object(Bucket=bucket, Key=found["Key"])
            name = "ours/" + found["Key"].removeprefix("run/")
            if "/board-" not in name:
                metadata[name] = stored["Metadata"]
                file.writestr(name, stored["Body"].read())
        for path in sorted(tmp_path.joinpath("torch").rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(tmp_path)))
        file.writestr(_METADATA, json.dumps(metadata))
    _check(archive, s3, bucket, root, tmp_path)


@pytest.mark.parametrize("archive", _ARCHIVES, ids=lambda path: path.stem)
def test_what_another_torch_wrote_is_read(s3: Any, bucket: str, root: str, tmp_path: Path, archive: Path) -> None:
    _check(archive, s3, bucket, root, tmp_path)


def _check(archive: Path, s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    folder = tmp_path / f"read-{archive.stem}"
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    metadata = json.loads((folder / _METADATA).read_text())
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != _METADATA:
            fields, key = metadata.get(name, {}), f"run/{archive.stem}/{name}"
            s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes(), Metadata=fields)
    stock = _STRIDES or release(archive.stem) < release("2.15")  # its own reader takes no more values than it knows
    pairs = []
    for writer, names in (("ours", ("ranks", "merged")), ("torch", ("ranks",))):
        url = f"{root}/{archive.stem}/{writer}"
        _check_one(dcp.FileSystemReader(folder / writer / "one") if stock else None, f"{url}/one")
        pairs += [(f"{url}/{name}", str(folder / writer / name) if stock else None) for name in names]
    for world_size in (1, 2, 3):
        run_ranks(world_size, _load_ranks, pairs)


def _check_one(stock: Any, url: str) -> None:
    expected = one_rank()
    for reader in (S3StorageReader(url), *([] if stock is None else [stock])):
        found = blank(expected)
        dcp.load(found, storage_reader=reader)
        assert_same(found, expected)
    found = one_rank()
    for strided in ("transposed", "channels_last"):
        found[strided].zero_()
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert_same(found, expected)


def _load_ranks(pairs: list[tuple[str, str | None]]) -> None:
    for reader in [each for url, folder in pairs for each in (S3StorageReader(url), folder) if each is not None]:
        found = ranks(blank=True)
        dcp.load(found, storage_reader=dcp.FileSystemReader(reader) if isinstance(reader, str) else reader)
        assert found["step"] == 7
        for tensor in ("rows", "columns", "replicated"):
            assert torch.equal(found[tensor].full_tensor(), whole(tensor)), (tensor, type(reader))


_NEWER = {Metadata: ("storage_meta", "version"), "_StorageInfo": ("transform_descriptors",)}


def state() -> dict[str, Any]:
    return {
        "w": random_tensor((4, 6), torch.bfloat16, 1),
        "nested": {"x": random_tensor((3,), torch.float32, 2), "step": 7},
        "conv": random_tensor((2, 3, 4, 5), torch.float32, 3),
    }


def as_torch_2_1_wrote(data: bytes) -> bytes:
    """The same metadata, of the classes and attributes that torch 2.1 and 2.2 had."""
    metadata = pickle.loads(data)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            kept = entry.properties
            entry.properties = OldProperties(  # type: ignore[assignment]
                kept.dtype, kept.layout, kept.requires_grad, torch.contiguous_format, kept.pin_memory
            )
    for part in (metadata, *metadata.storage_data.values()):
        for newer in _NEWER.get(type(part), _NEWER["_StorageInfo"]):
            vars(part).pop(newer, None)
    return pickle.dumps(metadata)


def test_it_is_loaded_verified_and_found(s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False))
    path = tmp_path / ".metadata"
    path.write_bytes(as_torch_2_1_wrote(path.read_bytes()))
    upload(s3, bucket, "run/step-1", tmp_path)
    found = blank(state())
    dcp.load(found, storage_reader=S3StorageReader(f"{root}/step-1"))
    assert_same(found, state())
    assert dcp_s3.latest(root).url == f"{root}/step-1"
    report = dcp_s3.verify(f"{root}/step-1")
    assert report.ok, report
    assert_same(dcp_s3.read_tensors(f"{root}/step-1", ["w"]), {"w": state()["w"]})
    shown = {entry.fqn: entry.dtype for entry in describe(f"{root}/step-1").entries}
    assert shown == {"w": "bfloat16", "nested.x": "float32", "nested.step": None, "conv": "float32"}


# --- a torch that is newer -----------------------------------------------------------------------------

_PROPERTIES = TensorProperties(torch.bfloat16, requires_grad=True)
_STATE = _PROPERTIES.__getstate__()[:5]  # type: ignore[no-untyped-call]
_SIZE = torch.Size([3, 4])
_CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), _SIZE)


def _newer_metadata(monkeypatch: pytest.MonkeyPatch, state: Any) -> bytes:
    """As a torch writes it whose TensorProperties have this state."""
    entry = TensorStorageMetadata(TensorProperties(torch.bfloat16), _SIZE, [_CHUNK])
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (self.dtype, *state[1:]))
        return dump_metadata(Metadata({"w": entry}, storage_data={}))


@pytest.mark.parametrize("added", [(), ((1, 3),), (None, torch.Size([2]), "text")])
def test_properties_with_more_values_are_loaded(monkeypatch: pytest.MonkeyPatch, added: tuple[Any, ...]) -> None:
    found = load_metadata(_newer_metadata(monkeypatch, (*_STATE, *added)), url="s3://bucket/step-1")
    read = found.state_dict_metadata["w"].properties  # type: ignore[union-attr]
    assert (type(read), read.dtype, read.layout) == (TensorProperties, torch.bfloat16, torch.strided)
    assert (read.requires_grad, read.memory_format) == (True, torch.contiguous_format)
    if _STRIDES:
        assert read.strides == (added[0] if added else None)


@pytest.mark.parametrize("added", [torch.nn.Linear, (print,), {"a": (torch.Size,)}])
def test_more_values_are_harmless(monkeypatch: pytest.MonkeyPatch, added: Any) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeMetadataError)):
        load_metadata(_newer_metadata(monkeypatch, (*_STATE, added)), url="s3://bucket/step-1")


_DCP = "torch.distributed.checkpoint."


@pytest.mark.parametrize(
    ("opcodes", "named"),
    [
        (name(_DCP + "metadata", "Fancy"), _DCP + "metadata.Fancy"),
        (name(_DCP + "fancy", "Fancy"), _DCP + "fancy.Fancy"),
        (name("torch", "float1"), "torch.float1"),
        (call(_DCP + "metadata", "_MEM_FORMAT_ENCODING", b"K\x63"), _DCP + r"metadata._MEM_FORMAT_ENCODING\(99\)"),
        (call("torch.serialization", "_get_layout", pickle.dumps("torch.fancy", 2)[2:-1]), "torch.fancy"),
    ],
)
def test_what_this_torch_does_not_have_is_named(opcodes: bytes, named: str) -> None:
    with pytest.raises(UnsafeMetadataError, match=named) as caught:
        decode_metadata(metadata_with(opcodes))
    assert f"torch {torch.__version__}" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_the_torch_that_wrote_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.1")
        data = seal(io.BytesIO(metadata_with(name("torch", "float1"))))
    with pytest.raises(UnsafeMetadataError, match=r"written by torch 2\.99\.1 and dcp_s3 ") as caught:
        load_metadata(data, url="s3://bucket/step-1")
    assert "the versions that wrote it" in str(caught.value)


@pytest.mark.parametrize(("module", "attribute"), [("torch", "load"), ("torch.nn.modules.linear", "Linear")])
def test_what_this_torch_has_and_metadata_never_needs_could_run_code(module: str, attribute: str) -> None:
    with pytest.raises(UnsafeMetadataError, match="run code"):
        decode_metadata(metadata_with(name(module, attribute)))
