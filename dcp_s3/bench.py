"""`dcp-s3 bench`: ranks save and load below a user's URL; what limits them is said, what they wrote is removed.

Each rank is a process of its own that runs this module, and prints what it measures, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.s3.pressure import cores
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import child_environment, launch, resolve_settings
from dcp_s3.stage.memory import measure_available
from dcp_s3.units import format_size, plural
from dcp_s3.url import CheckpointURL, URLLike, parse_url

if TYPE_CHECKING:
    from torch import Tensor

_NOT_SPILLING = {"spill_dir": None, "durability": "s3"}  # a drain would upload after the prefix was removed
_TENSOR_BYTES = 64 * 2**20
_SHARE_OF_MEMORY = 4
_LATE_SECONDS = 2.0  # after ranks were killed, until requests that they had sent have been carried out
_SHORT_SECONDS = 1.0  # below that, connections have not been compared: a few windows of 0.2 s
_BUSY = 0.8  # share of the host's CPU time from which on it is what limits


@dataclass(frozen=True)
class Transfer:
    """One save or load, of one rank or of all."""

    direction: str
    """``save`` or ``load``."""
    round: int
    """Number of the round, from 1. The first one is what a new process gets."""
    bytes: int
    seconds: float
    """Wall time, of the slowest rank."""
    cpu_seconds: float
    connections: int
    """Connections in the end, of the rank with the most of them: what its next transfer begins with."""
    throttled: int
    """Requests that S3 refused with SlowDown or a like error."""


def join(ranks: Sequence[Transfer]) -> Transfer:
    """The same transfer of all ranks as one."""
    sums = {name: sum(getattr(one, name) for one in ranks) for name in ("bytes", "cpu_seconds", "throttled")}
    most = {name: max(getattr(one, name) for one in ranks) for name in ("seconds", "connections")}
    return replace(ranks[0], **sums, **most)


@dataclass(frozen=True)
class BenchReport:
    """The outcome of a benchmark."""

    url: str
    ranks: int
    cores: int
    """CPU cores that the ranks may use, together."""
    most_connections: int
    """Most connections of a rank in each direction, by the settings."""
    transfers: tuple[Transfer, ...]
    """A save and a load for each round, in order."""

    @property
    def limits(self) -> dict[str, str]:
        """What limits saves, and loads, of a process that has found its number of connections, and what may help."""
        return {last.direction: self._find_limit(last) for last in self.transfers[-2:]}

    def _find_limit(self, last: Transfer) -> str:
        each = f"{format_size(last.bytes / last.seconds / (self.ranks * max(1, last.connections)))}/s"
        share = last.cpu_seconds / last.seconds / self.cores
        if last.throttled:
            return f"S3 throttles: it refused {last.throttled} requests; DCP_S3_PART_SIZE=64MiB sends fewer"
        if last.seconds < _SHORT_SECONDS:
            return f"it took {last.seconds:.2f} s, too short to tell: give a larger --size"
        if share >= _BUSY:
            return f"the CPU: {plural(self.ranks, 'rank')} use {share:.0%} of {plural(self.cores, 'core')}"
        if last.connections >= self.most_connections:
            return (
                f"the settings: a rank uses all {plural(self.most_connections, 'connection')} of DCP_S3_CONCURRENCY, "
                f"and each carries {each}; try a higher one"
            )
        return (
            f"the network or the server: {plural(last.connections, 'connection')} of a rank carry {each} each (S3 "
            "gives one about 85 MiB/s), and neither CPU nor settings are at their limit; more --ranks have more"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"bytes_per_rank": self.transfers[0].bytes // self.ranks, "limits": self.limits}


def bench(
    url: URLLike,
    *,
    size: int,
    ranks: int,
    rounds: int,
    note: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> BenchReport:
    """Save and load a synthetic state below a URL, compare it bit by bit, and remove it again.

    Args:
        size: bytes of each rank's state; fewer if all ranks would take more than a quarter of the free memory.

    Raises:
        DcpS3Error: a setting, a request or a rank failed, or what was loaded is not what was saved.
    """
    where = parse_url(url)
    settings = resolve_settings(_NOT_SPILLING)
    with contextlib.suppress(OSError):  # not known on every system
        most = measure_available() // _SHARE_OF_MEMORY // ranks
        if size > most:
            note(f"{format_size(most)} per rank instead of {format_size(size)}: a quarter of the free memory")
            size = most
    scratch = where.child(f"dcp-s3-bench-{uuid.uuid4().hex[:12]}")
    parse_url(str(scratch.child("round-999999")))  # its names are not too long
    store = store_of(scratch, settings)
    try:
        store.put(scratch.key("probe"), b"")
        _remove(store, scratch)  # that this may be done is seen before anything large is written
        found = _run_ranks({"url": str(scratch), "size": size, "ranks": ranks, "rounds": rounds}, progress)
        _remove(store, scratch)
    except BaseException:
        note(f"removing {scratch}; if that fails, delete what is below it")
        time.sleep(_LATE_SECONDS)
        with contextlib.suppress(errors.StorageError):
            _remove(store, scratch)
        raise
    transfers = tuple(map(join, zip(*found, strict=True)))
    return BenchReport(str(where), ranks, cores(), settings.max_connections, transfers)


def _remove(store: S3Store, url: CheckpointURL) -> None:
    """Remove objects and open uploads below a URL."""
    prefix = url.key("")
    try:
        for upload in store.uploads(prefix):
            store.abort(upload)
    finally:
        store.delete([each.key for each in store.list(prefix).objects])


def _run_ranks(order: dict[str, Any], progress: Callable[[int, int], None]) -> list[list[Transfer]]:
    """Run a process for each rank; none is left in the end. Returns the transfers of each."""
    with tempfile.TemporaryDirectory(prefix="dcp_s3-bench-") as directory:
        with RankProcesses("dcp_s3.bench", [json.dumps(order)], order["ranks"], Path(directory)) as ranks:
            # If one has failed, the others wait for it: what it said is the cause.
            while None in (statuses := ranks.statuses()) and not any(statuses):
                progress(len(ranks.lines(0)), 2 * order["rounds"])
                time.sleep(0.1)
        answers = [[json.loads(line) for line in ranks.lines(number)] for number in range(order["ranks"])]
        failed = []
        for number, (found, status) in enumerate(zip(answers, statuses, strict=True)):
            last = found[-1] if found and "error" in found[-1] else {}
            if last or status:
                said = last.get("error") or f"its process ended with status {status}: {ranks.last_words(number)}"
                failed.append((getattr(errors, last.get("kind", "DcpS3Error"), None), f"rank {number}: {said}"))
    if failed:
        # What is not dcp_s3's, such as a lost connection to another rank, is likely a consequence.
        kind, text = min(failed, key=lambda each: each[0] is None)
        raise (kind or errors.DcpS3Error)(text)
    return [[Transfer(**answer) for answer in each] for each in answers]


# --- ranks as processes on this host ----------------------------------------------------------------------


class RankProcesses:
    """A process for each rank, as torchrun would start them, with what they print in files.

    They are not started by torchrun, so that one SIGKILL each takes all of them down at the same instant, with nobody
    left to clean up. Leaving the context kills what still runs.
    """

    def __init__(self, module: str, arguments: Sequence[str], ranks: int, logs: Path, **environment: str) -> None:
        self.ranks, self._logs, self._processes = ranks, logs, list[subprocess.Popen[bytes]]()
        logs.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        every = child_environment(
            WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment
        )
        # Otherwise gloo looks up the host's name, which does not work on every laptop.
        every.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        try:
            for rank in range(ranks):
                with (logs / f"rank{rank}.out").open("wb") as out, (logs / f"rank{rank}.err").open("wb") as err:
                    process = subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        cwd=logs,  # Python finds modules there, too: a directory with nothing else in it
                        env=every | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,  # a rank may end when it does, so with this process
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # Ctrl-C reaches only this process, which then kills them
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, then wait until they are gone."""
        for process in self._processes:
            process.kill()  # does nothing if it has ended
        for process in self._processes:
            process.communicate()

    def statuses(self) -> list[int | None]:
        """The exit status of each; None while it runs."""
        return [process.poll() for process in self._processes]

    def lines(self, rank: int) -> list[str]:
        """The complete lines that a rank has printed."""
        text = (self._logs / f"rank{rank}.out").read_text(errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def last_words(self, rank: int) -> str:
        """The end of what a rank has written to stderr."""
        return (self._logs / f"rank{rank}.err").read_text(errors="replace")[-3000:].strip() or "(it printed nothing)"


# --- one rank ----------------------------------------------------------------------------------------------


def make_state(rank: int, size: int, number: int) -> dict[str, Tensor]:
    """Tensors of about ``size`` bytes in all, of one rank only, as shards are. Each rank, tensor and round has other
    values: random ones, which no link can compress."""
    import torch

    count, most = max(1, size // 8), _TENSOR_BYTES // 8
    generator = torch.Generator().manual_seed(2**20 * number + rank)
    return {
        f"rank-{rank}/tensor-{start // most}": torch.empty(min(most, count - start), dtype=torch.int64).random_(
            generator=generator
        )
        for start in range(0, count, most)
    }


def check(saved: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Check that all bits are the same: otherwise CorruptCheckpointError."""
    for name, tensor in saved.items():
        if not tensor.equal(loaded[name]):
            raise errors.CorruptCheckpointError(f"what was loaded as {name!r} is not what was saved")


def _rounds(order: Mapping[str, Any], rank: int) -> Iterator[Transfer]:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from dcp_s3.load.reader import S3StorageReader
    from dcp_s3.save.writer import S3StorageWriter

    torch.set_num_threads(max(1, torch.get_num_threads() // order["ranks"]))
    barrier: Any = lambda: None  # noqa: E731
    if order["ranks"] > 1:
        # The parent ends all ranks if one ends: no rank waits for another for long.
        dist.init_process_group("gloo", timeout=timedelta(days=1))
        barrier = dist.barrier
    loaded = make_state(rank, order["size"], 0)
    for number in range(1, order["rounds"] + 1):
        url = parse_url(f"{order['url']}/round-{number}")
        state = make_state(rank, order["size"], number)
        barrier()
        writer = S3StorageWriter(str(url), settings=_NOT_SPILLING)
        yield _measure("save", number, state, partial(save, dict(state), storage_writer=writer))
        barrier()
        reader = S3StorageReader(str(url), settings=_NOT_SPILLING)
        found = _measure("load", number, loaded, partial(load, dict(loaded), storage_reader=reader))
        check(state, loaded)
        yield found
        barrier()
        if rank == 0:
            _remove(store_of(url, resolve_settings(_NOT_SPILLING)), url)  # makes room for the next


def _measure(direction: str, number: int, state: Mapping[str, Tensor], action: Callable[[], object]) -> Transfer:
    from dcp_s3.monitoring import stats

    def count() -> dict[str, Any]:
        found = stats()
        return {
            "seconds": time.perf_counter(),
            "cpu_seconds": time.process_time(),
            "throttled": sum(each.throttled for each in found.throttle.values()),
        }

    before = count()
    action()
    spent = {name: after - before[name] for name, after in count().items()}
    way = {"save": " upload", "load": " download"}[direction]
    links = [int(link["connections"]) for name, link in stats().connections.items() if name.endswith(way)]
    connections = min(max(links, default=0), resolve_settings(_NOT_SPILLING).max_connections)
    size = sum(tensor.nbytes for tensor in state.values())
    return Transfer(direction, number, size, connections=connections, **spent)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # also in the middle of a save


def main() -> int:
    """Be one rank. Returns the exit status."""
    from torch.distributed.checkpoint.api import CheckpointException

    from dcp_s3.failures import real_causes

    threading.Thread(target=_end_with_parent, name="dcp_s3-bench", daemon=True).start()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        for transfer in _rounds(json.loads(sys.argv[1]), launch().rank):
            sys.stdout.write(json.dumps(asdict(transfer)) + "\n")
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        causes = {0: error}
        if isinstance(error, CheckpointException):
            causes = real_causes({number: each for number, (each, _) in error.failures.items()})
        cause = causes[min(causes)]
        kind = type(cause).__name__
        sys.stdout.write(json.dumps({"kind": kind, "error": str(cause) or kind}) + "\n")
        sys.stdout.flush()
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # whatever else still runs
