"""Real S3 servers for the tests; `Servers` starts each at its first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .process import ServerStartError
from .rgw import rgw
from .server import ENDPOINT, S3Server, ServerUnavailable, external, memory, moto, rclone

__all__ = ["NAMES", "S3Server", "ServerStartError", "ServerUnavailable", "Servers"]

_START: dict[str, Callable[[], contextlib.AbstractContextManager[S3Server]]] = {
    "memory": memory,
    "moto": moto,
    "rclone": rclone,
    "rgw": rgw,
    "external": external,
}

# What a test runs on unless it says otherwise.
NAMES = tuple(n for n in _START if n != "external" or ENDPOINT)


class Servers:
    """Every server that was asked for, running until `close()`. A failed start is not retried."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._outcome: dict[str, S3Server | ServerUnavailable | ServerStartError] = {}
        if ENDPOINT:
            # At once: its credentials are looked up in the environment, which each test clears.
            with contextlib.suppress(ServerUnavailable):
                self.get("external")

    def get(self, name: str) -> S3Server:
        """Starts it unless it runs already.

        Raises ServerUnavailable (it cannot run here) or ServerStartError (it should, but did not).
        """
        if name not in self._outcome:
            try:
                self._outcome[name] = self._stack.enter_context(_START[name]())
            except (ServerUnavailable, ServerStartError) as e:
                self._outcome[name] = e
        outcome = self._outcome[name]
        if isinstance(outcome, S3Server):
            return outcome
        raise outcome

    def close(self) -> None:
        self._stack.close()
        self._outcome.clear()
