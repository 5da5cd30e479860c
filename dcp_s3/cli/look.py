"""The commands that change no checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dcp_s3.cli import app as cli
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error, EntryNotFoundError
from dcp_s3.units import format_size, parse_size, plural


@cli.app.command()
def ls(
    root: cli.ROOT,
    as_json: cli.AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Print only the URL of the newest to load.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    from dcp_s3.cli import tables
    from dcp_s3.retention import catalog

    if latest:
        newest = catalog.latest(root)
        if as_json:
            cli.print_json(None if newest is None else newest.to_dict())
        elif newest is not None:
            cli.print_line(newest.url)
        if newest is None:
            cli.note(f"no complete checkpoint under {root}: dcp-s3 ls --all shows what is there")
            raise typer.Exit(cli.NOTHING_THERE)
        return
    found = catalog.list_checkpoints(root)
    shown = [info for info in found if everything or info.committed]
    if as_json:
        cli.print_json([info.to_dict() for info in shown])
    elif shown:
        tables.show(tables.checkpoints(shown))
    hidden = len(found) - len(shown)
    if hidden:
        cli.note(f"{plural(hidden, 'incomplete checkpoint')} not shown: see --all")
    elif not shown:
        cli.note(f"no checkpoints right under {root}; one checkpoint by its own URL: dcp-s3 show")
    if not shown:
        raise typer.Exit(cli.NOTHING_THERE)


Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="GLOB", help="Only the entries that match, as 'model.*'; may be repeated."),
]
All = Annotated[bool, typer.Option("--all", help="A line for everything, also for what is alike.")]


@cli.app.command()
def show(
    url: cli.URL,
    filter: Filter = None,
    everything: All = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Show one checkpoint: its properties, and what it holds. Reads no data.

    With --filter only the entries. Objects are listed with --all, and if one is missing or not used.
    """
    from dcp_s3.cli import tables
    from dcp_s3.offline.names import closest, matches
    from dcp_s3.retention.catalog import describe

    details = describe(url)
    entries = [entry for entry in details.entries if not filter or matches(entry.fqn, filter)]
    if filter and not entries:
        near = closest(" ".join(filter), [entry.fqn for entry in details.entries])
        what = f"{url} has no entry that matches {', '.join(map(repr, filter))}{near}"
        raise EntryNotFoundError(what, url=url, fqn=" ".join(filter))
    if as_json:
        cli.print_json(details.to_dict() | {"entries": [vars(entry) for entry in entries]})
        return
    if not filter:
        tables.show(tables.facts(details))
    if entries:
        tables.show(tables.entries(entries, alone=everything))
    if not filter and (everything or any(each.size is None or not each.used for each in details.objects)):
        tables.show(tables.objects(details.objects))


@cli.app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="s3://bucket/prefix for checkpoints.")] = None,
    settings: Annotated[bool, typer.Option("--settings", help="Only show each setting, and where it is set.")] = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Check settings, credentials, endpoint, permissions and what the store can do, before a run starts.

    Small probe objects are written below URL and removed again. The last line is the store's row in docs/stores.md.
    """
    from dcp_s3.checkup import doctor as checkup
    from dcp_s3.cli import tables
    from dcp_s3.retention.policy import policy_from_settings
    from dcp_s3.s3.client import find_chain
    from dcp_s3.settings import ENV_PREFIX, resolve_settings

    if settings:
        given = resolve_settings(None)
        policy_from_settings(given)  # raises if it is not a valid policy
        chain, rows = find_chain(given), []
        table = tables.make_table(("setting", "value", "from"))
        for name in type(given).model_fields:  # no secret is among them
            value, source = getattr(given, name), "default"
            if name in given.model_fields_set:
                source = f"{ENV_PREFIX}{name.upper()}"
            elif name in chain:
                value, source = chain[name].value, chain[name].source
            rows.append({"name": name, "value": value, "source": source})
            cells = name, "unset" if value is None else value, source
            tables.add_row(table, cells, style="dim" if source == "default" else "")
        if as_json:
            cli.print_json(rows)
        else:
            tables.show(table)
        return
    if url is None:
        raise typer.BadParameter("s3://bucket/prefix is missing; only --settings needs none", param_hint="URL")
    with cli.ended_like_ctrl_c():
        report = checkup.doctor(
            url, on_result=lambda each: None if as_json else cli.print_line(checkup.format_result(each))
        )
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
    for each in [info.url for info in list_checkpoints(url) if info.committed] if root else [url]:
        try:
            with cli.progress("verify") as callbacks:
                report = verifying.verify(each, full=full, **callbacks)
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
            without = report.objects_without_checksum, report.items_without_checksum
            text = f"{report.mode}: {plural(report.objects, 'object')}, {plural(report.items, 'item')}, "
            text += f"{format_size(report.bytes_read)} read"
            if any(without):
                text += f"; without checksum: {plural(without[0], 'object')}, {plural(without[1], 'item')}"
            lines = [f"{report.url}: {'good' if report.ok else 'damaged'} ({text})"]
            lines += [f"  {problem}" for problem in report.problems]
        for line in () if as_json else lines:
            cli.print_line(line)
    if as_json:
        cli.print_json(documents if root else documents[0])
    if not documents:
        cli.note(f"no committed checkpoints under {url}")
    status = max(statuses, default=cli.NOTHING_THERE)  # damage counts most
    if status:
        raise typer.Exit(status)


@cli.app.command()
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix to write below.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per rank; it needs twice as much memory.")] = "1GiB",
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks on this host, each its own process.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Saves and loads.")] = 2,
) -> None:
    """Measure saves and loads of random tensors below URL with these settings, and remove everything again."""
    from dcp_s3.bench import bench as run_bench
    from dcp_s3.cli import tables

    with cli.wrong_usage("--size"):
        count = parse_size(size)
        if not count:
            raise ValueError("expected at least one byte")
    with cli.progress("bench", steps=True) as step, cli.ended_like_ctrl_c():
        found = run_bench(url, size=count, ranks=ranks, rounds=rounds, progress=step)
    cli.print_line(f"{plural(ranks, 'rank')}; what was loaded is what was saved, bit by bit")
    table = tables.make_table((">round", "direction", ">seconds", ">GiB/s", ">CPU s/GiB"))
    for number, direction, *rates in found:
        tables.add_row(table, (number, direction, *(f"{rate:.2f}" for rate in rates)))
    tables.show(table)


@cli.app.command()
def demo() -> None:
    """Kill a training run in the middle of a save, restart it on another number of ranks, and check every bit.

    It runs on an S3 server of its own, on this host.
    """
    from dcp_s3.demo import run_demo

    with cli.ended_like_ctrl_c():  # the training processes must not be left behind
        holds = run_demo()
    if not holds:
        raise typer.Exit(cli.FAILED)
