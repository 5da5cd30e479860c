"""Ray Train starts workers again; S3 has their state, and Ray pointers to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dcp_s3 import latest, read_tensor
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import AtRequest

_REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = f"s3://{BUCKET}/run"
_PATIENCE = 600  # seconds for a driver to come as far as it must
_DRIVER = """
import ray
from examples import ray_train
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)  # whatever this machine has
ray_train.main()
ray.shutdown()
"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # else pyarrow sends chunked bodies
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.s3.endpoint_url)  # for Ray's own storage, which is pyarrow's
        yield server


@pytest.fixture
def ray_directory() -> Iterator[Path]:
    """Where Ray puts everything of its own. Not `tmp_path`: the names of its sockets would be too long."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@contextlib.contextmanager
def _driver(arguments: list[str], ray_directory: Path, cwd: Path, log: Path) -> Iterator[psutil.Popen]:
    """`examples.ray_train` on a small Ray of its own. Nothing of it is left."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_REPOSITORY),
        "HOME": str(ray_directory),
        "RAY_TMPDIR": str(ray_directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_raylet_start_wait_time_s": "900",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_PATIENCE),
    }
    command = [sys.executable, "-c", _DRIVER, *arguments]
    with log.open("wb") as output:
        driver = psutil.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
    family: list[psutil.Process] = []
    try:
        yield driver
    finally:
        if driver.is_running():
            family = driver.children(recursive=True)
        # What the driver has left, if it has ended: Ray's processes have its directory in their environment.
        family += [each for each in psutil.process_iter() if _has(each, str(ray_directory))]
        for process in (driver, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([driver, *family])


def _has(process: psutil.Process, directory: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RAY_TMPDIR") == directory
    return False


@pytest.mark.timeout(1500)
def test_ray_restarts_a_worker_that_is_killed_in_a_save_and_the_run_goes_on(
    faulty: FaultyServer, tmp_path: Path, ray_directory: Path
) -> None:
    digests, cwd, log = tmp_path / "digests", tmp_path / "work", tmp_path / "log"
    cwd.mkdir()
    run = ["--root", ROOT, "--storage", f"s3://{BUCKET}/ray", "--save-every", "2", "--steps", "6"]
    run += ["--digest-file", str(digests)]
    moment = AtRequest("PutObject", key="step-00000004/__", applied=True)
    with _driver(run, ray_directory, cwd, log) as driver:
        with moment.on(faulty):
            while not moment.reached.wait(0.5):
                assert driver.poll() is None, log.read_text()
            family = driver.children(recursive=True)
            workers = [each for each in family if "RayTrainWorker" in " ".join(each.cmdline())]
            assert len(workers) == 2, log.read_text()
            workers[1].kill()
        assert driver.wait(timeout=_PATIENCE) == 0, log.read_text()

    lines = [json.loads(line) for line in digests.read_text().splitlines()]
    events = {(line["event"], line["step"], line["ranks"]): line["sha256"] for line in lines}
    assert [(line["event"], line["step"], line["ranks"]) for line in lines] == [
        ("begun", 0, 2),
        ("saved", 2, 2),
        ("saved", 4, 2),  # not committed
        ("begun", 2, 2),  # by Ray
        ("saved", 4, 2),
        ("saved", 6, 2),
    ]
    assert events["begun", 2, 2] == events["saved", 2, 2]

    # Ray has a pointer to a checkpoint that is there, the newest one.
    [result] = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"url"')]
    newest = latest(ROOT)
    assert (newest.url, newest.step) == (result["url"], result["step"])
    assert isinstance(read_tensor(newest.url, "train.model.norm.weight"), torch.Tensor)

    # Nothing of a checkpoint on local disk: not where the driver ran, and not where Ray's workers did.
    assert list(cwd.iterdir()) == []
    names = [path.name for path in ray_directory.rglob("*")]
    assert not [name for name in names if name.endswith((".distcp", ".metadata")) or name.startswith("s3:")]
