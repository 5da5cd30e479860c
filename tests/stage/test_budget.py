"""How much memory staging may use, of hosts and of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3.stage.buffers import measure_available, resolve_limit

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
