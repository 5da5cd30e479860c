"""The pool: memory is used again, but never while anything can still read it, and never beyond the budget."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3Stager, S3StorageWriter
from dcp_s3.errors import StagingError, StagingLimitError
from dcp_s3.stage import pool as pool_module
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.stage.pool import BufferPool, Slot
from dcp_s3.stage.release import let_go
from tests.servers import S3Server

MIB = 2**20
_PATIENCE_SECONDS = 30


def _pool(**options: Any) -> BufferPool:
    return BufferPool(**{"limit": None, "generations": 2, "spill_dir": None, **options})


def _addresses(slots: list[Slot]) -> set[int]:
    return {slot.buffer.address for slot in slots}


class _Waiter:
    """A thread that asks the pool for memory; `waits` returns once it waits."""

    def __init__(self, pool: BufferPool, sizes: list[int], caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._before = self._reports()
        self.slots: list[Slot] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pool, sizes), daemon=True)
        self._thread.start()

    def _reports(self) -> int:
        return sum(record.getMessage().startswith("staging waits") for record in self._caplog.records)

    def _run(self, pool: BufferPool, sizes: list[int]) -> None:
        try:
            self.slots = pool.acquire(sizes)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def waits(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._reports() == self._before:
            assert self._thread.is_alive(), f"it did not wait: {self.error!r}"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def result(self) -> list[Slot]:
        self._thread.join(_PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.slots

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


@pytest.fixture(autouse=True)
def _reports(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "dcp_s3.stage.pool"):
        yield


def test_slots_are_apart_and_writable() -> None:
    slots = _pool().acquire([100, 1, 5000])
    for number, slot in enumerate(slots):
        slot.lease[slot.offset : slot.offset + 1] = bytes([number + 1])
    assert [slot.lease[slot.offset] for slot in slots] == [1, 2, 3]
    assert [slot.address - slot.buffer.address for slot in slots] == [0, 128, 192]
    assert len({id(slot.lease) for slot in slots}) == 1
    assert slots[0].buffer.size == 192 + 5056


def test_nothing_needs_no_memory() -> None:
    pool = _pool(generations=1)
    held = pool.acquire([10])
    assert pool.acquire([]) == []
    assert pool.in_use == 1
    del held


def test_memory_is_used_again() -> None:
    pool = _pool()
    slots = pool.acquire([MIB])
    first, buffer = _addresses(slots), weakref.ref(slots[0].buffer)
    del slots
    for _ in range(5):
        again = pool.acquire([MIB])
        assert _addresses(again) == first
        assert again[0].buffer is buffer()
        del again
    assert (pool.in_use, pool.size) == (0, MIB)


def test_memory_in_use_is_not_used_again() -> None:
    pool = _pool(generations=3)
    held = [pool.acquire([MIB]) for _ in range(3)]
    assert len({slots[0].address for slots in held}) == 3
    assert (pool.in_use, pool.size) == (3, 3 * MIB)
    kept = torch.frombuffer(held[1][0].lease, dtype=torch.uint8, count=5)[2:]
    held.clear()
    assert pool.in_use == 1
    more = [pool.acquire([MIB]) for _ in range(2)]
    assert kept.data_ptr() not in [slots[0].address + 2 for slots in more]
    assert pool.size == 3 * MIB


def test_a_request_beyond_the_generations_waits_and_is_woken(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(generations=2)
    first, second = pool.acquire([MIB]), pool.acquire([MIB])
    address = second[0].address
    waiter = _Waiter(pool, [MIB], caplog)
    waiter.waits()
    assert not waiter.done
    assert "2 earlier saves" in caplog.text
    assert "DCP_S3_STAGING_GENERATIONS=2" in caplog.text
    del second  # in another thread than the one that waits
    assert waiter.result()[0].address == address
    assert "staging waited for" in caplog.text
    del first


def test_without_waiting_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(generations=1, limit=2 * MIB)
    for size in (MIB, 2 * MIB, 100):
        slots = pool.acquire([size])
        del slots
    assert caplog.records == []


def test_a_long_wait_is_reported_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_REPORT_SECONDS", 0.0)
    pool = _pool(generations=1)
    held = pool.acquire([100])
    waiter = _Waiter(pool, [100], caplog)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while "staging has waited for" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del held
    waiter.result()


def test_a_lease_in_a_cycle_is_found_before_waiting(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(generations=1)
    cycle: list[Any] = [pool.acquire([100])]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert len(pool.acquire([100])) == 1
    finally:
        gc.enable()
    assert caplog.records == []


# --- the budget ------------------------------------------------------------------------------------------


def test_over_the_budget_with_nothing_in_use_names_both_settings() -> None:
    pool = _pool(limit=MIB)
    with pytest.raises(StagingLimitError) as failure:
        pool.acquire([MIB, 1])
    message = str(failure.value)
    assert "1.0 MiB" in message
    assert "DCP_S3_STAGING_LIMIT" in message
    assert "DCP_S3_SPILL_DIR" in message
    assert (pool.in_use, pool.size) == (0, 0)
    assert len(pool.acquire([MIB])) == 1


def test_over_the_budget_with_others_in_use_waits(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(limit=3 * MIB, generations=5)
    held = [pool.acquire([MIB]), pool.acquire([MIB])]
    waiter = _Waiter(pool, [2 * MIB], caplog)
    waiter.waits()
    assert "3.0 MiB" in caplog.text
    assert "DCP_S3_SPILL_DIR is not set" in caplog.text
    held.pop()
    slots = waiter.result()
    assert slots[0].buffer.size == 2 * MIB
    assert pool.size == 3 * MIB  # the free one made room


def test_one_that_waits_and_never_can_fit_is_refused_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(limit=2 * MIB)
    held = pool.acquire([MIB])
    waiter = _Waiter(pool, [3 * MIB], caplog)
    waiter.waits()
    del held
    with pytest.raises(StagingLimitError):
        waiter.result()
    assert len(pool.acquire([2 * MIB])) == 1


def test_what_exceeds_the_budget_goes_to_disk(tmp_path: Path) -> None:
    pool = _pool(limit=2 * MIB, spill_dir=str(tmp_path))
    slots = pool.acquire([3 * MIB, MIB, 100])
    assert [slot.buffer.kind for slot in slots] == ["file", "private", "private"]
    assert pool.in_use == 1
    assert sum({b.size for b in (s.buffer for s in slots) if b.kind != "file"}) <= 2 * MIB
    del slots[1:]
    assert pool.in_use == 1  # half of it
    del slots
    assert pool.in_use == 0


def test_with_a_spill_directory_memory_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(limit=2 * MIB, generations=3, spill_dir=str(tmp_path))
    first = pool.acquire([2 * MIB])
    second = pool.acquire([2 * MIB])
    assert [first[0].buffer.kind, second[0].buffer.kind] == ["private", "file"]
    del first
    assert pool.acquire([2 * MIB])[0].buffer.kind == "private"
    del second
    assert caplog.records == []


def test_files_are_used_again(tmp_path: Path) -> None:
    pool = _pool(limit=0, spill_dir=str(tmp_path))
    slots = pool.acquire([MIB])
    node = os.fstat(slots[0].buffer.fileno()).st_ino
    del slots
    assert os.fstat(pool.acquire([MIB])[0].buffer.fileno()).st_ino == node


def _in_memory(pool: BufferPool) -> int:
    buffers = [*pool._free, *pool._buffers_in_use()]
    return sum(buffer.size for buffer in buffers if buffer.kind != "file")


@pytest.mark.parametrize("seed", range(10))
def test_memory_never_exceeds_the_budget(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    limit, generations = 40 * 4096, 3
    pool = _pool(limit=limit, generations=generations, spill_dir=str(tmp_path))
    held: list[list[Slot]] = []
    for _ in range(60):
        while held and (len(held) == generations or generator.random() < 0.5):
            held.pop(generator.randrange(len(held)))
        held.append(pool.acquire([generator.randrange(1, 12 * 4096) for _ in range(generator.randrange(1, 6))]))
        used = [(slot.address, slot.buffer) for slots in held for slot in slots]
        assert len({address for address, _ in used}) == len(used)
        assert _in_memory(pool) <= limit
        assert pool.in_use == len(held)
        assert len([*pool._free, *pool._buffers_in_use()]) <= 2 * generations


@pytest.mark.parametrize("generations", [1, 2, 3])
def test_sizes_that_alternate_do_not_grow_the_pool(generations: int) -> None:
    pool = _pool(generations=generations)
    for number in range(30):
        slots = pool.acquire([(1, 10, 100, 1000)[number % 4] * 4096])
        assert len([*pool._free, *pool._buffers_in_use()]) <= generations
        del slots


def test_a_much_larger_buffer_is_not_taken_for_a_small_request() -> None:
    pool = _pool()
    slots = pool.acquire([10 * MIB])
    del slots
    assert pool.acquire([MIB])[0].buffer.size == MIB
    assert pool.acquire([6 * MIB])[0].buffer.size == 10 * MIB


# --- failures, and the end -------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["private", "file"])
def test_a_failed_allocation_leaves_the_pool_usable(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(HostBuffer):
        def __init__(self, size: int, kind: Any, **options: Any) -> None:
            if kind == failing:
                raise StagingError("no room")
            super().__init__(size, kind, **options)

    pool = _pool(limit=MIB, spill_dir=str(tmp_path), generations=1)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "HostBuffer", Failing)
        for _ in range(3):
            with pytest.raises(StagingError, match="no room"):
                pool.acquire([2 * MIB, MIB])
        assert pool.in_use == 0
    slots = pool.acquire([2 * MIB, MIB])
    assert [slot.buffer.kind for slot in slots] == ["file", "private"]
    assert pool.size == 3 * MIB


def test_a_full_disk_leaves_the_pool_usable(tmp_path: Path) -> None:
    pool = _pool(limit=MIB, spill_dir="/proc/self", generations=1)
    with pytest.raises(StagingError, match="DCP_S3_SPILL_DIR"):
        pool.acquire([2 * MIB, MIB])
    assert len(pool.acquire([MIB])) == 1


def test_close_frees_what_is_not_in_use() -> None:
    pool = _pool()
    slots = pool.acquire([MIB])
    buffer = weakref.ref(slots[0].buffer)
    del slots
    assert buffer() is not None
    pool.close()
    assert buffer() is None
    assert pool.size == 0
    pool.close()


def test_close_frees_the_rest_when_it_is_not_used_any_more() -> None:
    pool = _pool(shared=True)
    slots = pool.acquire([MIB])
    tensor = torch.frombuffer(slots[0].lease, dtype=torch.uint8, count=3)
    buffer = weakref.ref(slots[0].buffer)
    del slots
    pool.close()
    tensor.fill_(5)
    assert tensor.tolist() == [5, 5, 5]
    del tensor
    gc.collect()
    assert buffer() is None


def test_a_pool_that_is_dropped_frees_the_rest_when_it_is_not_used_any_more() -> None:
    pool = _pool()
    slots = pool.acquire([MIB])
    buffer = weakref.ref(slots[0].buffer)
    pool.close()
    del pool
    gc.collect()
    assert buffer() is not None
    slots[0].lease[0] = 1
    del slots
    gc.collect()
    assert buffer() is None


def test_close_while_a_request_waits(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool(generations=1)
    held = pool.acquire([100])
    waiter = _Waiter(pool, [100], caplog)
    waiter.waits()
    closer = threading.Thread(target=pool.close, daemon=True)
    closer.start()
    while not pool._closed.is_set():
        time.sleep(0.001)
    del held
    closer.join(60)
    assert not closer.is_alive()


def test_free_buffers_that_do_not_fit_make_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = 20 * MIB
    reserved: list[int] = []
    real = os.posix_fallocate

    def reserve(fd: int, offset: int, size: int) -> None:
        gc.collect()
        alive = sum(b.size for b in gc.get_objects() if type(b) is HostBuffer and b.kind == "file" and b.size != size)
        if alive + size > disk:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserved.append(size)
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    pool = _pool(limit=0, spill_dir=str(tmp_path))
    del pool.acquire([10 * MIB])[:]
    assert len(pool.acquire([12 * MIB])) == 1
    assert reserved == [10 * MIB, 12 * MIB]


# --- what a failed save leaves ---------------------------------------------------------------------------


def _fail_to_directory(tmp_path: Path, stager: S3Stager, state: dict[str, Any]) -> Any:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    writer = dcp.FileSystemWriter(blocked / "below")
    return dcp.async_save(state, storage_writer=writer, async_stager=stager)


def _assert_not_pinned(stager: S3Stager, future: Any) -> None:
    with pytest.raises(CheckpointException):
        future.result(_PATIENCE_SECONDS)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while stager._pool.in_use:  # whoever waits for the future is told a moment before
        assert time.monotonic() < deadline, "the kept future holds the copy"
        gc.collect()
        time.sleep(0.01)
    assert isinstance(future.exception(), CheckpointException)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_kept_future_of_a_failed_save_does_not_pin_memory(tmp_path: Path) -> None:
    stager = S3Stager({"staging_generations": 1})
    _assert_not_pinned(stager, _fail_to_directory(tmp_path, stager, {"w": torch.ones(1000)}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_kept_future_of_a_failed_save_to_s3_does_not_pin_memory(s3_env: S3Server, memory_server: S3Server) -> None:
    stager = S3Stager({"staging_generations": 1})
    writer = S3StorageWriter("s3://no-such-bucket-here/run")
    _assert_not_pinned(stager, dcp.async_save({"w": torch.ones(1000)}, storage_writer=writer, async_stager=stager))


def _namespace() -> dict[str, Any]:
    source = """
def fail(held):
    raise ValueError("with what it held")

def suspended(held):
    try:
        fail(held)
    except ValueError as error:
        kept.append(error)
    yield held
"""
    namespace: dict[str, Any] = {"kept": []}
    exec(source, namespace)
    return namespace


def test_an_error_lets_go_of_what_its_frames_hold() -> None:
    fail: Callable[[Any], None] = _namespace()["fail"]
    held = torch.ones(3)
    alive = weakref.ref(held)
    with pytest.raises(ValueError) as failure:
        fail(held)
    error = failure.value
    del held
    assert alive() is not None
    let_go(error)
    assert alive() is None
    assert str(error) == "with what it held"


def test_a_suspended_generator_is_not_closed() -> None:
    namespace = _namespace()
    generator = namespace["suspended"]("value")
    assert next(generator) == "value"
    let_go(namespace["kept"][0])
    assert list(generator) == []
    again = namespace["suspended"]("other")
    assert next(again) == "other"
    let_go(namespace["kept"][1])
    with pytest.raises(StopIteration):
        next(again)


# --- many threads ----------------------------------------------------------------------------------------


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search of the whole heap before each wait, which would take most of the time."""
    monkeypatch.setattr(pool_module, "count_released", lambda: -1)


def test_many_threads(tmp_path: Path, no_search: None) -> None:
    pool = _pool(limit=20 * 4096, generations=3, spill_dir=str(tmp_path))
    most = 0

    def work(number: int) -> None:
        nonlocal most
        generator = random.Random(number)
        for _ in range(40):
            slots = pool.acquire([generator.randrange(1, 8 * 4096) for _ in range(3)])
            tensors = [torch.frombuffer(s.lease, dtype=torch.uint8, count=1, offset=s.offset) for s in slots]
            del slots
            for tensor in tensors:
                tensor.fill_(number)
            time.sleep(0)
            assert all((tensor == number).all() for tensor in tensors), "another thread had the same memory"
            most = max(most, len(pool._in_use))
            del tensors, tensor

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(1, 9)))
    assert most <= 3
    assert pool.in_use == 0
    assert _in_memory(pool) <= 20 * 4096


def test_many_threads_without_a_spill_directory(no_search: None) -> None:
    pool = _pool(limit=10 * 4096, generations=4)

    def work(number: int) -> None:
        for size in range(1, 10):
            slots = pool.acquire([size * 4096])
            slots[0].lease[slots[0].offset] = number
            time.sleep(0)
            assert slots[0].lease[slots[0].offset] == number
            del slots

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert pool.in_use == 0
    assert pool.size <= 10 * 4096
