"""Runs a user's script as the ranks of a job, each a process, and returns everything that they print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SITE = Path(__file__).parent / "site"
_TIMEOUT_SECONDS = 240


@dataclass(frozen=True)
class Outcome:
    """What a job printed, standard error and output of all ranks in one, and the exit status of each rank."""

    text: str
    codes: list[int]

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class Interpreter:
    """Runs scripts; see ``site/sitecustomize.py``.

    Args:
        home: directory for the script.
    """

    def __init__(self, home: Path) -> None:
        self._script = home / "script.py"
        path = os.pathsep.join(map(str, (_SITE, _ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._receive() == "ready\n"

    def run(self, directory: Path, script: str, ranks: int = 1) -> Outcome:
        """Run a script on ``ranks`` processes, with the environment as it is now."""
        self._script.write_text(textwrap.dedent(script).lstrip())
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "RENDEZVOUS": f"file://{directory}/rendezvous",
        }
        request = {"directory": str(directory), "environment": environment, "ranks": ranks}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        children = json.loads(self._receive())["started"]
        timer = threading.Timer(_TIMEOUT_SECONDS, _end, [children])
        timer.start()
        try:
            codes = json.loads(self._receive())
        finally:
            timer.cancel()
        return Outcome((directory / "out").read_text() if (directory / "out").exists() else "", codes)

    def _receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the interpreter."""
        self._process.communicate()  # closes its standard input, which ends it


def _end(children: list[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
