"""The commands that move checkpoints: ``cp``, ``export``, ``import`` and ``drain``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import app as cli
from dcp_s3.cli import group
from dcp_s3.units import format_size, plural

if TYPE_CHECKING:
    from dcp_s3.spill.drain import DrainReport
    from dcp_s3.spill.store import SpillStore


@cli.app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="s3://bucket/prefix or directory of the checkpoint.")],
    destination: Annotated[
        str, typer.Argument(metavar="TO", help="s3://bucket/prefix or directory; empty, or from an interrupted copy.")
    ],
    overwrite: cli.Overwrite = False,
    as_json: cli.AsJSON = False,
) -> None:
    """Copy a checkpoint; from S3 to S3 without moving its bytes. An interrupted copy goes on when repeated.

    A directory is as torch's FileSystemReader reads and its FileSystemWriter writes it. Both URLs are reached through
    one endpoint with one set of credentials. Elsewhere: copy by way of a directory.
    """
    from dcp_s3.offline.copy import copy

    with cli.progress("copy") as callbacks:
        result = copy(source, destination, overwrite, **callbacks)
    if as_json:
        cli.print_json(asdict(result))
    cli.note(
        f"{destination}: {plural(result.files, 'object')}, {format_size(result.size)} "
        f"({format_size(result.moved)} copied)"
    )


@cli.app.command()
def export(
    url: cli.URL,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory or s3://bucket/prefix; must be empty.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only these entries, as model.*; may be repeated."),
    ] = None,
    rename: cli.Rename = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert floating-point tensors: bf16, fp16, fp32, ...")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of a safetensors file, as 5GB or 2GiB.")
    ] = "5GB",
    overwrite: cli.Overwrite = False,
) -> None:
    """Write the tensors of a checkpoint as safetensors files, as Hugging Face lays them out."""
    from dcp_s3.offline import export as exporting
    from dcp_s3.offline.names import parse_rules

    options: dict[str, Any] = {"include": include, "overwrite": overwrite}
    with cli.wrong_usage(ValueError, hint="--rename"):
        options["rename"] = parse_rules(rename or [])
    with cli.wrong_usage(ValueError, hint="--max-shard-size"):
        options["max_shard_size"] = exporting.parse_shard_size(max_shard_size)
    with cli.wrong_usage(ValueError, hint="--dtype"):
        options["dtype"] = exporting.parse_dtype(dtype)
    with cli.progress("export") as callbacks:
        result = exporting.export(url, destination, **options, **callbacks)
    tensors, files = plural(result.tensors, "tensor"), plural(len(result.files), "file")
    cli.note(f"{destination}: {tensors}, {files}, {format_size(result.size)}")
    if result.skipped:
        cli.note(f"left out: {plural(result.skipped, 'entry')} without a tensor")


@cli.app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Directory or s3://bucket/prefix with safetensors or torch files, or one."),
    ],
    url: cli.URL,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Put before every name, as model.")] = "",
    rename: cli.Rename = None,
    overwrite: cli.Overwrite = False,
) -> None:
    """Make a checkpoint of safetensors or torch files."""
    from dcp_s3.offline import import_weights as importing
    from dcp_s3.offline.names import parse_rules

    with cli.wrong_usage(ValueError, hint="--rename"):
        rules = parse_rules(rename or [])
    with cli.progress("import") as callbacks:
        result = importing.import_weights(source, url, prefix=prefix, rename=rules, overwrite=overwrite, **callbacks)
    others = f", {result.objects} other entries" if result.objects else ""
    cli.note(f"{url}: {plural(result.tensors, 'tensor')}{others}, {format_size(result.size)}")


_PAUSE = 5.0  # seconds between passes of --watch


@cli.app.command()
def drain(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Spill directory; the default is DCP_S3_SPILL_DIR.", callback=cli.local_directory
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep draining until SIGTERM or Ctrl-C.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show what is there.")] = False,
    as_json: cli.AsJSON = False,
    metrics_port: cli.MetricsPort = None,
    metrics_address: cli.MetricsAddress = "127.0.0.1",
) -> None:
    """Upload what a crash or an outage of S3 left in a spill directory, and commit what is then complete.

    Exit status 1: something still waits or was set aside; the reason is shown.
    """
    from dcp_s3.settings import resolve_settings
    from dcp_s3.spill.drain import Drainer, DrainReport
    from dcp_s3.spill.store import SpillStore

    settings = resolve_settings(None)
    if directory is None and settings.spill_dir is None:
        raise typer.BadParameter("name a directory, or set DCP_S3_SPILL_DIR", param_hint="DIR")
    store = SpillStore(directory or str(settings.spill_dir))
    if not store.path.is_dir():
        raise typer.BadParameter(f"there is no directory {store.path}", param_hint="DIR")
    found = _find_saves(store)
    if status:
        cli.print_json(found) if as_json else _print_saves(found)
        return
    total = DrainReport()
    with (
        cli.serving(metrics_port, metrics_address, needs="" if watch else "--watch"),
        cli.stop_on_signals() as stop,
        cli.progress("drain") as callbacks,
    ):
        callbacks["on_total"](None if watch else sum(save["size"] for save in found["saves"]))
        drainer = Drainer(store, stop=stop, on_progress=callbacks["on_progress"], patience=settings.spill_after)
        while True:
            report = drainer.run()
            total.uploaded += report.uploaded
            total.committed += report.committed
            total.discarded += report.discarded
            total.refused.update(report.refused)
            total.waiting, total.busy = report.waiting, report.busy
            for url in report.committed:
                cli.note(f"committed {url}")
            if not watch or stop.wait(_PAUSE):
                break
    if as_json:
        cli.print_json(asdict(total))
    if not _say_done(store, total):
        raise typer.Exit(group.FAILED)


def _find_saves(store: SpillStore) -> dict[str, Any]:
    saves = [
        {
            "name": save.name,
            "url": save.journal.url,
            "what": "commit" if save.journal.commit is not None else "data",
            "state": save.journal.state.value,
            "size": save.journal.size,
            "created_at": save.journal.created_at,
        }
        for save in store.scan()
    ]
    refused = [asdict(refused) | {"path": str(refused.path)} for refused in store.list_refused()]
    damaged = [asdict(found) | {"path": str(found.path)} for found in store.list_damaged()]
    return {"directory": str(store.path), "saves": saves, "damaged": damaged, "refused": refused}


def _print_saves(found: dict[str, Any]) -> None:
    from dcp_s3.cli import tables

    table = tables.make_table(("checkpoint", "what", "state", ">size", ">age"))
    for save in found["saves"]:
        age = tables.format_age(time.time() - save["created_at"])
        tables.add_row(table, (save["url"], save["what"], save["state"], format_size(save["size"]), age))
    if found["saves"]:
        tables.make_console().print(table)
    for kind, name in (("damaged", "damaged"), ("refused", "set aside")):
        for each in found[kind]:
            cli.print_line(f"{name}: {each['path']}: {each['reason']}")


def _say_done(store: SpillStore, report: DrainReport) -> bool:
    """Report what was done, for people. Returns whether nothing is left."""
    if report.busy:
        cli.note(f"another process drains {store.path}: nothing was done here")
        return False
    for name, reason in report.refused.items():
        cli.note(f"set aside {name}: {reason}")
    for name, reason in report.waiting.items():
        cli.note(f"waits: {name}: {reason}")
    cli.note(
        f"{store.path}: {format_size(report.uploaded)} uploaded, {len(report.committed)} committed, "
        f"{len(report.discarded)} given up, {len(report.waiting)} waiting, {len(report.refused)} set aside"
    )
    return not report.waiting and not store.list_refused()
