"""`JointSave` of ranks that are threads, on a store in memory: what each hears, and what stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3.checkpoint.deletion import Deleter
from dcp_s3.checkpoint.look import inspect
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.processes import count_of, settle_saves
from dcp_s3.coordination.values import OPEN
from dcp_s3.retention.prune import prune
from dcp_s3.save import joint, save
from dcp_s3.save.joint import JointSave, begin_joint_save
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

URL = parse_url("s3://bucket/run/step-1")
SETTINGS = resolve_settings({"rank_timeout": 1.0})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    monkeypatch.setattr(save, "store_of", lambda *_: store)
    yield store
    joint._learned.clear()
    assert not [each.name for each in threading.enumerate() if each.name == "dcp_s3-progress" and _lives(each)]


def _lives(thread: threading.Thread) -> bool:
    thread.join(10)
    return thread.is_alive()


def _attempt(rank: int, world_size: int = 2) -> Attempt:
    return Attempt("run", (0,), "token", 10.0, world_size, rank)


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
    planner.set_up_planner({"weight": torch.ones(3)}, None, True)
    made.begin()
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


def test_a_save_of_one_rank_is_not_remembered() -> None:
    counted = count_of(_attempt(0, 1), URL, 1)
    assert not isinstance(begin_joint_save(URL, "ab", SETTINGS, counted=counted), JointSave)
    assert counted.is_decided


def _save_by_a_merger_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has committed, and not cleaned up."""
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
