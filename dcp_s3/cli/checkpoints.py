"""``dcp-s3 ls``, ``show``, ``download``, ``upload``, ``verify``, ``drain`` and ``config``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dcp_s3.cli import drain as draining
from dcp_s3.cli import exits, tables
from dcp_s3.cli import verify as verifying
from dcp_s3.cli.app import (
    ROOT,
    URL,
    AsJSON,
    Overwrite,
    app,
    local_directory,
    note,
    print_json,
    print_line,
    progress,
    stop_on_signals,
)
from dcp_s3.offline import replicate
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.parse import policy_from_settings
from dcp_s3.retention.show import describe
from dcp_s3.s3.chain import find_chain
from dcp_s3.settings import resolve_settings
from dcp_s3.units import format_size


@app.command()
def ls(
    root: ROOT,
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    found = CheckpointCatalog(root).checkpoints()
    shown = [info for info in found if everything or info.committed]
    if as_json:
        print_json([info.to_dict() for info in shown])
    elif shown:
        tables.make_console().print(tables.checkpoints(shown, now=time.time()))
    hidden = len(found) - len(shown)
    if hidden:
        note(f"{hidden} incomplete checkpoint{'s' if hidden > 1 else ''} not shown: see --all")
    elif not shown:
        note(f"no checkpoints under {root} (for one checkpoint: dcp-s3 show)")
    if not shown:
        raise typer.Exit(exits.NOTHING_THERE)


@app.command()
def show(url: URL, as_json: AsJSON = False) -> None:
    """Show one checkpoint: its properties, its objects and what was saved."""
    details = describe(url)
    if as_json:
        print_json(details.to_dict())
        return
    console = tables.make_console()
    console.print(tables.facts(details))
    console.print(tables.objects(details.objects))
    if details.entries:
        console.print(tables.entries(details.entries))


@app.command()
def download(
    url: URL,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Empty, or from an interrupted download.", callback=local_directory),
    ],
    overwrite: Overwrite = False,
) -> None:
    """Copy a checkpoint into DIR, where torch's FileSystemReader reads it."""
    with progress("download") as callbacks:
        result = replicate.download(url, directory, overwrite=overwrite, **callbacks)
    note(f"{directory}: {result.files} files, {format_size(result.size)} ({format_size(result.moved)} moved)")


@app.command()
def upload(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Contains .metadata and its data files.", callback=local_directory),
    ],
    url: URL,
    overwrite: Overwrite = False,
) -> None:
    """Copy the checkpoint in DIR to S3."""
    with progress("upload") as callbacks:
        result = replicate.upload(directory, url, overwrite=overwrite, **callbacks)
    note(f"{url}: {result.files} objects, {format_size(result.size)}")


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
    results: list[verifying.VerifyResult] = []
    with progress("verify") as callbacks:
        if root:
            for found in verifying.verify_all(url, full=full, callbacks=callbacks):
                results.append(found)
                if not as_json:
                    print_line(verifying.line(found))
        else:
            results.append(verifying.verify_one(url, full=full, callbacks=callbacks))
    if root:
        if as_json:
            print_json([found.to_dict() for found in results])
        if not results:
            note(f"no committed checkpoints under {url}")
    elif as_json:
        print_json(results[0].to_dict())
    else:
        verifying.print_report(results[0], print_line)
    status = verifying.worst([found.status for found in results])
    if status:
        raise typer.Exit(status)


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
) -> None:
    """Upload what a crash or an outage of S3 left in a spill directory, and commit what is then complete.

    Exit status 1: something still waits or was set aside; the reason is shown.
    """
    settings = resolve_settings(None)
    store = draining.open_directory(directory, settings.spill_dir)
    found = draining.status(store)
    if status:
        if as_json:
            print_json(found)
        else:
            draining.print_status(found)
        return
    stop = stop_on_signals()
    with progress("drain") as callbacks:
        callbacks["on_total"](None if watch else sum(save["size"] for save in found["saves"]))
        report = draining.drain(
            store,
            stop=stop,
            watch=watch,
            patience=settings.spill_after,
            on_progress=callbacks["on_progress"],
            note=note,
        )
    if as_json:
        print_json(asdict(report))
    if not draining.report_done(store, report, note):
        raise typer.Exit(exits.FAILED)


@app.command()
def config(as_json: AsJSON = False) -> None:
    """Show the settings in effect, and the environment variable or AWS profile that each comes from."""
    settings = resolve_settings(None)
    policy_from_settings(settings)  # raises if it is not a valid policy
    rows = tables.settings_rows(settings, find_chain(settings))
    if as_json:
        print_json(rows)
    else:
        tables.make_console().print(tables.settings_table(rows))
