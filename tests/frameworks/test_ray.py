"""Ray Train starts workers again; S3 has their state, and Ray pointers to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dcp_s3 import latest, read_tensor
from examples import launchers_train
from tests.faulty import BUCKET, FaultyServer, serve
from tests.frameworks.ranks import run_ranks
from tests.killing import AtRequest

_REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = f"s3://{BUCKET}/run"
_STORAGE = f"s3://{BUCKET}/ray"
_PATIENCE = 600  # seconds for a driver to come as far as it must


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.s3.endpoint_url)  # for Ray's own storage, which is pyarrow's
        yield server


@pytest.fixture
def ray_directory() -> Iterator[Path]:
    """Where Ray puts everything of its own. Not `tmp_path`: the names of its sockets would be too long."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


class _Driver:
    """`tests.frameworks.ray_driver` in an empty directory. Nothing of its Ray is left at the end."""

    def __init__(self, *runs: list[str], ray_directory: Path, cwd: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(_REPOSITORY),
            "HOME": str(ray_directory),
            "RAY_TMPDIR": str(ray_directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_PATIENCE),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": "1",
        }
        self._log = cwd.with_suffix(".log")
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "tests.frameworks.ray_driver", *map(json.dumps, runs)]
            self._process = psutil.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._family: list[psutil.Process] = []

    def __enter__(self) -> _Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        for process in (self._process, *self._family):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs([self._process, *self._family])

    def _look(self) -> None:
        if self._process.is_running():
            self._family = self._process.children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        """The processes that train."""
        self._look()
        return [process for process in self._family if "RayTrainWorker" in " ".join(process.cmdline())]

    def until(self, moment: AtRequest) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not moment.reached.wait(0.1):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()

    def wait(self) -> None:
        """Wait for the end, which must be a good one."""
        self._look()
        assert self._process.wait(timeout=_PATIENCE) == 0, self.output()

    def output(self) -> str:
        return self._log.read_text(errors="replace")


def _events(digests: Path) -> list[tuple[str, int, int, str]]:
    lines = [json.loads(line) for line in digests.read_text().splitlines()]
    return [(line["event"], line["step"], line["ranks"], line["sha256"]) for line in lines]


def _uninterrupted(digests: Path, *arguments: str) -> None:
    """The same training without Ray, to a root of its own."""
    options = launchers_train.parse_arguments(["--root", f"{ROOT}-uninterrupted", *arguments])
    options.digest_file = digests
    launchers_train.train(options, launchers_train.StopSignal())


@pytest.mark.timeout(1500)
def test_ray_restarts_a_worker_that_is_killed_in_a_save_and_the_run_goes_on_bit_for_bit(
    faulty: FaultyServer, tmp_path: Path, ray_directory: Path
) -> None:
    digests, cwd = tmp_path / "digests", tmp_path / "work"
    cwd.mkdir()
    run = ["--root", ROOT, "--storage", _STORAGE, "--save-every", "2", "--digest-file", str(digests)]
    # On one worker the second one goes on from what Ray was told of the first.
    runs = [[*run, "--steps", "6"], [*run, "--steps", "8", "--workers", "1", "--reported"]]
    moment = AtRequest("PutObject", key="step-00000004/__", applied=True)
    with _Driver(*runs, ray_directory=ray_directory, cwd=cwd) as driver:
        with moment.on(faulty):
            driver.until(moment)
            workers = driver.workers()
            assert len(workers) == 2, driver.output()
            workers[1].kill()
        driver.wait()
        output = driver.output()

    events = _events(digests)
    assert [event[:3] for event in events] == [
        ("begun", 0, 2),
        ("saved", 2, 2),
        ("saved", 4, 2),  # not committed
        ("begun", 2, 2),  # by Ray
        ("saved", 4, 2),
        ("saved", 6, 2),
        ("begun", 6, 1),
        ("saved", 8, 1),
    ]
    of = {event[:3]: event[3] for event in events}
    assert of["begun", 2, 2] == of["saved", 2, 2]
    assert of["begun", 6, 1] == of["saved", 6, 2]
    run_ranks(2, _uninterrupted, tmp_path / "uninterrupted", "--steps", "6", "--save-every", "2")
    assert events[4:6] == _events(tmp_path / "uninterrupted")[-2:]

    # Ray has pointers to checkpoints that are there; the last one is the newest.
    pointers = {
        json.loads(faulty.s3.read(BUCKET, key))["step"]
        for key in faulty.s3.objects(BUCKET)
        if key.endswith("/pointer.json")
    }
    assert {4, 6, 8} <= pointers <= {2, 4, 6, 8}  # the report of step 2 may have met the kill
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"url"')]
    assert [result["step"] for result in results] == [6, 8]
    newest = latest(ROOT)
    assert newest is not None
    assert newest.url == results[1]["url"]
    assert isinstance(read_tensor(newest.url, "train.model.norm.weight"), torch.Tensor)

    # Nothing of a checkpoint on local disk: not where the driver ran, and not where Ray's workers did.
    assert list(cwd.iterdir()) == []
    names = [path.name for path in ray_directory.rglob("*")]
    assert not [name for name in names if name.endswith((".distcp", ".metadata")) or name.startswith("s3:")]
