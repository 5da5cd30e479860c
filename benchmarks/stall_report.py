"""What :mod:`benchmarks.stall` has measured: the figures, the tables, the chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.units import GIB

_OURS = "dcp_s3"


@dataclass(frozen=True)
class Stall:
    """One ``dcp.async_save``. Times count from its call."""

    round: int
    first: bool
    """The first save of its stager (of the process, where no stager is kept): it touches fresh memory."""
    state_bytes: int
    memcpy_seconds: float
    """Of as many bytes, right before the save."""
    return_seconds: float
    staged_seconds: float
    """Until the state may be changed."""
    saved_seconds: float
    """Until the upload is complete."""

    def __str__(self) -> str:
        return (
            f"{'first save, ' if self.first else ''}memcpy {1e3 * self.memcpy_seconds:.0f} ms, returns after "
            f"{1e3 * self.return_seconds:.1f} ms ({self.return_ratio:.2f} x), staged after "
            f"{1e3 * self.staged_seconds:.1f} ms ({self.staged_ratio:.2f} x), saved after {self.saved_seconds:.1f} s"
        )

    @property
    def return_ratio(self) -> float:
        """Time until the call returns, over that of the memcpy."""
        return self.return_seconds / self.memcpy_seconds

    @property
    def staged_ratio(self) -> float:
        """Time until the state may be changed, over that of the memcpy."""
        return self.staged_seconds / self.memcpy_seconds


@dataclass(frozen=True)
class Training:
    """The steps of one training loop, with saves. The figures leave out the first save, but for those that say so."""

    state_bytes: int
    step_seconds: list[float]
    saves: list[int]
    """Steps, in order, at whose end a save was begun."""
    quiet: list[bool]
    """By step: no save was begun or under way."""
    saved_seconds: list[float]
    """By save: from the call to the end of the upload, as seen at the end of a step."""

    def __str__(self) -> str:
        return (
            f"step {1e3 * self.quiet_seconds:.0f} ms, longest {1e3 * self.longest_seconds:.0f} ms, a save costs "
            f"{self.extra_seconds:.2f} s, uploads take {statistics.median(self.saved_seconds):.1f} s"
        )

    @property
    def quiet_seconds(self) -> float:
        """Median step without a save."""
        return statistics.median(s for s, quiet in zip(self.step_seconds, self.quiet, strict=True) if quiet)

    @property
    def longest_seconds(self) -> float:
        """Longest step from the second save on."""
        return max(self.step_seconds[self.saves[1] :])

    @property
    def first_longest_seconds(self) -> float:
        """Longest step from the first save to the second."""
        return max(self.step_seconds[self.saves[0] : self.saves[1]])

    @property
    def extra_seconds(self) -> float:
        """What a save costs training: median over the saves."""
        return statistics.median(extra_seconds(self.step_seconds, self.saves, self.quiet_seconds)[1:])

    @property
    def first_extra_seconds(self) -> float:
        """What the first save costs training."""
        return extra_seconds(self.step_seconds, self.saves, self.quiet_seconds)[0]


def extra_seconds(step_seconds: Sequence[float], saves: Sequence[int], quiet_seconds: float) -> list[float]:
    """By save: seconds of the steps from it to the next (or the end), beyond as many of ``quiet_seconds``.

    The step at whose end the save is begun counts as the save's. Pure.
    """
    extra = []
    for start, stop in pairwise([*saves, len(step_seconds)]):
        extra.append(sum(step_seconds[start:stop]) - quiet_seconds * (stop - start))
    return extra


@dataclass
class StallResults:
    """Everything that was measured, and on what."""

    machine: dict[str, Any]
    options: dict[str, Any]
    stalls: dict[str, list[Stall]] = field(default_factory=dict)
    """By case, in order."""
    training: dict[str, Training] = field(default_factory=dict)
    """By case."""
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add_stall(self, case: str, stall: Stall) -> None:
        """Note a save of a case."""
        self.stalls.setdefault(case, []).append(stall)

    def add_failure(self, case: str, text: str) -> None:
        """Note that a case failed."""
        self.failures.setdefault(case, []).append(text)


@dataclass(frozen=True)
class _Figure:
    title: str
    of: Callable[[Stall], float]
    digits: int


_STALL_FIGURES = (
    _Figure("memcpy ms", lambda s: 1e3 * s.memcpy_seconds, 0),
    _Figure("returns ms", lambda s: 1e3 * s.return_seconds, 1),
    _Figure("/ memcpy", lambda s: s.return_ratio, 2),
    _Figure("staged ms", lambda s: 1e3 * s.staged_seconds, 1),
    _Figure("/ memcpy", lambda s: s.staged_ratio, 2),
    _Figure("saved s", lambda s: s.saved_seconds, 2),
)
_FIRST_FIGURES = (
    _Figure("first: returns ms", lambda s: 1e3 * s.return_seconds, 1),
    _Figure("first: staged / memcpy", lambda s: s.staged_ratio, 2),
)
_TRAINING_FIGURES: tuple[tuple[str, Callable[[Training], str]], ...] = (
    ("step without a save ms", lambda t: f"{1e3 * t.quiet_seconds:.0f}"),
    ("longest step ms", lambda t: f"{1e3 * t.longest_seconds:.0f}"),
    ("a save costs s", lambda t: f"{t.extra_seconds:.2f}"),
    ("upload s", lambda t: f"{statistics.median(t.saved_seconds[1:] or t.saved_seconds):.1f}"),
    ("first: longest step ms", lambda t: f"{1e3 * t.first_longest_seconds:.0f}"),
    ("first: costs s", lambda t: f"{t.first_extra_seconds:.2f}"),
)


def show(results: StallResults, console: Console) -> None:
    """Print the tables, as Markdown: medians, the range of the ratios."""
    if results.stalls:
        _show_stalls(results.stalls, console)
    if results.training:
        _show_training(results.training, console)


def _show_stalls(stalls: dict[str, list[Stall]], console: Console) -> None:
    size = next(iter(stalls.values()))[0].state_bytes / GIB
    count = max(sum(not stall.first for stall in of_case) for of_case in stalls.values())
    table = Table(
        title=f"dcp.async_save of {size:.2f} GiB, one process, median of {count} round(s) (lowest-highest)",
        caption="memcpy: Tensor.copy_ of as many bytes. staged: the state may be changed. saved: the upload is done.",
        box=box.MARKDOWN,
    )
    table.add_column("", no_wrap=True)
    for figure in (*_STALL_FIGURES, *_FIRST_FIGURES):
        table.add_column(figure.title, justify="right")
    for name, of_case in stalls.items():
        first = [stall for stall in of_case if stall.first]
        later = [stall for stall in of_case if not stall.first]
        cells = [_cell(figure, later, with_range="/" in figure.title) for figure in _STALL_FIGURES]
        table.add_row(name, *cells, *(_cell(figure, first, with_range=False) for figure in _FIRST_FIGURES))
    console.print(table)


def _cell(figure: _Figure, stalls: Sequence[Stall], *, with_range: bool) -> str:
    values = [figure.of(stall) for stall in stalls]
    if not values:
        return "-"
    digits = figure.digits
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1 or not with_range:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _show_training(training: dict[str, Training], console: Console) -> None:
    first = next(iter(training.values()))
    table = Table(
        title=f"training with a save of {first.state_bytes / GIB:.2f} GiB every {_every(first)} steps, "
        f"medians of {len(first.saves) - 1} save(s) after the first",
        caption="A save waits for the upload of the one before.\n"
        "costs: seconds of the steps up to the next save, beyond those of as many steps without a save.",
        box=box.MARKDOWN,
    )
    table.add_column("", no_wrap=True)
    for title, _ in _TRAINING_FIGURES:
        table.add_column(title, justify="right")
    for name, of_case in training.items():
        table.add_row(name, *(cell(of_case) for _, cell in _TRAINING_FIGURES))
    console.print(table)


def _every(training: Training) -> int:
    return training.saves[1] - training.saves[0]


def save_chart(results: StallResults, path: Path) -> None:
    """Draw the time of each step over its number, one panel a case."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    training = results.training
    figure, panels = plt.subplots(
        len(training), 1, figsize=(12, 1.2 + 1.35 * len(training)), sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, of_case) in zip(panels.flat, training.items(), strict=True):
        for save in of_case.saves:
            axis.axvline(save, color="#495057", linestyle=":", linewidth=1)
        color = "#d9480f" if name.startswith(_OURS) else "#868e96"
        axis.plot(of_case.step_seconds, color=color, linewidth=1)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="y", color="#dee2e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.set_ylabel("step (s)", fontsize=9)
        axis.set_title(
            f"{name}: longest step {of_case.longest_seconds:.2f} s, a save costs {of_case.extra_seconds:.2f} s",
            fontsize=10,
            loc="left",
        )
        axis.margins(x=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("step number (dotted: a save begins)", fontsize=9)
    first = next(iter(training.values()))
    figure.suptitle(
        f"Training steps around dcp.async_save of {first.state_bytes / GIB:.2f} GiB (lower is better)\n"
        f"{results.machine['cpu']}, {results.machine['cores']} cores",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
