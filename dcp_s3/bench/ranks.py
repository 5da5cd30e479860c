"""The ranks of a benchmark: child processes that save and load when they are told to."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from dcp_s3 import errors
from dcp_s3.settings import child_environment

_MODULE = "dcp_s3.bench.worker"
_OTHERS_SECONDS = 5.0
"""For which the other ranks are heard after one has failed: they may know better why."""
_END_SECONDS = 10.0


class Ranks:
    """Child processes, one for each rank. A context manager: at its end there are none left.

    Args:
        count: number of ranks.
        size: bytes of each rank's state.
    """

    def __init__(self, count: int, size: int) -> None:
        self._answers: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="dcp_s3-bench-")
        self._begin = {"ranks": count, "size": size, "rendezvous": f"{self._directory.name}/rendezvous"}
        self._count = count
        self.began: list[dict[str, Any]] = []
        """What the ranks answered when they began."""

    def __enter__(self) -> Ranks:
        try:
            for rank in range(self._count):
                self._processes.append(self._start(rank))
            self.began = self.tell({"do": "begin", **self._begin})
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._kill()

    def _end(self) -> None:
        """Let the ranks end by themselves."""
        for process in self._processes:
            _hang_up(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(_END_SECONDS)

    def tell(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give all ranks an order, and wait for their answers.

        Returns:
            The answers, by rank.

        Raises:
            DcpS3Error: what failed on a rank; or a rank ended.
        """
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its missing answer tells
                process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self._count:
            rank, line = self._answers.get()
            answers[rank] = self._read(rank, line)
            if "error" in answers[rank]:
                raise self._failure(answers)
        return [answers[rank] for rank in range(self._count)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        environment = child_environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self._count),
            LOCAL_WORLD_SIZE=str(self._count),
            # Otherwise gloo looks for this host's name.
            GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
        )
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends them
        )
        threading.Thread(
            target=self._listen, args=(rank, process.stdout), name=f"dcp_s3-bench-{rank}", daemon=True
        ).start()
        return process

    def _listen(self, rank: int, lines: Any) -> None:
        with lines:
            for line in lines:
                self._answers.put((rank, line))
        self._answers.put((rank, None))

    def _read(self, rank: int, line: str | None) -> dict[str, Any]:
        if line is not None:
            answer: dict[str, Any] = json.loads(line)
            return answer
        try:
            status: int | None = self._processes[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return {"kind": "DcpS3Error", "error": f"its process ended with status {status}"}

    def _failure(self, answers: dict[int, dict[str, Any]]) -> errors.DcpS3Error:
        until = time.monotonic() + _OTHERS_SECONDS
        with contextlib.suppress(queue.Empty):
            while len(answers) < self._count:
                rank, line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                answers[rank] = self._read(rank, line)
        failed = {rank: answer for rank, answer in answers.items() if "error" in answer}
        # What is not dcp_s3's, such as a lost connection to another rank, is likely a consequence.
        rank = min(failed, key=lambda each: (not hasattr(errors, failed[each]["kind"]), each))
        kind = getattr(errors, failed[rank]["kind"], errors.DcpS3Error)
        error: errors.DcpS3Error = kind(f"rank {rank}: {failed[rank]['error']}")
        return error

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            _hang_up(process)
        self._directory.cleanup()


def _hang_up(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
