"""Saves by `AsyncCheckpointerType.PROCESS` that overlap.

torch 2.13 gives each of them a thread of its own, and all threads talk to the one checkpoint process through one pipe,
unlocked: answers go to the wrong save, two first saves start two processes, and ranks may send their saves in different
orders, which mixes up the collectives. So a save waits here until those before it are through with the pipe.
"""

from __future__ import annotations

import time

from dcp_s3 import torch_private
from dcp_s3.stage.release import release
from dcp_s3.stage.turns import take_turn

_PIPE = "the checkpoint process"


def serialize_process_saves() -> None:
    """Make overlapping saves by `AsyncCheckpointerType.PROCESS` queue up in the order of the calls, exactly.

    Call it once, before the first such save, if several ranks make saves that may overlap. It replaces the constructor
    of torch's executor in this process, for every backend. Without it dcp_s3's saves take turns as well, but in the
    order in which their threads come to the pipe, which two saves within a millisecond may swap on one rank.
    """
    torch_private.save_in_turn(release)


def wait_for_process() -> None:
    """Before a save begins: wait while an earlier one starts the checkpoint process."""
    while torch_private.is_process_starting():
        time.sleep(0.01)


def wait_for_pipe() -> None:
    """In the thread of a save, before its state is sent: wait for the answers to those that were sent before."""
    take_turn(_PIPE)
