"""Child processes of the test servers: with a log, waited for, always stopped by their pid."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
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

START_TIMEOUT = 60.0
STOP_GRACE_SECONDS = 10.0
# A port that was free a moment ago may be taken when the server binds it.
PORT_ATTEMPTS = 3


class ServerStartError(RuntimeError):
    """A test server did not come up; the message holds the end of its log."""


class ServerProcess:
    """One child process, started at once, its output in `log`. `stop()` may be called twice."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
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

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Polls `ready`; ServerStartError when the process ends or `timeout` seconds pass."""
        deadline, why = time.monotonic() + timeout, f"was not ready after {timeout:g} s"
        while time.monotonic() < deadline:
            # Before `ready`: another server may answer on the port that this one could not bind.
            status = self._popen.poll()
            if status is not None:
                why = f"ended with status {status}"
                break
            if ready():
                return
            time.sleep(0.05)
        end = self.log.read_bytes()[-3000:].decode(errors="replace")
        raise ServerStartError(f"{self.name} {why}:\n{end}")

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


@contextlib.contextmanager
def listening(
    name: str, command: Callable[[int, Path], Sequence[str]], env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Runs `command(port, directory)` on a free port of 127.0.0.1; yields its URL once it accepts."""
    with tempfile.TemporaryDirectory(prefix=f"dcp-s3-{name}-") as directory, contextlib.ExitStack() as stack:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = free_port()
            process = ServerProcess(name, command(port, Path(directory)), Path(directory) / "log", env)
            stack.callback(process.stop)
            try:
                process.wait_until(lambda port=port: accepts(port), START_TIMEOUT)
                break
            except ServerStartError:
                if attempt == PORT_ATTEMPTS:
                    raise
        yield f"http://127.0.0.1:{port}"
