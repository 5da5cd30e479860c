"""The commands that check and try: ``config``, ``doctor``, ``verify``, ``bench`` and ``demo``."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import URL, AsJSON, app, note, print_json, print_line, progress, progress_of_steps, wrong_usage
from dcp_s3.cli.group import GIVEN
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.units import format_size, parse_size, plural

if TYPE_CHECKING:
    from dcp_s3.bench import BenchReport
    from dcp_s3.offline.verify import VerifyReport


@app.command()
def config(ctx: typer.Context, as_json: AsJSON = False) -> None:
    """Show the settings in effect, and the environment variable or AWS profile that each comes from."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.parse import policy_from_settings
    from dcp_s3.s3.client import find_chain
    from dcp_s3.settings import resolve_settings

    settings = resolve_settings(None)
    policy_from_settings(settings)  # raises if it is not a valid policy
    rows = tables.settings_rows(settings, find_chain(settings))
    given = ctx.meta.get(GIVEN, {})
    rows = [row | {"source": given.get(row["name"], row["source"])} for row in rows]
    if as_json:
        print_json(rows)
    else:
        tables.make_console().print(tables.settings_table(rows))


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


@app.command()
def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix below which checkpoints are to lie.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Leave out everything that writes.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check settings, credentials, endpoint, permissions and what the store can do, before a run starts.

    Small probe objects are written below URL and removed again.
    """
    from dcp_s3.checkup.doctor import TICKS, conclude, examine, format_result
    from dcp_s3.checkup.probes import CheckResult
    from dcp_s3.cli import tables

    console = tables.make_console()

    def show(result: CheckResult) -> None:
        if as_json:
            return
        if console.is_terminal:
            console.print(format_result(result, TICKS), style=_STYLES[result.status], soft_wrap=True)
        else:
            print_line(format_result(result))

    with ended_like_ctrl_c():
        report = examine(url, None, read_only=read_only, on_result=show)
    if as_json:
        print_json(report.to_dict())
    else:
        print_line(conclude(report))
    if not report.ok:
        raise typer.Exit(exits.FAILED)


@app.command()
def verify(
    url: URL,
    full: Annotated[bool, typer.Option("--full", help="Read all data and compare checksums.")] = False,
    root: Annotated[bool, typer.Option("--root", help="Verify every committed checkpoint under URL.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check whether a checkpoint is still what was saved.

    Without --full: metadata, manifest, and that every object is there with its size. With --full also every byte.
    """
    from dcp_s3.offline import verify as verifying

    results: list[_Verified] = []
    with progress("verify") as callbacks:
        one = () if root else (_Verified(url, verifying.verify(url, full=full, **callbacks)),)
        for found in _verify_all(url, full, callbacks) if root else one:
            results.append(found)
            if root and not as_json:
                print_line(found.line)
    if as_json:
        documents = [found.to_dict() for found in results]
        print_json(documents if root else documents[0])
    elif not root:
        for text in results[0].lines:
            print_line(text)
    if not results:
        note(f"no committed checkpoints under {url}")
    status = max((found.status for found in results), default=exits.NOTHING_THERE)  # damage counts most
    if status:
        raise typer.Exit(status)


@dataclass(frozen=True)
class _Verified:
    """The result of verifying one checkpoint: a report, or why it could not be verified."""

    url: str
    report: VerifyReport | None = None
    error: Exception | None = None

    @property
    def status(self) -> int:
        if self.error is not None:
            return exits.status_of(self.error)
        return exits.DONE if self.report is None or self.report.ok else exits.DAMAGED

    def to_dict(self) -> dict[str, Any]:
        if self.report is None:
            return {"url": self.url, "ok": None, "error": str(self.error)}
        return self.report.to_dict()

    @property
    def line(self) -> str:
        """One line for people."""
        report = self.report
        if report is None:
            return f"{self.url}: could not be verified: {self.error}"
        if report.ok:
            return f"{self.url}: good ({_counts(report)}{_unchecked(report)})"
        more = f", the first of {len(report.problems)}" if len(report.problems) > 1 else ""
        return f"{self.url}: damaged: {report.problems[0]} ({_counts(report)}{more})"

    @property
    def lines(self) -> list[str]:
        """Everything, for people."""
        report = self.report
        if report is None or report.ok:
            return [self.line]
        last = f"{_counts(report)}, {plural(len(report.problems), 'problem')}{_unchecked(report)}"
        return [f"{self.url}: damaged", *(f"  {problem}" for problem in report.problems), last]


def _verify_all(root: str, full: bool, callbacks: dict[str, Any]) -> Iterator[_Verified]:
    """Every committed checkpoint under a root, oldest first. Those deleted meanwhile are left out."""
    from dcp_s3.offline import verify as verifying
    from dcp_s3.retention.catalog import list_checkpoints

    totals: list[int] = []

    def add(total: int) -> None:
        totals.append(total)
        callbacks["on_total"](sum(totals))

    for info in list_checkpoints(root):
        if not info.committed:
            continue
        try:
            report = verifying.verify(info.url, full=full, on_total=add, on_progress=callbacks["on_progress"])
            yield _Verified(info.url, report)
        except CheckpointNotFoundError:
            continue
        except (DcpS3Error, OSError) as error:
            yield _Verified(info.url, error=error)


def _counts(report: VerifyReport) -> str:
    objects, items = plural(report.objects, "object"), plural(report.items, "item")
    return f"{report.mode}: {objects}, {items}, {format_size(report.bytes_read)} read"


def _unchecked(report: VerifyReport) -> str:
    """How much has no checksum; empty if everything has one."""
    if not report.objects_without_checksum and not report.items_without_checksum:
        return ""
    objects = plural(report.objects_without_checksum, "object")
    text = f"; without checksum: {objects}, {plural(report.items_without_checksum, 'item')}"
    return text + (f", {report.items_not_decoded} of them not decoded" if report.items_not_decoded else "")


_ENDING = ("SIGTERM", "SIGHUP")


@app.command()
def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="s3://bucket/prefix to write below; what is there is not touched.")
    ],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per rank; at most a quarter of the free memory.")
    ] = "4GiB",
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks on this host, each its own process.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Saves and loads; the first has connections to find.")
    ] = 2,
    as_json: AsJSON = False,
) -> None:
    """Measure saves and loads below URL with these settings, say what limits them, and remove everything again."""
    from dcp_s3.bench import bench as run_bench

    with wrong_usage(ValueError, hint="--size"):
        count = parse_size(size)
        if not count:
            raise ValueError("expected at least one byte")
    with progress_of_steps("bench") as progress, ended_like_ctrl_c():
        report = run_bench(url, size=count, ranks=ranks, rounds=rounds, note=note, progress=progress)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if not report.removed:
        raise typer.Exit(exits.FAILED)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Clean up after other signals as after Ctrl-C."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for name in _ENDING if (number := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_report(report: BenchReport) -> None:
    from dcp_s3.cli import tables

    found = report.to_dict()
    ranks, size = plural(report.ranks, "rank"), format_size(found["bytes_per_rank"])
    print_line(f"{ranks} with {size} each; what was loaded is what was saved, bit by bit")
    titles = (">round", "direction", ">seconds", ">GiB/s", ">CPU s/GiB", ">connections per rank", ">throttled")
    table = tables.make_table((*titles, ">hedged"))
    for each in found["transfers"]:
        rates = (
            f"{each['seconds']:.2f}",
            f"{each['bytes_per_second'] / 2**30:.2f}",
            f"{each['cpu_seconds_per_gib']:.2f}",
        )
        counts = (each[name] for name in ("connections", "throttled", "hedged"))
        tables.add_row(table, (each["round"], each["direction"], *rates, *counts))
    tables.make_console().print(table)
    print_line("what limits it")
    for limit in report.limits:
        print_line(f"  {limit.direction}: {limit.text}")
    print_line("suggested settings")
    for text in found["suggestions"] or ["none: the settings fit"]:
        print_line(f"  {text}")


@app.command()
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="s3://bucket/prefix to run below; without it, on an S3 server of the demo's."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the training's logs and digests.")] = False,
) -> None:
    """Kill a training run in the middle of a save, restart it on another number of ranks, and check every bit."""
    from dcp_s3.cli import tables
    from dcp_s3.demo.run import run_demo

    # As with Ctrl-C, the training processes must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not run_demo(url, keep=keep, plan_table=tables.plan):
        raise typer.Exit(exits.FAILED)
