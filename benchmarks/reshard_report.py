"""What :mod:`benchmarks.reshard` has measured: the figures, the table, the chart, the targets missed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.reshard_cases import CASES, Case
from benchmarks.units import MIB
from tests.memory_s3 import Counters

OURS = "dcp_s3"
_METADATA = ".metadata"


@dataclass(frozen=True)
class Load:
    """One load by all ranks. What the server sent is of its own counters."""

    case: str
    backend: str
    round: int
    needed_bytes: list[int]
    """Of the local tensors, by rank."""
    unique_bytes: int
    """What several ranks hold counted once."""
    fetched_bytes: list[int]
    """Sent for GET requests of each rank."""
    total_bytes: int
    """All that was sent, other answers included."""
    metadata_bytes: int
    """Of these, for ``.metadata``."""
    gets: int
    requests: int
    seconds: float
    """Of the rank that took longest."""
    cpu_seconds: float
    """Sum over the ranks."""

    def __str__(self) -> str:
        return (
            f"fetched / needed {self.ratio('needed'):.3f}, / unique {self.ratio('unique'):.3f}, "
            f"{self.seconds:.2f} s, {self.gets} GETs, {self.cpu_seconds:.2f} CPU s"
        )

    def ratio(self, of: str) -> float:
        """All bytes sent, over those needed or unique."""
        return self.total_bytes / (sum(self.needed_bytes) if of == "needed" else self.unique_bytes)

    @property
    def largest_ratio(self) -> float:
        """Bytes that the rank with the most of them fetched, over the most that a rank needs."""
        return max(self.fetched_bytes) / max(self.needed_bytes)


def count(counters: Counters, access_keys: Sequence[str]) -> dict[str, Any]:
    """The fields of a `Load` that the server's counters say; ``access_keys`` are the ranks'. Pure."""
    fetched = dict.fromkeys(access_keys, 0)
    metadata = 0
    for reader, reads in counters.reads.items():
        fetched[reader.access_key] += reads.bytes_out
        if reader.key.endswith(_METADATA):
            metadata += reads.bytes_out
    return {
        "fetched_bytes": list(fetched.values()),
        "total_bytes": counters.bytes_out,
        "metadata_bytes": metadata,
        "gets": counters.requests.get("GetObject", 0),
        "requests": sum(counters.requests.values()),
    }


@dataclass
class Results:
    """Everything that was measured, and on what."""

    machine: dict[str, Any]
    options: dict[str, Any]
    loads: list[Load] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """By case and backend."""

    def of(self, case: str, backend: str) -> list[Load]:
        """The rounds of a case."""
        return [load for load in self.loads if (load.case, load.backend) == (case, backend)]


@dataclass(frozen=True)
class Miss:
    """A case in which dcp_s3 fetched more than it may."""

    case: str
    ratio: float
    """The highest of all rounds."""

    def __str__(self) -> str:
        limit = CASES[self.case]
        return f"{self.case}: {OURS} fetched {self.ratio:.3f} times the bytes {limit.of}, above {limit.limit:g}"


def find_misses(loads: Sequence[Load]) -> list[Miss]:
    """Cases in which dcp_s3, with its default settings, is above the limit. Pure."""
    worst: dict[str, float] = {}
    for load in loads:
        if load.backend == OURS:
            worst[load.case] = max(worst.get(load.case, 0.0), load.ratio(CASES[load.case].of))
    return [Miss(case, ratio) for case, ratio in worst.items() if ratio > CASES[case].limit]


_FIGURES: tuple[tuple[str, Callable[[Load], float], int], ...] = (
    ("needed MiB", lambda load: sum(load.needed_bytes) / MIB, 0),
    ("fetched MiB", lambda load: load.total_bytes / MIB, 1),
    ("of it .metadata", lambda load: load.metadata_bytes / MIB, 2),
    ("/ needed", lambda load: load.ratio("needed"), 3),
    ("/ unique", lambda load: load.ratio("unique"), 3),
    ("largest rank", lambda load: load.largest_ratio, 3),
    ("GETs", lambda load: load.gets, 0),
    ("requests", lambda load: load.requests, 0),
    ("wall s", lambda load: load.seconds, 2),
    ("CPU s", lambda load: load.cpu_seconds, 2),
)


def show(results: Results, console: Console) -> None:
    """Print medians, as Markdown."""
    table = Table(
        title=f"dcp.load of {_size(results):.0f} MiB of tensors by gloo ranks, medians",
        caption="fetched: sent by the server. needed: local tensors, summed over the ranks. unique: counted once.\n"
        "largest rank: the most that one rank fetched, over the most that one needs. wall: the slowest rank's.\n"
        "CPU: sum over the ranks.",
        box=box.MARKDOWN,
    )
    for title in ("case", "backend"):
        table.add_column(title, no_wrap=True)
    for title, _, _ in _FIGURES:
        table.add_column(title, justify="right")
    table.add_column("target", justify="right", no_wrap=True)
    for name, case in CASES.items():
        title = f"{name}: {case.title}"
        for backend in _backends(results):
            loads = results.of(name, backend)
            if not loads:
                continue
            cells = [f"{statistics.median(map(of, loads)):.{digits}f}" for _, of, digits in _FIGURES]
            table.add_row(title, backend, *cells, f"{case.limit:g} {case.of}")
            title = ""
    console.print(table)


def save_chart(results: Results, path: Path) -> None:
    """Draw, for each case, the ratio that its target is about, and the wall time, by backend."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = [name for name in CASES if any(load.case == name for load in results.loads)]
    backends = _backends(results)
    colors = ["#d9480f", "#ffa94d", "#868e96", "#ced4da"]
    figure, (ratios, times) = plt.subplots(2, 1, figsize=(11, 6.5), sharex=True)
    width = 0.8 / len(backends)
    for number, backend in enumerate(backends):
        places = [place + (number - (len(backends) - 1) / 2) * width for place in range(len(cases))]
        color = colors[number % len(colors)]
        for axis, of in ((ratios, _limited), (times, _seconds)):
            heights = [_median(results.of(case, backend), of) for case in cases]
            bars = axis.bar(places, heights, width, label=backend, color=color)
            axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    for place, name in enumerate(cases):
        ratios.hlines(CASES[name].limit, place - 0.45, place + 0.45, colors="#212529", linestyles=":", linewidth=1.2)
    ratios.set_yscale("log")
    ratios.set_ylabel("bytes fetched / needed, or / unique")
    ratios.set_title("dotted: dcp_s3's target; lower is better", fontsize=9)
    times.set_ylabel("wall seconds")
    times.set_xticks(range(len(cases)), [_label(name, CASES[name]) for name in cases], fontsize=7)
    for axis in (ratios, times):
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    times.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"dcp.load of {_size(results):.0f} MiB of tensors by gloo ranks\n"
        f"{results.machine['cpu']}, {results.machine['cores']} cores",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _limited(load: Load) -> float:
    return load.ratio(CASES[load.case].of)


def _seconds(load: Load) -> float:
    return load.seconds


def _median(loads: Sequence[Load], of: Callable[[Load], float]) -> float:
    return statistics.median(map(of, loads)) if loads else float("nan")


def _label(name: str, case: Case) -> str:
    return f"{name}\n{case.source.name}\n-> {case.target.name}\n/ {case.of}"


def _backends(results: Results) -> list[str]:
    return list(dict.fromkeys(load.backend for load in results.loads))


def _size(results: Results) -> float:
    return max((load.unique_bytes for load in results.loads), default=0) / MIB
