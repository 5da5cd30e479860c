"""The app of ``dcp-s3``, and what its commands share: options, output, progress and questions."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dcp_s3.cli.group import FAILED, GIVEN, LAYOUT, Group, printable, show_log, statuses
from dcp_s3.format.control_files import number_to_json
from dcp_s3.url import is_s3_url
from dcp_s3.versions import __version__

if TYPE_CHECKING:
    from rich.progress import Progress


app = typer.Typer(
    name="dcp-s3",
    cls=Group,
    help="PyTorch distributed checkpoints on S3: list, copy, verify and prune them.",
    epilog="\b\n" + statuses(),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _note_json(value: bool) -> bool:
    Group.owes_json = value
    return value


AsJSON = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, also of an error; NaN and infinities become text.", callback=_note_json),
]
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
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", metavar="PORT", min=0, max=65535,
        help="Serve metrics for Prometheus at this TCP port; 0: one that is free.",
    ),
]  # fmt: skip
MetricsAddress = Annotated[
    str, typer.Option("--metrics-address", metavar="ADDRESS", help="Address of --metrics-port; 0.0.0.0: all.")
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
        str | None, typer.Option(metavar="URL", help="S3 endpoint, instead of DCP_S3_ENDPOINT_URL.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Profile of AWS's configuration, instead of DCP_S3_PROFILE.")
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="Region, instead of DCP_S3_REGION.")] = None,
) -> None:
    """PyTorch distributed checkpoints on S3: list, copy, verify and prune them."""
    given = {"endpoint_url": endpoint_url, "profile": profile, "region": region}
    stack = contextlib.ExitStack()
    ctx.call_on_close(stack.close)
    ctx.meta[GIVEN] = {name: f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None}
    if ctx.meta[GIVEN]:
        from dcp_s3.settings import environment

        stack.enter_context(environment(**given))
    stack.enter_context(show_log(verbose))


def print_json(value: Any) -> None:
    """Print JSON, for programs."""
    Group.owes_json = False
    # Strict JSON: NaN and infinities become text, as in the manifests.
    sys.stdout.write(json.dumps(_strict(value), indent=1, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return number_to_json(value)


def print_line(text: str) -> None:
    """Print a line for people, above the progress bar if there is one."""
    sys.stdout.write(printable(text, keep=LAYOUT) + "\n")


def note(text: str) -> None:
    """Print for people on stderr, beside the output for programs."""
    sys.stderr.write(printable(text, keep=LAYOUT) + "\n")


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
    with _bar("TextColumn", "BarColumn", "MofNCompleteColumn", "TimeElapsedColumn") as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*columns: str) -> Progress:
    from rich import progress

    from dcp_s3.cli import tables

    console = tables.make_console(stderr=True)
    return progress.Progress(
        *(getattr(progress, name)(*(["{task.description}"] if name == "TextColumn" else [])) for name in columns),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output to a pipe stays out of the terminal
    )


@contextlib.contextmanager
def handling(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals during the body, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set during the body, for commands that then end by themselves."""
    stop = threading.Event()
    with handling(lambda *_: stop.set(), signal.SIGTERM, signal.SIGINT):
        try:
            yield stop
        finally:
            stop.set()  # for threads that wait for it, whatever has happened


def ended_like_ctrl_c() -> contextlib.AbstractContextManager[None]:
    """Clean up after other signals as after Ctrl-C."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    return handling(interrupt, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def serving(port: int | None, address: str, *, needs: str) -> Iterator[None]:
    """Serve metrics during the body, if there is a port. ``needs``: the option without which it makes no sense, if that
    is not given; otherwise empty."""
    if port is None:
        yield
        return
    if needs:
        raise typer.BadParameter(f"it is for a process that goes on. Remedy: {needs}", param_hint="--metrics-port")
    try:
        from dcp_s3.integrations.prometheus import serve
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics-port") from None
    server = serve(port, address)
    note(f"metrics: http://{address}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


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


def local_directory(path: Path | None) -> Path | None:
    """Check, as an argument's callback, that the argument is not a URL: the two are easily swapped."""
    if path is not None and is_s3_url(path):
        raise typer.BadParameter(f"{str(path)!r} is an S3 URL, but this must be a local directory")
    return path


@contextlib.contextmanager
def wrong_usage(*kinds: type[Exception], hint: str) -> Iterator[None]:
    """Report errors of these kinds in the body as wrong usage of ``hint``, an argument or option: exit status 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
