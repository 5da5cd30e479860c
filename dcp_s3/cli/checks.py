"""The commands that check and try: ``doctor``, ``verify``, ``bench`` and ``demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import app as cli
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.units import format_size, parse_size, plural

if TYPE_CHECKING:
    from dcp_s3.bench import BenchReport
    from dcp_s3.offline.verify import VerifyReport


def _show_settings(as_json: bool) -> None:
    from dcp_s3.cli import tables
    from dcp_s3.retention.parse import policy_from_settings
    from dcp_s3.s3.client import find_chain
    from dcp_s3.settings import ENV_PREFIX, resolve_settings

    settings = resolve_settings(None)
    policy_from_settings(settings)  # raises if it is not a valid policy
    chain, rows = find_chain(settings), []
    for name in type(settings).model_fields:  # no secret is among them
        value, source = getattr(settings, name), "default"
        if name in settings.model_fields_set:
            source = f"{ENV_PREFIX}{name.upper()}"
        elif name in chain:
            value, source = chain[name].value, chain[name].source
        rows.append({"name": name, "value": value, "source": source})
    if as_json:
        cli.print_json(rows)
    else:
        tables.make_console().print(tables.settings(rows))


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


@cli.app.command()
def doctor(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="s3://bucket/prefix below which checkpoints are to lie.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Leave out everything that writes.")] = False,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="Only show each setting, and the variable or AWS profile that it comes from."),
    ] = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Check settings, credentials, endpoint, permissions and what the store can do, before a run starts.

    Small probe objects are written below URL and removed again. The last line is the store's row in docs/stores.md.
    """
    if settings:
        _show_settings(as_json)
        return
    if url is None:
        raise typer.BadParameter("s3://bucket/prefix is missing; only --settings needs none", param_hint="URL")
    from dcp_s3.checkup import doctor as checkup
    from dcp_s3.checkup.probes import CheckResult
    from dcp_s3.cli import tables

    console = tables.make_console()

    def show(result: CheckResult) -> None:
        if not as_json:
            text = cli.printable(checkup.format_result(result), keep=cli.LAYOUT)
            console.print(text, style=_STYLES[result.status], soft_wrap=True)

    with cli.ended_like_ctrl_c():
        report = checkup.doctor(url, read_only=read_only, on_result=show)
    if as_json:
        cli.print_json(report.to_dict())
    else:
        cli.print_line(checkup.conclude(report))
    if not report.ok:
        raise typer.Exit(cli.FAILED)


@cli.app.command()
def verify(
    url: cli.URL,
    full: Annotated[bool, typer.Option("--full", help="Read all data and compare checksums.")] = False,
    root: Annotated[bool, typer.Option("--root", help="Verify every committed checkpoint under URL.")] = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Check whether a checkpoint is still what was saved.

    Without --full: metadata, manifest, and that every object is there with its size. With --full also every byte.
    """
    from dcp_s3.offline import verify as verifying
    from dcp_s3.retention.catalog import list_checkpoints

    documents: list[Any] = []
    statuses: list[int] = []
    totals: list[int] = []
    with cli.progress("verify") as callbacks:

        def add(total: int) -> None:
            totals.append(total)
            callbacks["on_total"](sum(totals))

        for each in [info.url for info in list_checkpoints(url) if info.committed] if root else [url]:
            try:
                report = verifying.verify(each, full=full, on_total=add, on_progress=callbacks["on_progress"])
            except (DcpS3Error, OSError) as error:
                if not root:
                    raise
                if isinstance(error, CheckpointNotFoundError):
                    continue  # deleted meanwhile
                documents.append({"url": each, "ok": None, "error": str(error)})
                statuses.append(cli.status_of(error))
                lines = [f"{each}: could not be verified: {error}"]
            else:
                documents.append(report.to_dict())
                statuses.append(cli.DONE if report.ok else cli.DAMAGED)
                lines = _lines(report, one_line=root)
            for line in () if as_json else lines:
                cli.print_line(line)
    if as_json:
        cli.print_json(documents if root else documents[0])
    if not documents:
        cli.note(f"no committed checkpoints under {url}")
    status = max(statuses, default=cli.NOTHING_THERE)  # damage counts most
    if status:
        raise typer.Exit(status)


def _lines(report: VerifyReport, *, one_line: bool) -> list[str]:
    objects, problems = plural(report.objects, "object"), report.problems
    counts = f"{report.mode}: {objects}, {plural(report.items, 'item')}, {format_size(report.bytes_read)} read"
    unchecked = ""
    if report.objects_without_checksum or report.items_without_checksum:
        unchecked = f"; without checksum: {plural(report.objects_without_checksum, 'object')}"
        unchecked += f", {plural(report.items_without_checksum, 'item')}"
    if report.ok:
        return [f"{report.url}: good ({counts}{unchecked})"]
    if one_line:
        more = f", the first of {len(problems)}" if len(problems) > 1 else ""
        return [f"{report.url}: damaged: {problems[0]} ({counts}{more})"]
    last = f"{counts}, {plural(len(problems), 'problem')}{unchecked}"
    return [f"{report.url}: damaged", *(f"  {problem}" for problem in problems), last]


@cli.app.command()
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
    as_json: cli.AsJSON = False,
) -> None:
    """Measure saves and loads below URL with these settings, say what limits them, and remove everything again."""
    from dcp_s3.bench import bench as run_bench

    with cli.wrong_usage(ValueError, hint="--size"):
        count = parse_size(size)
        if not count:
            raise ValueError("expected at least one byte")
    with cli.progress_of_steps("bench") as step, cli.ended_like_ctrl_c():
        report = run_bench(url, size=count, ranks=ranks, rounds=rounds, note=cli.note, progress=step)
    if as_json:
        cli.print_json(report.to_dict())
    else:
        _print_report(report)


def _print_report(report: BenchReport) -> None:
    from dcp_s3.cli import tables

    cli.print_line(f"{plural(report.ranks, 'rank')}; what was loaded is what was saved, bit by bit")
    titles = (">round", "direction", ">seconds", ">GiB/s", ">CPU s/GiB", ">connections per rank", ">throttled")
    table = tables.make_table(titles)
    for each in report.transfers:
        gib = each.bytes / 2**30
        rates = (f"{rate:.2f}" for rate in (each.seconds, gib / each.seconds, each.cpu_seconds / gib))
        tables.add_row(table, (each.round, each.direction, *rates, each.connections, each.throttled))
    tables.make_console().print(table)
    for direction, text in report.limits.items():
        cli.print_line(f"what limits a {direction}: {text}")


@cli.app.command()
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="s3://bucket/prefix to run below; without it, on an S3 server of the demo's."
        ),
    ] = None,
) -> None:
    """Kill a training run in the middle of a save, restart it on another number of ranks, and check every bit."""
    from dcp_s3.demo.run import run_demo

    # The training processes must not be left behind.
    with cli.ended_like_ctrl_c():
        holds = run_demo(url)
    if not holds:
        raise typer.Exit(cli.FAILED)
