"""Checks of this host: settings, packages, open files, memory, the spill disk. No request is sent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
import time
from pathlib import Path

from dcp_s3 import errors
from dcp_s3._version import __version__
from dcp_s3.checkup.examination import Examination
from dcp_s3.checkup.result import CheckResult, failed, from_error, passed, skipped, warned
from dcp_s3.retention.parse import policy_from_settings
from dcp_s3.s3.chain import find_chain
from dcp_s3.settings import ENV_PREFIX, local_world_size, resolve_settings, unknown_variables
from dcp_s3.spill.durable import as_spill_error, flush_directory
from dcp_s3.spill.store import SpillStore
from dcp_s3.stage.buffers import measure_available, resolve_limit
from dcp_s3.torch_version import TESTED, is_newer_than_tested
from dcp_s3.units import format_size, plural

_OTHER_FILES = 256
"""Open files that a training process has anyway: libraries, shared memory of data loaders, logs."""
_MOUNTS = Path("/proc/mounts")
_MEASURED = 64 * 2**20
_BLOCK = 4 * 2**20
_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.s3fs", "fuse.goofys", "fuse.mount-s3", "fuse.geesefs", "lustre", "ceph")
_LITTLE_SPACE = 2**30


def check_settings(name: str, exam: Examination) -> CheckResult:
    """Whether each setting is valid, and whether a variable is misspelled."""
    try:
        settings = exam.settings = resolve_settings(exam.given)
        policy_from_settings(settings)
        chain = find_chain(settings)
    except (errors.SettingsError, errors.PolicyError) as error:
        return from_error(name, error)
    unknown = unknown_variables()
    if unknown:
        guesses = [f"{found}: did you mean {near}?" if near else f"unset {found}" for found, near in unknown.items()]
        return warned(name, f"not a setting of dcp_s3, so without effect: {', '.join(unknown)}", "; ".join(guesses))
    shown = [f"{ENV_PREFIX}{each.upper()}={getattr(settings, each)}" for each in sorted(settings.model_fields_set)]
    shown += [f"{each} {value.value} ({value.source})" for each, value in chain.items()]
    return passed(name, f"valid; set are {', '.join(shown)}" if shown else "valid; none is set")


def check_versions(name: str, exam: Examination) -> CheckResult:
    """Which versions are installed of what dcp_s3 relies on."""
    versions = {"dcp_s3": __version__, "Python": platform.python_version()}
    for package in ("torch", "awscrt", "boto3", "aiobotocore"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return failed(name, f"{package} is not installed", f"pip install {package}")
    found = ", ".join(f"{package} {version}" for package, version in versions.items())
    if is_newer_than_tested(versions["torch"]):
        return warned(
            name, f"{found}: dcp_s3 was never run with this torch, the newest was {TESTED[-1]}",
            "save and load a small state first; pip install --upgrade dcp-s3, or an earlier torch",
        )  # fmt: skip
    return passed(name, found)


def check_open_files(name: str, exam: Examination) -> CheckResult:
    """Whether a process may have as many sockets as it would open."""
    connections = exam.settings.max_connections
    return judge_open_files(name, resource.getrlimit(resource.RLIMIT_NOFILE)[0], connections)


def judge_open_files(name: str, limit: int, connections: int) -> CheckResult:
    """The result for a soft limit of open files. A hedged load has up to two sockets for each of its connections, and a
    save may run beside it."""
    needed = 3 * connections + _OTHER_FILES
    if limit == resource.RLIM_INFINITY:
        return passed(name, "unlimited")
    if limit < needed:
        return warned(
            name,
            f"at most {limit} per process, but {connections} connections in each direction may need {needed}",
            f"ulimit -n {max(65536, needed)} (LimitNOFILE= in systemd), or a smaller DCP_S3_CONCURRENCY",
        )
    return passed(name, f"{limit} per process, enough for {connections} connections in each direction")


def check_memory(name: str, exam: Examination) -> CheckResult:
    """Whether the memory has room for the staged copies that the settings allow."""
    try:
        available = measure_available()
    except OSError as error:
        return skipped(name, str(error))
    ranks = local_world_size()
    limit = resolve_limit(exam.settings.staging_limit, available, ranks)
    free = f"{format_size(available)} available"
    if limit is None:
        return passed(
            name, f"{free}; asynchronous saves stage up to {exam.settings.staging_generations} copies of a rank's state"
        )
    if limit * ranks > available:
        return warned(
            name,
            f"{free}, but DCP_S3_STAGING_LIMIT allows {format_size(limit)} to each of {ranks} ranks",
            "a smaller DCP_S3_STAGING_LIMIT (0.5 is half of what is available), with DCP_S3_SPILL_DIR for the rest",
        )
    return passed(name, f"{free}; DCP_S3_STAGING_LIMIT allows {format_size(limit)} to a rank")


def check_spill(name: str, exam: Examination) -> CheckResult:
    """Whether the spill directory can take data, and keep it."""
    spill = exam.settings.spill_dir
    if spill is None:
        return skipped(name, "DCP_S3_SPILL_DIR is unset: while S3 is away, saves fail")
    path = Path(spill)
    if not path.exists() and exam.read_only:
        return skipped(name, f"{path} does not exist; the first save makes it")
    try:
        with as_spill_error(path, "write"):
            speed = None if exam.read_only else _measure(path)
        store = SpillStore(path)
        waiting = store.scan()
        broken = [*store.list_damaged(), *store.list_unreadable(), *store.list_refused()]
    except (errors.SpillError, OSError) as error:
        return from_error(name, error)
    there = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(there).free
    kind = filesystem_of(path, _MOUNTS.read_text()) if _MOUNTS.exists() else ""
    parts = [str(path), kind, f"{format_size(free)} free"]
    parts += [] if speed is None else [f"{format_size(speed)}/s written and flushed"]
    if waiting:
        size = format_size(sum(save.journal.size for save in waiting))
        parts.append(f"{plural(len(waiting), 'save')} ({size}) waiting for S3")
    found = ", ".join(part for part in parts if part)
    return _judge_spill(name, found, kind, free, waiting=bool(waiting), broken=len(broken))


def _judge_spill(name: str, found: str, kind: str, free: int, *, waiting: bool, broken: int) -> CheckResult:
    if kind in _IN_MEMORY:
        return warned(
            name, f"{found}: {kind} is memory, which a reboot empties",
            "set DCP_S3_SPILL_DIR to a directory on a local disk (NVMe)",
        )  # fmt: skip
    if kind in _REMOTE:
        return warned(
            name, f"{found}: {kind} is not a local disk: it may be away when S3 is, and hosts must not share it",
            "set DCP_S3_SPILL_DIR to a directory on a local disk (NVMe)",
        )  # fmt: skip
    if broken:
        return warned(
            name, f"{found}; damaged or set aside: {plural(broken, 'save')}", "dcp-s3 drain --status says why"
        )
    if waiting:
        return warned(name, found, "dcp-s3 drain uploads and commits them; the next save from here does, too")
    if free < _LITTLE_SPACE:
        return warned(name, f"{found}: hardly room for a checkpoint", "free space there, or use a larger disk")
    return passed(name, found)


def _measure(directory: Path) -> float:
    """Bytes per second that a file in ``directory`` takes, flushed. What is made for that is removed again."""
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"doctor-{secrets.token_hex(4)}.tmp"
    size = min(_MEASURED, shutil.disk_usage(directory).free // 4)
    block = secrets.token_bytes(min(_BLOCK, max(1, size)))
    try:
        began = time.monotonic()
        written = 0
        with open(path, "xb") as file:
            while written < max(1, size):
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - began
        flush_directory(directory)
        return written / max(seconds, 1e-9)
    finally:
        path.unlink(missing_ok=True)
        for each in made:
            each.rmdir()


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem that holds a path, by the text of ``/proc/mounts``; empty if none does."""
    best, kind = "", ""
    resolved = f"{path.resolve()}/"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mounted = fields[1].replace("\\040", " ").rstrip("/") + "/"
        if resolved.startswith(mounted) and len(mounted) >= len(best):
            best, kind = mounted, fields[2]
    return kind
