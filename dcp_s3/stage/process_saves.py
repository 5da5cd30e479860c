"""Overlapping saves by `AsyncCheckpointerType.PROCESS` take turns.

torch 2.13 gives each of them a thread of its own. All threads use one pipe to the one checkpoint process, without a
lock: answers go to the wrong save, two first saves start two processes, and ranks may send their saves in different
orders, which mixes up the collectives. So a save waits here until the earlier ones have finished with the pipe.
"""

from __future__ import annotations

import time

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_s3 import torch_private
from dcp_s3.stage.turns import Turn, find_turns, take_turn

_PIPE = "the checkpoint process"
_LOST_SECONDS = 5.0
"""For which no thread has started the process, after a save that would have to."""


def draw_turn() -> Turn | None:
    """The turn of the `dcp.async_save` that calls a stager; None if another caller stages.

    Waits while an earlier save starts the checkpoint process: that takes a collective step, and a second save would
    take part in it on those ranks only that do not see the process yet.
    """
    kind = torch_private.find_async_save()
    if kind is None:
        return None
    if kind is not AsyncCheckpointerType.PROCESS:
        return Turn()
    _wait_for_process()
    turn = Turn()
    turn.share(_PIPE)
    return turn


def _wait_for_process() -> None:
    seen = time.monotonic()
    while not torch_private.has_checkpoint_process() and (earlier := find_turns(_PIPE)):
        if torch_private.is_process_starting():
            seen = time.monotonic()
        elif time.monotonic() - seen > _LOST_SECONDS:  # it could not be started; who keeps the error keeps the state
            for each in earlier:
                each.abandon()
        time.sleep(0.01)


def wait_for_pipe() -> None:
    """In the thread of a save, before its state is sent: wait for the answers to all earlier saves."""
    take_turn(_PIPE)
