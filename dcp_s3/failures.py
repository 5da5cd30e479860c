"""Failures: how errors leave dcp_s3 for DCP and for other processes, and what failed on which ranks, for people.

DCP sends the traceback of each rank's error to all ranks, and each prints all of them. The message of a dcp_s3 error
says it all: it leaves without frames and causes, which are in the log, at level DEBUG. Others keep their frames.
"""

from __future__ import annotations

import functools
import logging
import pickle
import re
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dcp_s3 import errors

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_MOST_FRAMES = 8
_MOST_CAUSES = 3
_MOST_TEXT = 1000
WIDTH = 100
"""Most characters in a line of a panel, unless one word (a URL) is longer."""
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
# Hex names, sizes and times differ from rank to rank even if the cause is the same.
_OWN = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
_REMEDY = re.compile(r"[;.,]? *Remedy[:,] *")


def panel(
    what: str, failures: Mapping[int, BaseException], *, left: str = "", last_good: str = "", resume: str = ""
) -> str:
    """A failure as lines of text: what failed on which ranks, each cause once with its remedy, how to go on.

    At most `WIDTH` characters wide, and about ten lines if there is one cause.

    Args:
        what: ``the save of step 1000 to s3://bucket/run/step-00001000``.
        failures: the causes by rank.
        left: what the failure left behind, and what it left alone.
        last_good: the last good checkpoint.
        resume: the line of code to go on with.
    """
    causes = _causes(failures)
    fields = []
    for ranks, text in causes:
        cause, *remedies = _REMEDY.split(text)
        fields += [("Cause" if len(causes) == 1 else f"On {ranks}", cause), *(("Remedy", each) for each in remedies)]
    fields += [each for each in (("Left", left), ("Last good", last_good), ("Resume", resume)) if each[1]]
    lines = textwrap.wrap(f"{what} failed on {name_ranks(real_causes(failures))}", WIDTH, **_WHOLE_WORDS)
    for name, text in fields:
        first = f"  {name}: "
        for line in text.splitlines() or [""]:
            wrapped = textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent="    ", **_WHOLE_WORDS)
            lines, first = lines + wrapped, "    " if wrapped else first
    return "\n".join(lines)


def name_failed(failures: Mapping[int, BaseException]) -> str:
    """``rank 1 cannot go on: ZeroDivisionError: ...``. Ranks with the same cause share one entry, in the words of the
    first."""
    return "; ".join(f"{ranks} cannot go on: {cause}" for ranks, cause in _causes(failures))


def _causes(failures: Mapping[int, BaseException]) -> list[tuple[str, str]]:
    """Ranks and cause, alike ones once."""
    causes = real_causes(failures)
    alike: dict[tuple[type, str], list[int]] = {}
    for rank, error in causes.items():
        alike.setdefault((type(error), _OWN.sub("#", str(error))), []).append(rank)
    told = []
    for ranks in list(alike.values())[:_MOST_CAUSES]:
        text = f"{type(causes[ranks[0]]).__name__}: {causes[ranks[0]]}"
        told.append((name_ranks(ranks), text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."))
    left = sorted(rank for ranks in list(alike.values())[_MOST_CAUSES:] for rank in ranks)
    return [*told, (name_ranks(left), "other causes")] if left else told


def real_causes(failures: Mapping[int, BaseException]) -> dict[int, BaseException]:
    """Leave out the ranks that failed only because another one did, unless all of them say so."""
    causes = {rank: error for rank, error in failures.items() if not isinstance(error, errors.PeerReadError)}
    return causes or dict(failures)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 to 7, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    several = len(runs) > 1 or runs[0][0] != runs[0][1]
    named = (str(first) if first == last else f"{first} to {last}" for first, last in runs)
    return f"rank{'s' if several else ''} {', '.join(named)}"


# --- errors on their way out -----------------------------------------------------------------------------


def called_by_dcp(method: F) -> F:
    """Decorate a method of a writer, reader or planner that DCP calls: its errors leave without their frames, and the
    object's ``_tell_failed``, if it has one, is told of each."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error, errors.DcpS3Error):
                logger.debug("%s failed:", method.__qualname__, exc_info=True)
                without_tracebacks(error)
                error.__cause__ = error.__context__ = None
                error._without_frames = True
            tell = getattr(self, "_tell_failed", None)
            # Metadata that cannot be read fail a load later, when DCP uses them.
            if tell is not None and method.__name__ != "read_metadata":
                tell(error)
            if not isinstance(error, errors.DcpS3Error):
                raise
            failure = error
        try:
            raise failure
        finally:
            del failure, self, args, kwargs  # no cycle, and no state kept: the traceback has this frame

    return call  # type: ignore[return-value]


def frames_of_others(error: BaseException) -> str:
    """Where an error that is none of dcp_s3's was raised, as text for the log; empty if all causes are of dcp_s3."""
    failures: Any = getattr(error, "failures", None)  # of torch's CheckpointException: cause and frames of each rank
    of_ranks = [each for each in failures.values() if type(each) is tuple] if type(failures) is dict else []
    for cause, frames in of_ranks or [(error, traceback.extract_tb(error.__traceback__))]:
        if not isinstance(cause, errors.DcpS3Error) and frames:
            return "\nTraceback (most recent call last):\n" + "".join(traceback.format_list(frames[-_MOST_FRAMES:]))
    return ""


def without_tracebacks(error: BaseException) -> None:
    """Make an error safe to keep. Its tracebacks hold every caller's variables, and so the state being saved."""
    links, seen = [error], set()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            failures: Any = getattr(link, "failures", None)
            of_ranks = failures.values() if type(failures) is dict else ()
            causes = (link.__cause__, link.__context__, *(each[0] for each in of_ranks if type(each) is tuple))
            links += [each for each in causes if isinstance(each, BaseException)]


def portable(error: BaseException) -> BaseException | None:
    """A copy of the error without its traceback and cause, as another process gets it; None if it does not pickle."""
    try:
        copied: BaseException = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just pickled
    except Exception:  # noqa: BLE001 - whatever its class does
        return None
    return copied
