"""What a process prints of a failed save or load that nobody catches: one panel for the job, no frames but the user's.

DCP raises the failures of all ranks on all ranks, each with a traceback: thousands of lines for one missing
permission. `install` puts a function before ``sys.excepthook`` that shortens such an error and passes it on to the hook
that was there, which prints it as it prints any. The first rank prints the panel, each other one a line.

It shortens only errors of dcp_s3, and torch's CheckpointException if all of its causes are errors of dcp_s3. All others
go on as they are, and so does an error that was raised while another one was handled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import ranks
from dcp_s3.boundary import describe, find_call, take_telling
from dcp_s3.errors import DcpS3Error, StepFailedError
from dcp_s3.failures import Failed, first_cause, headline, panel

_OURS = ("dcp_s3.", "torch.distributed.", "concurrent.futures.")

_MOST_HEAD = 250

_lock = threading.Lock()
_previous: Callable[..., Any] | None = None


def install() -> None:
    """Shorten the failures that this process does not catch. Only the first call does anything."""
    global _previous
    with _lock:
        if _previous is None:
            _previous = sys.excepthook
            sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    previous = _previous or sys.__excepthook__
    with _termination_put_off():
        try:
            shown = shorten(error, trace)
        except Exception:  # noqa: BLE001 - the error itself must be printed, whatever fails here
            shown = None
        if shown is not None:
            previous(type(shown), shown, shown.__traceback__)
            return
    previous(kind, error, trace)


@contextlib.contextmanager
def _termination_put_off() -> Iterator[None]:
    """Let the first SIGTERM wait for the end of the body; a second one does not.

    torchrun sends it to all ranks as soon as one has ended: to the first one too, which has more to say than the others
    and looks for the last good checkpoint before.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    waiting = False

    def put_off(number: int, frame: types.FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            waiting = True

    signal.signal(signal.SIGTERM, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if waiting:
            os.kill(os.getpid(), signal.SIGTERM)


def shorten(error: BaseException, trace: types.TracebackType | None) -> BaseException | None:
    """The error to print instead, of a class with the same name; None if it is to be printed as it is."""
    if error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        return None
    if isinstance(error, CheckpointException):
        return _shorten_shared(error, trace)
    if isinstance(error, StepFailedError) and error.failures:
        return _shorten_failed_step(error, trace)
    if isinstance(error, DcpS3Error):
        if ranks.rank() == 0:
            return _replace(error, str(error), _only_users(trace))
        return _replace(error, f"{error}{_place(trace)}", None)
    return None


def _shorten_shared(error: CheckpointException, trace: types.TracebackType | None) -> BaseException | None:
    failures = {rank: cause for rank, (cause, _) in error.failures.items()}
    if not failures or not all(isinstance(cause, DcpS3Error) for cause in failures.values()):
        return None
    call = find_call(error, trace)
    if (ranks.rank() if call is None else call.rank) > 0:
        what = "the save or load" if call is None else f"the {'load of' if call.loading else 'save to'} {call.url}"
        head = headline(Failed(what, failures))
        return _replace(error, f"{head}: {first_cause(failures)} (rank 0 says more){_place(trace)}", None)
    if take_telling(error):
        return _replace(error, panel(describe(error, call)), _only_users(trace))
    return _replace(error, f"{first_cause(failures)} (logged above)", _only_users(trace))


def _shorten_failed_step(error: StepFailedError, trace: types.TracebackType | None) -> BaseException:
    rank = ranks.rank() if error.rank is None else error.rank
    head, cause = str(error).splitlines()[0][:_MOST_HEAD], first_cause(error.failures)
    if rank == 0 and take_telling(error):
        return _replace(error, str(error), _only_users(trace))
    line = head if cause.partition(":")[0] in head else f"{head}: {cause}"
    if rank == 0:
        return _replace(error, f"{line} (logged above)", _only_users(trace))
    return _replace(error, f"{line} (rank 0 says more){_place(trace)}", None)


def _replace(error: BaseException, text: str, trace: types.TracebackType | None) -> BaseException:
    kind = type(error)
    shown = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__str__": lambda _: text})
    made: BaseException = BaseException.__new__(shown)
    made.__dict__.update(error.__dict__)
    made.args = error.args
    return made.with_traceback(trace)


def _only_users(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of dcp_s3 and torch.distributed; as it is if no other frame is left."""
    kept = _users(trace)
    shown = None
    for each in reversed(kept):
        shown = types.TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or trace


def _place(trace: types.TracebackType | None) -> str:
    kept = _users(trace)
    return f" [{kept[-1].tb_frame.f_code.co_filename}:{kept[-1].tb_lineno}]" if kept else ""


def _users(trace: types.TracebackType | None) -> list[types.TracebackType]:
    kept = []
    while trace is not None:
        if not f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(_OURS):
            kept.append(trace)
        trace = trace.tb_next
    return kept
