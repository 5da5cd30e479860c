"""`.metadata` is read by an allow-list."""

import collections
import os
import pathlib
import pickle
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3.errors import CorruptMetadataError, UnsafeMetadataError
from dcp_s3.format.metadata import dump_metadata, load_metadata

URL = "s3://bucket/step-1"


def _metadata(path: str = "__0_0.distcp") -> Metadata:
    size = torch.Size([4])
    properties = TensorProperties(dtype=torch.bfloat16)
    return Metadata(
        {
            "w": TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0]), size)]),
            "x": BytesStorageMetadata(),
        },
        planner_data={"w": ("w",), "x": ("a", 0, "x")},
        storage_data={MetadataIndex("w", [0]): _StorageInfo(path, 0, 10)},
        storage_meta=StorageMeta(checkpoint_id=pathlib.PosixPath("/somewhere"), save_id="1"),
        version="1.0.0",
    )


def test_round_trip() -> None:
    assert load_metadata(dump_metadata(_metadata()), url=URL) == _metadata()


def test_what_planners_may_add() -> None:
    metadata = _metadata()
    metadata.planner_data = [collections.OrderedDict(a={1, 2}), frozenset({3}), 1j, b"b", torch.float8_e4m3fn, slice(1)]
    assert load_metadata(dump_metadata(metadata), url=URL) == metadata


class _Evil:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "system"),
        (subprocess.Popen, "Popen"),
        (eval, "eval"),
        (getattr, "getattr"),
        (torch.load, "load"),
        (__import__, "__import__"),
    ],
)
def test_code_is_never_run(function: object, name: str, tmp_path: pathlib.Path) -> None:
    victim = tmp_path / "owned"
    metadata = _metadata()
    metadata.planner_data = _Evil(function, f"touch {victim}")
    with pytest.raises(UnsafeMetadataError, match=name):
        load_metadata(pickle.dumps(metadata), url=URL)
    assert not victim.exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/abs", "a/../../x", ""])
def test_objects_outside_of_the_checkpoint_are_refused(path: str) -> None:
    with pytest.raises(UnsafeMetadataError, match="'w'"):
        load_metadata(dump_metadata(_metadata(path)), url=URL)


@pytest.mark.parametrize("cut", [0, 1, 10, 100, -1])
def test_truncation_names_the_checkpoint(cut: int) -> None:
    data = dump_metadata(_metadata())
    with pytest.raises(CorruptMetadataError, match="step-1"):
        load_metadata(data[:cut], url=URL)


def test_another_pickle_is_not_metadata() -> None:
    with pytest.raises(CorruptMetadataError, match="dict"):
        load_metadata(pickle.dumps({"a": 1}), url=URL)
