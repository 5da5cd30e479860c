"""Errors that are kept or sent to other processes, without the memory that their tracebacks hold."""

from __future__ import annotations

import pickle
from typing import Any


def without_tracebacks(error: BaseException) -> None:
    """Make an error safe to keep. Its tracebacks hold every caller's variables, and so the state being saved."""
    links, seen = [error], set()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            # torch's CheckpointException has them by rank, with the text of their tracebacks.
            failures: Any = getattr(link, "failures", None)
            causes = [each[0] for each in failures.values() if type(each) is tuple] if type(failures) is dict else []
            links += [each for each in (link.__cause__, link.__context__, *causes) if isinstance(each, BaseException)]


def portable(error: BaseException) -> BaseException | None:
    """A copy of the error without its traceback and cause, as another process gets it; None if it does not pickle."""
    try:
        copied: BaseException = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just pickled
    except Exception:  # noqa: BLE001 - whatever its class does
        return None
    return copied
