"""Child processes of the test servers: with a log, waited for, always stopped by their pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Asks Linux to end the child when we die, however we die (SIGKILL included), then becomes the
# command. A tiny interpreter that execs, rather than preexec_fn: that is unsafe in a parent that
# has threads.
_DIE_WITH_PARENT = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""

STOP_GRACE_SECONDS = 10.0
# A port that was free a moment ago may be taken when the server binds it.
PORT_ATTEMPTS = 3


class ServerStartError(RuntimeError):
    """A test server did not come up; the message holds the end of its log."""


class ServerProcess:
    """One child process, started at once, its output in `log`. `stop()` may be called twice."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                # Not ours: `python -m moto.server` would import a moto.py of the directory.
                cwd=log.parent,
            )

    def tail(self, size: int = 3000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Polls `ready`; ServerStartError when the process ends or `timeout` seconds pass."""
        deadline = time.monotonic() + timeout
        while True:
            # Before `ready`: another server may answer on the port that this one could not bind.
            status = self._popen.poll()
            if status is not None:
                raise ServerStartError(f"{self.name} ended with status {status}:\n{self.tail()}")
            if ready():
                return
            if time.monotonic() > deadline:
                raise ServerStartError(f"{self.name} was not ready after {timeout:g} s:\n{self.tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._popen.poll() is not None:
            return
        self._popen.terminate()
        try:
            self._popen.wait(STOP_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def beside_python(program: str) -> str | None:
    """The program next to this interpreter (where pip puts it), else on PATH, else None."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)


@contextlib.contextmanager
def listening(
    name: str,
    command: Callable[[int], Sequence[str]],
    log: Path,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Runs `command(port)` on a free port of 127.0.0.1; yields its URL once it accepts."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        port = free_port()
        process = ServerProcess(name, command(port), log, env=env)
        try:
            process.wait_until(lambda port=port: accepts(port), timeout)
        except ServerStartError:
            process.stop()
            if attempt == PORT_ATTEMPTS:
                raise
            continue
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stop()
        return
