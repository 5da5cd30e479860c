"""register() and redirect() on torch's own classes: whoever makes one, whenever the name was imported."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future
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
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from tests.ranks import run_ranks
from tests.servers import S3Server

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


# --- register ---------------------------------------------------------------------------------------------


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


# --- redirect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_directory_is_on_s3(root: str, tmp_path: Path, cwd: Path, kind: Any) -> None:
    step, url = kind(tmp_path / "ckpt" / "step-1"), f"{root}/run/step-1"
    with dcp_s3.redirect({tmp_path / "ckpt": f"{root}/run/"}):
        dcp.save(_state(1.0), checkpoint_id=step)
        assert _load(checkpoint_id=step) == 1
        dcp.save(_state(2.0), storage_writer=FileSystemWriter(step), checkpoint_id=step)  # as torch's, it replaces
        assert _load(storage_reader=FileSystemReader(step)) == 2
        dcp.async_save(_state(3.0), checkpoint_id=step).result(60)
        assert _load(storage_reader=FileSystemReader(step), checkpoint_id=step) == 3
        dcp.save(_state(4.0), checkpoint_id=kind(tmp_path / "ckpt-2"))  # not below it
    assert _load(storage_reader=S3StorageReader(url)) == 3
    assert [path.name for path in tmp_path.iterdir() if path != cwd] == ["ckpt-2"]
    assert type(FileSystemWriter(step)) is FileSystemWriter


def test_a_relative_path_is_below_it(root: str, cwd: Path) -> None:
    with dcp_s3.redirect({cwd: root}):
        dcp.save(_state(1.0), checkpoint_id="out/../step-1")
        assert _load(checkpoint_id=cwd / "step-1") == 1
    assert _load(storage_reader=S3StorageReader(f"{root}/step-1")) == 1


def test_a_writer_for_elsewhere_does_not_write_locally(root: str, tmp_path: Path, cwd: Path) -> None:
    with dcp_s3.redirect({tmp_path / "ckpt": root}), pytest.raises(errors.SettingsError, match="cannot go to"):
        dcp.save(_state(1.0), storage_writer=FileSystemWriter(tmp_path / "x"), checkpoint_id=tmp_path / "ckpt" / "1")
    assert not (tmp_path / "ckpt").exists()


def test_a_link_counts_under_its_real_name_too(root: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk")
    with dcp_s3.redirect({tmp_path / "ckpt": f"{root}/a", tmp_path / "disk": f"{root}/b"}):
        dcp.save(_state(1.0), checkpoint_id=(tmp_path / "ckpt" / "1"))
        dcp.save(_state(2.0), checkpoint_id=(tmp_path / "ckpt" / "1").resolve())
    with dcp_s3.redirect({tmp_path / "ckpt": f"{root}/c"}):
        dcp.save(_state(3.0), checkpoint_id=(tmp_path / "ckpt" / "1").resolve())
    assert list((tmp_path / "disk").iterdir()) == []
    assert [_load(storage_reader=S3StorageReader(f"{root}/{name}/1")) for name in "abc"] == [1, 2, 3]


def test_a_reader_of_safetensors_below_it_reads_the_disk(root: str, tmp_path: Path) -> None:
    """Only FileSystemWriter and FileSystemReader are redirected: a base model may lie there."""
    with dcp_s3.redirect({tmp_path: root}):
        HuggingFaceStorageReader(str(tmp_path / "base-model"))


class _SlowStager:
    """Copies in the background: the save begins when ``go`` is done."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.go: Future[Any] = Future()

    def stage(self, state_dict: Any, **kwargs: Any) -> Future[Any]:
        return self.go

    def close(self) -> None:
        pass


def test_a_save_that_began_in_it_ends_on_s3_after_it(root: str, tmp_path: Path, cwd: Path) -> None:
    """`with redirect(...): trainer.train()` may be left while the last copy is being made."""
    stager: Any = _SlowStager()
    with dcp_s3.redirect({cwd / "ckpt": root}):
        saving: Any = dcp.async_save(_state(1.0), checkpoint_id=cwd / "ckpt" / "1", async_stager=stager)
    stager.go.set_result(_state(1.0))
    saving.upload_completion.result()
    assert _load(storage_reader=S3StorageReader(f"{root}/1")) == 1


def test_s3_urls_are_not_its_business(root: str, tmp_path: Path) -> None:
    with dcp_s3.redirect({"/": root}):
        made = FileSystemWriter(tmp_path / "a")
        assert isinstance(made, S3StorageWriter)
        assert made.checkpoint_id == f"{root}{tmp_path}/a"
        assert not isinstance(FsspecWriter(f"memory://{tmp_path}/b"), S3StorageWriter)


def test_which_one_counts(root: str) -> None:
    def target() -> str | None:
        return FileSystemWriter("/ckpt/a/b/c").checkpoint_id  # type: ignore[attr-defined, no-any-return]

    outer = dcp_s3.redirect({"/ckpt": f"{root}/1", "/ckpt/a": f"{root}/2"})
    try:
        assert target() == f"{root}/2/b/c"
        with dcp_s3.redirect({"/ckpt": f"{root}/3"}) as inner:
            assert target() == f"{root}/3/a/b/c"
            assert repr(inner) == f"Redirect({{'/ckpt': '{root}/3'}})"
        inner.undo()
        assert target() == f"{root}/2/b/c"
        dcp_s3.register()
        dcp_s3.unregister()
        assert target() == f"{root}/2/b/c"
    finally:
        outer.undo()
    assert type(FileSystemWriter("/ckpt/a/b/c")) is FileSystemWriter


def test_equal_ones_are_two(root: str) -> None:
    first, other, again = (dcp_s3.redirect({"/ckpt": f"{root}/{name}"}) for name in ("1", "2", "1"))
    try:
        again.undo()
        again.undo()
        assert FileSystemWriter("/ckpt").checkpoint_id == f"{root}/2"  # type: ignore[attr-defined]
        other.undo()
        assert FileSystemWriter("/ckpt").checkpoint_id == f"{root}/1"  # type: ignore[attr-defined]
    finally:
        first.undo()
    assert isinstance(HuggingFaceStorageReader(root), HuggingFaceStorageReader)  # as torch has it


def test_bad_arguments_change_nothing() -> None:
    with pytest.raises(errors.InvalidURLError, match="not an S3 URL"):
        dcp_s3.redirect({"/ckpt": "/other"})
    with pytest.raises(errors.InvalidURLError, match="cannot be redirected: it is a URL"):
        dcp_s3.redirect({"s3://bucket/a": "s3://bucket/b"})
    with pytest.raises(errors.SettingsError):
        dcp_s3.redirect({"/ckpt": "s3://bucket/b"}, settings={"part_size": "1"})
    assert type(FileSystemWriter("/ckpt/a")) is FileSystemWriter


def _in_a_process(root: str, directory: str) -> None:
    with dcp_s3.redirect({directory: root}):
        for number, how in enumerate(({}, {"storage_writer": FileSystemWriter(f"{directory}/1")})):
            dcp.async_save(
                _state(number),
                checkpoint_id=f"{directory}/{number}",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                **how,
            ).result(120)
            assert _load(checkpoint_id=f"{directory}/{number}") == number
    assert _load(storage_reader=S3StorageReader(f"{root}/1")) == 1
    assert not os.path.exists(directory)


def test_saves_by_a_process(root: str, memory_server: S3Server, tmp_path: Path) -> None:
    run_ranks(1, _in_a_process, root, str(tmp_path / "ckpt"))
