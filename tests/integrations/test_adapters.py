"""register() and unregister(): a bare checkpoint_id, torch's own classes, and what stays torch's own; the framework
that an adapter needs; Prometheus; a framework's saves, several to a step, and the checkpoints that go after them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, _fsspec_filesystem
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors, integrations, list_checkpoints, pin
from dcp_s3.errors import SaveFailedError, StagingError
from dcp_s3.integrations import prometheus, require
from dcp_s3.integrations.saves import Saves
from dcp_s3.manager.agree import Ranks
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.url import parse_url
from tests.end_to_end.loads import failure
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import AtRequest
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),  # of fsspec's writer
]

# The names were imported before anything is registered.
_FSSPEC = _fsspec_filesystem.FsspecWriter, _fsspec_filesystem.FsspecReader
_TORCHS = (FileSystemWriter, FileSystemReader, *_FSSPEC)


@pytest.fixture
def registered() -> Iterator[None]:
    dcp_s3.register()
    yield
    dcp_s3.unregister()
    assert type(FileSystemWriter("s3://bucket/run")) is FileSystemWriter
    assert not FileSystemWriter.validate_checkpoint_id("s3://bucket/run")


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, in which the test must leave nothing."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    yield directory
    assert [str(path) for path in directory.rglob("*")] == []


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), float(value)), "epoch": int(value)}


def _load(**how: Any) -> int:
    """The value of the state that is there."""
    found = _state(-1.0)
    dcp.load(found, **how)
    assert torch.equal(found["w"], torch.full((100,), float(found["epoch"])))
    return int(found["epoch"])


# --- s3:// -----------------------------------------------------------------------------------------------


def test_saves_and_loads_by_checkpoint_id_alone(root: str, s3: Any, bucket: str, cwd: Path, registered: None) -> None:
    """Also by a path: pathlib takes the two slashes for one."""
    ids: Any = (f"{root}/0", Path(root, "1"), PurePosixPath(root, "2"), f"{root.replace('//', '/')}/3")
    for number, checkpoint_id in enumerate(ids):
        dcp.save(_state(number), checkpoint_id=checkpoint_id)
        assert _load(checkpoint_id=checkpoint_id) == number
    # They are ours: there is a manifest, and the defaults are ours: fsspec's would overwrite.
    assert sum("manifest-" in each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]) == len(ids)
    failure(lambda: dcp.save(_state(3.0), checkpoint_id=f"{root}/0"), errors.CheckpointExistsError)
    failure(lambda: _load(checkpoint_id=f"{root}-missing"), errors.CheckpointNotFoundError)
    for number, checkpoint_id in enumerate((f"{root}/4", Path(root, "5")), 4):
        state = _state(number)
        future: Any = dcp.async_save(state, checkpoint_id=checkpoint_id)
        state["w"].zero_()
        future.result(60)
        assert _load(checkpoint_id=checkpoint_id) == number
    assert dcp_s3.latest(Path(root)).url == f"{root}/5"
    dcp.save(_state(9.0), checkpoint_id=Path(root, "9"), storage_writer=S3StorageWriter())
    assert _load(storage_reader=S3StorageReader(Path(root, "9"))) == 9


def test_a_registration_can_overwrite_and_has_settings(root: str, registered: None) -> None:
    """As with torch's FsspecWriter: a run that goes on from an earlier step saves its later steps again."""
    with pytest.raises(errors.SettingsError, match="part_size"):
        dcp_s3.register(settings={"part_size": "1"})
    dcp_s3.register(overwrite=True, settings={"concurrency": 1})
    for value in (1.0, 2.0):
        dcp.save(_state(value), checkpoint_id=root)
    dcp.async_save(_state(3.0), checkpoint_id=root).result(60)  # type: ignore[union-attr]
    assert _load(checkpoint_id=root) == 3
    for reader in (False, True):
        assert _storage_setup(None, root, reader=reader).settings.concurrency == 1  # type: ignore[union-attr]
    dcp_s3.register()  # the last call counts
    error = failure(lambda: dcp.save(_state(4.0), checkpoint_id=root), errors.CheckpointExistsError)
    assert "overwrite=True" in str(error)
    for registered_one in (False, True):
        dcp_s3.register(overwrite=registered_one)
        assert FileSystemWriter(root).overwrite == registered_one
        assert [FileSystemWriter(root, overwrite=own).overwrite for own in (False, True)] == [False, True]


def _save_on_a_rank(url: str, directory: str) -> None:
    dcp_s3.register(overwrite=True)
    dcp.save({"rank": torch.tensor(7), f"of_{dist.get_rank()}": dist.get_rank()}, checkpoint_id=url)
    found = {"rank": torch.tensor(0), "of_0": -1, "of_1": -1}
    dcp.load(found, checkpoint_id=url)
    assert found == {"rank": torch.tensor(7), "of_0": 0, "of_1": 1}
    for checkpoint_id in (url, Path(url), directory):  # in a process in which nothing is registered
        saving: Any = dcp.async_save(
            _state(4.0),
            checkpoint_id=checkpoint_id,
            process_group=dist.group.WORLD,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        saving.result(60)
    assert [_load(checkpoint_id=each) for each in (url, directory)] == [4, 4]


def test_on_ranks_and_in_their_checkpoint_processes(root: str, bucket: str, s3: Any, tmp_path: Path) -> None:
    run_ranks(2, _save_on_a_rank, root, str(tmp_path / "local"))
    assert any("manifest-" in each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"])
    assert (tmp_path / "local" / ".metadata").is_file()


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("classes", [_TORCHS[:2], _FSSPEC], ids=["FileSystem", "Fsspec"])
def test_what_a_framework_makes_itself(root: str, cwd: Path, registered: None, classes: Any, kind: Any) -> None:
    """The arguments are those that Accelerate, torchtitan and others give."""
    writer, reader = classes
    dcp_s3.register(overwrite=True)
    made = writer(kind(root), single_file_per_rank=True, thread_count=4, sync_files=False)
    assert isinstance(made, S3StorageWriter)
    dcp.save(_state(1.0), storage_writer=made, checkpoint_id=kind(root))
    assert isinstance(reader(kind(root)), S3StorageReader)
    assert _load(storage_reader=reader(path=kind(root)), checkpoint_id=kind(root)) == 1
    dcp.async_save(_state(2.0), storage_writer=writer(kind(root), False, True, 2)).result(60)  # type: ignore[union-attr]
    assert _load(storage_reader=reader(kind(root))) == 2


def test_torchs_classes_take_our_urls_and_refuse_safetensors_and_stream_extensions(root: str, registered: None) -> None:
    for each in _TORCHS:
        assert each.validate_checkpoint_id(checkpoint_id=Path("s3://bucket"))
        assert "path" in inspect.signature(each).parameters, "jsonargparse and others make objects from them"
    for option in ({"serialization_format": SerializationFormat.SAFETENSORS}, {"_extensions": [object()]}):
        with pytest.raises(errors.SettingsError, match=rf"{root} as safetensors or .*leave .*_extensions out.*export"):
            FileSystemWriter(root, **option)  # type: ignore[arg-type]


# --- everything else is torch's --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "Path", "file"])
def test_other_paths_and_urls_stay_torchs(tmp_path: Path, registered: None, kind: str) -> None:
    url = {"path": str(tmp_path / "run"), "Path": tmp_path / "run", "file": f"file://{tmp_path}/run"}[kind]
    writer, reader = _FSSPEC if kind == "file" else _TORCHS[:2]
    assert type(_storage_setup(None, url, reader=False)) is writer
    assert type(_storage_setup(None, url, reader=True)) is reader
    for value in (6.0, 7.0):  # with their own defaults: they overwrite
        dcp.save(_state(value), checkpoint_id=url)
    assert _load(checkpoint_id=url) == 7
    made = writer(url, thread_count=3, overwrite=False)  # type: ignore[operator]
    assert (type(made), made.thread_count, made.overwrite) == (writer, 3, False)
    # AsyncCheckpointerType.PROCESS pickles the writer into a process which knows nothing of the registration.
    pickled = pickle.dumps(writer(url))  # type: ignore[operator]
    dcp_s3.unregister()
    dcp.save(_state(1.0), storage_writer=pickle.loads(pickled))
    assert (tmp_path / "run" / ".metadata").is_file()


def test_subclasses_of_the_registered_classes_work(tmp_path: Path, registered: None) -> None:
    class Writer(_fsspec_filesystem.FsspecWriter):  # type: ignore[misc, name-defined]
        def __init__(self, path: str, label: str) -> None:
            if path.startswith("file:"):
                super().__init__(path, single_file_per_rank=False)
            self.label = label

    local = type("Local", (FileSystemWriter,), {})
    assert not local.validate_checkpoint_id("s3://bucket/run"), "what makes files is not chosen for S3"
    url = f"file://{tmp_path}/run"
    writer = Writer(url, label="mine")
    assert (type(writer), writer.label, writer.single_file_per_rank) == (Writer, "mine", False)
    dcp.save(_state(2.0), storage_writer=writer)
    assert _load(storage_reader=_fsspec_filesystem.FsspecReader(path=url)) == 2
    assert type(Writer("s3://bucket/run", "fsspec, s3fs included")) is Writer


# --- writers and readers without a URL -------------------------------------------------------------------


def test_no_url_at_all_or_none_of_s3_is_an_error_that_says_what_to_pass(tmp_path: Path) -> None:
    for call in (
        lambda: dcp.save(_state(1.0), storage_writer=S3StorageWriter()),
        lambda: dcp.load(_state(1.0), storage_reader=S3StorageReader()),
    ):
        assert "checkpoint_id=" in str(failure(call, errors.InvalidURLError))
    with pytest.raises(errors.InvalidURLError, match="not an S3 URL"):
        dcp.save(_state(1.0), checkpoint_id=tmp_path, storage_writer=S3StorageWriter("s3://bucket/run"))


# --- the framework that an adapter needs ------------------------------------------------------------------

ADAPTERS = {
    "accelerate": "accelerate>=1.15,<2",
    "lightning": "lightning>=2.6,<2.7",
    "megatron": "megatron-core>=0.16,<0.17",
    "torchtitan": "torchtitan>=0.3,<0.4",
    "transformers": "transformers>=5.23,<6",
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_framework_is_named_with_its_versions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(integrations.metadata, "version", version)
    monkeypatch.delitem(sys.modules, f"dcp_s3.integrations.{name}", raising=False)
    wanted = re.escape(ADAPTERS[name])
    with pytest.raises(ImportError, match=rf"not installed, and {wanted} .*pip install '{wanted}'"):
        importlib.import_module(f"dcp_s3.integrations.{name}")


@pytest.mark.parametrize("version", ["0.16", "0.16.1+cu128", "0.15.3", "0.17.0rc0", "unknown"])
def test_which_versions_are_supported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(integrations.metadata, "version", lambda _: version)
    says = rf"megatron-core is {re.escape(version)}, and megatron-core>=0\.16,<0\.17 is needed"
    with contextlib.nullcontext() if version.startswith("0.16") else pytest.raises(ImportError, match=says):
        require("megatron-core", "0.16", "0.17")


# --- Prometheus -----------------------------------------------------------------------------------------


def scrape() -> dict[str, list[Any]]:
    registry = CollectorRegistry()
    registry.register(prometheus.Collector())
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_it_serves_what_stats_says(root: str) -> None:
    dcp.save({"w": torch.ones(1000)}, storage_writer=S3StorageWriter(f"{root}/step-33"))
    dcp.load({"w": torch.ones(1000)}, storage_reader=S3StorageReader(f"{root}/step-33"))
    found, stats = scrape(), dcp_s3.stats()
    assert [sample.value for sample in found["dcp_s3_saves_done_total"]] == [stats.saves.done]
    assert [sample.value for sample in found["dcp_s3_saves_bytes_total"]] == [stats.saves.bytes]
    assert [sample.value for sample in found["dcp_s3_saves_last_step"]] == [33]
    assert [sample.value for sample in found["dcp_s3_saves_last_commit_timestamp_seconds"]] == [stats.saves.last_commit]
    throttled = {sample.labels["bucket"]: sample.value for sample in found["dcp_s3_throttled_requests_total"]}
    assert throttled == {name: state.throttled for name, state in stats.throttle.items()}


# --- the saves of a framework -----------------------------------------------------------------------------

ROOT = f"s3://{BUCKET}/run"
A, B, LAST = f"{ROOT}/epoch=0-step=4.ckpt", f"{ROOT}/epoch=1-step=8.ckpt", f"{ROOT}/last.ckpt"


def make(settings: Settings | None = None) -> Saves:
    settings = settings or resolve_settings(None)
    return Saves(Ranks(None), settings, S3Stager(settings), background=Ranks(None), queue=1)


@pytest.fixture
def saves(faulty: FaultyServer) -> Saves:
    return make()


def save(saves: Saves, url: str, step: int, *, blocking: bool = False) -> None:
    state, files = {"weight": torch.full((100,), step)}, {"meta.pt": str(step).encode()}
    saves.save(url, step, state, lambda: ({"global_step": step}, files), blocking=blocking)


def committed() -> set[str]:
    return {info.url for info in list_checkpoints(ROOT) if info.committed}


def held(of: str) -> AtRequest:
    """The first object whose key contains ``of`` is not written before the end of the block; then it is."""
    return AtRequest("PutObject", applied=True, key=of)


def test_a_checkpoint_stays_until_the_one_that_replaces_it_is_committed(faulty: FaultyServer, saves: Saves) -> None:
    save(saves, A, 4)
    saves.wait()
    with (moment := held("step=8")).on(faulty):
        save(saves, B, 8)
        saves.remove(A)
        assert moment.reached.wait(60)
        assert committed() == {A}
        assert [saves.will_hold(url) for url in (A, B, LAST)] == [False, True, None]
    saves.close()
    assert saves.will_hold(B) is None
    assert committed() == {B}


def test_two_saves_of_a_step_are_held_and_neither_holds_up_the_training(faulty: FaultyServer, saves: Saves) -> None:
    with (moment := held("/")).on(faulty):
        save(saves, A, 4)
        save(saves, LAST, 4)
        assert moment.reached.wait(60)
        assert committed() == set()
    saves.close()
    assert committed() == {A, LAST}


def test_a_checkpoint_stays_if_the_save_that_replaces_it_fails(
    faulty: FaultyServer, saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    save(saves, A, 4)
    saves.wait()
    faulty.once("PutObject", Fault.error(403, "AccessDenied"), key="step=8")
    save(saves, B, 8)
    saves.remove(A)
    save(saves, LAST, 8)
    with pytest.raises(SaveFailedError, match=r"(?s)step 8 .*AccessDenied"):
        saves.close()
    assert committed() == {A, LAST}
    assert f"{A} stays" in caplog.text


def test_a_checkpoint_that_is_still_being_saved_goes_after_the_next_one(faulty: FaultyServer, saves: Saves) -> None:
    with (moment := held("step=4")).on(faulty):
        save(saves, A, 4)
        saves.remove(A)
        assert moment.reached.wait(60)
    saves.wait()
    until(lambda: saves._retention._thread is None)  # it has removed what it may
    assert committed() == {A}, "it is the newest"
    save(saves, B, 8)
    saves.close()
    assert committed() == {B}


def test_a_url_that_is_saved_to_again_is_not_removed(faulty: FaultyServer, saves: Saves) -> None:
    save(saves, A, 4)
    saves.remove(A)  # when the next save is committed
    save(saves, A, 8)
    saves.close()
    assert committed() == {A}
    assert S3StorageReader(A).attachment("meta.pt") == b"8"


def test_what_a_killed_save_left_there_does_not_keep_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    with serve(monkeypatch, FaultyServer(clock=lambda: time.time() + later[0])):
        store_of(parse_url(A), Settings()).put("run/epoch=0-step=4.ckpt/__0_0-0123456789abcdef.distcp", b"left")
        later[0] = 60.0
        saves = make()
        save(saves, A, 4)
        save(saves, B, 8)
        saves.remove(A)
        saves.close()
        assert [info.url for info in list_checkpoints(ROOT)] == [B]


def test_a_pinned_checkpoint_stays(faulty: FaultyServer, saves: Saves, caplog: pytest.LogCaptureFixture) -> None:
    save(saves, A, 4, blocking=True)
    pin(A, reason="the paper's")
    save(saves, B, 8)
    saves.remove(A)
    saves.close()
    assert committed() == {A, B}
    assert "the paper's" in caplog.text


def test_with_local_durability_a_checkpoint_goes_when_the_last_save_is_on_s3_whatever_is_not(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    saves = make(resolve_settings({"durability": "local", "spill_dir": str(tmp_path / "spill")}))
    save(saves, A, 4)
    saves.wait()
    until(lambda: A in committed())
    save(saves, B, 8)
    saves.wait()
    until(lambda: B in committed())
    with (moment := held("last")).on(faulty):
        save(saves, LAST, 8)
        saves.remove(A)
        saves.wait()  # on disk
        assert moment.reached.wait(60)
        with pytest.raises(TimeoutError):
            saves._wait_committed(0.1)
        assert A in committed()
    saves.close()
    assert committed() == {B, LAST}


def test_the_newest_checkpoint_stays_also_after_a_save_that_could_not_be_staged(saves: Saves) -> None:
    save(saves, A, 4, blocking=True)
    with pytest.raises(StagingError):
        saves.save(B, 8, {"lock": threading.Lock()}, lambda: ({}, {}), blocking=False)
    save(saves, B, 8, blocking=True)
    saves.remove(B)  # no later save replaces it
    saves.close()
    assert committed() == {A, B}
