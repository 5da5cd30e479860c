"""Runs scripts and programs as processes of their own, in none of which torch is imported for seconds.

An `Interpreter` has imported it. What it starts is forked from it, and then is as ``python script.py`` or
``python -m module`` would be: `Interpreter.popen` and `Interpreter.run` take the place of those of `subprocess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[1]
_SITE = Path(__file__).parent / "site"
_PROGRAM = (_SITE / "program.py").read_text()
_TIMEOUT_SECONDS = 240


@dataclass(frozen=True)
class Outcome:
    """What a job printed, standard error and output of all ranks in one, and the exit status of each rank."""

    text: str
    codes: list[int]

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class Program:
    """A process, with what `subprocess.Popen` has of it. Its parent is another process, which tells its end."""

    def __init__(self, arguments: Sequence[str], pid: int, end: int, ours: Mapping[str, IO[Any]]) -> None:
        self.args, self.pid, self._end = arguments, pid, end
        self.stdout, self.stderr = ours.get("stdout"), ours.get("stderr")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = int(os.read(self._end, 16))
                os.close(self._end)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        read: dict[IO[Any], Any] = {}
        files = [file for file in (self.stdout, self.stderr) if file is not None and not file.closed]
        threads = [
            threading.Thread(target=lambda file=file: read.update({file: file.read()}), daemon=True) for file in files
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        for file in files:
            file.close()
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return tuple(None if file is None else read.get(file) for file in (self.stdout, self.stderr))  # type: ignore[return-value]


class Interpreter:
    """Starts processes; see ``site/sitecustomize.py``. What it has started opens its script only then: one at a time.

    Args:
        home: directory for the script.
    """

    def __init__(self, home: Path) -> None:
        self._script = home / "script.py"
        path = os.pathsep.join(map(str, (_SITE, _ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([sys.executable, str(self._script)], stdin=theirs, env=environment)
        self._answers = self._channel.makefile()
        assert self._answers.readline() == "ready\n"

    # --- as subprocess ------------------------------------------------------------------------------------

    def popen(
        self,
        command: Sequence[str],
        *,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> Program:
        """A process that does what one of ``sys.executable`` with these arguments would."""
        assert command[0] == sys.executable
        self._write(_PROGRAM)
        request = {
            "arguments": command[1:],
            "directory": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": False,
        }
        ours: dict[str, IO[Any]] = {}
        with contextlib.ExitStack() as stack:
            files = [0]
            for name, given in (("stdout", stdout), ("stderr", stderr)):
                if given == subprocess.PIPE:
                    reading, writing = os.pipe()
                    stack.callback(os.close, writing)
                    ours[name] = os.fdopen(reading, "r")
                    files.append(writing)
                elif given is None:
                    files.append(len(files))
                else:
                    files.append(given if isinstance(given, int) else given.fileno())
            return self._start(request, files, ours)

    def run(
        self, command: Sequence[str], *, capture_output: bool = False, timeout: float | None = None,
        check: bool = False, **options: Any,
    ) -> subprocess.CompletedProcess[Any]:  # fmt: skip
        """As `popen`, until the end."""
        if capture_output:
            options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        program = self.popen(command, **options)
        try:
            done = subprocess.CompletedProcess(command, 0, *program.communicate(timeout))
        finally:
            program.kill()
        done.returncode = program.wait()
        if check:
            done.check_returncode()
        return done

    # --- scripts ------------------------------------------------------------------------------------------

    def run_script(self, directory: Path, script: str, ranks: int = 1) -> Outcome:
        """Run a script on ``ranks`` processes, with the environment as it is now."""
        self._write(textwrap.dedent(script).lstrip())
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "RENDEZVOUS": f"file://{directory}/rendezvous",
        }
        programs = []
        with (directory / "out").open("a") as out, open(os.devnull) as nothing:
            for rank in range(ranks):
                environment.update(RANK=str(rank), LOCAL_RANK=str(rank))
                request = {"arguments": [], "directory": str(directory), "environment": environment, "session": True}
                programs.append(self._start(request, [nothing.fileno(), out.fileno(), out.fileno()], {}))
        timer = threading.Timer(_TIMEOUT_SECONDS, _end, [programs])
        timer.start()
        try:
            codes = [program.wait() for program in programs]
        finally:
            timer.cancel()
        return Outcome((directory / "out").read_text(), codes)

    def close(self) -> None:
        """End the interpreter."""
        self._answers.close()
        self._channel.close()
        self._process.wait()

    def _write(self, script: str) -> None:
        new = self._script.with_suffix(".new")
        new.write_text(script)
        new.replace(self._script)

    def _start(self, request: dict[str, Any], files: list[int], ours: Mapping[str, IO[Any]]) -> Program:
        end, telling = os.pipe()
        try:
            message = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._channel, [message], [*files, telling])
            self._channel.sendall(message[sent:])
        finally:
            os.close(telling)
        return Program(request["arguments"], int(self._answers.readline()), end, ours)


def _end(programs: list[Program]) -> None:
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
