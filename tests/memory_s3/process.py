"""The server in a process of its own."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from pathlib import Path

from .http import Link

_ROOT = Path(__file__).resolve().parents[2]


class MemoryS3Process:
    """A context manager that runs ``python -m tests.memory_s3`` and stops it at the end.

    The server also ends when this process dies.
    """

    def __init__(self, preallocate: int = 0, *, link: Link | None = None) -> None:
        """Take the settings: bytes of memory to touch at start, the link."""
        self._command = [
            sys.executable, "-m", "tests.memory_s3", "--until-stdin-closes",
            "--preallocate", str(preallocate),
        ]  # fmt: skip
        if link is not None:
            self._command += ["--latency", str(link.latency)]
            if link.rate != math.inf:
                self._command += ["--connection-rate", str(int(link.rate))]
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    def __enter__(self) -> MemoryS3Process:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        assert self._process.stdout is not None
        self.endpoint_url = self._process.stdout.readline().strip()
        if not self.endpoint_url:
            raise RuntimeError(f"the server did not start: status {self._process.wait()}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):
            self._process.communicate()  # closes its standard input, which ends it
