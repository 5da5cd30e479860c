"""Saves and loads while a quarter of all requests fails, in every way that the in-memory server can make them fail.

DCP_S3_TEST_CYCLES says how many cycles of save and load there are (10); DCP_S3_TEST_SEED what they do and which faults
come (0). The cycle is in the message of a failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, latest, list_checkpoints, prune
from dcp_s3.s3 import retry
from dcp_s3.s3.client import close_clients
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

CYCLES = int(os.environ.get("DCP_S3_TEST_CYCLES", "10"))
SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
OTHER_BUCKET = "other-bucket"
MIB = 2**20

pytestmark = pytest.mark.counted

# One request fails this often in a row, at most: two less than DCP_S3_RETRY_ATTEMPTS's default. With more, a run of
# thousands of requests would now and then meet eight faults in a row, and be right to fail.
LONGEST_ROW = 6
# Of these an answer that was lost is not harmless by itself.
CHANGES = {
    "PutObject", "CompleteMultipartUpload", "CreateMultipartUpload", "UploadPart", "DeleteObjects",
    "AbortMultipartUpload",
}  # fmt: skip


class Chaos:
    """A rule for `FaultyServer`: what goes wrong with a request is drawn, and counted in ``injected``.

    Args:
        seed: of the choices.
        due: (operation, part of the key, fault) of those that must come; the first request that fits meets it.
    """

    def __init__(self, seed: int, due: Sequence[tuple[str, str, Fault]] = ()) -> None:
        self.injected: Counter[str] = Counter()
        self.due = list(due)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._row: Counter[tuple[str, ...]] = Counter()

    def __call__(self, request: Any) -> Fault | None:
        with self._lock:
            # Parts, ranges and pages are requests of their own.
            same = (
                request.operation, request.bucket, request.key, request.range or "",
                *(request.query.get(name, "") for name in ("partNumber", "prefix", "delimiter", "continuation-token")),
            )  # fmt: skip
            fault = None if self._row[same] >= LONGEST_ROW else self._take_due(request) or self._draw(request)
            if fault is None:
                self._row[same] = 0
                return None
            self._row[same] += 1
            self.injected[f"{fault.kind} {fault.status or ''}"] += 1
            return fault

    def _take_due(self, request: Any) -> Fault | None:
        for number, (operation, key, fault) in enumerate(self.due):
            if operation == request.operation and key in request.key:
                del self.due[number]
                return fault
        return None

    def _draw(self, request: Any) -> Fault | None:
        chance, amount = self._rng.random(), self._rng.random()
        operation, size = request.operation, request.content_length
        if chance < 0.10:
            return Fault.error(503, "SlowDown")
        if chance < 0.15:
            return Fault.error(500, "InternalError")
        if chance < 0.20:
            return Fault.reset_request(int(amount * size)) if size else Fault.reset_response(int(amount * 100_000))
        if chance < 0.25 and request.method == "GET":
            return Fault.truncate(int(amount * 1000) if amount < 0.5 else int(amount * MIB))
        if chance < 0.28:
            return Fault.cut_head(int(amount * 200))
        if chance < 0.33 and operation in CHANGES:
            return Fault.apply_then_reset()
        if chance < 0.40 and operation == "CompleteMultipartUpload":
            return Fault.error_in_200("InternalError")
        if chance < 0.50 and operation == "DeleteObjects":
            return Fault.delete_partly("InternalError") if amount < 0.5 else Fault.error_in_200("SlowDown")
        return None


_SLOW, _FAILED = Fault.error(503, "SlowDown"), Fault.error(500, "InternalError")
_LOST, _IN_200, _CUT = Fault.apply_then_reset(), Fault.error_in_200("InternalError"), Fault.cut_head(0)
DUE: list[tuple[str, str, Fault]] = [
    *((operation, "", fault) for operation in sorted(CHANGES - {"AbortMultipartUpload"}) for fault in (_LOST, _CUT)),
    *(("PutObject", name, fault) for name in (".metadata", "manifest") for fault in (_LOST, _LOST, _SLOW)),
    *(("CompleteMultipartUpload", "", fault) for fault in (_LOST, _IN_200, _IN_200, _SLOW, _FAILED)),
    *(("DeleteObjects", "", fault) for fault in (Fault.delete_partly("SlowDown"), _IN_200)),
    *(("UploadPart", "", fault) for fault in (Fault.reset_request(2 * MIB), _SLOW, _FAILED)),
    *(("GetObject", ".distcp", fault) for fault in (Fault.truncate(MIB), Fault.reset_response(MIB), _SLOW, _CUT)),
    *(("GetObject", ".metadata", fault) for fault in (Fault.truncate(10), Fault.reset_response(10), _FAILED, _CUT)),
    *(("ListObjectsV2", "", fault) for fault in (Fault.truncate(100), Fault.truncate(0), _SLOW, _CUT)),
    *(("ListMultipartUploads", "", fault) for fault in (Fault.truncate(100), _CUT)),
    *(("HeadObject", "", fault) for fault in (Fault.reset_response(0), _SLOW, _CUT)),
]


def make_state(rng: random.Random) -> dict[str, Any]:
    """Single-part objects only, or 12 MiB in multipart ones."""
    seed = rng.randrange(2**30)
    state: dict[str, Any] = {"small": random_tensor((1000,), torch.int64, seed), "step": seed}
    if rng.random() < 0.5:
        state["large"] = random_tensor((12 * MIB // 4 + rng.randrange(1000),), torch.float32, seed)
    return state


class Training:
    """Cycle after cycle, each a save and a load; knows what must be at which URL."""

    def __init__(self, seed: int, buckets: list[str]) -> None:
        self.done: Counter[str] = Counter()
        self.expected: dict[str, dict[str, Any]] = {}
        self._rng = random.Random(seed)
        self._buckets = buckets

    def cycle(self, number: int) -> None:
        rng = self._rng
        overwrite = bool(self.expected) and rng.random() < 0.4
        root = f"s3://{rng.choice(self._buckets)}/run"
        url = rng.choice(sorted(self.expected)) if overwrite else f"{root}/step-{number}"
        state, objects = make_state(rng), rng.choice([1, 2])
        writer = S3StorageWriter(url, overwrite=overwrite, max_objects=objects)
        kind = rng.choice(["sync", "async"])
        if kind == "async":
            future: Any = dcp.async_save(state, storage_writer=writer)
            future.result()
        else:
            dcp.save(state, storage_writer=writer)
        self.expected[url] = state
        # The memory of every state would add up.
        self.expected = dict(list(self.expected.items())[-8:])
        self.check(url)
        for what in (kind, "overwrite" if overwrite else "new", "large" if "large" in state else "small", root):
            self.done[what] += 1

    def check(self, url: str) -> None:
        loaded = blank(self.expected[url])
        dcp.load(loaded, storage_reader=S3StorageReader(url))
        assert_same(loaded, self.expected[url], url)


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.002)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.02)
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "4")
    # pytest keeps the records of the log; urllib3's of heads that were cut off hold the frames that send a staged copy.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    close_clients()


@contextlib.contextmanager
def context(text: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(text)
        print(text)
        raise


@pytest.mark.timeout(300 + CYCLES)
@pytest.mark.usefixtures("_short_waits")
def test_saves_and_loads_are_right_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch) as server:
        server.s3.create_bucket(OTHER_BUCKET)
        chaos = Chaos(SEED, DUE)
        server.rule = chaos
        training = Training(SEED, [BUCKET, BUCKET, OTHER_BUCKET])
        for number in range(CYCLES):
            with context(f"seed {SEED}, cycle {number}"):
                training.cycle(number)
                if number % 5 == 0:
                    check_catalog(training)
                server.s3.reset_counters()  # the log of requests grows
        server.rule = lambda _: None
        check_what_is_there(server, training)
    if CYCLES >= 30:
        assert chaos.due == []
        assert min(training.done.values()) >= 5, training.done


def check_catalog(training: Training) -> None:
    url = next(reversed(training.expected))
    root, _, name = url.rpartition("/")
    assert name in {info.name for info in list_checkpoints(root) if info.committed}
    assert latest(root) is not None
    remove_lost_uploads(root)


def remove_lost_uploads(root: str) -> None:
    """An upload whose id was lost with the answer is left to a prune."""
    assert prune(root, "latest:999", grace=0, force=True).ok


def check_what_is_there(server: FaultyServer, training: Training) -> None:
    time.sleep(1.1)  # what was begun in the second that S3's clock shows counts as new
    for bucket in (BUCKET, OTHER_BUCKET):
        names = {key.split("/")[1] for key in server.s3.objects(bucket)}
        committed = {info.name for info in list_checkpoints(f"s3://{bucket}/run") if info.committed}
        assert names == committed
        for name in sorted(names):
            # An overwrite removed what it replaced, although some of the deletes failed at first.
            keys = [key for key in server.s3.objects(bucket) if key.startswith(f"run/{name}/")]
            assert len([key for key in keys if "manifest" in key]) == 1, keys
            assert len([key for key in keys if key.endswith(".distcp")]) <= 2, keys
        remove_lost_uploads(f"s3://{bucket}/run")
        assert server.s3.open_uploads(bucket) == []
    for url in training.expected:
        training.check(url)
