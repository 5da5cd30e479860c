"""`dcp-s3 bench`: processes save and load below a URL; the report says what limits them; their objects are removed."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.events import stats
from dcp_s3.failures import real_causes
from dcp_s3.process import launch
from dcp_s3.s3.pressure import cores
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import environment, resolve_settings
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
    store = store_of(scratch, settings)
    try:
        store.put(scratch.key("probe"), b"")
        _remove(store, scratch)  # that this may be done is seen before anything large is written
        found = _run_ranks(str(scratch), size, ranks, rounds, progress)
        _remove(store, scratch)
    except BaseException:
        note(f"removing {scratch}; if that fails, delete what is below it")
        time.sleep(_LATE_SECONDS)
        with contextlib.suppress(errors.StorageError):
            _remove(store, scratch)
        raise
    transfers = tuple(map(_join, zip(*found, strict=True)))
    return BenchReport(str(where), ranks, cores(), settings.max_connections, transfers)


def _remove(store: S3Store, url: CheckpointURL) -> None:
    """Remove objects and open uploads below a URL."""
    prefix = url.key("")
    try:
        for upload in store.uploads(prefix):
            store.abort(upload)
    finally:
        store.delete([each.key for each in store.list(prefix).objects])


def _join(ranks: Sequence[Transfer]) -> Transfer:
    """The same transfer of all ranks as one."""
    sums = {name: sum(getattr(one, name) for one in ranks) for name in ("bytes", "cpu_seconds", "throttled")}
    most = {name: max(getattr(one, name) for one in ranks) for name in ("seconds", "connections")}
    return replace(ranks[0], **sums, **most)


# --- ranks, each a process of its own ----------------------------------------------------------------------


@contextlib.contextmanager
def ranks_here(ranks: int, function: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Have ``function(*arguments)`` run by a process for each rank, as torchrun would start them; none is left in the
    end. Yields torch's context of them: ``join(seconds)`` is True once all have ended, and raises if one failed."""
    from torch.multiprocessing.spawn import start_processes

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    every = (ranks, port, function, arguments)
    started: Any = start_processes(_enter, every, ranks, join=False, daemon=True, start_method="spawn")  # type: ignore[no-untyped-call]
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()  # does nothing if it has ended
        for process in started.processes:
            process.join()


def _enter(rank: int, ranks: int, port: str, function: Callable[..., None], arguments: Sequence[Any]) -> None:
    link = "lo0" if sys.platform == "darwin" else "lo"  # gloo would look up the host's name, which may not work
    with environment(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME=link,
    ):  # fmt: skip
        function(*arguments)


def _run_ranks(
    url: str, size: int, ranks: int, rounds: int, progress: Callable[[int, int], None]
) -> list[list[Transfer]]:
    """The transfers of each rank."""
    from torch.multiprocessing.spawn import ProcessExitedException

    answers = multiprocessing.get_context("spawn").SimpleQueue()
    found: list[list[Transfer]] = [[] for _ in range(ranks)]
    with ranks_here(ranks, _be_rank, url, size, rounds, answers) as running:
        is_over = False
        while not is_over:
            try:
                is_over = running.join(0.1)
            except ProcessExitedException as error:
                raise errors.DcpS3Error(f"rank {error.error_index}: {error}") from None
            while not answers.empty():
                rank, answer = answers.get()
                if isinstance(answer, BaseException):  # the others would wait for it
                    raise answer
                found[rank].append(answer)
            progress(len(found[0]), 2 * rounds)
    return found


def _be_rank(url: str, size: int, rounds: int, answers: Any) -> None:
    """Put this rank's transfers into ``answers``, or why one failed."""
    from torch.distributed.checkpoint.api import CheckpointException

    rank = launch().rank
    try:
        for transfer in _transfers(url, size, rounds):
            answers.put((rank, transfer))
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - told to the parent, which ends all
        causes: dict[int, BaseException] = {rank: error}
        if isinstance(error, CheckpointException):
            causes = real_causes({number: cause for number, (cause, _) in error.failures.items()})
        first = min(causes)
        kind = type(causes[first]) if isinstance(causes[first], errors.DcpS3Error) else errors.DcpS3Error
        answers.put((rank, kind(f"rank {first}: {str(causes[first]) or type(causes[first]).__name__}")))


def _transfers(base: str, size: int, rounds: int) -> Iterator[Transfer]:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from dcp_s3.load.reader import S3StorageReader
    from dcp_s3.save.writer import S3StorageWriter

    rank = launch().rank
    torch.set_num_threads(max(1, torch.get_num_threads() // launch().world_size))
    dist.init_process_group("gloo", timeout=timedelta(days=1))  # the parent ends all ranks if one ends
    loaded = make_state(rank, size, 0)
    for number in range(1, rounds + 1):
        url = parse_url(f"{base}/round-{number}")
        state = make_state(rank, size, number)
        dist.barrier()
        writer = S3StorageWriter(str(url), settings=_NOT_SPILLING)
        yield _measure("save", number, state, partial(save, dict(state), storage_writer=writer))
        dist.barrier()
        reader = S3StorageReader(str(url), settings=_NOT_SPILLING)
        found = _measure("load", number, loaded, partial(load, dict(loaded), storage_reader=reader))
        check(state, loaded)
        yield found
        dist.barrier()
        if rank == 0:
            _remove(store_of(url, resolve_settings(_NOT_SPILLING)), url)  # makes room for the next


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


def _measure(direction: str, number: int, state: Mapping[str, Tensor], action: Callable[[], object]) -> Transfer:
    def throttled() -> int:
        return sum(each.throttled for each in stats().throttle.values())

    refused, cpu, began = throttled(), time.process_time(), time.perf_counter()
    action()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    way = {"save": " upload", "load": " download"}[direction]
    links = [int(link["connections"]) for name, link in stats().connections.items() if name.endswith(way)]
    connections = min(max(links, default=0), resolve_settings(_NOT_SPILLING).max_connections)
    size = sum(tensor.nbytes for tensor in state.values())
    return Transfer(direction, number, size, seconds, cpu, connections, throttled() - refused)
