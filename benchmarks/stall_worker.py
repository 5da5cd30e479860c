"""The measuring process of :mod:`benchmarks.stall`: prints each figure, as it comes, as a line of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from benchmarks.cases import CASES, Case, Target
from benchmarks.llama import llama_shapes
from benchmarks.save_load import empty
from benchmarks.stall_report import Stall, Training
from benchmarks.units import MIB

State = dict[str, torch.Tensor]

#: Saved before anything is measured, so that imports, clients and threads are there.
_WARM_UP_BYTES = 4 * MIB
#: Elements at the start of each tensor that a training step changes. All of a state of GiBs would take longer on a
#: CPU than the step.
_CHANGED = 128
#: Looked at in what was saved. There in a state of any size.
_WITNESS = "model.norm.weight"
_MATRIX = 1024


def _ours(asynchronous: bool) -> AsyncStager:
    from dcp_s3 import S3Stager

    return S3Stager(asynchronous=asynchronous)


def _default(asynchronous: bool = False) -> AsyncStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=asynchronous,
            use_non_blocking_copy=False,
        )
    )


@dataclass(frozen=True)
class Way:
    """A way to call ``dcp.async_save``."""

    backend: str
    """Whose writer, of :data:`benchmarks.cases.CASES`."""
    stager: Callable[[], AsyncStager] | None = None
    """Makes the ``async_stager``; None: it is not given."""
    kept: bool = False
    """One stager for all saves, instead of one each."""
    trained: bool = False
    """Also measured in the training loop."""


WAYS: dict[str, Way] = {
    "dcp_s3-blocking": Way("dcp_s3", lambda: _ours(False), kept=True, trained=True),
    "dcp_s3-async": Way("dcp_s3", lambda: _ours(True), kept=True, trained=True),
    "dcp_s3-writer": Way("dcp_s3"),
    # Unsafe if saves overlap: the next one changes what the last one still uploads. They do not here.
    "torch-kept": Way("dcp_s3", _default, kept=True),
    "torch-async": Way("dcp_s3", lambda: _default(True), kept=True),
    "torch-blocking": Way("dcp_s3", BlockingAsyncStager),
    # What DCP does for a writer that does not stage, if it is given no stager.
    "torch-fresh": Way("dcp_s3", _default, trained=True),
    "s3torchconnector": Way("s3torchconnector", trained=True),
    "fsspec": Way("fsspec", trained=True),
}


@dataclass(frozen=True)
class Plan:
    """A training loop."""

    multiplications: int
    """Of matrices, a step."""
    lead_in: int
    """Steps before the first save."""
    every: int
    """Steps from a save to the next, and after the last."""
    saves: int
    """With the first."""


def make_state(size: int) -> State:
    """About ``size`` bytes of parameters, shaped as a Llama's; all are 1, which takes no time to make."""
    return {name: torch.ones(shape) for name, shape in llama_shapes(size).items()}


def change(state: State, value: int) -> None:
    """Write ``value`` in place at the start of each tensor."""
    for tensor in state.values():
        tensor.view(-1)[:_CHANGED].fill_(value)


def calibrate(step_seconds: float) -> int:
    """Matrix multiplications that take about ``step_seconds`` on this machine, at least 1."""
    compute = Compute(1)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        compute.step()
        seconds.append(time.perf_counter() - start)
    return max(1, round(step_seconds / min(seconds)))  # the fastest: other programs slow the rest down


class Compute:
    """What a training step computes: ``multiplications`` of matrices, by all threads of torch."""

    def __init__(self, multiplications: int) -> None:
        self._multiplications = multiplications
        self._weights = torch.full((_MATRIX, _MATRIX), 1 / _MATRIX)
        self._activations = torch.ones(_MATRIX, _MATRIX)
        self._result = torch.empty(_MATRIX, _MATRIX)

    def step(self) -> None:
        """Do them."""
        for _ in range(self._multiplications):
            torch.mm(self._activations, self._weights, out=self._result)


class Memcpy:
    """A plain copy of ``size`` bytes between memory that has been touched."""

    def __init__(self, size: int) -> None:
        self._source = torch.ones(size, dtype=torch.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8)

    def seconds(self) -> float:
        """Copy."""
        start = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - start


class Save:
    """A ``dcp.async_save`` that has returned. ``value`` is what the state holds, from `change`."""

    def __init__(self, way: Way, stager: AsyncStager | None, case: Case, state: State, name: str, value: int) -> None:
        self._case = case
        self._name = name
        self._value = value
        self._witness = state[_WITNESS].shape
        writer = case.writer(name)
        self._start = time.perf_counter()
        made = None
        if stager is None and way.stager is not None:
            stager = made = way.stager()
        answer: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        self.return_seconds = self.seconds()
        if isinstance(answer, AsyncSaveResponse):
            self._staged: Future[None] | None = answer.staging_completion
            self._uploaded = answer.upload_completion
        else:
            self._staged, self._uploaded = None, answer
        if made is not None:
            self._uploaded.add_done_callback(lambda _: made.close())

    def seconds(self) -> float:
        """Since the call."""
        return time.perf_counter() - self._start

    @property
    def done(self) -> bool:
        """Whether the upload is complete."""
        return bool(self._uploaded.done())

    def wait_until_staged(self) -> None:
        """After this, the state may be changed. Raises what made staging fail."""
        if self._staged is not None:
            self._staged.result()

    def wait(self) -> None:
        """Wait for the upload. Raises what made it fail."""
        self._uploaded.result()

    def check(self) -> None:
        """Look whether the state was saved as it was at the call.

        Raises:
            RuntimeError: it was not.
        """
        loaded = {_WITNESS: torch.zeros(self._witness)}
        dcp.load(loaded, storage_reader=self._case.reader(self._name), no_dist=True)
        found = loaded[_WITNESS][:_CHANGED]
        if not bool((found == self._value).all()):
            raise RuntimeError(f"{_WITNESS} was saved with {found.unique().tolist()} instead of {self._value}")


class _Saver:
    """Begins and ends the saves of one way. At most one is on the server at a time."""

    def __init__(self, way: Way, target: Target) -> None:
        self._way = way
        self._target = target
        self._case = CASES[way.backend](target)
        self._count = 0

    def warm_up(self) -> None:
        """A small save that nothing remains of."""
        state = make_state(_WARM_UP_BYTES)
        stager = self.open()
        try:
            change(state, 0)
            self.finish(self.save(stager, state, 0))
        finally:
            if stager is not None:
                stager.close()

    def open(self) -> AsyncStager | None:
        """A stager to keep, if this way keeps one."""
        return self._way.stager() if self._way.kept and self._way.stager else None

    def save(self, stager: AsyncStager | None, state: State, value: int) -> Save:
        self._count += 1
        return Save(self._way, stager, self._case, state, f"save-{self._count}", value)

    def finish(self, save: Save) -> None:
        """Wait for the upload, look at what was saved, delete it."""
        save.wait()
        save.check()
        self.empty()

    def empty(self) -> None:
        """Delete what was saved, or a failed save has left."""
        empty(self._target, dict(os.environ))


def measure_stalls(targets: dict[str, Target], size: int, rounds: int) -> Iterator[tuple[str, Stall | str]]:
    """For each round and way, how long saves stall, or the traceback of a way that failed.

    A way that keeps its stager opens a new one each round and saves twice: the first save touches fresh memory. Not
    one for all rounds: the buffers of all ways together would not fit in the memory of a small machine. Where no
    stager is kept, only the first save of the first round counts as such.
    """
    state = make_state(size)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    memcpy = Memcpy(nbytes)
    memcpy.seconds()
    savers = {name: _Saver(WAYS[name], target) for name, target in targets.items()}
    value = 0
    for number in range(1, rounds + 1):
        for name, saver in savers.items():
            kept = WAYS[name].kept
            try:
                if number == 1:
                    saver.warm_up()
                stager = saver.open()
                try:
                    for first in (True, False) if kept or number == 1 else (False,):
                        value += 1
                        yield name, _measure_stall(saver, stager, state, value, memcpy, number, first)
                finally:
                    if stager is not None:
                        stager.close()
            except Exception:  # noqa: BLE001 - the other ways go on
                saver.empty()
                yield name, traceback.format_exc()


def _measure_stall(
    saver: _Saver,
    stager: AsyncStager | None,
    state: State,
    value: int,
    memcpy: Memcpy,
    number: int,
    first: bool,
) -> Stall:
    change(state, value)
    memcpy_seconds = memcpy.seconds()
    save = saver.save(stager, state, value)
    save.wait_until_staged()
    staged = save.seconds()
    change(state, -value)  # as training would, during the upload
    save.wait()
    saved = save.seconds()
    saver.finish(save)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return Stall(number, first, nbytes, memcpy_seconds, save.return_seconds, staged, saved)


def measure_training(targets: dict[str, Target], size: int, plan: Plan) -> Iterator[tuple[str, Training | str]]:
    """For each way a training loop, or the traceback of a way that failed."""
    for name, target in targets.items():
        try:
            yield name, train(WAYS[name], target, size, plan)
        except Exception:  # noqa: BLE001 - the other ways go on
            yield name, traceback.format_exc()


def train(way: Way, target: Target, size: int, plan: Plan) -> Training:
    """Run a training loop that saves, and time its steps.

    A step computes, waits until the save before (if it is asynchronous) has staged the state, and changes the state in
    place. A step with a save waits for the upload of the one before, then calls ``dcp.async_save``.
    """
    saver = _Saver(way, target)
    saver.warm_up()
    state = make_state(size)
    compute = Compute(plan.multiplications)
    for _ in range(3):
        compute.step()
    result = Training(sum(tensor.nbytes for tensor in state.values()), [], [], [], [])
    stager = saver.open()
    save: Save | None = None

    def end(save: Save) -> None:
        """Off the clock."""
        result.saved_seconds.append(save.seconds())
        saver.finish(save)

    try:
        for number in range(plan.lead_in + plan.saves * plan.every):
            saves = number >= plan.lead_in and (number - plan.lead_in) % plan.every == 0
            result.quiet.append(save is None and not saves)
            start = time.perf_counter()
            compute.step()
            if save is not None:
                save.wait_until_staged()
            change(state, number)
            seconds = 0.0
            if saves:
                if save is not None:
                    save.wait()
                    seconds = time.perf_counter() - start
                    end(save)
                    start = time.perf_counter()
                save = saver.save(stager, state, number)
                result.saves.append(number)
            result.step_seconds.append(seconds + time.perf_counter() - start)
            if save is not None and save.done:
                end(save)
                save = None
        if save is not None:
            save.wait()
            end(save)
    finally:
        if stager is not None:
            stager.close()
    return result


def main() -> None:
    """Measure what the first argument (JSON) asks for."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    request = json.loads(sys.argv[1])
    targets = {name: Target(**target) for name, target in request["targets"].items()}
    if "plan" in request:
        measured = measure_training(targets, request["size"], Plan(**request["plan"]))
    else:
        measured = measure_stalls(targets, request["size"], request["rounds"])
    for name, outcome in measured:
        if isinstance(outcome, str):
            answer: dict[str, Any] = {"failure": outcome}
        else:
            answer = {"stall" if isinstance(outcome, Stall) else "training": asdict(outcome)}
        print(json.dumps({"case": name} | answer), flush=True)


if __name__ == "__main__":
    main()
