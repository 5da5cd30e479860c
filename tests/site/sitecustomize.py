"""Runs programs as `python ...` does, without importing torch for each: on the path of one interpreter only.

The interpreter imports this module before it opens its script. Here it imports torch, and then forks for each program
that it is asked for. The child has an environment and output of its own, and goes on to run `program.py`:
its tracebacks, warnings, exit handlers and exit status are those of any process. See `tests.interpreter`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from typing import Any


def _prepare() -> None:
    import typer.testing  # noqa: F401

    import tests.preload  # noqa: F401

    gc.collect()
    gc.freeze()  # what is imported is never garbage: at its end each process would look through it for a second


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that is asked for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    sys.argv[:] = request["arguments"]
    sys.stdin = sys.__stdin__ = _open(0, "r")
    sys.stdout = sys.__stdout__ = _open(1, "w")
    sys.stderr = sys.__stderr__ = _open(2, "w", buffering=1, errors="backslashreplace")


def _open(number: int, mode: str, **options: Any) -> Any:
    return open(number, mode, encoding="utf-8", closefd=False, **options)


def _read(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A request, and the files that came with it: standard input, output and error, and where its end is told."""
    line, files, _, _ = socket.recv_fds(channel, 2**16, 4)
    while line and not line.endswith(b"\n"):
        line += channel.recv(2**16)
    return line, files


def _serve() -> None:
    _prepare()
    channel = socket.socket(fileno=os.dup(0))
    channel.sendall(b"ready\n")
    while True:
        line, files = _read(channel)
        if not line:
            os._exit(0)
        if os.fork() == 0:  # waits for the end of the program, and tells it
            child = os.fork()
            if child == 0:
                channel.close()
                _become(json.loads(line), files)
                return
            channel.sendall(b"%d\n" % child)
            channel.close()
            for number in (0, 1, 2, *files[:3]):
                os.close(number)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(files[3], b"%d" % code)
            os._exit(0)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


_serve()
