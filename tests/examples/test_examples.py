"""Examples that are programs: training with hand-made shards, and what docs/launchers.md tells people to write: a SLURM
job stops in time, a restart goes on. The demo as a newcomer runs it."""

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

from dcp_s3 import latest, read_tensors
from dcp_s3.demo import DemoError, training
from examples import launchers_train
from examples.hand_sharded import HEAD, KEYS, QUERIES, WIDTH, train
from tests.docs.blocks import ROOT as REPOSITORY
from tests.docs.blocks import blocks
from tests.faulty import BUCKET, FaultyServer
from tests.killing import AtRequest
from tests.ranks import run_ranks
from tests.servers import S3Server

_TORCHRUN = Path(sys.executable).with_name("torchrun")
ROOT = f"s3://{BUCKET}/run"  # that of the page


def _blocks(language: str) -> list[str]:
    found = blocks(REPOSITORY / "docs" / "launchers.md")
    return [block.text for block in found if block.language == language]


@pytest.mark.parametrize("language", ["bash", "yaml"])
def test_each_command_starts_the_script_with_torchrun(language: str) -> None:
    for block in _blocks(language):
        assert {"torchrun", "examples.launchers_train"} <= {*block.split()}
        if language == "yaml":
            yaml.safe_load(block)


def _goes_on(digests: Path) -> None:
    """The same training on a rank of `run_ranks`, to the end."""
    options = launchers_train.parse_arguments(["--root", ROOT, "--steps", "22"])
    options.digest_file = digests
    launchers_train.train(options, launchers_train.StopSignal())


def _sbatch() -> str:
    """The script of the page. Every node of a job has its port for itself; tests share a machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert "29500" in _blocks("bash")[0]
        return _blocks("bash")[0].replace("29500", str(listener.getsockname()[1]))


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
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{_TORCHRUN.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }


@pytest.mark.timeout(900)
def test_before_the_time_limit_a_slurm_job_saves_and_queues_itself_again_and_goes_on(
    faulty: FaultyServer, tmp_path: Path, slurm: dict[str, str]
) -> None:
    script, log, work = tmp_path / "train.sbatch", tmp_path / "log", tmp_path / "work"
    script.write_text(_sbatch())
    work.mkdir()
    # The run cannot be over before the signal: the save of step 10 is held up, so that step 20 waits for it.
    moment = AtRequest("PutObject", key="step-00000010/__", applied=True)
    with log.open("wb") as output:
        job = subprocess.Popen(
            ["bash", script], cwd=work, env=slurm, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not happened():
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    try:
        with moment.on(faulty):
            until(moment.reached.is_set)
            os.kill(int((tmp_path / "task").read_text()), signal.SIGUSR1)
            until(lambda: log.read_text().count("closing signal SIGUSR1") == 2)
        assert job.wait(timeout=200) == 1, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
            job.wait()
    stopped = re.findall(r"asked to stop at step (\d+)", log.read_text())
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    newest = latest(ROOT)
    assert newest is not None
    assert stopped == [str(newest.step)]
    assert 10 < newest.step < 200
    digests = tmp_path / "digests"
    run_ranks(1, _goes_on, digests)
    begun = json.loads(digests.read_text().splitlines()[0])
    assert (begun["event"], begun["step"]) == ("begun", newest.step)
    assert list(work.iterdir()) == []  # nothing on local disk


def _train_in(directory: str, url: str, steps: int) -> int:
    os.chdir(directory)
    return train(url, steps)


def test_the_training_goes_on_with_other_ranks(root: str, memory_server: S3Server, tmp_path: Path) -> None:
    assert run_ranks(4, _train_in, str(tmp_path), root, 2) == [0] * 4
    assert run_ranks(2, _train_in, str(tmp_path), root, 3) == [2] * 2
    first, last = (read_tensors(f"{root}/step-{step}") for step in (2, 3))
    rows = HEAD * (QUERIES + 2 * KEYS)
    shapes = {name: tuple(tensor.shape) for name, tensor in last.items() if name.startswith("momentum.")}
    assert shapes == {
        "momentum.qkv.weight": (rows, WIDTH),
        "momentum.qkv.bias": (rows,),
        "momentum.dense.weight": (WIDTH, HEAD * QUERIES),
        "momentum.norm.weight": (WIDTH,),
        "momentum.norm.bias": (WIDTH,),
    }
    assert all(not first[name].equal(last[name]) for name in shapes)
    assert last["step"] == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_interrupts_a_save_and_restores_every_bit_on_another_number_of_ranks() -> None:
    command = [sys.executable, "-m", "dcp_s3.cli.main", "demo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        process.terminate()  # not SIGKILL: the demo then takes its workers along
        process.wait()
    assert process.returncode == 0, output
    passed = [line.strip() for line in output.splitlines() if line.strip().startswith("PASS")]
    assert len(passed) == 5, output
    assert "FAIL" not in output
    assert "restored on 3 ranks is bit-identical to the one saved on 2" in output
    assert "no policy keeps it" in output
    assert "Traceback" not in output


def test_a_rank_that_fails_is_reported_with_its_error_and_leaving_kills_the_others(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match=r"failed on rank [01]:\nprocess . terminated with exit code 2"),
        training(tmp_path, 2, steps=1, save_every="often") as ranks,  # type: ignore[arg-type]
    ):
        ranks.join()
    assert [process.is_alive() for process in ranks.processes] == [False, False]
