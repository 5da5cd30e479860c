"""What the commands show of the package's log, on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from dcp_s3.cli.group import LAYOUT, printable

_PACKAGE = "dcp_s3"
_RETRIES = "dcp_s3.s3.diagnosis"
"""Logs at INFO why a request is tried again; shown in any case, lest a command sits silent."""
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Lines(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time: a progress bar puts something else there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(printable(self.format(record), keep=LAYOUT) + "\n")
        except (OSError, ValueError):
            self.handleError(record)


@contextlib.contextmanager
def shown(verbose: int) -> Iterator[None]:
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
