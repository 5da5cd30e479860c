"""Saves and loads while a quarter of all requests fails, in every way that the tests' servers can make them fail.

And joint saves each of whose PUTs goes wrong, and perhaps its retry: all ranks hear the same, and it is true.

DCP_S3_TEST_CYCLES says how many cycles of save and load, and joint saves, there are on the in-memory server (10), and
through the proxy (a tenth of it, 3 at least); DCP_S3_TEST_SEED what they do and which faults come (0). The cycle is in
the message of a failure.
"""

from __future__ import annotations

import contextlib
import itertools
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest, list_checkpoints, prune, verify
from dcp_s3.coordination.identity import Attempt
from dcp_s3.s3 import retry
from dcp_s3.save import joint
from dcp_s3.save.joint import JointSave
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.faulty import BUCKET, FaultyProxy, FaultyServer, close_clients, serve
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
    joint._learned.clear()
    close_clients()


@contextlib.contextmanager
def context(text: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"{text}: {error!r}") from error


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


@pytest.mark.soak
@pytest.mark.servers("moto", "rclone")
@pytest.mark.timeout(300 + 2 * CYCLES)
@pytest.mark.usefixtures("_short_waits")
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
            with context(f"seed {SEED}, cycle {number}, {proxy.cuts}"):
                training.cycle(number)
            close_clients()  # what is cut is drawn for each connection
        for url in training.expected:
            training.check(url)
    close_clients()
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.endpoint_url)
    time.sleep(1.1)
    remove_lost_uploads(f"s3://{bucket}/run")  # the bucket's fixture fails if any is left


# --- joint saves ----------------------------------------------------------------------------------------

KEYS = ("claim.json", ".intent.", ".roll.", ".part.", ".merged.", "manifest-", "/.metadata", ".distcp")


def _forged(status: int) -> Fault:
    return Fault.forge(status, b"<html/>", {"Content-Type": "text/html"}, applied=True)


# S3 answers 409 to a conditional write beside another one, and to one that it tried again itself and had done.
FAULTS = {
    "409": Fault.error(409, "ConditionalRequestConflict"),
    "409 done": _forged(409),
    "412": Fault.error(412, "PreconditionFailed"),
    "412 done": _forged(412),
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


def _state(number: int, rank: int) -> dict[str, torch.Tensor]:
    return {"same": torch.full((1000,), float(number)), f"own-{rank}": torch.full((10,), float(number))}


def _save(url: str, number: int, ranks: int, *, overwrite: bool) -> list[str]:
    """What each rank hears."""
    settings = resolve_settings({"rank_timeout": 60.0})
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        attempt = Attempt("run", (0,), f"{number}", float(number), ranks, rank)
        made = JointSave(parse_url(url), "", settings, overwrite=overwrite, attempt=attempt, of_step=number)
        planner = DefaultSavePlanner()
        planner.set_up_planner(_state(number, rank), None, True)
        try:
            plan = made.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            made.write_data(planner.finish_plan(plans[0]), planner)
            made.finish(metadata, [])
            told[rank] = "saved"
        except errors.DcpS3Error as error:
            told[rank] = f"failed: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [told[rank] for rank in range(ranks)]


@pytest.mark.timeout(300 + 30 * CYCLES)
@pytest.mark.usefixtures("_short_waits")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_whatever_is_answered_to_each_put_of_a_joint_save_it_is_whole(faulty: FaultyServer) -> None:
    """The ranks are threads."""
    every = EveryPut(SEED)
    # The first save of a process looks whether the store keeps conditions: a 412 then would say that it does not.
    assert _save(f"s3://{BUCKET}/run/first", 0, 2, overwrite=False) == ["saved"] * 2
    for number in range(1, CYCLES + 1):
        overwrite = number % 2 == 0
        url = f"s3://{BUCKET}/run/step-{number - number % 4 if overwrite else number}"
        faulty.rule = every
        told = _save(url, number, 2 + number % 2, overwrite=overwrite)
        faulty.rule = lambda _: None
        assert told == ["saved"] * (2 + number % 2), (number, told)
        loaded = {f"own-{rank}": torch.zeros(10) for rank in range(2 + number % 2)} | {"same": torch.zeros(1000)}
        dcp.load(loaded, storage_reader=S3StorageReader(url), no_dist=True)
        assert all((value == float(number)).all() for value in loaded.values()), (number, loaded)
        assert verify(url, full=True).ok
    if CYCLES >= 50:
        met = {name: {fault for where, fault in every.met if where == name} for name, _ in every.met}
        assert {name for name in met if "if-" in name} >= {
            "claim.json if-none-match", "claim.json if-match", ".intent. if-none-match", ".part. if-none-match",
            "/.metadata if-none-match", "/.metadata if-match",
        }  # fmt: skip
        written = Counter[str]()
        for (name, _), times in every.met.items():
            written[name] += times
        often = {name: found for name, found in met.items() if written[name] > 2 * len(FAULTS)}
        missing = {name: set(_faults(name.split()[-1])) - found for name, found in often.items()}
        assert not any(missing.values()), missing
