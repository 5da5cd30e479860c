"""How much host memory staging may use."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resolve_limit(limit: int | float | None, available: int, local_ranks: int) -> int | None:
    """Bytes that this process may stage in memory; None for no limit.

    Args:
        limit: bytes (int), a fraction (float) of ``available`` that the ranks of this host share, or None.
        available: bytes of memory that are free or can be freed.
        local_ranks: processes that share the host.
    """
    if limit is None or isinstance(limit, int):
        return limit
    return int(limit * available / local_ranks)


def measure_available(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Bytes of memory that can still be used: the host's, or the container's if that is less.

    Raises:
        OSError: this system does not report it.
    """
    available = _host_available(proc)
    for limit_file, usage_file in _FILES:
        limit, usage = _read_number(cgroup / limit_file), _read_number(cgroup / usage_file)
        if limit is not None and usage is not None:
            cache = _file_cache(cgroup / limit_file)
            available = min(available, max(0, limit - usage + cache))
    return available


def _host_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"no MemAvailable in {proc}/meminfo")


def _file_cache(limit_file: Path) -> int:
    """Bytes of the cgroup's usage that are inactive page cache."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
