"""Resets for a forked child: connections, threads and locks are its parent's."""

from __future__ import annotations

import os
from collections.abc import Callable

_resets: list[Callable[[], object]] = []


def reset_in_child(reset: Callable[[], object]) -> Callable[[], object]:
    """Call ``reset`` in every forked child before its own code goes on, in order of registration.

    A lock that another thread held at the time of the fork would stay locked forever: make a new one.
    """
    _resets.append(reset)
    return reset


def _reset() -> None:
    for reset in _resets:
        reset()


os.register_at_fork(after_in_child=_reset)
