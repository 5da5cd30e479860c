"""Saves and loads while a quarter of all requests fails, in every way that the tests' servers can make them fail.

And joint saves each of whose PUTs goes wrong, and perhaps its retry: all ranks hear the same, and it is true.

DCP_S3_TEST_CYCLES says how many cycles of save and load, and joint saves, there are on the in-memory server (10), and
through the proxy (a tenth of it, 3 at least); DCP_S3_TEST_SEED what they do and which faults come (0). What a failing
test has printed says the cycle.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageWriter, errors, latest, list_checkpoints, prune, verify
from dcp_s3.coordination.identity import Attempt
from dcp_s3.s3 import retry
from dcp_s3.save import joint
from dcp_s3.save.joint import JointSave
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import random_tensor
from tests.faulty import BUCKET, FaultyProxy, FaultyServer, close_clients
from tests.memory_s3 import Fault

CYCLES = int(os.environ.get("DCP_S3_TEST_CYCLES", "10"))
SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
OTHER_BUCKET = "other-bucket"
MIB = 2**20

pytestmark = [pytest.mark.counted, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]

# One request fails this often in a row, at most: two less than DCP_S3_RETRY_ATTEMPTS's default. With more, a run of
# thousands of requests would now and then meet eight faults in a row, and be right to fail.
LONGEST_ROW = 6
# Of these an answer that was lost is not harmless by itself.
CHANGES = {
    "PutObject", "CompleteMultipartUpload", "CreateMultipartUpload", "UploadPart", "DeleteObjects",
    "AbortMultipartUpload",
}  # fmt: skip


class Chaos:
    """A rule for `FaultyServer`: what goes wrong with a request is drawn. ``due`` are
    (operation, part of the key, fault) that must come: the first request that fits meets it."""

    def __init__(self, seed: int) -> None:
        self.due = list(DUE)
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
            self._row[same] = 0 if fault is None else self._row[same] + 1
            return fault

    def _take_due(self, request: Any) -> Fault | None:
        for found in self.due:
            operation, key, fault = found
            if operation == request.operation and key in request.key:
                self.due.remove(found)
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
        assert_loads(url, state)
        self.done.update([kind, "overwrite" if overwrite else "new", "large" if "large" in state else "small", root])

    def check(self) -> None:
        for url, state in self.expected.items():
            assert_loads(url, state)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.002)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.02)
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "4")
    # pytest keeps the records of the log; urllib3's of heads that were cut off hold the frames that send a staged copy.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    joint._learned.clear()
    close_clients()


@pytest.mark.timeout(300 + CYCLES)
def test_saves_and_loads_are_right_whatever_fails(faulty: FaultyServer) -> None:
    faulty.s3.create_bucket(OTHER_BUCKET)
    chaos = faulty.rule = Chaos(SEED)
    training = Training(SEED, [BUCKET, BUCKET, OTHER_BUCKET])
    for number in range(CYCLES):
        print(f"seed {SEED}, cycle {number}")
        training.cycle(number)
        if number % 5 == 0:
            check_catalog(training)
        faulty.s3.reset_counters()  # the log of requests grows
    faulty.rule = lambda _: None
    check_what_is_there(faulty, training)
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
            assert sum("manifest" in key for key in keys) == 1, keys
            assert sum(key.endswith(".distcp") for key in keys) <= 2, keys
        remove_lost_uploads(f"s3://{bucket}/run")
        assert server.s3.open_uploads(bucket) == []
    training.check()


@pytest.mark.soak
@pytest.mark.servers("moto", "rclone")
@pytest.mark.timeout(300 + 2 * CYCLES)
def test_saves_and_loads_are_right_through_a_network_that_breaks(
    server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycles = max(3, CYCLES // 10)
    # moto takes a request whose head was cut off for a whole one without a body, which S3's signature rules out.
    directions = ["response"] if server.name == "moto" else ["request", "response"]
    with FaultyProxy(server.endpoint_url, seed=SEED, directions=directions) as proxy:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", proxy.url)
        training = Training(SEED, [bucket])
        for number in itertools.count():
            if number >= cycles and set(proxy.cuts) == set(directions):
                break
            print(f"seed {SEED}, cycle {number}, {proxy.cuts}")
            training.cycle(number)
            close_clients()  # what is cut is drawn for each connection
        training.check()
    close_clients()
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.endpoint_url)
    time.sleep(1.1)
    remove_lost_uploads(f"s3://{bucket}/run")  # the bucket's fixture fails if any is left


# --- joint saves ----------------------------------------------------------------------------------------

HTML = {"Content-Type": "text/html"}
KEYS = ("claim.json", ".intent.", ".roll.", ".part.", ".merged.", "manifest-", "/.metadata", ".distcp")


# S3 answers 409 to a conditional write beside another one, and to one that it tried again itself and had done.
FAULTS = {
    "409": Fault.error(409, "ConditionalRequestConflict"),
    "412": Fault.error(412, "PreconditionFailed"),
    **{f"{status} done": Fault.forge(status, b"<html/>", HTML, applied=True) for status in (409, 412)},
    "lost": Fault.reset(),
    "lost when done": Fault.apply_then_reset(),
    "late": Fault.delay(0.2),
    "refused late": Fault.error(503, "SlowDown", seconds=0.2),
    "twice": Fault.repeat(),
}


def _faults(condition: str) -> list[str]:
    """Nobody answers 412 to a write without a condition."""
    return [name for name in FAULTS if condition != "none" or "412" not in name]


class EveryPut:
    """A rule: the first try of each PUT meets a fault, every second try another one; then it succeeds. The kinds of
    faults come in turn for each kind of key, with and without a condition."""

    def __init__(self, seed: int) -> None:
        self.met: Counter[tuple[str, str]] = Counter()
        self._draw = random.Random(seed)
        self._tries: Counter[tuple[str, str]] = Counter()
        self._turns: dict[tuple[str, str], Iterator[str]] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> Fault | None:
        if request.operation != "PutObject":
            return None
        with self._lock:
            condition = next((name for name in ("if-none-match", "if-match") if name in request.headers), "none")
            this = request.key, request.headers.get("if-match", "")
            self._tries[this] += 1
            if self._tries[this] > 2 or (self._tries[this] == 2 and self._draw.random() < 0.5):
                return None
            kind = next(each for each in KEYS if each in request.key)
            name = next(self._turns.setdefault((kind, condition), itertools.cycle(_faults(condition))))
            self.met[f"{kind} {condition}", name] += 1
            return FAULTS[name]


def _save(url: str, number: int, ranks: int, *, overwrite: bool) -> None:
    """By threads that are ranks; all must hear that it is saved."""
    settings = resolve_settings({"rank_timeout": 60.0})

    def run(rank: int) -> str:
        attempt = Attempt("run", (0,), f"{number}", float(number), ranks, rank)
        made = JointSave(parse_url(url), "", settings, overwrite=overwrite, attempt=attempt, of_step=number)
        planner = DefaultSavePlanner()
        state = {"same": torch.full((1000,), float(number)), f"own-{rank}": torch.full((10,), float(number))}
        planner.set_up_planner(state, None, True)
        try:
            plan = made.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            made.write_data(planner.finish_plan(plans[0]), planner)
            made.finish(metadata, [])
        except errors.DcpS3Error as error:
            return f"failed: {error}"
        return "saved"

    with ThreadPoolExecutor(ranks) as pool:
        told = list(pool.map(run, range(ranks)))
    assert told == ["saved"] * ranks, (number, told)


@pytest.mark.timeout(300 + 30 * CYCLES)
def test_whatever_is_answered_to_each_put_of_a_joint_save_it_is_whole(faulty: FaultyServer) -> None:
    every = EveryPut(SEED)
    # The first save of a process looks whether the store keeps conditions: a 412 then would say that it does not.
    _save(f"s3://{BUCKET}/run/first", 0, 2, overwrite=False)
    for number in range(1, CYCLES + 1):
        overwrite, ranks = number % 2 == 0, 2 + number % 2
        url = f"s3://{BUCKET}/run/step-{number - number % 4 if overwrite else number}"
        faulty.rule = every
        _save(url, number, ranks, overwrite=overwrite)
        faulty.rule = lambda _: None
        own = {f"own-{rank}": torch.full((10,), float(number)) for rank in range(ranks)}
        assert_loads(url, {"same": torch.full((1000,), float(number)), **own})
        assert verify(url, full=True).ok
    if CYCLES >= 50:
        met: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, fault), times in every.met.items():
            met[name][fault] += times
        assert {name for name in met if "if-" in name} >= {
            "claim.json if-none-match", "claim.json if-match", ".intent. if-none-match", ".part. if-none-match",
            "/.metadata if-none-match", "/.metadata if-match",
        }  # fmt: skip
        often = {name: found for name, found in met.items() if found.total() > 2 * len(FAULTS)}
        missing = {name: set(_faults(name.split()[-1])) - {*found} for name, found in often.items()}
        assert not any(missing.values()), missing
