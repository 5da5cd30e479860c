"""The app of ``dcp-s3``: exit statuses, errors, the log, and what the commands share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from dcp_s3 import errors
from dcp_s3.format.control_files import number_to_json
from dcp_s3.process import __version__

if TYPE_CHECKING:
    from rich.progress import Progress

DONE = 0
FAILED = 1
USAGE = 2
NOTHING_THERE = 3
DAMAGED = 4
DIFFERENT = 5
INTERRUPTED = 130
NOBODY_READS = 141
"""The reader of the output has gone: what a shell makes of SIGPIPE. No mistake, so the table leaves it out."""

MEANINGS = {
    DONE: "done; verify: the checkpoint is good",
    FAILED: "failed: S3 or the disk refused, or something is protected, exists already, or waits",
    USAGE: "wrong usage: an argument, an option, a URL or a setting",
    NOTHING_THERE: "nothing is there",
    DAMAGED: "damaged: a checkpoint is not what was saved",
    DIFFERENT: "diff: something differs, or is not known to be the same",
    INTERRUPTED: "ended by Ctrl-C",
}

_STATUSES: dict[int, tuple[type[Exception], ...]] = {
    USAGE: (errors.SettingsError, errors.InvalidURLError),
    NOTHING_THERE: (errors.CheckpointNotFoundError,),
    DAMAGED: (errors.CorruptCheckpointError, errors.UnsafeMetadataError),
}

ORDER = (
    "ls", "show", "diff", "verify", "cp", "export", "import", "drain", "prune", "pin", "rm", "doctor",
    "bench", "demo",
)  # fmt: skip
"""The order in which ``--help`` shows the commands."""

LAYOUT = "\n\t"
"""Characters that messages and lines for people keep."""

# Control and formatting characters (also those that turn the direction of the text), lone surrogates, line ends.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")

_ANYWHERE = {"--endpoint-url": 2, "--region": 2, "--verbose": 1, "-v": 1, "-vv": 1}
"""Options of all commands, and the words that they take."""

_RETRIES = "dcp_s3.s3.diagnosis"
"""Logs at INFO why a request is tried again; shown in any case, lest a command sits silent."""


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), FAILED)


class Group(TyperGroup):
    """The commands. Turns errors into a message and an exit status."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None and not command.epilog:
            command.epilog = "Options of all commands: -v, --endpoint-url, --region (see dcp-s3 --help)."
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move options of all commands, which may stand anywhere before ``--``, before the command."""
        first: list[str] = []
        rest: list[str] = []
        words = list(args)
        while words and words[0] != "--":
            name, equals, _ = words[0].partition("=")
            count = 1 if equals else _ANYWHERE.get(name, 1)
            (first if name in _ANYWHERE else rest).extend(words[:count])
            del words[:count]
        return super().parse_args(ctx, first + rest + words)

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
Grace = Annotated[
    str | None,
    typer.Option(
        metavar="24h", help="How long an uncommitted save counts as in progress; the default is DCP_S3_RETENTION_GRACE."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Delete without asking; required without a terminal.")]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="REGEX=NEW",
        help="Replace what REGEX matches in the names by NEW, which may have \\1 for a group; the last = divides. "
        "May be repeated: the rules apply one after the other.",
    ),
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
        int,
        typer.Option(
            "-v", "--verbose", count=True, show_default=False, help="Log to stderr what is done; -vv: every request."
        ),
    ] = 0,
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint, as DCP_S3_ENDPOINT_URL.")
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="Region, as DCP_S3_REGION.")] = None,
) -> None:
    """PyTorch distributed checkpoints on S3: list, copy, verify and prune them."""
    stack = contextlib.ExitStack()
    ctx.call_on_close(stack.close)
    if endpoint_url or region:
        from dcp_s3.settings import environment

        stack.enter_context(environment(DCP_S3_ENDPOINT_URL=endpoint_url, DCP_S3_REGION=region))
    stack.enter_context(show_log(verbose))


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
def progress(label: str) -> Iterator[dict[str, Any]]:
    """A progress bar for bytes, on a terminal only. Yields the callbacks ``on_total`` and ``on_progress``."""
    with _bar("BarColumn", "DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn") as bar:
        task = bar.add_task(label, total=None)
        yield {
            "on_total": lambda total: bar.update(task, total=total),
            "on_progress": lambda count: bar.update(task, advance=count),
        }


@contextlib.contextmanager
def progress_of_steps(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for steps, on a terminal only. Yields a function that takes the steps done and their total."""
    with _bar("BarColumn", "MofNCompleteColumn", "TimeElapsedColumn") as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*columns: str) -> Progress:
    from rich import progress

    from dcp_s3.cli import tables

    console = tables.make_console(stderr=True)
    return progress.Progress(
        *(getattr(progress, name)() for name in columns),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output to a pipe stays out of the terminal
    )


# --- signals and questions ---------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Clean up after SIGTERM and SIGHUP as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

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
def wrong_usage(*kinds: type[Exception], hint: str) -> Iterator[None]:
    """Report errors of these kinds in the body as wrong usage of ``hint``, an argument or option: exit status 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
