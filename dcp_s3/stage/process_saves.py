"""Overlapping saves by `AsyncCheckpointerType.PROCESS` take turns.

torch 2.13 gives each of them a thread of its own. All threads use one pipe to the one checkpoint process, without a
lock: answers go to the wrong save, two first saves start two processes, and ranks may send their saves in different
orders, which mixes up the collectives. So a save waits here until the earlier ones have finished with the pipe.
"""

from __future__ import annotations

import time

from dcp_s3 import torch_private
from dcp_s3.stage.release import release
from dcp_s3.stage.turns import take_turn

_PIPE = "the checkpoint process"


def serialize_process_saves() -> None:
    """Make overlapping saves by `AsyncCheckpointerType.PROCESS` queue up in exactly the order of the calls.

    Call it once, before the first such save, if several ranks make saves that may overlap. It replaces the constructor
    of torch's executor in this process, for every backend. Without it dcp_s3's saves take turns as well, but in the
    order in which their threads reach the pipe. Two saves within a millisecond may swap that order on one rank.
    """
    torch_private.save_in_turn(release)


def wait_for_process() -> None:
    """Before a save begins: wait while an earlier save starts the checkpoint process."""
    while torch_private.is_process_starting():
        time.sleep(0.01)


def wait_for_pipe() -> None:
    """In the thread of a save, before its state is sent: wait for the answers to all earlier saves."""
    take_turn(_PIPE)
