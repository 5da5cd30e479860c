"""The pool never takes more memory than its budget, also with many threads."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage import pool as pool_module
from dcp_s3.stage.buffers import measure_available, resolve_limit
from dcp_s3.stage.pool import BufferPool, Slot
from tests.stage.pools import MIB, Waiter, make_pool

pytestmark = pytest.mark.usefixtures("reported_waits")

# --- the budget ------------------------------------------------------------------------------------------


def test_over_the_budget_with_nothing_in_use_names_both_settings() -> None:
    pool = make_pool(limit=MIB)
    with pytest.raises(StagingError) as failure:
        pool.acquire([MIB, 1])
    message = str(failure.value)
    assert "1.0 MiB" in message
    assert "DCP_S3_STAGING_LIMIT" in message
    assert "DCP_S3_SPILL_DIR" in message
    assert (pool.in_use, pool.size) == (0, 0)
    assert len(pool.acquire([MIB])) == 1


def test_over_the_budget_with_others_in_use_waits(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(limit=3 * MIB, generations=5)
    held = [pool.acquire([MIB]), pool.acquire([MIB])]
    waiter = Waiter(pool, [2 * MIB], caplog)
    waiter.waits()
    assert "3.0 MiB" in caplog.text
    assert "DCP_S3_SPILL_DIR is not set" in caplog.text
    held.pop()
    slots = waiter.result()
    assert slots[0].buffer.size == 2 * MIB
    assert pool.size == 3 * MIB  # the free one made room


def test_one_that_waits_and_never_can_fit_is_refused_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(limit=2 * MIB)
    held = pool.acquire([MIB])
    waiter = Waiter(pool, [3 * MIB], caplog)
    waiter.waits()
    del held
    with pytest.raises(StagingError):
        waiter.result()
    assert len(pool.acquire([2 * MIB])) == 1


def test_what_exceeds_the_budget_goes_to_disk(tmp_path: Path) -> None:
    pool = make_pool(limit=2 * MIB, spill_dir=str(tmp_path))
    slots = pool.acquire([3 * MIB, MIB, 100])
    assert [slot.buffer.kind for slot in slots] == ["file", "private", "private"]
    assert pool.in_use == 1
    assert sum({b.size for b in (s.buffer for s in slots) if b.kind != "file"}) <= 2 * MIB
    del slots[1:]
    assert pool.in_use == 1  # half of it
    del slots
    assert pool.in_use == 0


def test_with_a_spill_directory_memory_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(limit=2 * MIB, generations=3, spill_dir=str(tmp_path))
    first = pool.acquire([2 * MIB])
    second = pool.acquire([2 * MIB])
    assert [first[0].buffer.kind, second[0].buffer.kind] == ["private", "file"]
    del first
    assert pool.acquire([2 * MIB])[0].buffer.kind == "private"
    del second
    assert caplog.records == []


def test_files_are_used_again(tmp_path: Path) -> None:
    pool = make_pool(limit=0, spill_dir=str(tmp_path))
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
    pool = make_pool(limit=limit, generations=generations, spill_dir=str(tmp_path))
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
    pool = make_pool(generations=generations)
    for number in range(30):
        slots = pool.acquire([(1, 10, 100, 1000)[number % 4] * 4096])
        assert len([*pool._free, *pool._buffers_in_use()]) <= generations
        del slots


def test_a_much_larger_buffer_is_not_taken_for_a_small_request() -> None:
    pool = make_pool()
    slots = pool.acquire([10 * MIB])
    del slots
    assert pool.acquire([MIB])[0].buffer.size == MIB
    assert pool.acquire([6 * MIB])[0].buffer.size == 10 * MIB


# --- many threads ----------------------------------------------------------------------------------------


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search of the whole heap before each wait, which would take most of the time."""
    monkeypatch.setattr(pool_module.gc, "collect", lambda: 0)


def test_many_threads(tmp_path: Path, no_search: None) -> None:
    pool = make_pool(limit=20 * 4096, generations=3, spill_dir=str(tmp_path))
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
    pool = make_pool(limit=10 * 4096, generations=4)

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


# --- limits ---------------------------------------------------------------------------------------------


GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "available", "ranks", "expected"),
    [
        (None, 0, 1, None),
        (None, 100 * GIB, 8, None),
        (5 * GIB, GIB, 8, 5 * GIB),  # bytes are for each process, and taken as they are
        (0.5, 100 * GIB, 1, 50 * GIB),
        (0.5, 100 * GIB, 8, 50 * GIB // 8),
        (1.0, 3 * GIB, 2, 3 * GIB // 2),
    ],
)
def test_limits(limit: int | float | None, available: int, ranks: int, expected: int | None) -> None:
    found = resolve_limit(limit, available, ranks)
    assert found == expected
    assert found is None or isinstance(found, int)


def _host(tmp_path: Path, available: int) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal:  {500 * 2**20} kB\nMemFree:   1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"
    )
    return proc


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_host_without_cgroups(tmp_path: Path) -> None:
    assert measure_available(_host(tmp_path, 7 * GIB), tmp_path / "absent") == 7 * GIB


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        ("max\n", 3 * GIB, 40 * GIB),
        (f"{10 * GIB}\n", 3 * GIB, 7 * GIB),
        (f"{100 * GIB}\n", 3 * GIB, 40 * GIB),  # the host has less than the container may use
        (f"{2 * GIB}\n", 3 * GIB, 0),
    ],
)
def test_a_container_of_version_2(tmp_path: Path, limit: str, usage: int, expected: int) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "memory.max", limit)
    _write(cgroup / "memory.current", f"{usage}\n")
    assert measure_available(_host(tmp_path, 40 * GIB), cgroup) == expected


def test_page_cache_of_a_container_counts_as_available(tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "memory.max", f"{10 * GIB}\n")
    _write(cgroup / "memory.current", f"{9 * GIB}\n")
    _write(cgroup / "memory.stat", f"anon {5 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n")
    assert measure_available(_host(tmp_path, 40 * GIB), cgroup) == 3 * GIB


def test_a_container_of_version_1(tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "memory/memory.limit_in_bytes", f"{10 * GIB}\n")
    _write(cgroup / "memory/memory.usage_in_bytes", f"{9 * GIB}\n")
    _write(cgroup / "memory/memory.stat", f"inactive_file {GIB}\ntotal_inactive_file {4 * GIB}\n")
    assert measure_available(_host(tmp_path, 40 * GIB), cgroup) == 5 * GIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    _write(cgroup / "memory/memory.usage_in_bytes", f"{9 * GIB}\n")
    assert measure_available(_host(tmp_path, 40 * GIB), cgroup) == 40 * GIB


def test_a_limit_without_its_usage_is_not_counted(tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "memory.max", f"{GIB}\n")
    assert measure_available(_host(tmp_path, 40 * GIB), cgroup) == 40 * GIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="meminfo"):
        measure_available(tmp_path / "proc", tmp_path)
    _write(tmp_path / "proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        measure_available(tmp_path / "proc", tmp_path)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="measures this Linux machine")
def test_this_machine() -> None:
    total = next(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < measure_available() <= total
