"""The app of ``dcp-s3``: exit statuses, errors, the log, and what the commands share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from dcp_s3 import errors
from dcp_s3.format.control_files import number_to_json
from dcp_s3.process import __version__

DONE = 0
FAILED = 1
USAGE = 2
NOTHING_THERE = 3
DAMAGED = 4
INTERRUPTED = 130
NOBODY_READS = 141
"""The reader of the output has gone: what a shell makes of SIGPIPE. No mistake, so the table leaves it out."""

MEANINGS = {
    DONE: "done; verify: the checkpoint is good",
    FAILED: "failed: S3 or the disk refused, or something is protected, exists already, or waits",
    USAGE: "wrong usage: an argument, an option, a URL or a setting",
    NOTHING_THERE: "nothing is there",
    DAMAGED: "damaged: a checkpoint is not what was saved",
    INTERRUPTED: "ended by Ctrl-C",
}

LAYOUT = "\n\t"
"""Characters that messages and lines for people keep."""

# Control and formatting characters (also those that turn the direction of the text), lone surrogates, line ends.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")

_RETRIES = "dcp_s3.s3.diagnosis"
"""Logs at INFO why a request is tried again; shown in any case, lest a command sits silent."""


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    if isinstance(error, (errors.SettingsError, errors.InvalidURLError)):
        return USAGE
    if isinstance(error, (errors.CorruptCheckpointError, errors.UnsafeMetadataError)):
        return DAMAGED
    return NOTHING_THERE if isinstance(error, errors.CheckpointNotFoundError) else FAILED


class Group(TyperGroup):
    """The commands. Turns errors into a message and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``-v``, which may stand anywhere before ``--``, before the command."""
        end = args.index("--") if "--" in args else len(args)
        words = sorted(args[:end], key=lambda word: word not in ("-v", "-vv", "--verbose"))
        return super().parse_args(ctx, words + args[end:])

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # rather than at exit, where a reader that has gone would be a traceback
        except BrokenPipeError:
            # What could not be written would be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(NOBODY_READS) from None
        except KeyboardInterrupt:
            note("dcp-s3: interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except (errors.DcpS3Error, OSError) as error:
            message = re.sub(r"\b(overwrite|force)=True", r"--\1", str(error))  # an argument of Python's
            note(f"dcp-s3: {message}")
            raise typer.Exit(status_of(error)) from None


app = typer.Typer(
    name="dcp-s3",
    cls=Group,
    help="PyTorch distributed checkpoints on S3: list, copy, verify and prune them.",
    epilog="\b\n" + "\n".join(["Exit status:", *(f"  {status:3} {meaning}" for status, meaning in MEANINGS.items())]),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON; NaN and infinities become text.")]
URL = Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix of the checkpoint.")]
ROOT = Annotated[str, typer.Argument(metavar="ROOT", help="s3://bucket/prefix above the checkpoints.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done, and why.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Yes = Annotated[bool, typer.Option("--yes", help="Delete without asking; required without a terminal.")]
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="REGEX=NEW", help="Replace what REGEX matches in the names, as re.sub does; may be repeated."),
]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dcp-s3 {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Log to stderr; -vv: every request.")
    ] = 0,
) -> None:
    """PyTorch distributed checkpoints on S3: list, copy, verify and prune them."""
    ctx.with_resource(show_log(verbose))


# --- output ------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Print JSON, for programs."""
    # Strict JSON: NaN and infinities become text, as in the manifests.
    sys.stdout.write(json.dumps(_strict(value), indent=1, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return number_to_json(value)


def printable(text: str, keep: str = "") -> str:
    """A text whose control characters, which a terminal would obey, are escapes: names come from a bucket."""
    if text.isprintable():
        return text
    return "".join(
        ascii(each)[1:-1] if unicodedata.category(each) in _OBEYED and each not in keep else each for each in text
    )


def print_line(text: str) -> None:
    """Print a line for people, above the progress bar if there is one."""
    sys.stdout.write(printable(text, keep=LAYOUT) + "\n")


def note(text: str) -> None:
    """Print for people on stderr, beside the output for programs."""
    sys.stderr.write(printable(text, keep=LAYOUT) + "\n")


class _Lines(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time: a progress bar puts something else there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except (OSError, ValueError):
            self.handleError(record)


@contextlib.contextmanager
def show_log(verbose: int) -> Iterator[None]:
    """Show the log while this lasts: warnings, and with ``verbose`` 1 what is done, with 2 also every request."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = _Lines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else None))
    package, retries = logging.getLogger("dcp_s3"), logging.getLogger(_RETRIES)
    before = package.level, retries.level
    package.addHandler(handler)
    package.setLevel(level)
    retries.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(before[0])
        retries.setLevel(before[1])


@contextlib.contextmanager
def progress(label: str, *, steps: bool = False) -> Iterator[Any]:
    """A progress bar, on a terminal only. Yields the callbacks ``on_total`` and ``on_progress`` for bytes, or (with
    ``steps``) a function that takes the steps done and their total."""
    from rich import progress as bars

    from dcp_s3.cli import tables

    console = tables.make_console(stderr=True)
    of_bytes = bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
    with bars.Progress(
        *((bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()) if steps else of_bytes),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output to a pipe stays out of the terminal
    ) as bar:
        task = bar.add_task(label, total=None)
        callbacks = {
            "on_total": lambda total: bar.update(task, total=total),
            "on_progress": lambda count: bar.update(task, advance=count),
        }
        yield (lambda done, total: bar.update(task, completed=done, total=total)) if steps else callbacks


# --- signals and questions ---------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Clean up after SIGTERM and SIGHUP as after Ctrl-C."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def someone_is_there() -> bool:
    """Whether a question can be asked and answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def require_yes(yes: bool) -> None:
    """Require ``--yes`` if there is no terminal on which to ask: otherwise typer.BadParameter."""
    if not yes and not someone_is_there():
        raise typer.BadParameter(
            "there is no terminal to ask on. Remedy: --yes deletes without a question, --dry-run only shows",
            param_hint="--yes",
        )


def ask(question: str) -> None:
    """Ask, and end the command unless the answer is yes."""
    if not typer.confirm(question, err=True):
        note("nothing was deleted")
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def wrong_usage(hint: str) -> Iterator[None]:
    """Report a ValueError in the body as wrong usage of ``hint``, arguments or options: exit status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
