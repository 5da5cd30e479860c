"""Saves without collectives: what each rank hears, and what stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageWriter, errors, latest, list_checkpoints
from dcp_s3.checkpoint.deletion import Deleter
from dcp_s3.checkpoint.look import inspect
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.processes import count_of, settle_saves
from dcp_s3.coordination.values import OPEN
from dcp_s3.failures import called_by_dcp, without_tracebacks
from dcp_s3.format.layout import METADATA
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.prune import prune
from dcp_s3.save import joint, save
from dcp_s3.save.joint import JointSave, begin_joint_save
from dcp_s3.save.save import Save
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore
from tests.ranks import run_ranks

URL = parse_url("s3://bucket/run/step-1")
NAMES = {f"weight-{number}" for number in range(8)}
"""Each rank writes some of them."""
SETTINGS = resolve_settings({"rank_timeout": 1.0})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    monkeypatch.setattr(save, "S3Store", lambda *_: store)
    yield store
    joint._learned.clear()
    for thread in threading.enumerate():
        if thread.name == "dcp_s3-progress":
            thread.join(10)
            assert not thread.is_alive()


def _attempt(rank: int, world_size: int = 2) -> Attempt:
    return Attempt("run", (0,), "token", 10.0, world_size, rank)


def _save_alone(made: Save) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.ones(3) for name in NAMES}, None, True)
    plan = made.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    made.finish(metadata, [made.write_data(planner.finish_plan(plans[0]), planner)])


def _save(rank: int, upload: Callable[[JointSave], Any] = lambda _: None) -> JointSave:
    """One rank's save; ``upload`` is called before its data moves."""
    made = JointSave(URL, "", SETTINGS, attempt=_attempt(rank), of_step=1)
    _upload = made._upload

    def upload_first(claim: Any, *args: Any, **options: Any) -> Any:
        if claim.state == OPEN:
            upload(made)
        return _upload(claim, *args, **options)

    made._upload = upload_first  # type: ignore[method-assign]
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.ones(3) for name in NAMES}, None, True)
    plan = made.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    made.write_data(planner.finish_plan(plans[0]), planner)
    made.finish(metadata, [])
    return made


def test_a_rank_whose_own_upload_fails_after_others_have_made_up_for_it_hears_that_it_is_committed(
    store: MemoryStore,
) -> None:
    other = threading.Thread(target=_save, args=(0,))

    def fail(_: JointSave) -> None:
        other.start()  # once this rank has joined
        other.join(60)
        raise OSError("too late")

    made = _save(1, fail)
    assert made.is_committed()
    found = load_metadata(store.get(URL.key(METADATA)).data, url=str(URL))
    assert {index.fqn for index in found.storage_data} == set(found.state_dict_metadata) == NAMES


def test_an_interrupt_while_data_moves_ends_the_save_for_all_and_leaves_no_thread(store: MemoryStore) -> None:
    has_begun = threading.Event()

    def interrupt(_: JointSave) -> None:
        other.start()
        assert has_begun.wait(60)
        raise KeyboardInterrupt

    told: list[str] = []

    def run() -> None:
        try:
            _save(0, lambda _: has_begun.set())
        except Exception as error:  # noqa: BLE001 - looked at below
            told.append(str(error))

    other = threading.Thread(target=run)
    with pytest.raises(KeyboardInterrupt):
        _save(1, interrupt)
    other.join(60)
    assert "rank 1: KeyboardInterrupt" in told[0]


def test_nothing_of_the_state_is_left_of_a_write_that_has_failed(store: MemoryStore) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise errors.AccessDeniedError("no")

    made, planner = JointSave(URL, "", SETTINGS, attempt=_attempt(0), of_step=1), DefaultSavePlanner()
    made._upload = refused  # type: ignore[method-assign]
    planner.set_up_planner({name: torch.ones(3) for name in NAMES}, None, True)
    plan = made.prepare_local_plan(planner.create_local_plan())
    left = weakref.ref(planner)
    gc.collect()
    gc.disable()  # whoever trains may have done so
    try:
        with pytest.raises(errors.AccessDeniedError) as caught:
            called_by_dcp(JointSave.write_data)(made, plan, planner)
        without_tracebacks(caught.value)
        del planner, caught
        assert left() is None
    finally:
        gc.enable()


def test_what_replaces_a_save_at_once_is_not_taken_for_it(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    find, replacing = joint.find_save_id, threading.Lock()

    def replace_first(*arguments: Any) -> str | None:
        made = threading.current_thread() is threading.main_thread()
        if made and replacing.acquire(blocking=False):
            _save_alone(Save(URL, secrets.token_hex(8), SETTINGS, overwrite=True))
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


def test_what_a_prune_deletes_is_not_committed_once_more_by_who_finishes_saves(
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


def test_what_a_merger_leaves_that_died_before_it_had_cleaned_up_is_collected_by_a_prune(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_by_a_merger_that_dies(monkeypatch)
    store._storage.clock = lambda: time.time() + 3 * 86400
    assert prune("s3://bucket/run", store=store, grace=86400).ok
    left = [each.key for each in store.list("").objects]
    assert not [key for key in left if "/joint-" in key]
    assert inspect(store, URL).info.committed  # type: ignore[union-attr]


# --- as `dcp.save` makes them, on ranks that are processes ------------------------------------------------


def _names() -> dict[str, torch.Tensor]:
    return {f"rank-{dist.get_rank()}-{number}": torch.ones(2) for number in range(12)}


def _alone(root: str) -> None:
    if dist.get_rank() == 1:  # the other one makes no save
        dcp.save(_names(), storage_writer=S3StorageWriter(root), no_dist=True)


@pytest.mark.servers("memory")
def test_a_rank_that_saves_without_the_others_does_not_wait_for_them(root: str) -> None:
    run_ranks(2, _alone, root)


def _over_another(root: str) -> None:
    first, second = (S3StorageWriter(root, overwrite=True) for _ in range(2))
    for writer in (first, second):
        dcp.save(_names(), storage_writer=writer, use_collectives=False)
    second.wait_committed(60)
    with pytest.raises(errors.CheckpointError, match="this save was replaced"):
        first.wait_committed(60)


@pytest.mark.servers("memory", "moto")
def test_a_save_that_was_replaced_is_not_waited_for(root: str) -> None:
    run_ranks(2, _over_another, root)


def _again_without_a_step(root: str) -> str:
    for step in (1, 2):
        writer = S3StorageWriter(f"{root}/last", overwrite=True, step=step)
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    writer = S3StorageWriter(f"{root}/best", overwrite=True)
    dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    with pytest.raises(BaseException, match=r"Remedy: S3StorageWriter\(url, step=...\)"):
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    for _ in range(2):  # in lockstep nothing is needed
        dcp.save(_names(), storage_writer=S3StorageWriter(f"{root}/best", overwrite=True), use_collectives=False)
    return "done"


@pytest.mark.servers("memory")
def test_an_asynchronous_save_to_a_url_that_was_saved_to_needs_a_step(root: str) -> None:
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


@pytest.mark.servers("memory")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("use_collectives", [True, False])
def test_one_rank_is_not_taken_for_all_when_the_group_is_gone(root: str, use_collectives: bool) -> None:
    for text in run_ranks(2, _without_its_group, root, use_collectives):
        assert "before destroy_process_group()" in text
    assert latest(root) is None


def _in_a_group_of_some(root: str) -> list[str]:
    group = dist.new_group([1, 2])
    told = []
    for process_group in (None, group) if dist.get_rank() else ():
        writer = S3StorageWriter(root, process_group=process_group)
        with pytest.raises(errors.SaveProtocolError) as caught:
            dcp.save(_names(), storage_writer=writer, process_group=group, use_collectives=False)
        told.append(str(caught.value))
    return told


@pytest.mark.servers("memory")
def test_a_save_of_some_ranks_of_the_job_is_refused(root: str) -> None:
    _, *told = run_ranks(3, _in_a_group_of_some, root)
    assert all(
        "without collectives all ranks of the job save together. Remedy: " in text for each in told for text in each
    )
