"""`dcp-s3 bench`: processes save and load random tensors below a URL, compare them, and remove them again."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.failures import name_failed
from dcp_s3.process import launch
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import environment, resolve_settings
from dcp_s3.url import CheckpointURL, URLLike, parse_url

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_NOT_SPILLING = {"spill_dir": None, "durability": "s3"}  # a drain would upload after the prefix was removed
_TENSOR_BYTES = 64 * 2**20
_LATE_SECONDS = 2.0  # after ranks were killed, until requests that they had sent have been carried out


Row = tuple[int, str, float, float, float]
"""Of one save or load of all ranks: the number of its round, from 1 (the first one has connections to find), ``save``
or ``load``, wall seconds of the slowest rank, GiB/s, CPU seconds per GiB."""


def bench(url: URLLike, *, size: int, ranks: int, rounds: int, progress: Callable[[int, int], None]) -> Sequence[Row]:
    """Save and load ``size`` bytes of each rank below a URL, compare them bit by bit, and remove them again. The result
    is a save and a load for each round, in order.

    Raises:
        DcpS3Error: a setting, a request or a rank failed, or what was loaded is not what was saved.
    """
    from torch.multiprocessing.spawn import ProcessExitedException

    scratch = parse_url(url).child(f"dcp-s3-bench-{uuid.uuid4().hex[:12]}")
    store, found, is_over = store_of(scratch, resolve_settings(_NOT_SPILLING)), list[Row](), False
    try:
        store.put(scratch.key("probe"), b"")
        _remove(store, scratch)  # that this may be done is seen before anything large is written
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with ranks_here(ranks, _be_rank, str(scratch), size, rounds, answers) as running:
            while not is_over:
                try:
                    is_over = running.join(0.1)
                except ProcessExitedException as error:
                    raise errors.DcpS3Error(f"rank {error.error_index}: {error}") from None
                while not answers.empty():
                    answer = answers.get()
                    if isinstance(answer, BaseException):  # the other ranks would wait for this one
                        raise answer
                    found.append(answer)
                progress(len(found), 2 * rounds)
        _remove(store, scratch)
    except BaseException:
        logger.warning("removing %s; if that fails, delete what is below it", scratch)
        time.sleep(_LATE_SECONDS)
        with contextlib.suppress(errors.StorageError):
            _remove(store, scratch)
        raise
    return found


def _remove(store: S3Store, url: CheckpointURL) -> None:
    """Remove objects and open uploads below a URL."""
    prefix = url.key("")
    try:
        for upload in store.uploads(prefix):
            store.abort(upload)
    finally:
        store.delete([each.key for each in store.list(prefix).objects])


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


def _be_rank(url: str, size: int, rounds: int, answers: Any) -> None:
    """Put why this rank failed into ``answers``, and on rank 0 a `Row` for each transfer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from dcp_s3.load.reader import S3StorageReader
    from dcp_s3.save.writer import S3StorageWriter

    rank, ranks = launch().rank, launch().world_size
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        dist.init_process_group("gloo", timeout=timedelta(days=1))  # the parent ends all ranks if one ends
        loaded, measured = make_state(rank, size, 0), [(0.0, 0.0)] * ranks
        gib = ranks * sum(tensor.nbytes for tensor in loaded.values()) / 2**30
        for number in range(1, rounds + 1):
            state, where = make_state(rank, size, number), f"{url}/round-{number}"
            for direction in ("save", "load"):
                dist.barrier()
                cpu, began = time.process_time(), time.perf_counter()
                if direction == "save":
                    save(dict(state), storage_writer=S3StorageWriter(where, settings=_NOT_SPILLING))
                else:
                    load(dict(loaded), storage_reader=S3StorageReader(where, settings=_NOT_SPILLING))
                mine = time.perf_counter() - began, time.process_time() - cpu
                dist.all_gather_object(measured, mine)
                seconds, cpu = max(wall for wall, _ in measured), sum(cpu for _, cpu in measured)
                if rank == 0:
                    answers.put((number, direction, seconds, gib / seconds, cpu / gib))
            check(state, loaded)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - told to the parent, which ends all
        causes: dict[int, BaseException] = {rank: error}
        if isinstance(error, CheckpointException):
            causes = {number: cause for number, (cause, _) in error.failures.items()}
        answers.put(errors.DcpS3Error(f"it failed: {name_failed(causes)}"))


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
