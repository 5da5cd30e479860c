"""Saves and loads that are given up: at a deadline, by Ctrl-C, because a rank died. Nothing is left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.spill.background import stop_draining
from tests.end_to_end import loads
from tests.end_to_end.loads import failure
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.objects import separate_objects

pytestmark = [
    pytest.mark.timeout(180),  # below what requests may hang without a deadline: eight times LONG
]

MIB = 2**20
URL = f"s3://{BUCKET}/run"
LONG = 30.0


class Hanging(FaultyServer):
    """A server that never answers some requests."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.released = threading.Event()

    def hang(self, *operations: str, key: str = "", then: Callable[[], None] = lambda: None) -> None:
        """From now on, on requests of these operations whose keys contain ``key``; ``then`` is called at the first."""

        def rule(request: Any) -> Fault | None:
            if request.operation not in operations or key not in request.key:
                return None
            if not self.reached.is_set():
                self.reached.set()
                then()
            self.released.wait(LONG)
            return Fault.reset()

        self.rule = rule


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    hanging = Hanging()
    with serve(monkeypatch, hanging):
        yield hanging
        hanging.released.set()


def make_state() -> dict[str, Any]:
    """Two objects: 6 MiB, which is two parts, and a small one."""
    return {"large": torch.randn(MIB * 3 // 2), "small": torch.randn(100)}


def save(state: dict[str, Any] | None = None, **settings: Any) -> None:
    with separate_objects("large", "small"):
        dcp.save(state or make_state(), storage_writer=S3StorageWriter(URL, settings=settings))


def load(expected: dict[str, Any], **settings: Any) -> None:
    loads.assert_loads(URL, expected, settings=settings)


def assert_nothing_is_left(faulty: Hanging) -> None:
    assert faulty.s3.open_uploads(BUCKET) == []
    assert faulty.s3.objects(BUCKET) == {}
    assert_no_threads()


def assert_no_threads() -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("dcp_s3-") and name != "dcp_s3-drain"]


# --- deadlines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "PutObject", "throttled"])
def test_a_save_ends_at_its_deadline(faulty: Hanging, operation: str) -> None:
    if operation == "throttled":
        faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.operation == "UploadPart" else None
    else:
        faulty.hang(operation, key="__0_")
    error = failure(lambda: save(save_timeout=1.5, retry_attempts=100), errors.DeadlineExceededError)
    assert faulty.reached.is_set() == (operation != "throttled")
    assert (error.setting, error.seconds) == ("DCP_S3_SAVE_TIMEOUT", 1.5)
    said = f"the save to {URL} was not done within DCP_S3_SAVE_TIMEOUT = 1.5 s: of about 6.0 MiB of rank 0"
    assert said in str(error)
    assert_nothing_is_left(faulty)


# --- Ctrl-C ------------------------------------------------------------------------------------------


def interrupt() -> None:
    """Ctrl-C. A signal that the main thread gets: another one would not wake it."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_ctrl_c_during_a_save(faulty: Hanging, tmp_path: Path) -> None:
    faulty.hang("UploadPart", then=interrupt)
    failure(lambda: save(read_timeout=0.3, spill_dir=str(tmp_path)), KeyboardInterrupt)
    stop_draining()
    assert not list(tmp_path.glob("saves/*"))
    assert_nothing_is_left(faulty)


def test_a_load_ends_at_its_deadline_and_by_ctrl_c(faulty: Hanging) -> None:
    save()
    faulty.hang("GetObject", key="__0_0")
    error = failure(lambda: load(make_state(), load_timeout=1.5), errors.DeadlineExceededError)
    assert faulty.reached.is_set()
    assert f"the load of {URL} was not done within DCP_S3_LOAD_TIMEOUT = 1.5 s: 400 B of the 6.0 MiB" in str(error)
    faulty.reached.clear()
    faulty.hang("GetObject", key="__0_", then=interrupt)
    failure(lambda: load(make_state(), read_timeout=0.3), KeyboardInterrupt)
    assert_no_threads()
