"""What goes on although a signal's handler raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dcp_s3.load.peers.interrupts import run_through


class Interrupt(BaseException):
    pass


class Interrupts:
    """Raises `Interrupt` on the main thread, from another."""

    def __init__(self) -> None:
        self._raised = threading.Semaphore(0)

    def handle(self, *_: object) -> None:
        self._raised.release()
        raise Interrupt

    def send(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self._raised.acquire(timeout=60)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    found = Interrupts()
    before = signal.signal(signal.SIGUSR1, found.handle)
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_it_ends_whatever_is_raised_meanwhile(interrupts: Interrupts) -> None:
    def function() -> str:
        interrupts.send()
        interrupts.send()
        return "done"

    result, raised = run_through(function)
    assert (result, type(raised)) == ("done", Interrupt)
    assert run_through(lambda: 1) == (1, None)


def test_its_own_error_is_raised(interrupts: Interrupts) -> None:
    def function() -> None:
        interrupts.send()
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        run_through(function)


def test_without_a_thread_it_runs_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    result, raised = run_through(lambda: 2)
    assert result == 2
    assert "can't start" in str(raised)
