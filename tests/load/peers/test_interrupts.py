"""What goes on although a signal's handler raises."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_s3.load.peers.interrupts import Latch, run_through, wait_through
from tests.interrupting import Interrupts


class Interrupt(BaseException):
    pass


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    found = Interrupts(Interrupt)
    yield found
    found.end()


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


def test_an_interrupt_of_an_interrupt_ends_no_wait(interrupts: Interrupts) -> None:
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()
    told: list[tuple[type[BaseException], bool]] = []

    class Begun(Latch):
        def wait(self) -> None:
            begun.put(None)
            super().wait()

    ended = Begun()

    def end() -> None:
        begun.get()
        interrupts.send()
        time.sleep(0.1)
        ended.set()

    def tell(error: BaseException) -> None:
        told.append((type(error), ended.is_set))
        if len(told) == 1:
            signal.raise_signal(signal.SIGUSR1)

    with ThreadPoolExecutor() as pool:
        pool.submit(end)
        wait_through(ended, tell)
        assert ended.is_set
    assert len(told) >= 2
    assert set(told) == {(Interrupt, False)}
