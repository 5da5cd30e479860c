"""Metadata of torch 2.1 and 2.2, whose classes later releases call otherwise, and of a torch that is newer."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp_s3
from dcp_s3 import S3StorageReader, errors
from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.metadata import dump_metadata, load_metadata, seal
from dcp_s3.retention.catalog import describe
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.end_to_end.test_interchange import upload
from tests.hostile import call, decode_metadata, metadata_with, name

pytestmark = pytest.mark.servers("memory")


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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False))
    path = tmp_path / ".metadata"
    path.write_bytes(as_torch_2_1_wrote(path.read_bytes()))
    return tmp_path


def test_it_is_loaded_verified_and_found(s3: Any, bucket: str, root: str, directory: Path) -> None:
    upload(s3, bucket, "run/step-1", directory)
    found = blank(state())
    dcp.load(found, storage_reader=S3StorageReader(f"{root}/step-1"))
    assert_same(found, state())
    latest = dcp_s3.latest(root)
    assert latest is not None
    assert latest.url == f"{root}/step-1"
    report = dcp_s3.verify(f"{root}/step-1")
    assert report.ok, report
    assert_same(dcp_s3.read_tensors(f"{root}/step-1", ["w"]), {"w": state()["w"]})
    shown = {entry.fqn: entry.dtype for entry in describe(f"{root}/step-1").entries}
    assert shown == {"w": "bfloat16", "nested.x": "float32", "nested.step": None, "conv": "float32"}


def test_nothing_else_of_the_old_modules_is_taken() -> None:
    for old in (b"ShardedTensorMetadata", b"ShardMetadata"):
        data = b"\x80\x02ctorch.distributed._shard.sharded_tensor.metadata\n" + old + b"\n)\x81."
        with pytest.raises(errors.UnsafeMetadataError, match=old.decode()):
            load_metadata(data, url="s3://bucket/step-1")


# --- a torch that is newer -----------------------------------------------------------------------------


_PROPERTIES = TensorProperties(torch.bfloat16, requires_grad=True)
_STATE = _PROPERTIES.__getstate__()[:5]  # type: ignore[no-untyped-call]
_SIZE = torch.Size([3, 4])
_CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), _SIZE)
_STRIDES = hasattr(TensorProperties(), "strides")


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
