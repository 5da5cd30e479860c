"""Ranks as processes on this host, for `dcp-s3 bench` and the demo."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dcp_s3.settings import child_environment


class RankProcesses:
    """A process for each rank, as torchrun would start them, with what they print in files.

    They are not started by torchrun, so that one SIGKILL each takes all of them down at the same instant, with nobody
    left to clean up. Leaving the context kills what still runs.
    """

    def __init__(self, module: str, arguments: Sequence[str], ranks: int, logs: Path, **environment: str) -> None:
        self.ranks, self._logs, self._processes = ranks, logs, list[subprocess.Popen[bytes]]()
        logs.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        every = child_environment(
            WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment
        )
        # Otherwise gloo looks up the host's name, which does not work on every laptop.
        every.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        try:
            for rank in range(ranks):
                with (logs / f"rank{rank}.out").open("wb") as out, (logs / f"rank{rank}.err").open("wb") as err:
                    process = subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        cwd=logs,  # Python finds modules there, too: a directory with nothing else in it
                        env=every | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,  # a rank may end when it does, so with this process
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # Ctrl-C reaches only this process, which then kills them
                    )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, then wait until they are gone."""
        for process in self._processes:
            process.kill()  # does nothing if it has ended
        for process in self._processes:
            process.communicate()

    def statuses(self) -> list[int | None]:
        """The exit status of each; None while it runs."""
        return [process.poll() for process in self._processes]

    def lines(self, rank: int) -> list[str]:
        """The complete lines that a rank has printed."""
        text = (self._logs / f"rank{rank}.out").read_text(errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def last_words(self, rank: int) -> str:
        """The end of what a rank has written to stderr."""
        return (self._logs / f"rank{rank}.err").read_text(errors="replace")[-3000:].strip() or "(it printed nothing)"
