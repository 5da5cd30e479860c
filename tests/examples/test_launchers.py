"""What docs/launchers.md tells people to write: it parses, it runs under torchrun, and a restart goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dcp_s3 import latest
from examples import launchers_train
from tests.faulty import BUCKET, FaultyServer
from tests.killing import AtRequest
from tests.ranks import run_ranks

_REPOSITORY = Path(__file__).resolve().parents[2]
_TORCHRUN = Path(sys.executable).with_name("torchrun")
_PAGE = (_REPOSITORY / "docs" / "launchers.md").read_text()
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROOT = f"s3://{BUCKET}/run"  # that of the page


def _blocks(language: str) -> list[str]:
    return [block for found, block in _FENCED.findall(_PAGE) if found == language]


SBATCH = _blocks("bash")[0]


@pytest.mark.parametrize("language", ["bash", "yaml"])
def test_each_command_starts_the_script_with_torchrun(language: str) -> None:
    for block in _blocks(language):
        words = re.split(r"[\s\\-]+", " ".join(block.split()))
        assert {"torchrun", "examples.launchers_train"} <= {*words}
        if language == "yaml":
            yaml.safe_load(block)


# --- as it runs -------------------------------------------------------------------------------------------


def _environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{_TORCHRUN.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
        **more,
    }


class _Started:
    """A command in an empty directory. Nothing that it started is left at the end."""

    def __init__(self, command: list[str], cwd: Path, **environment: str) -> None:
        cwd.mkdir(exist_ok=True)
        self.log = cwd.with_suffix(f".{time.monotonic_ns()}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=_environment(**environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> _Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGTERM, which torchrun passes on to its ranks."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()

    def wait(self) -> int:
        """Exit status."""
        return self.process.wait(timeout=200)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened while the command runs."""
        deadline = time.monotonic() + 200
        while not happened():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _goes_on(digests: Path) -> None:
    """The same training on a rank of `run_ranks`, to the end."""
    options = launchers_train.parse_arguments(["--root", ROOT, "--steps", "22"])
    options.digest_file = digests
    launchers_train.train(options, launchers_train.StopSignal())


def _with_free_port(script: str) -> str:
    """Every node of a job has the port of the page for itself; tests share a machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert "29500" in script
        return script.replace("29500", str(listener.getsockname()[1]))


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """SLURM for one node: its srun starts the one task here, its scontrol notes what it is asked."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    _program(programs / "srun", f'shift\necho $$ >{tmp_path}/task\nexec "$@"\n')
    _program(programs / "scontrol", f'[ "$1" = show ] && echo localhost || echo "$@" >>{tmp_path}/scontrol\n')
    return {
        "PATH": f"{programs}{os.pathsep}{_TORCHRUN.parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }


@pytest.mark.timeout(900)
def test_before_the_time_limit_a_slurm_job_saves_and_queues_itself_again_and_goes_on(
    faulty: FaultyServer, tmp_path: Path, slurm: dict[str, str]
) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(_with_free_port(SBATCH))
    # The run cannot be over before the signal: the save of step 10 is held up, so that step 20 waits for it.
    moment = AtRequest("PutObject", key="step-00000010/__", applied=True)
    with _Started(["bash", str(script)], tmp_path / "work", **slurm) as job:
        with moment.on(faulty):
            job.until(moment.reached.is_set)
            os.kill(int((tmp_path / "task").read_text()), signal.SIGUSR1)
            job.until(lambda: job.output().count("closing signal SIGUSR1") == 2)
        assert job.wait() == 1, job.output()
        stopped = re.findall(r"asked to stop at step (\d+)", job.output())
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    newest = latest(ROOT)
    assert newest is not None
    assert stopped == [str(newest.step)]
    assert 10 < newest.step < 200
    digests = tmp_path / "digests"
    run_ranks(1, _goes_on, digests)
    begun = json.loads(digests.read_text().splitlines()[0])
    assert (begun["event"], begun["step"]) == ("begun", newest.step)
    assert list((tmp_path / "work").iterdir()) == []  # nothing on local disk
