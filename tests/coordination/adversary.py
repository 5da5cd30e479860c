"""Ranks that run real code over a store in memory, while an adversary decides what happens next.

Each rank (`Actor`) has a thread, but one of them runs at a time, from one *point* to the next: a point is each request
to the store, and each sleep. What happens at the points is a list of `Move`s, plain values, so that hypothesis finds
the shortest one that breaks something. After the moves all go on fairly, and without faults, in virtual time.

    with Adversary(job, check=invariants) as adversary:
        adversary.play(moves)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from dcp_s3 import errors
from dcp_s3.store import Store
from tests.coordination.actor_store import ActorStore
from tests.coordination.moves import Kind, Move
from tests.memory_store import MemoryStore

T = TypeVar("T")

_LATENCY = 0.01  # virtual seconds of a request
_MOST_STEPS = 20_000
_STUCK = 60.0  # real seconds: a rank that waits for something else than the store and the clock


class Killed(BaseException):
    """Ends the thread of a rank."""


@dataclass(frozen=True)
class _Late:
    text: str
    call: Callable[[], object]


class Actor:
    """One rank: runs ``work`` in a thread of its own, from point to point.

    ``work`` gets the actor; its result is in `result` when it `has_ended`, or its exception in `error`.
    """

    def __init__(self, adversary: Adversary, name: str, attempt: int, work: Callable[[Actor], object]) -> None:
        self.name, self.attempt = name, attempt
        self.result: object = None
        self.error: Exception | None = None
        self.killed = False
        self.has_ended = False
        self.held = False
        self.ready_at = adversary.time
        self.fault: Kind | None = None
        self.point = "begins"
        self.adversary = adversary
        self._work = work
        self._go = threading.Lock()
        self._go.acquire()
        self._thread: threading.Thread | None = None

    # --- for the code that runs as this rank -----------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store as this rank reaches it."""
        return ActorStore(self.adversary, self)

    def now(self) -> float:
        """Virtual seconds."""
        return self.adversary.time

    def sleep(self, seconds: float) -> None:
        """Pass a point, and go on when it is so much later."""
        self._pass(f"sleeps {seconds:.2f} s", seconds)

    def request(self, text: str, call: Callable[[], T], *, changes: bool) -> T:
        """Pass a point, then carry out a request, as the adversary lets it be."""
        self._pass(text, 0.0)
        fault = self._take_fault(changes)
        self.adversary.log(self.name, text, fault)
        self.ready_at = self.adversary.time + _LATENCY
        if fault in (Kind.DELAY, Kind.REPEAT):
            self.adversary.late.append(_Late(f"{self.name}: {text}", call))
        if fault not in (Kind.DELAY, Kind.REFUSE):
            self.adversary.changed |= changes
            result = call()
        if fault in (Kind.DELAY, Kind.REFUSE, Kind.LOSE):
            raise errors.TransferError(f"no answer: {text}")
        return result

    def _take_fault(self, changes: bool) -> Kind | None:
        fault = self.fault
        if fault is None or (fault is not Kind.REFUSE and not changes):
            return None
        self.fault = None
        return fault

    def _pass(self, text: str, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            problem = f"{self.name}: {text}, in another thread than its own"
            self.adversary.problem = AssertionError(problem)
            raise RuntimeError(problem)
        if self.killed:
            raise Killed
        self.point = text
        self.ready_at = max(self.ready_at, self.adversary.time + seconds)
        if self.adversary.pass_turn(self):
            self._go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        try:
            if not self.killed:
                self.result = self._work(self)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        except Killed:
            pass
        finally:
            self.has_ended = True
            self.adversary.pass_turn(self)

    # --- for the adversary -------------------------------------------------------------------------------

    def go(self) -> None:
        """Let it run to its next point."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"actor-{self.name}", daemon=True)
            self._thread.start()
        else:
            self._go.release()

    def end(self) -> None:
        """End its thread."""
        self.killed |= not self.has_ended
        if self._thread is not None:
            if not self.has_ended:
                self.go()
            self._thread.join(_STUCK)
            assert not self._thread.is_alive()


Job = Callable[[int], Mapping[str, Callable[[Actor], object]]]
"""What the ranks of one attempt (from 0) do, by name."""


class Adversary:
    """Plays moves against the ranks of a job, and checks after each change of the store.

    Args:
        job: what the ranks do.
        check: looks at the store, after each change.
        most_restarts: how often the job may begin again.
        honours_conditions: whether the store honours the conditions of writes and deletes.
        page_size: most entries of a page of a listing.
        spare: whether a rank must not be killed by itself.
    """

    def __init__(
        self,
        job: Job,
        *,
        check: Callable[[Adversary], None] = lambda adversary: None,
        most_restarts: int = 2,
        honours_conditions: bool = True,
        page_size: int = 1000,
        spare: Callable[[Adversary, Actor], bool] = lambda adversary, actor: False,
    ) -> None:
        self.stored = MemoryStore(page_size=page_size)
        """The store as a reader sees it."""
        self.honours_conditions = honours_conditions
        self.time = 0.0
        self.changed = False
        self.late: list[_Late] = []
        self.actors: list[Actor] = []
        self.problem: BaseException | None = None
        self.attempts = 0
        self.had_faults = False
        """Whether anything was done that may keep the job from its end."""
        self._job, self._check, self._most_restarts, self._spare = job, check, most_restarts, spare
        self._script: Iterator[Actor] = iter(())
        self._done = threading.Lock()
        self._done.acquire()
        self._turns = itertools.count()
        self._last_turn: dict[str, int] = {}
        self._steps = 0
        self._story: list[tuple[float, str, str, Kind | None]] = []
        self._begin()

    def __enter__(self) -> Adversary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def living(self) -> list[Actor]:
        """Ranks that go on, or stand still."""
        return [each for each in self.actors if not each.has_ended]

    @property
    def story(self) -> str:
        """What happened, a line for each request."""
        return "\n".join(
            f"{time:8.2f}  {name}: {text}{f'  [{fault.value}]' if fault else ''}"
            for time, name, text, fault in self._story
        )

    def play(self, moves: Iterable[Move]) -> None:
        """Make the moves; then all go on fairly until they end, those that stand still at last."""
        self._script = self._play(moves)
        self.pass_turn(None)
        steps = -1
        while not self._done.acquire(timeout=_STUCK):
            if steps == self._steps:
                going = ", ".join(f"{each.name} after {each.point}" for each in self.living)
                raise AssertionError(f"somebody waits for something else than the store: {going}")
            steps = self._steps
        if self.problem is not None:
            raise self.problem

    def log(self, name: str, text: str, fault: Kind | None = None) -> None:
        self._story.append((self.time, name, text, fault))

    def pass_turn(self, actor: Actor | None) -> bool:
        """Let run whose turn it is: in the thread of the actor that ran, which saves most changes of threads.

        Returns:
            Whether that is another than ``actor``.
        """
        following = None
        if self.problem is None:
            try:
                following = next(self._script, None)
            except BaseException as error:  # noqa: BLE001 - raised in `play`
                self.problem = error
        if following is None:
            if self._done.locked():
                self._done.release()
            return True
        if following is actor:
            return False
        following.go()
        return True

    def close(self) -> None:
        """End all threads."""
        self._script = iter(())
        for each in self.actors:
            each.end()

    # --- internal ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        work = self._job(self.attempts)
        self.actors += [Actor(self, f"{name}/{self.attempts}", self.attempts, each) for name, each in work.items()]
        self.attempts += 1

    def _play(self, moves: Iterable[Move]) -> Iterator[Actor]:
        """Whose turn it is, one after the other."""
        for move in moves:
            yield from self._make(move)
            yield from self._pass_points(move)
        while self.living:
            while any(not each.held for each in self.living):
                yield from self._step(self._next())
            self._free()
        while self.late:
            self._land(0)

    def _make(self, move: Move) -> Iterator[Actor]:
        kind, living = move.kind, self.living
        if kind is not Kind.RUN:
            self.had_faults = True
        if kind is Kind.LAND:
            if self.late:
                self._land(move.actor % len(self.late))
        elif kind is Kind.FREE:
            self._free()
        elif kind in (Kind.RESTART, Kind.CRASH):
            if self.attempts <= self._most_restarts:
                self.log("the job", f"begins again, attempt {self.attempts}", kind)
                for each in living:
                    each.held = True
                    if kind is Kind.CRASH:
                        yield from self._kill(each)
                self._begin()
        elif living:
            yield from self._meddle(living[move.actor % len(living)], kind)

    def _meddle(self, actor: Actor, kind: Kind) -> Iterator[Actor]:
        if kind is Kind.KILL:
            if self._spare(self, actor):
                return
            self.log(actor.name, actor.point, kind)
            yield from self._kill(actor)
        elif kind is Kind.HOLD:
            self.log(actor.name, actor.point, kind)
            actor.held = True
        elif kind is not Kind.RUN:
            actor.fault = kind

    def _pass_points(self, move: Move) -> Iterator[Actor]:
        chosen = self.living[move.actor % len(self.living)] if self.living and move.alone else None
        for _ in range(move.steps):
            if all(each.held for each in self.living) or (chosen is not None and (chosen.has_ended or chosen.held)):
                return
            yield from self._step(chosen or self._next())

    def _next(self) -> Actor:
        """Who is first in virtual time; of those the one that has waited longest."""
        going = [each for each in self.living if not each.held]
        return min(going, key=lambda each: (max(each.ready_at, self.time), self._last_turn.get(each.name, -1)))

    def _step(self, actor: Actor) -> Iterator[Actor]:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise AssertionError(f"no end after {_MOST_STEPS} points:\n" + "\n".join(self.story.splitlines()[-60:]))
        self.time = max(self.time, actor.ready_at)
        self._last_turn[actor.name] = next(self._turns)
        yield from self._let_run(actor)
        self._look()

    def _let_run(self, actor: Actor) -> Iterator[Actor]:
        yield actor
        if actor.has_ended:
            self.log(actor.name, self._end_of(actor))

    def _end_of(self, actor: Actor) -> str:
        if actor.killed:
            return "is dead"
        return f"returns {actor.result!r}" if actor.error is None else f"raises {actor.error!r}"

    def _kill(self, actor: Actor) -> Iterator[Actor]:
        actor.killed = True
        yield from self._let_run(actor)

    def _free(self) -> None:
        for each in self.living:
            if each.held:
                self.log(each.name, "goes on", Kind.FREE)
            each.held = False

    def _land(self, number: int) -> None:
        late = self.late.pop(number)
        try:
            late.call()
            outcome = ""
        except errors.StorageError as error:
            outcome = f" ({type(error).__name__})"
        self.log("late", late.text + outcome, Kind.LAND)
        self.changed = True
        self._look()

    def _look(self) -> None:
        if self.changed:
            self.changed = False
            self._check(self)
