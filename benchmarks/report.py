"""Tables and charts of what :mod:`benchmarks.save_load` has measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Sample
from benchmarks.units import GIB, MIB

_OURS = "dcp_s3"
_PACKAGES = (
    "torch", "boto3", "botocore", "awscrt", "s3torchconnector", "s3fs", "fsspec", "aiobotocore",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One save and one load of the same state."""

    number: int
    """Cases are compared within a round."""
    state_bytes: int
    save: Sample
    load: Sample

    def __str__(self) -> str:
        return ", ".join(
            f"{label} {self.rate(sample):.2f} GiB/s {self.cpu(sample):.2f} CPU s/GiB {sample.peak_bytes / MIB:+.0f} MiB"
            for label, sample in (("save", self.save), ("load", self.load))
        )

    def rate(self, sample: Sample) -> float:
        """GiB of state per second."""
        return self.state_bytes / GIB / sample.wall_seconds

    def cpu(self, sample: Sample) -> float:
        """CPU seconds of the client per GiB of state."""
        return sample.cpu_seconds / (self.state_bytes / GIB)


@dataclass
class Results:
    """Everything that was measured, and on what."""

    machine: dict[str, Any]
    options: dict[str, Any]
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    """By case, in order."""
    limit: list[Round] = field(default_factory=list)
    """Raw sockets, once per round."""
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add(self, case: str, outcome: Round) -> None:
        """Note what a case did in one round."""
        self.rounds.setdefault(case, []).append(outcome)

    def add_limit(self, outcome: Round) -> None:
        """Note what raw sockets did in one round."""
        self.limit.append(outcome)


@dataclass(frozen=True)
class _Figure:
    title: str
    of: Callable[[Round], float]
    digits: int


_FIGURES = (
    _Figure("save GiB/s", lambda r: r.rate(r.save), 2),
    _Figure("load GiB/s", lambda r: r.rate(r.load), 2),
    _Figure("save CPU s/GiB", lambda r: r.cpu(r.save), 2),
    _Figure("load CPU s/GiB", lambda r: r.cpu(r.load), 2),
    _Figure("save peak MiB", lambda r: r.save.peak_bytes / MIB, 0),
    _Figure("load peak MiB", lambda r: r.load.peak_bytes / MIB, 0),
)


def show(results: Results, console: Console) -> None:
    """Print medians with their range, then how dcp_s3 compares with each other case."""
    rows = dict(results.rounds)
    if results.limit:
        rows["raw sockets"] = results.limit
    if not rows:
        return
    count = max(len(rounds) for rounds in rows.values())
    size = next(iter(rows.values()))[0].state_bytes / GIB
    table = Table(
        title=f"{size:.2f} GiB state, one rank, median of {count} round(s) (lowest-highest)",
        caption="CPU: the client process. Peak: resident memory above that before the operation.\n"
        "raw sockets: as many bytes between two processes, the limit of this machine.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for figure in _FIGURES:
        table.add_column(_two_lines(figure.title), justify="right", no_wrap=True)
    for name, rounds in rows.items():
        table.add_row(name, *(_with_range(figure, rounds) for figure in _FIGURES))
    console.print(table)
    others = [name for name in results.rounds if name != _OURS]
    if _OURS not in results.rounds or not others:
        return
    table = Table(
        title=f"{_OURS} compared with each other backend",
        caption="Median over the rounds of the ratio within a round. Speed: times as fast.\n"
        "CPU: share of the other's CPU time. Peak: MiB less than the other.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("against", no_wrap=True)
    for figure in _FIGURES:
        title = figure.title.removesuffix(" s/GiB").replace("MiB", "MiB less")
        table.add_column(_two_lines(title), justify="right", no_wrap=True)
    for name in others:
        ours, theirs = results.rounds[_OURS], results.rounds[name]
        cells = [_compared(figure, ours, theirs) for figure in _FIGURES]
        table.add_row(name, *cells)
    console.print(table)


def _with_range(figure: _Figure, rounds: list[Round]) -> str:
    values = [figure.of(outcome) for outcome in rounds]
    middle, low, high = statistics.median(values), min(values), max(values)
    digits = figure.digits
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f}\n[dim]{low:.{digits}f}-{high:.{digits}f}[/]"


def _two_lines(title: str) -> str:
    return title.replace(" ", "\n", 1)


def _compared(figure: _Figure, ours: list[Round], theirs: list[Round]) -> str:
    by_number = {outcome.number: figure.of(outcome) for outcome in theirs}
    pairs = [(figure.of(a), by_number[a.number]) for a in ours if a.number in by_number]
    if not pairs:
        return "-"
    if "peak" in figure.title:
        return f"{statistics.median(b - a for a, b in pairs):.0f}"
    return f"{statistics.median(a / b for a, b in pairs):.2f} x"


def save_chart(results: Results, path: Path) -> None:
    """Draw the medians as horizontal bars, one panel per figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(results.rounds)
    figure, axes = plt.subplots(2, 3, figsize=(12, 0.9 + 1.1 * len(names)), sharey=True)
    # A panel per figure: save above load.
    order = [_FIGURES[i] for i in (0, 2, 4, 1, 3, 5)]
    for axis, shown in zip(axes.flat, order, strict=True):
        values = [statistics.median(map(shown.of, results.rounds[name])) for name in names]
        colors = ["#d9480f" if name == _OURS else "#adb5bd" for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, fmt=f"%.{shown.digits}f", padding=3, fontsize=9)
        axis.set_title(_chart_title(shown.title), fontsize=10)
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
        if "GiB/s" in shown.title and results.limit:
            limit = statistics.median(map(shown.of, results.limit))
            axis.axvline(limit, color="#495057", linestyle=":", linewidth=1)
            axis.text(
                limit,
                0.03,
                "raw sockets ",
                transform=axis.get_xaxis_transform(),
                rotation=90,
                fontsize=8,
                ha="right",
                va="bottom",
                color="#495057",
            )
    axes.flat[0].invert_yaxis()
    first = next(iter(results.rounds.values()))
    size = first[0].state_bytes / GIB
    figure.suptitle(
        f"dcp.save and dcp.load of {size:.2f} GiB, one rank, median of {len(first)} round(s)\n"
        f"{results.machine['cpu']}, {results.machine['cores']} cores",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _chart_title(title: str) -> str:
    better = "higher is better" if "GiB/s" in title else "lower is better"
    return f"{title} ({better})"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
