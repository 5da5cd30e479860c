"""Runs programs as processes of their own, in none of which torch is imported for seconds.

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
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[1]
_SITE = Path(__file__).parent / "site"


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
    """Starts processes; see ``site/sitecustomize.py``."""

    def __init__(self) -> None:
        path = os.pathsep.join(map(str, (_SITE, _ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([sys.executable, str(_SITE / "program.py")], stdin=theirs, env=environment)
        self._answers = self._channel.makefile()
        assert self._answers.readline() == "ready\n"

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
        request = {
            "arguments": command[1:],
            "directory": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
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

    def close(self) -> None:
        """End the interpreter."""
        self._answers.close()
        self._channel.close()
        self._process.wait()

    def _start(self, request: dict[str, Any], files: list[int], ours: Mapping[str, IO[Any]]) -> Program:
        end, telling = os.pipe()
        try:
            message = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._channel, [message], [*files, telling])
            self._channel.sendall(message[sent:])
        finally:
            os.close(telling)
        return Program(request["arguments"], int(self._answers.readline()), end, ours)
