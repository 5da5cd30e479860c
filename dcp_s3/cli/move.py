"""The commands that move checkpoints: ``cp``, ``download``, ``upload``, ``export``, ``import`` and ``drain``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import (
    URL,
    AsJSON,
    MetricsAddress,
    MetricsPort,
    Overwrite,
    Rename,
    app,
    local_directory,
    note,
    print_json,
    print_line,
    progress,
    serving,
    stop_on_signals,
    wrong_usage,
)
from dcp_s3.units import format_size, plural

if TYPE_CHECKING:
    from dcp_s3.spill.drain import DrainReport
    from dcp_s3.spill.store import SpillStore


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="s3://bucket/prefix or directory of the checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="s3://bucket/prefix or directory of the copy.")],
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy a checkpoint; from S3 to S3 without moving its bytes. An interrupted copy goes on when repeated.

    Both URLs are reached through one endpoint with one set of credentials. Elsewhere: copy by way of a directory.
    """
    from dcp_s3.offline.copy import copy

    with progress("copy") as callbacks:
        result = copy(source, destination, overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(
        f"{destination}: {plural(result.files, 'object')}, {format_size(result.size)} "
        f"({format_size(result.moved)} copied)"
    )


@app.command()
def download(
    url: URL,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Empty, or from an interrupted download.", callback=local_directory),
    ],
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy a checkpoint into DIR, where torch's FileSystemReader reads it."""
    from dcp_s3.offline.copy import copy

    with progress("download") as callbacks:
        result = copy(url, directory, overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(f"{directory}: {plural(result.files, 'file')}, {format_size(result.size)} ({format_size(result.moved)} moved)")


@app.command()
def upload(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Contains .metadata and its data files.", callback=local_directory),
    ],
    url: URL,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Copy the checkpoint in DIR to S3."""
    from dcp_s3.offline.copy import copy

    with progress("upload") as callbacks:
        result = copy(directory, url, overwrite, **callbacks)
    if as_json:
        print_json(asdict(result))
    note(f"{url}: {plural(result.files, 'object')}, {format_size(result.size)}")


@app.command()
def export(
    url: URL,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory or s3://bucket/prefix; must be empty.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only these entries, as model.*; may be repeated."),
    ] = None,
    rename: Rename = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert floating-point tensors: bf16, fp16, fp32, ...")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of a safetensors file, as 5GB or 2GiB.")
    ] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write the tensors of a checkpoint as safetensors files, as Hugging Face lays them out."""
    from dcp_s3.offline import export as exporting
    from dcp_s3.offline.names import parse_rules

    with wrong_usage(ValueError, hint="--rename"):
        rules = parse_rules(rename or [])
    with wrong_usage(ValueError, hint="--max-shard-size"):
        most = exporting.parse_shard_size(max_shard_size)
    with wrong_usage(ValueError, hint="--dtype"):
        wanted = exporting.parse_dtype(dtype)
    with progress("export") as callbacks:
        result = exporting.export(
            url,
            destination,
            include=include,
            rename=rules,
            dtype=wanted,
            max_shard_size=most,
            overwrite=overwrite,
            **callbacks,
        )
    note(
        f"{destination}: {plural(result.tensors, 'tensor')}, {plural(len(result.files), 'file')}, "
        f"{format_size(result.size)}"
    )
    if result.skipped:
        note(f"left out: {plural(result.skipped, 'entry')} without a tensor")


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Directory or s3://bucket/prefix with safetensors or torch files, or one."),
    ],
    url: URL,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Put before every name, as model.")] = "",
    rename: Rename = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a checkpoint of safetensors or torch files."""
    from dcp_s3.offline import import_weights as importing
    from dcp_s3.offline.names import parse_rules

    with wrong_usage(ValueError, hint="--rename"):
        rules = parse_rules(rename or [])
    with progress("import") as callbacks:
        result = importing.import_weights(source, url, prefix=prefix, rename=rules, overwrite=overwrite, **callbacks)
    others = f", {result.objects} other entries" if result.objects else ""
    note(f"{url}: {plural(result.tensors, 'tensor')}{others}, {format_size(result.size)}")


_PAUSE = 5.0  # seconds between passes of --watch


@app.command()
def drain(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Spill directory; the default is DCP_S3_SPILL_DIR.", callback=local_directory
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep draining until SIGTERM or Ctrl-C.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show what is there.")] = False,
    as_json: AsJSON = False,
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = "127.0.0.1",
) -> None:
    """Upload what a crash or an outage of S3 left in a spill directory, and commit what is then complete.

    Exit status 1: something still waits or was set aside; the reason is shown.
    """
    from dcp_s3.settings import resolve_settings

    settings = resolve_settings(None)
    store = _open_directory(directory, settings.spill_dir)
    found = find_saves(store)
    if status:
        if as_json:
            print_json(found)
        else:
            _print_saves(found)
        return
    with (
        serving(metrics_port, metrics_address, needs="" if watch else "--watch"),
        stop_on_signals() as stop,
        progress("drain") as callbacks,
    ):
        callbacks["on_total"](None if watch else sum(save["size"] for save in found["saves"]))
        report = _drain(
            store,
            stop=stop,
            watch=watch,
            patience=settings.spill_after,
            on_progress=callbacks["on_progress"],
        )
    if as_json:
        print_json(asdict(report))
    if not _say_done(store, report):
        raise typer.Exit(exits.FAILED)


def find_saves(store: SpillStore) -> dict[str, Any]:
    """The state of a spill directory, for ``--status``."""
    from dcp_s3.spill.journal import State

    saves = [
        {
            "name": save.name,
            "url": save.journal.url,
            "what": "commit" if save.journal.commit is not None else "data",
            "state": "sealed" if save.journal.state is State.SEALED else "writing",
            "size": save.journal.size,
            "created_at": save.journal.created_at,
        }
        for save in store.scan()
    ]
    refused = [asdict(refused) | {"path": str(refused.path)} for refused in store.list_refused()]
    damaged = [asdict(found) | {"path": str(found.path)} for found in store.list_damaged()]
    return {"directory": str(store.path), "saves": saves, "damaged": damaged, "refused": refused}


def _print_saves(found: dict[str, Any]) -> None:
    """Print the state of a spill directory, for people."""
    from dcp_s3.cli import tables

    table = tables.make_table(("checkpoint", "what", "state", ">size", ">age"))
    for save in found["saves"]:
        age = tables.format_age(max(0.0, time.time() - save["created_at"]))
        tables.add_row(table, (save["url"], save["what"], save["state"], format_size(save["size"]), age))
    if found["saves"]:
        tables.make_console().print(table)
    for damaged in found["damaged"]:
        print_line(f"damaged: {damaged['path']}: {damaged['reason']}")
    for refused in found["refused"]:
        print_line(f"set aside: {refused['path']}: {refused['reason']}")


def _drain(
    store: SpillStore,
    *,
    stop: threading.Event,
    watch: bool,
    patience: float,
    on_progress: Callable[[int], None],
) -> DrainReport:
    """One pass, or with ``watch`` pass after pass until ``stop`` is set. Returns the sum of all passes."""
    from dcp_s3.spill.drain import Drainer, DrainReport

    total = DrainReport()
    while True:
        report = Drainer(store, stop=stop, on_progress=on_progress, patience=patience).run()
        total.uploaded += report.uploaded
        total.committed += report.committed
        total.discarded += report.discarded
        total.refused.update(report.refused)
        total.waiting, total.busy = report.waiting, report.busy
        for url in report.committed:
            note(f"committed {url}")
        if not watch or stop.wait(_PAUSE):
            return total


def _say_done(store: SpillStore, report: DrainReport) -> bool:
    """Report what was done, for people. Returns whether nothing is left."""
    if report.busy:
        note(f"another process drains {store.path}: nothing was done here")
        return False
    for name, reason in report.refused.items():
        note(f"set aside {name}: {reason}")
    for name, reason in report.waiting.items():
        note(f"waits: {name}: {reason}")
    note(
        f"{store.path}: {format_size(report.uploaded)} uploaded, {len(report.committed)} committed, "
        f"{len(report.discarded)} given up, {len(report.waiting)} waiting, {len(report.refused)} set aside"
    )
    return not report.waiting and not store.list_refused()


def _open_directory(directory: Path | None, configured: str | None) -> SpillStore:
    """The given directory, or else the configured one: typer.BadParameter if there is none."""
    from dcp_s3.spill.store import SpillStore

    if directory is None and configured is None:
        raise typer.BadParameter("name a directory, or set DCP_S3_SPILL_DIR", param_hint="DIR")
    store = SpillStore(directory or str(configured))
    if not store.path.is_dir():
        raise typer.BadParameter(f"there is no directory {store.path}", param_hint="DIR")
    return store
