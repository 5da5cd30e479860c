"""What a forked child has to forget: connections, threads and locks are its parent's."""

from __future__ import annotations

import os
from collections.abc import Callable

_resets: list[Callable[[], object]] = []


def reset_in_child(reset: Callable[[], object]) -> Callable[[], object]:
    """Have ``reset`` called in every child of a fork, before its own code goes on; in order of registration.

    A lock that another thread held at the time of the fork would stay locked for ever: make a new one.
    """
    _resets.append(reset)
    return reset


def _reset() -> None:
    for reset in _resets:
        reset()


os.register_at_fork(after_in_child=_reset)
