"""Host memory: it lives as long as something reads it, is really there, and is given back; the pool uses it again, but
never while anything can still read it, nor more of it than its budget."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import random
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3.errors import StagingError
from dcp_s3.memory import view_bytes
from dcp_s3.stage import memory
from dcp_s3.stage.memory import ALIGNMENT, BufferPool, HostBuffer, Kind, Slot, measure_available
from tests.s3.waiting import until
from tests.stage.making import MIB, PATIENCE, buffers_of, generations_in_use, make_pool, no_collector

KINDS: tuple[Kind, ...] = ("private", "shared", "file")
PAGE = mmap.PAGESIZE


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.mark.parametrize("kind", ["shared", "file"])
def test_space_is_reserved_and_a_file_has_no_name(kind: Kind, tmp_path: Path) -> None:
    directory = tmp_path / "made" / "at need"
    buffer = HostBuffer(3 * PAGE + 5, kind, directory=str(directory))
    state, mapped = os.fstat(buffer.fd), mmap.mmap(buffer.fd, buffer.size)
    assert state.st_size == len(buffer.lease()) == buffer.size == 3 * PAGE + 5
    assert state.st_blocks * 512 >= buffer.size
    assert not os.get_inheritable(buffer.fd)
    buffer.lease()[PAGE] = 42
    assert mapped[PAGE] == 42, "another mapping shows the same"
    if kind == "file":
        assert os.listdir(directory) == []
        assert (state.st_nlink, state.st_mode & 0o077, state.st_dev) == (0, 0, os.stat(directory).st_dev)


_READERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t[3:5],
    lambda t: t.view(torch.int32),
    lambda t: torch.nn.Parameter(t.view(torch.float32)),
    lambda t: t.untyped_storage(),
    lambda t: view_bytes(t[5:])[1:],
    lambda t: t[3:].numpy(),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_lives_as_long_as_what_reads_it(kind: Kind, tmp_path: Path) -> None:
    buffer = HostBuffer(3 * PAGE, kind, directory=str(tmp_path))
    for read in (*_READERS, torch.clone):
        lease, other = buffer.lease(), buffer.lease()
        alive, others = weakref.ref(lease), weakref.ref(other)
        tensor = torch.frombuffer(lease, dtype=torch.uint8, count=64, offset=64)
        kept = read(tensor)
        del lease, other, tensor
        gc.collect()
        assert (alive() is None) == (read is torch.clone)
        assert others() is None
        del kept
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize(
    ("kind", "number"), [("file", errno.ENOSPC), ("file", errno.EOPNOTSUPP), ("shared", errno.ENOSPC)]
)
def test_no_room_names_what_is_full_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, number: int
) -> None:
    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = _descriptors()
    with pytest.raises(StagingError, match="DCP_S3_SPILL_DIR") as failure:
        HostBuffer(5 * 2**20, kind, directory=str(tmp_path))
    message = str(failure.value)
    where = repr(str(tmp_path)) if kind == "file" else "shared memory"
    for each in ("DCP_S3_STAGING_LIMIT", "5.0 MiB", os.strerror(number), where):
        assert each in message
    assert isinstance(failure.value.__cause__, OSError)
    del failure
    gc.collect()
    assert _descriptors() == before


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_and_memory_are_given_back(kind: Kind, tmp_path: Path) -> None:
    size = 64 * 2**20
    before, mapped = _descriptors(), _mapped()
    for _ in range(20):
        buffer = HostBuffer(size, kind, directory=str(tmp_path))
        tensor = torch.frombuffer(buffer.lease(), dtype=torch.uint8)
        del buffer
        tensor[-1] = 1
    assert _mapped() >= mapped + size  # the last one is in use
    del tensor
    gc.collect()
    assert _descriptors() == before
    assert _mapped() < mapped + size


def test_pinned_memory_is_unpinned_and_what_cannot_be_pinned_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, int]] = []

    def pin(address: int, size: int) -> None:
        calls.append(("pin", address))
        if size > PAGE:
            raise RuntimeError("no more")

    monkeypatch.setattr(memory.torch_private, "pin_memory", pin)
    monkeypatch.setattr(memory.torch_private, "unpin_memory", lambda address: calls.append(("unpin", address)))
    buffer = HostBuffer(PAGE, "private")
    buffer.pin()
    address = buffer.address
    del buffer
    assert calls == [("pin", address), ("unpin", address)]
    pool = make_pool()
    for _ in range(3):
        assert len(pool.acquire([2 * PAGE], pin=True, wait=False)) == 1
    assert (caplog.text.count("stays unpinned: no more"), len(calls)) == (1, 3)


# --- the pool ----------------------------------------------------------------------------------------------


def size_of(pool: BufferPool, but: str = "") -> int:
    return sum(buffer.size for buffer in buffers_of(pool) if buffer.kind != but)


def test_memory_is_used_again_but_not_while_in_use() -> None:
    pool = make_pool(generations=3)
    held = [pool.acquire([MIB]) for _ in range(3)]
    addresses = {slots[0].address for slots in held}
    assert len(addresses) == 3
    assert (generations_in_use(pool), size_of(pool)) == (3, 3 * MIB)
    kept = torch.frombuffer(held[1][0].lease, dtype=torch.uint8, count=5)[2:]
    held.clear()
    assert (pool.acquire([]), generations_in_use(pool)) == ([], 1), "nothing needs no memory"
    more = [pool.acquire([MIB]) for _ in range(2)]
    assert {slots[0].address for slots in more} == addresses - {kept.data_ptr() - 2}
    assert size_of(pool) == 3 * MIB
    assert pool.acquire([MIB], wait=False) == [], "what does not wait, as for tensors on a device, gets nothing"
    more.clear()
    small = pool.acquire([MIB // 4])
    assert small[0].buffer.size == MIB // 4, "a much larger buffer is not taken for a small request"
    [slot] = pool.acquire([MIB * 3 // 5], wait=False)
    assert slot.buffer.size == MIB


@pytest.mark.parametrize(
    ("options", "held", "asked", "words"),
    [
        ({"generations": 2}, 2, MIB, "2 earlier saves still hold their staged copies, as many as may exist at once"),
        ({"generations": 5, "limit": 3 * MIB}, 2, 2 * MIB, "most of the 3.0 MiB .* DCP_S3_SPILL_DIR is not set"),
        ({"generations": 5, "limit": 2 * MIB}, 1, 3 * MIB, "most of the 2.0 MiB"),  # it never can fit
    ],
    ids=["generations", "budget", "never"],
)
def test_a_request_that_has_to_wait_says_why_and_is_woken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, options: Any, held: int, asked: int, words: str
) -> None:
    monkeypatch.setattr(memory, "_REPORT_SECONDS", 0.0)
    pool = make_pool(**options)
    kept = [pool.acquire([MIB]) for _ in range(held)]
    with ThreadPoolExecutor(1) as threads, closing(pool):
        waiter = threads.submit(pool.acquire, [asked])
        until(lambda: caplog.text.count("staging has waited for") >= 2)  # and again every now and then
        assert re.search(words, caplog.text)
        assert not waiter.done()
        kept.pop()  # in another thread than the one that waits
        if asked > options.get("limit", asked):
            with pytest.raises(StagingError):
                waiter.result(PATIENCE)
            assert len(pool.acquire([2 * MIB])) == 1
            return
        assert waiter.result(PATIENCE)[0].buffer.size == asked
        assert size_of(pool) == options.get("limit", 2 * MIB), "what is free has made room"


def test_a_lease_in_a_cycle_is_found_before_waiting(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(generations=1)
    cycle: list[Any] = [pool.acquire([100])]
    cycle.append(cycle)
    with no_collector():
        del cycle
        assert len(pool.acquire([100])) == 1
    assert caplog.records == [], "it did not wait"


@pytest.mark.parametrize("failing", ["private", "file"])
def test_a_failed_allocation_leaves_the_pool_usable(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(size: int, kind: Any, **options: Any) -> HostBuffer:
        if kind == failing:
            raise StagingError("no room")
        return HostBuffer(size, kind, **options)

    pool = make_pool(limit=MIB, spill_dir=str(tmp_path), generations=1)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "HostBuffer", allocate)
        for _ in range(3):
            with pytest.raises(StagingError, match="no room"):
                pool.acquire([2 * MIB, MIB])
        assert (generations_in_use(pool), size_of(pool)) == (0, MIB if failing == "file" else 0), "what it had is kept"
    slots = pool.acquire([2 * MIB, MIB])
    assert [slot.buffer.kind for slot in slots] == ["file", "private"]
    assert size_of(pool) == 3 * MIB


def test_close_frees_what_is_free_ends_waits_and_leaves_what_is_in_use() -> None:
    pool = make_pool()
    free = weakref.ref(pool.acquire([MIB])[0].buffer)
    assert free() is not None
    pool.close()
    assert free() is None
    pool = make_pool(generations=1)
    slots = pool.acquire([MIB])
    tensor = torch.frombuffer(slots[0].lease, dtype=torch.uint8, count=3)
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(pool.acquire, [100])
        pool.close()
        with pytest.raises(StagingError, match="closed"):
            waiter.result(PATIENCE)
    del slots, pool
    gc.collect()
    tensor.fill_(5)
    assert tensor.tolist() == [5, 5, 5]


@pytest.mark.parametrize("spill_dir", [None, "/proc/self", __file__])
def test_over_the_budget_with_nothing_in_use_names_both_settings(spill_dir: str | None) -> None:
    pool = make_pool(limit=MIB, spill_dir=spill_dir)
    with pytest.raises(StagingError, match="DCP_S3_SPILL_DIR") as failure:
        pool.acquire([2 * MIB])
    assert "2.0 MiB" in str(failure.value)
    assert spill_dir or "DCP_S3_STAGING_LIMIT" in str(failure.value)
    assert (generations_in_use(pool), size_of(pool)) == (0, 0)
    assert len(pool.acquire([MIB])) == 1


def test_what_exceeds_the_budget_goes_to_disk(tmp_path: Path) -> None:
    pool = make_pool(limit=2 * MIB, spill_dir=str(tmp_path))
    slots = pool.acquire([3 * MIB, MIB, 100])
    assert [slot.buffer.kind for slot in slots] == ["file", "private", "private"]
    assert pool.acquire([2 * MIB])[0].buffer.kind == "file", "memory is not waited for"
    node = os.fstat(slots[0].buffer.fd).st_ino
    assert generations_in_use(pool) == 1
    del slots[1:]
    assert generations_in_use(pool) == 1  # half of it
    del slots
    assert generations_in_use(pool) == 0
    assert os.fstat(pool.acquire([3 * MIB])[0].buffer.fd).st_ino == node, "files are used again"


@pytest.mark.parametrize("seed", range(3))
def test_memory_never_exceeds_the_budget(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    limit, generations = 40 * 4096, 3
    pool = make_pool(limit=limit, generations=generations, spill_dir=str(tmp_path))
    held: list[list[tuple[Slot, int]]] = []
    for _ in range(60):
        while held and (len(held) == generations or generator.random() < 0.5):
            held.pop(generator.randrange(len(held)))
        sizes = [generator.randrange(1, 12 * 4096) for _ in range(generator.randrange(1, 6))]
        held.append(list(zip(pool.acquire(sizes), sizes, strict=True)))
        used = sorted((slot.address, size) for slots in held for slot, size in slots)
        assert all(address % ALIGNMENT == 0 for address, _ in used)
        assert all(address + size <= other for (address, size), (other, _) in itertools.pairwise(used))
        assert size_of(pool, "file") <= limit
        assert generations_in_use(pool) == len(held)
        assert len(buffers_of(pool)) <= 2 * generations, "sizes that change do not grow it"


GIB = 2**30


_V1 = "memory/memory.{}"
_CGROUPS: dict[str, tuple[dict[str, str], int]] = {
    "none": ({}, 40),
    "version 2 without a limit": ({"memory.max": "max", "memory.current": f"{3 * GIB}"}, 40),
    "version 2": ({"memory.max": f"{10 * GIB}", "memory.current": f"{3 * GIB}"}, 7),
    "page cache": (
        {"memory.max": f"{10 * GIB}", "memory.current": f"{9 * GIB}",
         "memory.stat": f"anon {5 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}"}, 3,
    ),
    "version 1": (
        {_V1.format("limit_in_bytes"): f"{10 * GIB}", _V1.format("usage_in_bytes"): f"{9 * GIB}",
         _V1.format("stat"): f"inactive_file {GIB}\ntotal_inactive_file {4 * GIB}"}, 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _CGROUPS)
def test_memory_that_a_host_of_40_gib_and_its_container_leave(tmp_path: Path, name: str) -> None:
    files, expected = _CGROUPS[name]
    host = f"MemTotal:  {500 * 2**20} kB\nMemFree:   1 kB\nMemAvailable: {40 * 2**20} kB\nHugePages_Total: 0"
    for path, text in {"proc/meminfo": host, **{f"cgroup/{path}": text for path, text in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    assert measure_available(tmp_path / "proc", tmp_path / "cgroup") == expected * GIB
