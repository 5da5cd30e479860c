"""The pool: memory is used again, but never while anything can still read it; failures leave it usable."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage import pool as pool_module
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.stage.pool import Slot
from tests.stage.pools import MIB, PATIENCE_SECONDS, Waiter, make_pool

pytestmark = pytest.mark.usefixtures("reported_waits")


def _addresses(slots: list[Slot]) -> set[int]:
    return {slot.buffer.address for slot in slots}


def test_slots_are_apart_and_writable() -> None:
    slots = make_pool().acquire([100, 1, 5000])
    for number, slot in enumerate(slots):
        slot.lease[slot.offset : slot.offset + 1] = bytes([number + 1])
    assert [slot.lease[slot.offset] for slot in slots] == [1, 2, 3]
    assert [slot.address - slot.buffer.address for slot in slots] == [0, 128, 192]
    assert len({id(slot.lease) for slot in slots}) == 1
    assert slots[0].buffer.size == 192 + 5056


def test_nothing_needs_no_memory() -> None:
    pool = make_pool(generations=1)
    held = pool.acquire([10])
    assert pool.acquire([]) == []
    assert pool.in_use == 1
    del held


def test_memory_is_used_again() -> None:
    pool = make_pool()
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
    pool = make_pool(generations=3)
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
    pool = make_pool(generations=2)
    first, second = pool.acquire([MIB]), pool.acquire([MIB])
    address = second[0].address
    waiter = Waiter(pool, [MIB], caplog)
    waiter.waits()
    assert not waiter.done
    assert "2 earlier saves" in caplog.text
    assert "as many as may exist at a time" in caplog.text
    del second  # in another thread than the one that waits
    assert waiter.result()[0].address == address
    assert "staging waited for" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}, "it was short"
    del first


def test_without_waiting_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(generations=1, limit=2 * MIB)
    for size in (MIB, 2 * MIB, 100):
        slots = pool.acquire([size])
        del slots
    assert caplog.records == []


def test_a_long_wait_is_reported_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "_REPORT_SECONDS", 0.0)
    pool = make_pool(generations=1)
    held = pool.acquire([100])
    waiter = Waiter(pool, [100], caplog)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while caplog.text.count("staging has waited for") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del held
    waiter.result()
    assert [record.levelname for record in caplog.records][:: len(caplog.records) - 1] == ["INFO", "WARNING"]


def test_a_lease_in_a_cycle_is_found_before_waiting(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(generations=1)
    cycle: list[Any] = [pool.acquire([100])]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert len(pool.acquire([100])) == 1
    finally:
        gc.enable()
    assert caplog.records == []


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

    pool = make_pool(limit=MIB, spill_dir=str(tmp_path), generations=1)
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
    pool = make_pool(limit=MIB, spill_dir="/proc/self", generations=1)
    with pytest.raises(StagingError, match="DCP_S3_SPILL_DIR"):
        pool.acquire([2 * MIB, MIB])
    assert len(pool.acquire([MIB])) == 1


def test_close_frees_what_is_not_in_use() -> None:
    pool = make_pool()
    slots = pool.acquire([MIB])
    buffer = weakref.ref(slots[0].buffer)
    del slots
    assert buffer() is not None
    pool.close()
    assert buffer() is None
    assert pool.size == 0
    pool.close()


def test_close_frees_the_rest_when_it_is_not_used_any_more() -> None:
    pool = make_pool(shared=True)
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
    pool = make_pool()
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
    pool = make_pool(generations=1)
    held = pool.acquire([100])
    waiter = Waiter(pool, [100], caplog)
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
    pool = make_pool(limit=0, spill_dir=str(tmp_path))
    del pool.acquire([10 * MIB])[:]
    assert len(pool.acquire([12 * MIB])) == 1
    assert reserved == [10 * MIB, 12 * MIB]
