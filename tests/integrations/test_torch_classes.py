"""register() on torch's own classes: whoever makes one, whenever the name was imported."""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value), "epoch": int(value)}


def _load(**how: Any) -> int:
    found = _state(-1.0)
    dcp.load(found, **how)
    assert torch.equal(found["w"], torch.full((100,), float(found["epoch"])))
    return int(found["epoch"])


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, in which the test must leave nothing."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    yield directory
    assert [str(path) for path in directory.rglob("*")] == []


@pytest.fixture
def registered() -> Iterator[None]:
    dcp_s3.register(overwrite=True)
    yield
    dcp_s3.unregister()


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(("writer", "reader"), [(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)])
def test_what_a_framework_makes_itself(
    root: str, cwd: Path, registered: None, writer: Any, reader: Any, kind: Any
) -> None:
    """The names were imported before, and the arguments are those that Accelerate, torchtitan and others give."""
    made = writer(kind(root), single_file_per_rank=True, thread_count=4, sync_files=False)
    assert isinstance(made, S3StorageWriter)
    dcp.save(_state(1.0), storage_writer=made, checkpoint_id=kind(root))
    assert isinstance(reader(kind(root)), S3StorageReader)
    assert _load(storage_reader=reader(path=kind(root)), checkpoint_id=kind(root)) == 1
    dcp.async_save(_state(2.0), storage_writer=writer(kind(root), False, True, 2)).result(60)
    assert _load(storage_reader=reader(kind(root))) == 2


def test_their_own_overwrite_counts(root: str, registered: None) -> None:
    dcp.save(_state(1.0), storage_writer=FileSystemWriter(root))
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(_state(2.0), storage_writer=FileSystemWriter(root, overwrite=False))
    dcp_s3.register(overwrite=False)
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(_state(2.0), storage_writer=FileSystemWriter(root))
    dcp.save(_state(3.0), storage_writer=FileSystemWriter(root, overwrite=True))
    assert _load(checkpoint_id=root) == 3


def test_arguments_that_torch_would_refuse(root: str, registered: None) -> None:
    with pytest.raises(TypeError, match="threads"):
        FileSystemWriter(root, threads=2)
    with pytest.raises(errors.SaveProtocolError, match="cannot be saved as safetensors"):
        FileSystemWriter(root, serialization_format=SerializationFormat.SAFETENSORS)


def test_options_of_fsspec_are_not_silently_dropped(
    root: str, registered: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        FsspecWriter(root, secret="s", endpoint_url="http://other")
    assert "the options endpoint_url, secret are fsspec's and not used" in caplog.text


def test_what_would_be_written_locally_is_refused(root: str, cwd: Path, registered: None) -> None:
    with pytest.raises(errors.SettingsError, match=r"HuggingFaceStorageWriter has no S3.*dcp-s3 export"):
        HuggingFaceStorageWriter(root)


def test_validate_says_so(root: str, registered: None) -> None:
    for each in (FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader):
        assert each.validate_checkpoint_id(root)
        assert each.validate_checkpoint_id(Path(root))


def test_signatures_stay_those_of_torch(registered: None) -> None:
    """jsonargparse and others make objects from them."""
    for each in (FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader):
        assert "path" in inspect.signature(each).parameters


@pytest.mark.parametrize("path", ["", "elsewhere"])
def test_a_writer_of_files_that_gets_an_s3_url_writes_nowhere(
    root: str, cwd: Path, registered: None, path: str
) -> None:
    with pytest.raises(errors.SettingsError, match=r"this FileSystemWriter was made for .*cannot go to s3://"):
        dcp.save(_state(1.0), storage_writer=FileSystemWriter(path), checkpoint_id=f"{root}/step-1")
    with pytest.raises(errors.SettingsError, match="this FileSystemReader was made for"):
        dcp.load(_state(1.0), storage_reader=FileSystemReader(path), checkpoint_id=f"{root}/step-1")


def test_a_reader_of_safetensors_is_not_told_that_it_would_write(root: str, registered: None) -> None:
    with pytest.raises(errors.SettingsError, match=r"HuggingFaceStorageReader has no S3.*dcp-s3 import"):
        HuggingFaceStorageReader(f"{root}/base-model")


def test_afterwards_the_classes_are_torchs(root: str, tmp_path: Path) -> None:
    before = {each: each.__dict__.get("validate_checkpoint_id") for each in (FileSystemWriter, FsspecReader)}
    dcp_s3.register()
    dcp_s3.unregister()
    assert {each: each.__dict__.get("validate_checkpoint_id") for each in before} == before
    writer = FileSystemWriter(tmp_path / "a", thread_count=3)
    assert type(writer) is FileSystemWriter
    assert writer.thread_count == 3
    assert type(pickle.loads(pickle.dumps(writer))) is FileSystemWriter
    assert not FileSystemWriter.validate_checkpoint_id(root)
