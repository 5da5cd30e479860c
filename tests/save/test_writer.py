"""One writer for several saves: each keeps its URL, its id and its arguments; saves and writers in other processes."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, list_checkpoints, verify
from tests.end_to_end.loads import assert_loads
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import PROCESS

pytestmark = pytest.mark.servers("memory")


_PATIENCE_SECONDS = 60


class _Planner(DefaultSavePlanner):
    """Says when the save is at its first item, and does not go on before it may."""

    def __init__(self, *, hold: bool = False) -> None:
        super().__init__()
        self.writing, self.go = threading.Event(), threading.Event()
        self.storage_meta: StorageMeta | None = None
        if not hold:
            self.go.set()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.storage_meta = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.writing.set()
        assert self.go.wait(_PATIENCE_SECONDS)
        return super().resolve_data(write_item)


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def _assert_holds(url: str, step: int) -> None:
    assert_loads(url, _state(step))
    assert verify(url, full=True).ok


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("urls", [("1", "2"), ("1", "1")], ids=["two URLs", "one URL"])
def test_a_save_waits_for_the_asynchronous_one_before_it_and_has_its_own_arguments(
    root: str, urls: tuple[str, str], asynchronous: bool
) -> None:
    writer, first, second = S3StorageWriter(overwrite=True, metrics={"loss": 1.0}), _Planner(hold=True), _Planner()
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
        first.go.set()
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


def _mixed(url: str, save: Callable[[str, int], Any], proper: int) -> list[str]:
    for step in range(proper):
        save(f"{url}/proper-{step}", step)
    with pytest.raises(CheckpointException) as caught:
        save(f"{url}/of-{dist.get_rank()}", proper)
    return [f"{type(error).__name__}: {error}" for error, _ in caught.value.failures.values()]


def _save_plainly(url: str, step: int) -> None:
    dcp.save(_state(step), checkpoint_id=url, storage_writer=S3StorageWriter())


def _save_with_cached_plan(url: str, step: int) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(
        {"w": torch.full((1000,), float(step))}, checkpoint_id=url, storage_writer=S3StorageWriter(), planner=planner
    )


@pytest.mark.parametrize(
    ("save", "proper"), [(_save_plainly, 0), (_save_with_cached_plan, 2)], ids=["plans", "cached plans"]
)
def test_two_saves_that_meet_are_refused(
    root: str, bucket: str, memory_server: S3Server, save: Callable[[str, int], None], proper: int
) -> None:
    for messages in run_ranks(2, _mixed, root, save, proper):
        assert messages
        for message in messages:
            assert message.startswith("SaveProtocolError: two saves overlapped: rank 1 saves to")
            assert errors.SaveProtocolError.__name__ in message
    left = [key for key in memory_server.handle.objects(bucket) if "/of-" in key]
    assert not [key for key in left if key.endswith(".metadata")]
    if not proper:
        assert left == []  # refused before a byte moved


def _save_in_processes(url: str) -> None:
    """By writers that have their URL, and that get it with the save; the process and its stagers are the same."""
    state = {"w": torch.full((3,), 4.0)}
    for name, writer, how in (
        ("1", S3StorageWriter(f"{url}/1"), {}),
        ("2", S3StorageWriter(), {"checkpoint_id": f"{url}/2"}),
    ):
        how |= {"process_group": dist.group.WORLD, "async_checkpointer_type": PROCESS}
        metadata: Any = dcp.async_save(state, storage_writer=writer, **how).result(_PATIENCE_SECONDS)
        assert metadata.storage_meta.checkpoint_id == f"{url}/{name}"
        assert_loads(f"{url}/{name}", state)


def test_saves_in_another_process(root: str) -> None:
    run_ranks(2, _save_in_processes, root)


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
