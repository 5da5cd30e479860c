"""What the demo prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.demo.storage import StepDirectory
from dcp_s3.retention.plan import Plan
from dcp_s3.units import format_size

#: Columns if the output is not a terminal.
_WIDTH = 110


@dataclass(frozen=True)
class Check:
    """Something that the demo promises, and whether it held."""

    holds: bool
    text: str


class Report:
    """Prints numbered stages, the training's output, a table, and the checks.

    Args:
        plan_table: draws what retention keeps and deletes.
    """

    def __init__(self, plan_table: Callable[[Plan], Table]) -> None:
        self._plan_table = plan_table
        self._console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        self._stage = 0

    def stage(self, title: str, why: str) -> None:
        """Begin a numbered stage."""
        self._stage += 1
        self._console.print(f"\n[bold cyan]{self._stage}  {title}[/]")
        self.say(why)

    def say(self, text: str) -> None:
        """Print a paragraph about what happens (rich markup)."""
        self._console.print(Padding(text, (0, 0, 0, 3), expand=False))

    def commands(self, title: str, lines: Sequence[str]) -> None:
        """Print commands to copy, never wrapped."""
        self._console.print(f"\n[bold]{title}[/]")
        for line in lines:
            self._console.print(f"   {line}", markup=False, soft_wrap=True)

    def training(self, ranks: int, lines: Sequence[str]) -> None:
        """Print the training's output."""
        for line in lines:
            self._console.print(f"     {ranks} ranks | {line}", style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print why the demo cannot go on."""
        self._console.print(f"\n{text}", style="bold red", markup=False, soft_wrap=True)

    def table(
        self,
        root: str,
        directories: Sequence[StepDirectory],
        infos: Mapping[str, CheckpointInfo],
        latest: str | None,
    ) -> None:
        """Print everything that is below ``root``.

        Args:
            root: the demo's URL.
            directories: what boto3 sees.
            infos: what `dcp_s3.list_checkpoints` says of each, by name.
            latest: name of the newest complete checkpoint.
        """
        table = Table(title=root, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("checkpoint", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for name in ("ranks", "objects", "size", "open uploads", "age"):
            table.add_column(name, justify="right", no_wrap=True)
        for directory in directories:
            info = infos.get(directory.name)
            if info is None or not info.committed:
                state = "[red]incomplete (invisible)[/]"
            else:
                state = f"[green]committed{', latest' if info.name == latest else ''}[/]"
            table.add_row(
                directory.name,
                state,
                str((info and info.world_size) or "-"),
                str(directory.objects),
                format_size(directory.size),
                str(len(directory.uploads) or "-"),
                _age(directory.modified),
            )
        self._console.print(Padding(table, (1, 0, 0, 2), expand=False))

    def plan(self, plan: Plan) -> None:
        """Print what is kept and what is deleted, with the reasons: the table of ``dcp-s3 prune``."""
        self._console.print(Padding(self._plan_table(plan), (1, 0, 0, 2), expand=False))

    def checks(self, checks: Sequence[Check], seconds: float) -> None:
        """Print the summary."""
        self._console.print(f"\n[bold]What you saw[/]  [dim]({seconds:.0f} s)[/]")
        table = Table.grid(padding=(0, 1))
        for check in checks:
            word = "[bold green]PASS[/]" if check.holds else "[bold red]FAIL[/]"
            table.add_row(word, check.text)
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _age(moment: datetime | None) -> str:
    if moment is None:
        return "-"
    # S3's clock may be ahead of this one.
    return f"{max(0.0, (datetime.now(timezone.utc) - moment).total_seconds()):.0f} s"
