"""Hands a staged state to the thread of its save or to the checkpoint process, and a failed staging to the other ranks.

One asynchronous save at a time: if two of one process group overlapped, their collectives would mix, and torch sends
all saves by `AsyncCheckpointerType.PROCESS` through one pipe without a lock. So `stage`, which all ranks call in the
same order, waits until the save before it has ended in this process. torch ends the thread of a save with the save;
that the state is taken up in it shows which thread that is.

To the checkpoint process goes a `StagedState` as its structure plus one file descriptor for each of its buffers.

If `stage` raised on one rank, the others would wait forever for it in the collectives of the save. So with several
ranks it returns a state that raises on its rank in the first collective step: the save fails on all, with the cause.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NoReturn

import torch

from dcp_s3.errors import StagingError
from dcp_s3.failures import portable, without_tracebacks
from dcp_s3.process import reset_in_child
from dcp_s3.stage.memory import BufferPool, HostBuffer

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
_REPORT_SECONDS = 30.0
_LOST_SECONDS = 120.0
"""In which a save whose state is staged begins, unless `async_save` raised after it had staged."""
_EXECUTOR = "AsyncCheckpointExecutor"
"""How the names of torch's threads for asynchronous saves begin (torch 2.9 to 2.15; tests/test_torch_private.py)."""

_saves: list[AsyncSave] = []
"""The asynchronous saves under way, in order. Changed only by single operations, without a lock that a fork could leave
locked."""

reset_in_child(_saves.clear)


# --- one save at a time ------------------------------------------------------------------------------------


class AsyncSave:
    """One asynchronous save of this process, from the call of `stage` to its end. ``sent``: its state was staged in
    another process."""

    def __init__(self, *, sent: bool = False) -> None:
        self.has_ended = False
        """Set without a lock: by the garbage collector, too, in any thread at any place."""
        self.stall_seconds: float | None = None
        """Seconds for which the training waited in `stage`; None: not known."""
        self.error: BaseException | None = None
        """Why there is no copy of the state, or what failed later."""
        self.if_unfinished: Callable[[], object] | None = None
        """Called if its thread ends as it is, because something other than dcp_s3 failed, or another rank."""
        self._lost_at: float | None = None
        self._state: Any = lambda: None
        self._was_sent = sent
        _saves.append(self)

    def go_with(self, state: StagedState) -> None:
        """``state`` is what is saved, by DCP alone. If it is dropped, the save is over."""
        state.save, self.error = self, state.error
        self._state, self._lost_at = weakref.ref(state), time.monotonic() + _LOST_SECONDS
        weakref.finalize(state, self.end).atexit = False

    def end(self) -> None:
        """Let the next save go on. May be called again."""
        self.has_ended = True
        with contextlib.suppress(ValueError):
            _saves.remove(self)


class _Running:
    """The save of a thread. It goes when the thread ends, or begins another save."""

    def __init__(self, save: AsyncSave) -> None:
        self.save = save

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # modules may have lost their names already
            return
        # The save has ended: whoever keeps its future or its error does not keep its memory.
        save = self.save
        try:
            tell, save.if_unfinished = save.if_unfinished, None
            if tell is not None:
                tell()
            if save.error is not None:
                without_tracebacks(save.error)
                save.error = None
            if (state := save._state()) is not None:
                state.release()
        finally:
            save.end()


_thread: Any = threading.local()


def current_save() -> AsyncSave | None:
    """The asynchronous save of this thread; None if there is none."""
    running = getattr(_thread, "running", None)
    return running.save if running is not None and running.save._state() is not None else None


def wait_for_saves() -> None:
    """Wait until the asynchronous saves of this process have ended; in the thread of one of them, those before it: two
    whose states were staged by two threads at once must not wait for each other. A save that nobody has begun for a
    long time is lost."""
    running, saves = getattr(_thread, "running", None), list(_saves)
    if running is not None and running.save in saves:
        saves = saves[: saves.index(running.save)]
    started = reported = time.monotonic()
    for save in saves:
        while not save.has_ended:
            time.sleep(_LOOK_SECONDS)
            if save._lost_at is not None and time.monotonic() > save._lost_at:
                save.end()
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logger.warning(
                    "a save has waited %.0f s for the asynchronous save before it. Remedy: save less often; pass what "
                    "S3Stager.stage returns to one save, a copy for anything else comes from stage_now",
                    reported - started,
                )


# --- states ------------------------------------------------------------------------------------------------


class StagedState(dict[str, Any]):
    """A staged state dict, and the memory of its tensors."""

    save: AsyncSave | None = None
    error: BaseException | None = None
    """Why it is none: its only value raises this."""

    def __init__(
        self,
        state: dict[str, Any],
        tensors: Sequence[torch.Tensor] = (),
        buffers: Sequence[HostBuffer] = (),
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(state)
        self.buffers, self._tensors = buffers, tensors
        self.pool = None if pool is None else weakref.ref(pool)
        self._released = False

    def begin(self, *, sent: bool = False) -> None:
        """The state is taken up: in the thread of its save (always if it is ``sent`` to the checkpoint process), which
        ends with the save, or in a thread of the user's, where nobody can say when its save ends. A StagingError if it
        has ended."""
        if self._released:
            raise StagingError(
                "the save of this staged state has ended, and its memory is free. Remedy: stage the state again; a "
                "copy for several saves comes from S3Stager.stage_now"
            )
        if (save := self.save) is None:
            return
        save._lost_at = None
        if not (sent or save._was_sent or threading.current_thread().name.startswith(_EXECUTOR)):
            save.end()
        elif getattr(_thread, "running", None) is None or _thread.running.save is not save:
            _thread.running = _Running(save)

    def items(self) -> Any:
        """The items, as of any dict. DCP calls this first in the thread of the save."""
        self.begin()
        return super().items()

    def release(self) -> None:
        """Take the memory from the tensors; a view of one still keeps it."""
        self._released = True
        with torch.inference_mode():  # else tensors that were made in it cannot be changed
            for tensor in self._tensors:
                tensor.set_()  # type: ignore[call-overload]
        self.clear()
        self._tensors, self.buffers = (), ()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def failed_staging(error: BaseException) -> StagedState:
    """The state for a staging that failed."""
    if portable(error) is None:
        error = StagingError(f"{type(error).__name__}: {error}")
    without_tracebacks(error)
    state = StagedState({"__dcp_s3_staging_failed__": _RaiseWhenSaved(error)})
    state.error = error
    return state


class _RaiseWhenSaved:
    """Raises the cause when it is pickled, by any planner or writer."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        logger.error("a state could not be staged: %s: %s", type(self._error).__name__, self._error)
        raise self._error


# --- to the checkpoint process -----------------------------------------------------------------------------


class _BufferPickler(ForkingPickler):
    """Writes a tensor that lies in one of ``buffers`` as a position in it."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[HostBuffer]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._buffers = buffers

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return None
        storage = value.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        for number, buffer in enumerate(self._buffers):
            if buffer.address <= address < buffer.address + buffer.size:
                place = (number, address - buffer.address, size)
                view = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
                return place, view, value.is_conj()
        return None


class _BufferUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[memoryview]) -> None:
        super().__init__(file)
        self._buffers = buffers
        self._storages: dict[tuple[int, int, int], torch.UntypedStorage] = {}

    def persistent_load(self, found: Any) -> torch.Tensor:
        place, (dtype, offset, shape, stride), conjugate = found
        storage = self._storages.get(place)
        if storage is None:
            number, start, size = place
            raw = torch.frombuffer(self._buffers[number], dtype=torch.uint8, count=size, offset=start)
            storage = self._storages[place] = raw.untyped_storage()
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        return torch._conj(tensor) if conjugate else tensor


def _reduce(state: StagedState) -> tuple[Any, ...]:
    state.begin(sent=True)
    if state.error is not None:
        return _rebuild, (state.error,)
    file, descriptors = io.BytesIO(), []
    try:
        _BufferPickler(file, state.buffers).dump(dict(state))
        for buffer in state.buffers:
            if buffer.kind == "private":  # another process cannot map it
                # stage() learns of PROCESS saves only from the first one. From now on its memory is shared at once.
                if state.pool is not None and (pool := state.pool()) is not None:
                    pool.shared = True
                private, buffer = buffer, HostBuffer(buffer.size, "shared")
                copied, source = (torch.frombuffer(each.lease(), dtype=torch.uint8) for each in (buffer, private))
                copied.copy_(source)
            descriptors.append((DupFd(buffer.fd), buffer.size))
    except Exception as error:  # noqa: BLE001 - it goes to all ranks
        # Raised here, it would reach only this rank, and the others would wait for its checkpoint process.
        why = StagingError(f"the state cannot be sent to the checkpoint process: {error!r}")
        return _rebuild, (failed_staging(why).error,)
    return _rebuild, (None, file.getvalue(), descriptors)


def _rebuild(
    error: BaseException | None, structure: bytes = b"", descriptors: Sequence[tuple[Any, int]] = ()
) -> StagedState:
    if error is not None:
        state = failed_staging(error)
    else:
        buffers = []
        for descriptor, size in descriptors:
            with os.fdopen(descriptor.detach(), "r+b") as file:
                buffers.append(memoryview(mmap.mmap(file.fileno(), size)))
        state = StagedState(_BufferUnpickler(io.BytesIO(structure), buffers).load())
    AsyncSave(sent=True).go_with(state)
    return state


ForkingPickler.register(StagedState, _reduce)
