"""The commands of ``dcp-s3``.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 there is nothing to show. Of ``verify``: 0 good, 1 damaged, 2 it can
not be told.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from typer.core import TyperGroup

from dcp_s3._version import __version__
from dcp_s3.checkpoint import copy
from dcp_s3.cli import drain as draining
from dcp_s3.cli import tables
from dcp_s3.cli import verify as verifying
from dcp_s3.errors import DcpS3Error
from dcp_s3.retention.catalog import list_checkpoints
from dcp_s3.retention.details import describe
from dcp_s3.settings import Settings
from dcp_s3.units import format_size

FAILED = 1
NOTHING_THERE = 3


class _Group(TyperGroup):
    """Turns what goes wrong into a message and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click's: the reader of our output has gone
        except (DcpS3Error, OSError) as error:
            tables.make_console(stderr=True).print(f"dcp-s3: {error}", soft_wrap=True)
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    name="dcp-s3",
    cls=_Group,
    help="PyTorch distributed checkpoints on S3: look at them and copy them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
URL = Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix of the checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dcp-s3 {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """PyTorch distributed checkpoints on S3: look at them and copy them."""


@app.command()
def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="s3://bucket/prefix above the checkpoints.")],
    as_json: AsJSON = False,
    everything: Annotated[bool, typer.Option("--all", help="Show incomplete ones too.")] = False,
) -> None:
    """List the checkpoints under ROOT, oldest first."""
    found = list_checkpoints(root)
    shown = [info for info in found if everything or info.committed]
    if as_json:
        _print_json([info.to_dict() for info in shown])
    elif shown:
        tables.make_console().print(tables.checkpoints(shown, now=time.time()))
    hidden = len(found) - len(shown)
    if hidden:
        _note(f"{hidden} incomplete checkpoint{'s' if hidden > 1 else ''} not shown: see --all")
    elif not shown:
        _note(f"no checkpoints under {root} (for one checkpoint: dcp-s3 show)")
    if not shown:
        raise typer.Exit(NOTHING_THERE)


@app.command()
def show(url: URL, as_json: AsJSON = False) -> None:
    """Show one checkpoint: its facts, its objects and what was saved."""
    details = describe(url)
    if as_json:
        _print_json(details.to_dict())
        return
    console = tables.make_console()
    console.print(tables.facts(details))
    console.print(tables.objects(details.objects))
    if details.entries:
        console.print(tables.entries(details.entries))


@app.command()
def download(
    url: URL,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Empty, or of a download that was cut off.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a checkpoint into DIR, where torch's FileSystemReader reads it."""
    with _progress("download") as callbacks:
        result = copy.download(url, directory, overwrite=overwrite, **callbacks)
    _note(f"{directory}: {result.files} files, {format_size(result.size)} ({format_size(result.moved)} moved)")


@app.command()
def upload(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds .metadata and what belongs to it.")],
    url: URL,
    overwrite: Overwrite = False,
) -> None:
    """Copy the checkpoint in DIR to S3."""
    with _progress("upload") as callbacks:
        result = copy.upload(directory, url, overwrite=overwrite, **callbacks)
    _note(f"{url}: {result.files} objects, {format_size(result.size)}")


@app.command()
def verify(
    url: URL,
    full: Annotated[bool, typer.Option("--full", help="Read all data and compare checksums.")] = False,
    root: Annotated[bool, typer.Option("--root", help="Verify every committed checkpoint under URL.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check whether a checkpoint is still what was saved.

    Without --full: metadata, manifest, and that every object is there with its size. With --full also every byte.

    Exit status 0: good. 1: damaged. 2: it can not be told (S3 failed, or no checkpoint is there).
    """
    answers: list[verifying.Answer] = []
    try:
        with _progress("verify") as callbacks:
            if root:
                for found in verifying.answer_all(url, full=full, callbacks=callbacks):
                    answers.append(found)
                    if not as_json:
                        _print(verifying.line(found))
            else:
                answers.append(verifying.answer(url, full=full, callbacks=callbacks))
    except BrokenPipeError:
        raise
    except (DcpS3Error, OSError) as error:
        _note(f"dcp-s3: {error}")
        raise typer.Exit(verifying.UNKNOWN) from None
    if root:
        if as_json:
            _print_json([found.to_dict() for found in answers])
        if not answers:
            _note(f"no committed checkpoints under {url}")
    elif answers[0].report is None:
        _note(f"dcp-s3: {answers[0].error}")
    elif as_json:
        _print_json(answers[0].to_dict())
    else:
        verifying.print_report(answers[0], _print)
    status = verifying.worst([found.status for found in answers])
    if status:
        raise typer.Exit(status)


@app.command()
def drain(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Spill directory; the default is DCP_S3_SPILL_DIR.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until SIGTERM or Ctrl-C.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show what is there.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Upload what a crash or an outage of S3 left in a spill directory, and commit what is complete then.

    Exit status 0: nothing is left. 1: something waits or was set aside, with the reason.
    """
    settings = Settings()
    store = draining.open_directory(directory, settings.spill_dir)
    found = draining.status(store)
    if status:
        if as_json:
            _print_json(found)
        else:
            draining.print_status(found)
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with _progress("drain") as callbacks:
        callbacks["on_total"](None if watch else sum(save["size"] for save in found["saves"]))
        report = draining.drain(
            store,
            stop=stop,
            watch=watch,
            patience=settings.spill_after,
            on_progress=callbacks["on_progress"],
            note=_note,
        )
    if as_json:
        _print_json(asdict(report))
    if not draining.report_done(store, report, _note):
        raise typer.Exit(FAILED)


@app.command()
def config(as_json: AsJSON = False) -> None:
    """Show the settings in effect, and which environment variable each comes from."""
    settings = Settings()
    if as_json:
        _print_json(tables.settings_rows(settings))
    else:
        tables.make_console().print(tables.settings_table(settings))


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _print(text: str) -> None:
    """A line for people, above the progress bar if there is one."""
    sys.stdout.write(text + "\n")


def _note(text: str) -> None:
    """For people, beside what is printed for programs."""
    tables.make_console(stderr=True).print(text, soft_wrap=True)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[dict[str, Any]]:
    console = tables.make_console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what goes into a pipe stays out of the terminal
    ) as progress:
        task = progress.add_task(label, total=None)
        yield {
            "on_total": lambda total: progress.update(task, total=total),
            "on_progress": lambda count: progress.update(task, advance=count),
        }


if __name__ == "__main__":
    app()
