"""Checkpoints of torch 2.1 and 2.2, whose metadata is made of classes that later releases call otherwise."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dcp_s3
from dcp_s3 import S3StorageReader, errors
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.show import describe
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.end_to_end.test_interchange import upload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

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
        for name in _NEWER.get(type(part), _NEWER["_StorageInfo"]):
            vars(part).pop(name, None)
    return pickle.dumps(metadata)


def globals_of(data: bytes) -> set[str]:
    """Qualified names of what a pickle names."""
    found = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    Recorder(io.BytesIO(data)).load()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False))
    path = tmp_path / ".metadata"
    path.write_bytes(as_torch_2_1_wrote(path.read_bytes()))
    return tmp_path


def test_the_fixture_is_what_torch_2_1_wrote(directory: Path) -> None:
    data = (directory / ".metadata").read_bytes()
    old = "torch.distributed._shard.sharded_tensor.metadata."
    assert {f"{old}TensorProperties", f"{old}MEM_FORMAT_ENCODING"} <= globals_of(data)
    assert not any(name.endswith(("StorageMeta", "metadata._MEM_FORMAT_ENCODING")) for name in globals_of(data))
    found = blank(state())
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory))
    assert_same(found, state())


def test_it_is_loaded_verified_and_found(memory_server: Any, s3: Any, bucket: str, root: str, directory: Path) -> None:
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


def test_its_properties_are_todays(directory: Path) -> None:
    """What reads metadata need not know of two classes."""
    data = (directory / ".metadata").read_bytes()
    found = load_metadata(data, url="s3://bucket/step-1")
    expected = pickle.loads(data)
    for fqn, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert type(entry.properties) is dcp.metadata.TensorProperties
            assert vars(entry.properties) == vars(expected.state_dict_metadata[fqn].properties)


def test_nothing_else_of_the_old_modules_is_taken() -> None:
    for name in (b"ShardedTensorMetadata", b"ShardMetadata"):
        data = b"\x80\x02ctorch.distributed._shard.sharded_tensor.metadata\n" + name + b"\n)\x81."
        with pytest.raises(errors.UnsafeMetadataError, match=name.decode()):
            load_metadata(data, url="s3://bucket/step-1")
