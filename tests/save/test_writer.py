"""One writer for several saves: each keeps its URL, its id and its arguments; saves and writers in other processes; and
saves without collectives: what each rank hears, and what stays behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest, list_checkpoints, verify
from dcp_s3.checkpoint.deletion import Deleter
from dcp_s3.checkpoint.look import inspect
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.processes import count_of, settle_saves
from dcp_s3.failures import called_by_dcp, without_tracebacks
from dcp_s3.format.layout import METADATA
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.prune import prune
from dcp_s3.save import joint, save
from dcp_s3.save.joint import JointSave, begin_joint_save
from dcp_s3.save.save import Save
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads
from tests.memory_store import MemoryStore
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import WaitingPlanner, no_collector

pytestmark = pytest.mark.servers("memory")


_PATIENCE_SECONDS = 60


class _Planner(WaitingPlanner):
    """Says when the save is at its first item, and which one it is of."""

    def __init__(self, go: Callable[[], object] = lambda: None) -> None:
        super().__init__(lambda: (self.writing.set(), go()))
        self.writing, self.storage_meta = threading.Event(), None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.storage_meta = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def _assert_holds(url: str, step: int) -> None:
    assert_loads(url, _state(step))
    assert verify(url, full=True).ok


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("urls", [("1", "2"), ("1", "1")], ids=["two URLs", "one URL"])
def test_a_save_waits_for_the_one_before_and_has_its_own_arguments(
    root: str, urls: tuple[str, str], asynchronous: bool
) -> None:
    writer, go = S3StorageWriter(overwrite=True, metrics={"loss": 1.0}), threading.Event()
    first, second = _Planner(lambda: go.wait(_PATIENCE_SECONDS)), _Planner()
    one, two = (f"{root}/step-{name}" for name in urls)
    begun = dcp.async_save(_state(1), checkpoint_id=one, storage_writer=writer, planner=first)
    assert first.writing.wait(_PATIENCE_SECONDS)
    writer.metrics["loss"] = 2.0

    def save() -> None:
        if asynchronous:
            dcp.async_save(_state(2), checkpoint_id=two, storage_writer=writer, planner=second).result(60)  # type: ignore[union-attr]
        else:
            dcp.save(_state(2), checkpoint_id=two, storage_writer=writer, planner=second)

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(save)
        assert not second.writing.wait(0.2)
        go.set()
        for future in (begun, later):
            future.result(_PATIENCE_SECONDS)  # type: ignore[union-attr]
    _assert_holds(two, 2)
    if one != two:
        _assert_holds(one, 1)
    found = {info.url: info.metrics for info in list_checkpoints(root)}
    assert found == {one: {"loss": 1.0}} | {two: {"loss": 2.0}}


def test_a_save_has_one_id(root: str) -> None:
    writer = S3StorageWriter(overwrite=True)
    seen = set()
    for step, target in enumerate([f"{root}/a", f"{root}/b", None, None]):
        planner = _Planner()
        metadata = dcp.save(_state(step), checkpoint_id=target, storage_writer=writer, planner=planner)
        assert metadata.storage_meta == planner.storage_meta
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.checkpoint_id == writer.checkpoint_id == (target or f"{root}/b")
        seen.add(metadata.storage_meta.save_id)
    assert len(seen) == 4
    _assert_holds(f"{root}/a", 0)
    _assert_holds(f"{root}/b", 3)


def test_an_asynchronous_save_has_the_url_given_beforehand_if_there_was_one_only(root: str) -> None:
    writer, urls = S3StorageWriter(), [f"{root}/step-{step}" for step in (1, 2)]
    writer.reset(urls[0])
    dcp.async_save(_state(1), storage_writer=writer).result(_PATIENCE_SECONDS)  # type: ignore[union-attr]
    _assert_holds(urls[0], 1)
    writer.reset(urls[1])
    with pytest.raises(CheckpointException, match=r"unclear which URL .*step-2.*checkpoint_id"):
        dcp.async_save(_state(2), storage_writer=writer).result(_PATIENCE_SECONDS)  # type: ignore[union-attr]
    dcp.async_save(_state(2), checkpoint_id=urls[1], storage_writer=writer).result(_PATIENCE_SECONDS)  # type: ignore[union-attr]
    _assert_holds(urls[1], 2)


# --- on several ranks ------------------------------------------------------------------------------------


def _at_once_after_an_asynchronous_one(url: str) -> None:
    own = {f"of_{dist.get_rank()}": torch.arange(100_000)}
    saving: Any = dcp.async_save({**_state(0), **own}, storage_writer=S3StorageWriter(f"{url}/step-0"))
    dcp.save({**_state(1), **own}, storage_writer=S3StorageWriter(f"{url}/step-1"))
    assert saving.done()
    saving.result()


def test_the_collectives_of_two_saves_do_not_mix(root: str) -> None:
    run_ranks(2, _at_once_after_an_asynchronous_one, root)
    for step in range(2):
        _assert_holds(f"{root}/step-{step}", step)
        assert_loads(f"{root}/step-{step}", {f"of_{rank}": torch.arange(100_000) for rank in range(2)})


def _mixed(url: str, cached: bool) -> list[str]:
    def save(name: str) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=cached)
        dcp.save({"w": torch.ones(1000)}, storage_writer=S3StorageWriter(f"{url}/{name}"), planner=planner)

    for number in range(2 if cached else 0):
        save(f"proper-{number}")
    with pytest.raises(CheckpointException) as caught:
        save(f"of-{dist.get_rank()}")
    return [f"{type(error).__name__}: {error}" for error, _ in caught.value.failures.values()]


@pytest.mark.parametrize("cached", [False, True])
def test_two_saves_that_meet_are_refused(root: str, bucket: str, memory_server: S3Server, cached: bool) -> None:
    for messages in run_ranks(2, _mixed, root, cached):
        assert messages
        for message in messages:
            assert message.startswith("SaveProtocolError: two saves overlapped: rank 1 saves to")
    left = [key for key in memory_server.handle.objects(bucket) if "/of-" in key]
    assert not [key for key in left if key.endswith(".metadata")]
    if not cached:
        assert left == []  # refused before a byte moved


def test_a_writer_that_was_pickled_writes(root: str, memory_server: S3Server) -> None:
    writer = S3StorageWriter(root, overwrite=True, metrics={"loss": 1.5}, settings={"concurrency": 3})
    dcp.save({"a": torch.zeros(3)}, storage_writer=writer)  # it has clients by now
    assert memory_server.secret_key.encode() not in pickle.dumps(writer)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.settings == writer.settings
    assert copy.settings.concurrency == 3
    assert (copy.overwrite, copy.metrics, copy.checkpoint_id) == (True, {"loss": 1.5}, root)
    dcp.save({"a": torch.ones(3)}, storage_writer=copy)
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=pickle.loads(pickle.dumps(S3StorageReader(root))))
    assert torch.equal(found["a"], torch.ones(3))


# --- without collectives ---------------------------------------------------------------------------------

URL = parse_url("s3://bucket/run/step-1")
NAMES = {f"weight-{number}" for number in range(8)}
"""Each rank writes some of them."""
SETTINGS = resolve_settings({"rank_timeout": 1.0})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    monkeypatch.setattr(save, "store_of", lambda *_: store)
    yield store
    joint._learned.clear()
    for thread in threading.enumerate():
        if thread.name == "dcp_s3-progress":
            thread.join(10)
            assert not thread.is_alive()


def _attempt(rank: int, world_size: int = 2) -> Attempt:
    return Attempt("run", (0,), "token", 10.0, world_size, rank)


def _run(made: Save, planner: DefaultSavePlanner | None = None) -> Any:
    """As DCP does on one rank; ``planner`` is asked when its data move."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner({name: torch.ones(3) for name in NAMES}, None, True)
    plan = made.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    made.finish(metadata, [made.write_data(planner.finish_plan(plans[0]), planner)])
    return made


def _make(rank: int) -> JointSave:
    return JointSave(URL, "", SETTINGS, attempt=_attempt(rank), of_step=1)


def _save(rank: int, before: Callable[[], object] = lambda: None) -> JointSave:
    """One rank's save; ``before`` is called before its data move."""
    made: JointSave = _run(_make(rank), WaitingPlanner(before))
    return made


def test_a_rank_that_fails_after_others_made_up_for_it_hears_that_it_is_committed(store: MemoryStore) -> None:
    other = threading.Thread(target=_save, args=(0,))

    def fail() -> None:
        other.start()  # once this rank has joined
        other.join(60)
        raise OSError("too late")

    made = _save(1, fail)
    assert made.is_committed()
    found = load_metadata(store.get(URL.key(METADATA)).data, url=str(URL))
    assert {index.fqn for index in found.storage_data} == set(found.state_dict_metadata) == NAMES


def test_an_interrupt_while_data_moves_ends_the_save_for_all_and_leaves_no_thread(store: MemoryStore) -> None:
    has_begun = threading.Event()

    def interrupt() -> None:
        other.start()
        assert has_begun.wait(60)
        raise KeyboardInterrupt

    told: list[str] = []

    def run() -> None:
        try:
            _save(0, has_begun.set)
        except Exception as error:  # noqa: BLE001 - looked at below
            told.append(str(error))

    other = threading.Thread(target=run)
    with pytest.raises(KeyboardInterrupt):
        _save(1, interrupt)
    other.join(60)
    assert "rank 1: KeyboardInterrupt" in told[0]


def test_nothing_of_the_state_is_left_of_a_write_that_has_failed(store: MemoryStore) -> None:
    def refuse() -> None:
        raise errors.AccessDeniedError("no")

    made, planner = _make(0), WaitingPlanner(refuse)
    planner.set_up_planner({name: torch.ones(3) for name in NAMES}, None, True)
    plan = made.prepare_local_plan(planner.create_local_plan())
    left = weakref.ref(planner)
    with no_collector():  # whoever trains may have done so
        with pytest.raises(errors.AccessDeniedError) as caught:
            called_by_dcp(JointSave.write_data)(made, plan, planner)
        without_tracebacks(caught.value)
        del planner, caught
        assert left() is None


def test_what_replaces_a_save_at_once_is_not_taken_for_it(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    find, replacing = joint.find_save_id, threading.Lock()

    def replace_first(*arguments: Any) -> str | None:
        made = threading.current_thread() is threading.main_thread()
        if made and replacing.acquire(blocking=False):
            _run(Save(URL, secrets.token_hex(8), SETTINGS, overwrite=True))
        return find(*arguments)

    monkeypatch.setattr(JointSave, "clean", lambda *_: None)
    monkeypatch.setattr(joint, "find_save_id", replace_first)

    def save_other() -> None:
        with contextlib.suppress(errors.DcpS3Error):  # it may come to its end after that
            _save(0)

    other = threading.Thread(target=save_other)
    other.start()
    made = _save(1)
    other.join(60)
    with pytest.raises(errors.CheckpointError, match="replaced"):
        made.is_committed()


def test_a_save_of_one_rank_is_not_remembered() -> None:
    counted = count_of(_attempt(0, 1), URL, 1)
    assert not isinstance(begin_joint_save(URL, "ab", SETTINGS, counted=counted), JointSave)
    assert counted.is_decided


def _save_by_a_merger_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointSave, "clean", lambda *_: None)
    other = threading.Thread(target=_save, args=(0,))
    other.start()
    _save(1)
    other.join(60)


def test_who_finishes_saves_commits_nothing_that_a_prune_deletes(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merger died before it had cleaned up; another process restores meanwhile."""
    _save_by_a_merger_that_dies(monkeypatch)
    delete = MemoryStore.delete

    def delete_and_finish(self: MemoryStore, targets: Any) -> Any:
        changed = delete(self, targets)
        settle_saves(store, URL)
        return changed

    monkeypatch.setattr(MemoryStore, "delete", delete_and_finish)
    found = inspect(store, URL)
    assert found is not None
    Deleter(store).delete_committed(URL, found.info, since=0)
    assert store.list(URL.key("")).objects == ()


def test_what_a_dead_merger_leaves_is_collected_by_a_prune(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _save_by_a_merger_that_dies(monkeypatch)
    store._storage.clock = lambda: time.time() + 3 * 86400
    assert prune("s3://bucket/run", store=store, grace=86400).ok
    left = [each.key for each in store.list("").objects]
    assert not [key for key in left if "/joint-" in key]
    assert inspect(store, URL).info.committed  # type: ignore[union-attr]


# --- as `dcp.save` makes them, on ranks that are processes ------------------------------------------------


def _names() -> dict[str, torch.Tensor]:
    return {f"rank-{dist.get_rank()}-{number}": torch.ones(2) for number in range(12)}


def _again_without_a_step(root: str) -> str:
    for step in (1, 2):
        writer = S3StorageWriter(f"{root}/last", overwrite=True, step=step)
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    writer = S3StorageWriter(f"{root}/best", overwrite=True)
    dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    with pytest.raises(BaseException, match=r"Remedy: S3StorageWriter\(url, step=...\)"):
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    first, second = (S3StorageWriter(f"{root}/best", overwrite=True) for _ in range(2))
    for writer in (first, second):  # in lockstep nothing is needed
        dcp.save(_names(), storage_writer=writer, use_collectives=False)
    second.wait_committed(60)
    with pytest.raises(errors.CheckpointError, match="this save was replaced"):
        first.wait_committed(60)
    return "done"


@pytest.mark.servers("memory", "moto")
def test_an_asynchronous_save_over_another_needs_a_step_and_what_it_replaces_is_not_waited_for(root: str) -> None:
    assert run_ranks(2, _again_without_a_step, root) == ["done", "done"]
    assert {info.name for info in list_checkpoints(root) if info.committed} == {"best", "last"}


def _without_its_group(root: str, use_collectives: bool) -> str:
    writer, state = S3StorageWriter(root), _names()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with pytest.raises((CheckpointException, errors.SaveProtocolError)) as caught:
        dcp.save(state, storage_writer=writer, use_collectives=use_collectives)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("use_collectives", [True, False])
def test_one_rank_is_not_taken_for_all_when_the_group_is_gone(root: str, use_collectives: bool) -> None:
    for text in run_ranks(2, _without_its_group, root, use_collectives):
        assert "before destroy_process_group()" in text
    assert latest(root) is None


def _in_a_group_of_some(root: str) -> list[str]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:  # and does not wait for the others
        dcp.save(_names(), storage_writer=S3StorageWriter(root), no_dist=True)
    told = []
    for process_group in (None, group) if dist.get_rank() else ():
        writer = S3StorageWriter(root, process_group=process_group, overwrite=True)
        with pytest.raises(errors.SaveProtocolError) as caught:
            dcp.save(_names(), storage_writer=writer, process_group=group, use_collectives=False)
        told.append(str(caught.value))
    return told


def test_a_save_of_some_ranks_of_the_job_is_refused_unless_one_saves_alone(root: str) -> None:
    _, *told = run_ranks(3, _in_a_group_of_some, root)
    assert all(
        "without collectives all ranks of the job save together. Remedy: " in text for each in told for text in each
    )
