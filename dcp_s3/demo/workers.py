"""The training processes of the demo: started, watched and killed together."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dcp_s3.settings import child_environment

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOG_TAIL = 3000


class WorkerError(Exception):
    """A worker failed. The message has the end of its log."""


class TrainingProcesses:
    """One `dcp_s3.demo.train` process per rank, as torchrun would start them.

    They are not started by torchrun, so that one SIGKILL each takes all of them down at the same instant, with nobody
    left to clean up. Leaving the context kills what still runs.
    """

    def __init__(self, ranks: int, arguments: Sequence[str], *, logs: Path) -> None:
        self.ranks = ranks
        logs.mkdir(parents=True)
        self._logs = [logs / f"rank{rank}" for rank in range(ranks)]
        self._read = 0
        environment = child_environment(
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
            OMP_NUM_THREADS="1",  # the ranks share few cores
        )
        # Otherwise gloo looks up the host's name, which does not work on every laptop.
        environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(self._logs):
                with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "dcp_s3.demo.train", *arguments],
                        cwd=logs,  # Python finds modules there, too: a directory with nothing else in it
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # Ctrl-C reaches only the demo, which then kills them
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> TrainingProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, then wait until they are gone."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)  # does nothing if it has ended
        for process in self._processes:
            process.wait()

    def running(self) -> bool:
        """Whether any process still runs.

        Raises:
            WorkerError: a process has failed.
        """
        codes = [process.poll() for process in self._processes]
        for rank, code in enumerate(codes):
            if code:
                raise WorkerError(f"rank {rank} ended with exit status {code}:\n{self._tail(rank)}")
        return None in codes

    def new_lines(self) -> list[str]:
        """The complete lines that rank 0 printed since the last call."""
        with self._logs[0].with_suffix(".out").open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return complete.decode(errors="replace").splitlines()

    def _tail(self, rank: int) -> str:
        text = self._logs[rank].with_suffix(".err").read_text(errors="replace")
        return text[-_LOG_TAIL:].strip() or "(it printed nothing)"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
