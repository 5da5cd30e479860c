"""A whole benchmark: starts ranks, lets them save and load, and removes what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_s3.bench.figures import NOT_SPILLING, RankFigures, Transfer, join
from dcp_s3.bench.limits import Finding, Surroundings, find_limit, suggestions
from dcp_s3.bench.ranks import Ranks
from dcp_s3.bench.scratch import Scratch
from dcp_s3.s3.connections import cores
from dcp_s3.settings import Settings, resolve_settings
from dcp_s3.stage.buffers import measure_available
from dcp_s3.units import format_size
from dcp_s3.url import URLLike, parse_url

_SHARE_OF_MEMORY = 4
_LEAST_BYTES = 8


@dataclass(frozen=True)
class BenchReport:
    """The outcome of a benchmark."""

    url: str
    """URL that was given."""
    size: int
    """Bytes of each rank's state."""
    host: Surroundings
    transfers: tuple[Transfer, ...]
    """A save and a load for each round, in order."""
    removed: bool
    """Whether nothing of it is left in the bucket."""

    @property
    def findings(self) -> list[Finding]:
        """What limits saves, and loads, of a process that has found its number of connections."""
        return [find_limit(each, self.host) for each in self.transfers[-2:]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "url": self.url,
            "ranks": self.host.ranks,
            "bytes_per_rank": self.size,
            "cores": self.host.cores,
            "most_connections": self.host.most_connections,
            "transfers": [each.to_dict() for each in self.transfers],
            "limits": [each.to_dict() for each in self.findings],
            "suggestions": suggestions(self.findings),
            "removed": self.removed,
        }


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
        url: ``s3://bucket/prefix``; what is there is not touched.
        size: bytes of each rank's state; fewer if all ranks would take more than a quarter of the free memory.
        ranks: number of ranks, each a process of its own on this host.
        rounds: how often each rank saves and loads.
        note: called with a line for people.
        progress: called with the steps done and their total.

    Raises:
        CorruptCheckpointError: what was loaded is not what was saved.
        InvalidURLError, SettingsError
        StorageError, CheckpointError: a save or load failed.
        DcpS3Error: a rank ended.
    """
    where = parse_url(url)
    if resolve_settings(None).spill_dir is not None:
        note("DCP_S3_SPILL_DIR and DCP_S3_DURABILITY are left aside: S3 is measured, not a disk")
    settings = resolve_settings(NOT_SPILLING)
    size = _affordable(size, ranks, note)
    scratch = Scratch(where, settings, note)
    transfers: list[Transfer] = []
    with scratch.removing(), Ranks(ranks, size) as processes:
        total = sum(answer["size"] for answer in processes.began)
        for number in range(1, rounds + 1):
            for direction in ("save", "load"):
                progress(len(transfers), 2 * rounds)
                order = {"do": direction, "url": str(scratch.round(number)), "round": number}
                figures = [RankFigures(**answer) for answer in processes.tell(order)]
                transfers.append(join(direction, number, total, figures))
            scratch.remove(number)
    return BenchReport(str(where), total // ranks, _surroundings(ranks, settings), tuple(transfers), scratch.removed)


def _affordable(size: int, ranks: int, note: Callable[[str], None]) -> int:
    """Bytes per rank: as asked for, or what a quarter of the free memory has room for; whole values only."""
    try:
        most = measure_available() // _SHARE_OF_MEMORY // ranks
    except OSError:  # not on every system
        most = size
    if size > most:
        note(f"{format_size(most)} per rank instead of {format_size(size)}: a quarter of the free memory")
    return max(_LEAST_BYTES, min(size, most) // _LEAST_BYTES * _LEAST_BYTES)


def _surroundings(ranks: int, settings: Settings) -> Surroundings:
    part_size = None if settings.part_size == "auto" else settings.part_size
    return Surroundings(ranks, cores(), settings.max_connections, part_size)
