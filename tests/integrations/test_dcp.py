"""register() and unregister(): a bare checkpoint_id, and what stays torch's own."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, _fsspec_filesystem
from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),  # of fsspec's writer
]

_TORCHS_WRITER = _fsspec_filesystem.FsspecWriter
_TORCHS_READER = _fsspec_filesystem.FsspecReader
_TORCHS_SAVES = _ProcessBasedAsyncCheckpointExecutor.execute_save, _ThreadBasedAsyncCheckpointExecutor.execute_save
_TORCHS_OWN = {each: dict(vars(each)) for each in (FileSystemWriter, FileSystemReader, _TORCHS_WRITER, _TORCHS_READER)}


def _torch_is_as_it_was() -> bool:
    saves = _ProcessBasedAsyncCheckpointExecutor.execute_save, _ThreadBasedAsyncCheckpointExecutor.execute_save
    return saves == _TORCHS_SAVES and all(
        vars(each).get(name) is own.get(name)
        for each, own in _TORCHS_OWN.items()
        for name in ("validate_checkpoint_id", "reset")
    )


@pytest.fixture
def registered() -> Iterator[None]:
    dcp_s3.register()
    yield
    dcp_s3.unregister()
    assert _torch_is_as_it_was()


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value, dtype=torch.float32), "epoch": int(value)}


def _assert_loads(state: dict[str, Any], value: float) -> None:
    assert torch.equal(state["w"], _state(value)["w"])
    assert state["epoch"] == int(value)


# --- s3:// -----------------------------------------------------------------------------------------------


def test_save_and_load_by_checkpoint_id_alone(root: str, s3: Any, bucket: str, registered: None) -> None:
    dcp.save(_state(2.0), checkpoint_id=root)
    found = _state(0.0)
    dcp.load(found, checkpoint_id=root)
    _assert_loads(found, 2.0)
    # It is ours: an explicit reader agrees, and there is a manifest.
    found = _state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(root))
    _assert_loads(found, 2.0)
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    assert any("manifest-" in key for key in keys)


def _cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return caught.value.failures[0][0]


def _folded(url: str) -> list[Any]:
    """What is left of the URL when it went through pathlib, which takes the two slashes for one."""
    return [Path(url), PurePosixPath(url), str(Path(url))]


def test_a_url_that_went_through_pathlib_goes_to_s3(
    root: str, memory_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp_s3.register()
    try:
        for number, checkpoint_id in enumerate(_folded(root)):
            assert str(checkpoint_id) == root.replace("//", "/")
            step = (
                Path(checkpoint_id, str(number)) if isinstance(checkpoint_id, PurePath) else f"{checkpoint_id}/{number}"
            )
            dcp.save(_state(number), checkpoint_id=step)
            found = _state(-1.0)
            dcp.load(found, checkpoint_id=step)
            _assert_loads(found, number)
    finally:
        dcp_s3.unregister()
    assert list(tmp_path.iterdir()) == []
    assert {key.split("/")[1] for key in memory_server.handle.objects(bucket)} == {"0", "1", "2"}
    newest = dcp_s3.latest(Path(root))
    assert newest is not None
    assert newest.url == f"{root}/2"
    dcp.save(_state(9.0), checkpoint_id=Path(root, "9"), storage_writer=S3StorageWriter())
    found = _state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(Path(root, "9")))
    _assert_loads(found, 9.0)


def test_an_asynchronous_save_to_a_path_goes_to_s3(
    root: str, memory_server: S3Server, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.async_save(_state(3.0), checkpoint_id=Path(root)).result(60)
    found = _state(0.0)
    dcp.load(found, checkpoint_id=root)
    _assert_loads(found, 3.0)
    assert list(tmp_path.iterdir()) == []


def test_a_registration_can_overwrite_and_has_settings(root: str, memory_server: S3Server, bucket: str) -> None:
    """As with torch's FsspecWriter: a run that goes on from an earlier step saves its later steps again."""
    try:
        dcp_s3.register(overwrite=True, settings={"concurrency": 1})
        for value in (1.0, 2.0):
            dcp.save(_state(value), checkpoint_id=root)
        dcp.async_save(_state(3.0), checkpoint_id=root).result(60)
        found = _state(0.0)
        dcp.load(found, checkpoint_id=root)
        _assert_loads(found, 3.0)
        assert _storage_setup(None, root, reader=False).settings.concurrency == 1  # type: ignore[union-attr]
        assert _storage_setup(None, root, reader=True).settings.concurrency == 1  # type: ignore[union-attr]
        # The last call counts.
        dcp_s3.register()
        with pytest.raises(CheckpointException) as caught:
            dcp.save(_state(4.0), checkpoint_id=root)
        assert isinstance(_cause(caught), errors.CheckpointExistsError)
        assert "overwrite=True" in str(_cause(caught))
    finally:
        dcp_s3.unregister()
    assert _torch_is_as_it_was()


def test_a_wrong_setting_is_found_when_it_is_registered() -> None:
    with pytest.raises(errors.SettingsError, match="part_size"):
        dcp_s3.register(settings={"part_size": "1"})
    assert _torch_is_as_it_was()


def test_the_defaults_are_ours(root: str, memory_server: S3Server, registered: None) -> None:
    dcp.save(_state(1.0), checkpoint_id=root)
    # Fsspec's writer would overwrite.
    with pytest.raises(CheckpointException) as caught:
        dcp.save(_state(2.0), checkpoint_id=root)
    assert isinstance(caught.value.failures[0][0], errors.CheckpointExistsError)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(_state(0.0), checkpoint_id=f"{root}-missing")
    assert isinstance(caught.value.failures[0][0], errors.CheckpointNotFoundError)


def test_async_save_by_checkpoint_id_alone(root: str, memory_server: S3Server, registered: None) -> None:
    state = _state(3.0)
    future = dcp.async_save(state, checkpoint_id=root)
    state["w"].zero_()
    future.result(60)
    found = _state(0.0)
    dcp.load(found, checkpoint_id=root)
    _assert_loads(found, 3.0)


def _save_in_a_process(url: str, directory: str) -> None:
    dcp_s3.register(overwrite=True)
    state = _state(4.0)
    for checkpoint_id in (url, Path(url), directory):
        future = dcp.async_save(
            state,
            checkpoint_id=checkpoint_id,
            process_group=dist.group.WORLD,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result(60)
    for checkpoint_id in (url, directory):
        found = _state(0.0)
        dcp.load(found, checkpoint_id=checkpoint_id)
        _assert_loads(found, 4.0)
    dcp_s3.unregister()


def test_async_save_in_a_process_by_checkpoint_id_alone(
    root: str, bucket: str, memory_server: S3Server, tmp_path: Path
) -> None:
    run_ranks(1, _save_in_a_process, root, str(tmp_path / "local"))
    assert any("manifest-" in key for key in memory_server.handle.objects(bucket))
    assert (tmp_path / "local" / ".metadata").is_file()


def _save_on_a_rank(url: str) -> None:
    dcp_s3.register()
    dcp.save({"rank": torch.tensor(7), f"of_{dist.get_rank()}": dist.get_rank()}, checkpoint_id=url)
    found = {"rank": torch.tensor(0), "of_0": -1, "of_1": -1}
    dcp.load(found, checkpoint_id=url)
    assert torch.equal(found["rank"], torch.tensor(7))
    assert (found["of_0"], found["of_1"]) == (0, 1)


def test_on_two_ranks(root: str, memory_server: S3Server) -> None:
    run_ranks(2, _save_on_a_rank, root)


@pytest.mark.parametrize("url", ["s3://bucket/run", "S3://bucket/run", "s3://bucket"])
def test_which_urls_are_ours(url: str, registered: None) -> None:
    assert isinstance(_storage_setup(None, url, reader=False), S3StorageWriter)
    assert isinstance(_storage_setup(None, url, reader=True), S3StorageReader)


def test_a_bad_s3_url_is_our_error(registered: None) -> None:
    with pytest.raises(errors.InvalidURLError):
        dcp.save(_state(1.0), checkpoint_id="s3://bucket//run")
    with pytest.raises(errors.InvalidURLError):
        dcp.load(_state(1.0), checkpoint_id="s3:///run")


# --- everything else is torch's --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_local_paths_stay_torchs(tmp_path: Path, registered: None, kind: type) -> None:
    path = kind(tmp_path / "local")
    assert type(_storage_setup(None, path, reader=False)) is FileSystemWriter
    assert type(_storage_setup(None, path, reader=True)) is FileSystemReader
    dcp.save(_state(5.0), checkpoint_id=path)
    assert (tmp_path / "local" / ".metadata").is_file()
    found = _state(0.0)
    dcp.load(found, checkpoint_id=path)
    _assert_loads(found, 5.0)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_urls_stay_fsspecs(tmp_path: Path, registered: None, scheme: str) -> None:
    url = f"file://{tmp_path}/run" if scheme == "file" else f"memory://{uuid.uuid4().hex}/run"
    assert isinstance(_storage_setup(None, url, reader=False), _TORCHS_WRITER)
    assert isinstance(_storage_setup(None, url, reader=True), _TORCHS_READER)
    dcp.save(_state(6.0), checkpoint_id=url)
    # With fsspec's own defaults: it overwrites.
    dcp.save(_state(7.0), checkpoint_id=url)
    found = _state(0.0)
    dcp.load(found, checkpoint_id=url)
    _assert_loads(found, 7.0)


def test_a_url_that_nobody_knows_is_still_refused(registered: None) -> None:
    with pytest.raises(RuntimeError, match="Cannot detect which StorageReader or StorageWriter"):
        dcp.save(_state(1.0), checkpoint_id="no-such-scheme://bucket/run")


def test_the_registered_classes_by_name_are_still_torchs_for_other_urls(tmp_path: Path, registered: None) -> None:
    """Whoever imports FsspecWriter after the registration gets ours; to them nothing must have changed."""
    url = f"file://{tmp_path}/run"
    writer = _fsspec_filesystem.FsspecWriter(url, thread_count=2, overwrite=False)
    assert isinstance(writer, _TORCHS_WRITER)
    assert isinstance(writer, _fsspec_filesystem.FsspecWriter)
    assert (writer.thread_count, writer.overwrite) == (2, False)
    dcp.save(_state(1.0), storage_writer=writer)
    found = _state(0.0)
    dcp.load(found, storage_reader=_fsspec_filesystem.FsspecReader(path=url))
    _assert_loads(found, 1.0)
    assert _fsspec_filesystem.FsspecWriter.__name__ == _TORCHS_WRITER.__name__
    assert _fsspec_filesystem.FsspecWriter.validate_checkpoint_id(url)
    assert not _fsspec_filesystem.FsspecWriter.validate_checkpoint_id(Path(tmp_path))


def test_a_registered_writer_of_another_url_pickles_as_torchs(tmp_path: Path) -> None:
    """AsyncCheckpointerType.PROCESS pickles the writer into a process which knows nothing of the registration."""
    url = f"file://{tmp_path}/run"
    assert isinstance(pickle.loads(pickle.dumps(_TORCHS_WRITER(url))), _TORCHS_WRITER)
    dcp_s3.register()
    try:
        pickled = pickle.dumps(_fsspec_filesystem.FsspecWriter(url))
    finally:
        dcp_s3.unregister()
    writer = pickle.loads(pickled)
    assert isinstance(writer, _TORCHS_WRITER)
    dcp.save(_state(1.0), storage_writer=writer)


def test_subclasses_of_the_registered_classes_work(tmp_path: Path, registered: None) -> None:
    class Writer(_fsspec_filesystem.FsspecWriter):  # type: ignore[misc, name-defined]
        def __init__(self, path: str, label: str) -> None:
            super().__init__(path, single_file_per_rank=False)
            self.label = label

    class Reader(_fsspec_filesystem.FsspecReader):  # type: ignore[misc, name-defined]
        pass

    url = f"file://{tmp_path}/run"
    writer = Writer(url, label="mine")
    assert type(writer) is Writer
    assert (writer.label, writer.single_file_per_rank) == ("mine", False)
    dcp.save(_state(2.0), storage_writer=writer)
    reader = Reader(url)
    assert type(reader) is Reader
    found = _state(0.0)
    dcp.load(found, storage_reader=reader)
    _assert_loads(found, 2.0)
    dcp_s3.unregister()
    # It outlives the registration.
    dcp.save(_state(3.0), storage_writer=Writer(f"{url}-2", label="later"))
    assert os.path.exists(tmp_path / "run-2" / ".metadata")
    dcp_s3.register()  # for the fixture to undo


def test_torchs_conversions_to_and_from_one_file(root: str, tmp_path: Path, registered: None) -> None:
    dcp.save(_state(3.0), checkpoint_id=f"{root}/step-1")
    dcp_to_torch_save(f"{root}/step-1", tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt")["w"].tolist() == [3.0] * 100
    torch_save_to_dcp(tmp_path / "one.pt", f"{root}/step-2")
    found = _state(0.0)
    dcp.load(found, checkpoint_id=f"{root}/step-2")
    _assert_loads(found, 3.0)


def test_subclasses_stay_themselves_for_s3_urls_too(registered: None) -> None:
    """Somebody who derives from torch's class means fsspec, s3fs included."""

    class Writer(_fsspec_filesystem.FsspecWriter):  # type: ignore[misc, name-defined]
        def __init__(self, path: str) -> None:
            self.path = path

    assert type(Writer("s3://bucket/run")) is Writer


# --- on and off ------------------------------------------------------------------------------------------


def test_register_twice_unregister_once() -> None:
    dcp_s3.register()
    first = FileSystemWriter.validate_checkpoint_id.__func__, _ProcessBasedAsyncCheckpointExecutor.execute_save
    dcp_s3.register(overwrite=True)
    again = FileSystemWriter.validate_checkpoint_id.__func__, _ProcessBasedAsyncCheckpointExecutor.execute_save
    assert first == again
    assert not _torch_is_as_it_was()
    dcp_s3.unregister()
    assert _torch_is_as_it_was()
    dcp_s3.unregister()
    assert _torch_is_as_it_was()


def test_importing_registers_nothing() -> None:
    assert _torch_is_as_it_was()


def test_register_again_after_unregister(root: str, memory_server: S3Server) -> None:
    dcp_s3.register()
    dcp_s3.unregister()
    dcp_s3.register()
    try:
        dcp.save(_state(1.0), checkpoint_id=root)
    finally:
        dcp_s3.unregister()
    assert _torch_is_as_it_was()
    assert not isinstance(_TORCHS_WRITER("memory://x"), S3StorageWriter)


# --- writers and readers without a URL -------------------------------------------------------------------


def test_a_writer_and_a_reader_that_get_their_url_with_each_call(root: str, memory_server: S3Server) -> None:
    writer, reader = S3StorageWriter(), S3StorageReader()
    assert writer.checkpoint_id is None
    assert reader.checkpoint_id is None
    for step in range(2):
        dcp.save(_state(step), checkpoint_id=f"{root}/{step}", storage_writer=writer)
        assert writer.checkpoint_id == f"{root}/{step}"
    for step in range(2):
        found = _state(-1.0)
        dcp.load(found, checkpoint_id=f"{root}/{step}", storage_reader=reader)
        _assert_loads(found, step)


def test_checkpoint_id_goes_before_the_url_of_the_writer(root: str, memory_server: S3Server) -> None:
    dcp.save(_state(1.0), checkpoint_id=f"{root}/b", storage_writer=S3StorageWriter(f"{root}/a"))
    found = _state(0.0)
    dcp.load(found, checkpoint_id=f"{root}/b", storage_reader=S3StorageReader(f"{root}/a"))
    _assert_loads(found, 1.0)
    with pytest.raises(CheckpointException):
        dcp.load(found, storage_reader=S3StorageReader(f"{root}/a"))


def test_no_url_at_all_is_an_error_that_says_what_to_pass(s3_env: S3Server, memory_server: S3Server) -> None:
    for call, name in (
        (lambda: dcp.save(_state(1.0), storage_writer=S3StorageWriter()), "S3StorageWriter"),
        (lambda: dcp.async_save(_state(1.0), storage_writer=S3StorageWriter()).result(60), "S3StorageWriter"),
        (lambda: dcp.load(_state(1.0), storage_reader=S3StorageReader()), "S3StorageReader"),
    ):
        with pytest.raises(CheckpointException) as caught:
            call()
        (cause, _) = caught.value.failures[0]
        assert isinstance(cause, errors.InvalidURLError), cause
        assert name in str(cause)
        assert "checkpoint_id=" in str(cause)


def test_a_checkpoint_id_that_is_no_s3_url_is_refused_by_our_writer(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidURLError, match="not an S3 URL"):
        dcp.save(_state(1.0), checkpoint_id=tmp_path, storage_writer=S3StorageWriter("s3://bucket/run"))
