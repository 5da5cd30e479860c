"""``dcp-s3 bench``: how fast saves and loads are on the user's own bucket, and what limits them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import AsJSON, app, note, print_json, print_line, progress_of_steps, wrong_usage
from dcp_s3.units import format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from dcp_s3.bench.run import BenchReport

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
    from dcp_s3.bench.run import bench as run_bench

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
    from dcp_s3.bench.limits import suggestions
    from dcp_s3.cli import tables

    host = report.host
    ranks = "1 rank" if host.ranks == 1 else f"{host.ranks} ranks"
    print_line(f"{ranks} with {format_size(report.size)} each; what was loaded is what was saved, bit by bit")
    tables.make_console().print(_table(report))
    print_line("what limits it")
    for found in report.findings:
        print_line(f"  {found.direction}: {found.text}")
    print_line("suggested settings")
    for text in suggestions(report.findings) or ["none: the settings fit"]:
        print_line(f"  {text}")


def _table(report: BenchReport) -> Table:
    from dcp_s3.cli import tables

    columns = (
        ">round",
        "direction",
        ">seconds",
        ">GiB/s",
        ">CPU s/GiB",
        ">connections per rank",
        ">throttled",
        ">hedged",
    )
    table = tables.make_table(columns)
    for each in report.transfers:
        cells = (each.round, each.direction, f"{each.seconds:.2f}", f"{each.bytes_per_second / 2**30:.2f}",
                 f"{each.cpu_seconds_per_gib:.2f}", each.connections, each.throttled, each.hedged)  # fmt: skip
        tables.add_row(table, cells)
    return table
