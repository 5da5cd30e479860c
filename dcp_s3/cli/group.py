"""Around every command: exit statuses, options that may stand anywhere, errors, Ctrl-C, readers that leave, the log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from dcp_s3 import errors

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
    DONE: "done; of verify: good",
    FAILED: "failed: S3 or the disk refused, or something is protected, exists already, or waits",
    USAGE: "wrong usage: an argument, an option, a URL or a setting",
    NOTHING_THERE: "nothing is there",
    DAMAGED: "damaged: a checkpoint is not what was saved",
    DIFFERENT: "different: of diff, or not known to be the same",
    INTERRUPTED: "ended by Ctrl-C",
}

_STATUSES: dict[int, tuple[type[Exception], ...]] = {
    USAGE: (errors.SettingsError, errors.InvalidURLError),
    NOTHING_THERE: (errors.CheckpointNotFoundError,),
    DAMAGED: (errors.CorruptCheckpointError, errors.UnsafeMetadataError),
}


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), FAILED)


def statuses() -> str:
    """The statuses and what they mean, a line each, for ``--help``."""
    return "\n".join(["Exit status:", *(f"  {status:3} {meaning}" for status, meaning in MEANINGS.items())])


ORDER = (
    "ls", "show", "diff", "verify", "report", "cp", "export", "import", "drain", "prune", "pin", "annotate", "rm",
    "doctor", "bench", "demo",
)  # fmt: skip
"""The order in which ``--help`` shows the commands."""

ALIASES = {
    "latest": ("ls", "--latest"),
    "inspect": ("show",),
    "download": ("cp",),
    "upload": ("cp",),
    "unpin": ("pin", "--remove"),
    "config": ("doctor", "--settings"),
}
"""Commands of earlier versions, and what they are now; for one release."""

GIVEN = "given"
"""Key in a context's ``meta``: options that stand for settings, by the name of the setting."""

LAYOUT = "\n\t"
"""Characters that messages and lines for people keep."""

# Control and formatting characters (also those that turn the direction of the text), lone surrogates, line ends.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")

_ANYWHERE = {"--endpoint-url": True, "--profile": True, "--region": True, "--verbose": False, "-v": False}
"""Options of all commands, and whether a value follows."""

_PACKAGE = "dcp_s3"
_RETRIES = "dcp_s3.s3.diagnosis"
"""Logs at INFO why a request is tried again; shown in any case, lest a command sits silent."""
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Group(TyperGroup):
    """The commands. Turns errors into a message and an exit status."""

    owes_json = False
    """Whether this process's command is to print JSON, and has printed none."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None and not command.epilog:
            command.epilog = "Options of all commands: -v, --endpoint-url, --profile, --region (see dcp-s3 --help)."
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [*ALIASES.get(args[0], args[:1]), *args[1:]])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._general_first(list(args)))

    def _general_first(self, words: list[str]) -> list[str]:
        """Move options of all commands before the command."""
        first: list[str] = []
        rest: list[str] = []
        command: Any = None
        while words:
            word = words.pop(0)
            if word == "--":
                rest += [word, *words]
                break
            name = word.partition("=")[0]
            if name in _ANYWHERE or (word[:2] == "-v" and not word.strip("-v")):
                first.append(word)
                if _ANYWHERE.get(name) and "=" not in word:
                    first += words[:1]
                    del words[:1]
                continue
            rest.append(word)
            if command is None:
                command = self.commands.get(ALIASES.get(word, (word,))[0])
            elif word in _with_values(command):  # the next word is its value, whatever it looks like
                rest += words[:1]
                del words[:1]
        return first + rest

    def invoke(self, ctx: Any) -> Any:
        Group.owes_json = False
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # rather than at exit, where a reader that has gone would be a traceback
        except BrokenPipeError:
            _write_no_more()
            raise typer.Exit(NOBODY_READS) from None
        except KeyboardInterrupt:
            sys.stderr.write("dcp-s3: interrupted\n")
            raise typer.Exit(INTERRUPTED) from None
        except typer.BadParameter as error:
            error.message = _in_options(ctx, error.message, error.ctx.command if error.ctx is not None else None)
            _print_error(error, error.message, USAGE)
            raise
        except (errors.DcpS3Error, OSError) as error:
            message = _in_options(ctx, str(error), self.get_command(ctx, ctx.invoked_subcommand or ""))
            _print_error(error, message, status_of(error))
            sys.stderr.write(f"dcp-s3: {printable(message, keep=LAYOUT)}\n")
            raise typer.Exit(status_of(error)) from None


def _in_options(ctx: Any, message: str, command: Any) -> str:
    """A message of the library, with names of Python arguments and of settings, in the words of the command line."""
    for parameter in () if command is None else command.params:
        message = message.replace(f"{parameter.name}=True", parameter.opts[0])
    for name, option in ctx.meta.get(GIVEN, {}).items():
        message = message.replace(f"DCP_S3_{name.upper()} =", f"{option} =")
    return message


def printable(text: str, keep: str = "") -> str:
    """A text whose control characters, which a terminal would obey, are escapes: names come from a bucket."""
    if text.isprintable():
        return text
    return "".join(
        ascii(each)[1:-1] if unicodedata.category(each) in _OBEYED and each not in keep else each for each in text
    )


def _print_error(error: Exception, message: str, status: int) -> None:
    """Print an error for programs, if the command was to print JSON and has not."""
    if Group.owes_json:
        document = {"error": message, "kind": type(error).__name__, "status": status}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        sys.stdout.flush()


def _with_values(command: Any) -> set[str]:
    options = (each for each in command.params if each.param_type_name == "option")
    return {name for each in options if not each.is_flag and not each.count for name in each.opts}


def _write_no_more() -> None:
    """Leave what could not be written: Python would try again at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Lines(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time: a progress bar puts something else there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(printable(self.format(record), keep=LAYOUT) + "\n")
        except (OSError, ValueError):
            self.handleError(record)


@contextlib.contextmanager
def show_log(verbose: int) -> Iterator[None]:
    """Show the log while this lasts: warnings, and with ``verbose`` 1 what is done, with 2 also every request."""
    level = _LEVELS[min(verbose, 2)]
    handler = _Lines(level=logging.DEBUG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else None))
    package, retries = logging.getLogger(_PACKAGE), logging.getLogger(_RETRIES)
    handler.addFilter(lambda record: record.levelno >= (logging.INFO if record.name == _RETRIES else level))
    before = package.level, retries.level
    package.addHandler(handler)
    if verbose:
        package.setLevel(level)
    retries.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(before[0])
        retries.setLevel(before[1])
