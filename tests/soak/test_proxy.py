"""Each request of each operation, answered by everything but S3: no success that is none, nothing old lost, no hang.

An operation's requests are counted; then it runs once for each of them and each fault, with the fault at exactly that
request, and once with the fault from that request on. DCP_S3_TEST_FAULTS says how many of the faults each request meets
(1 of about 45, another one each time; more than there are: all).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest, pin, prune
from dcp_s3.format.layout import lease_object
from dcp_s3.s3 import retry
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.faulty import BUCKET, FaultyServer, close_clients, serve
from tests.memory_s3 import Fault
from tests.retention.runs import DAY, Clock

FAULTS = int(os.environ.get("DCP_S3_TEST_FAULTS", "1"))
ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/step-1"
MIB = 2**20

pytestmark = [
    pytest.mark.counted,
    pytest.mark.timeout(300 + 200 * FAULTS),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Welcome to the guest network</body></html>"
HTML = {"Content-Type": "text/html; charset=utf-8"}
# 5xx with S3's own words, and with a proxy's.
_CODES = {500: "InternalError", 501: "NotImplemented", 503: "SlowDown"}
_PAGES = (500, 502, 503, 504, 505, 507, 509, 520, 522, 529, 530, 598, 599)


def _forge(status: int, body: bytes = b"", **options: Any) -> Fault:
    return Fault.forge(status, body, HTML if body else None, **options)


FORGED: dict[str, Fault] = {
    "200": _forge(200),
    "200 page": _forge(200, PAGE),
    "200 XML": _forge(200, b"<html><body/></html>"),
    "200 done": _forge(200, applied=True),
    "200 page done": _forge(200, PAGE, applied=True),
    "203 page": _forge(203, PAGE),
    "status line": Fault.cut_head(0),
    "half a head": Fault.cut_head(60),
    "most of a head": Fault.cut_head(140),
    "half a body": Fault.truncate(20),
    "301": Fault.error(301, "PermanentRedirect"),
    "302 page": Fault.forge(302, PAGE, {**HTML, "Location": "http://127.0.0.1:9/login"}),
    "403": Fault.error(403, "AccessDenied"),
    "403 page": _forge(403, PAGE),
    "403 done": _forge(403, PAGE, applied=True),
    "404 page": _forge(404, PAGE),
    "407 page": _forge(407, PAGE),
    "409": Fault.error(409, "OperationAborted"),
    "409 done": _forge(409, PAGE, applied=True),
    "412": Fault.error(412, "PreconditionFailed"),
    "412 done": _forge(412, PAGE, applied=True),
    "429": Fault.error(429, "TooManyRequests"),
    "429 page": _forge(429, PAGE),
    **{str(status): Fault.error(status, code) for status, code in _CODES.items()},
    **{f"{status} page": _forge(status, PAGE) for status in _PAGES},
    "504 done": _forge(504, PAGE, applied=True),
    "524 done": _forge(524, PAGE, applied=True),
    "error in 200": Fault.error_in_200("InternalError"),
    "reset": Fault.reset(),
    "reset while it is sent": Fault.reset_request(1),
    "reset when done": Fault.apply_then_reset(),
    "twice": Fault.repeat(),
}


class At:
    """A rule for `FaultyServer`: a fault at request ``number`` (from 1), or from there on."""

    def __init__(self, number: int, fault: Fault, *, lasting: bool) -> None:
        self.number, self.fault, self.lasting = number, fault, lasting
        self.count = 0
        self.met: list[str] = []

    def __call__(self, request: Any) -> Fault | None:
        self.count += 1
        if self.count == self.number or (self.lasting and self.count > self.number):
            self.met.append(f"{request.operation} {request.key or request.query.get('prefix', '')}")
            return self.fault
        return None


@dataclass
class World:
    """A server, and what is on it and in a spill directory before each run."""

    server: FaultyServer
    clock: Clock
    spill_dir: Path
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def _bucket(self) -> Any:
        return self.server.s3._store._buckets[BUCKET]

    def keep(self) -> None:
        """What is there now is there before each run."""
        self.objects = dict(self._bucket.objects)
        if self.spill_dir.exists():
            shutil.copytree(self.spill_dir, self._aside)

    def put_back(self) -> None:
        self.server.rule = lambda _: None
        with self.server.s3._store._lock:
            self._bucket.objects = dict(self.objects)
            self._bucket.uploads = {}
            self._bucket._sorted = None
        if self._aside.exists():
            shutil.rmtree(self.spill_dir)
            shutil.copytree(self._aside, self.spill_dir)

    def has(self, name: str) -> bool:
        return f"run/{name}/.metadata" in self._bucket.objects

    def lacks(self, name: str) -> set[str]:
        """Keys of a checkpoint that are not what they were."""
        now = self._bucket.objects
        there = {key: stored for key, stored in self.objects.items() if key.startswith(f"run/{name}/")}
        return {key for key, stored in there.items() if now.get(key) is not stored}

    @property
    def _aside(self) -> Path:
        return self.spill_dir.with_name("aside")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.002)
    for name, value in {
        "PART_SIZE": "5MiB", "CONCURRENCY": "1", "RETRY_ATTEMPTS": "3", "SPILL_AFTER": "5s",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 1)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)  # the test drains
    clock = Clock()
    logging.disable(logging.CRITICAL)
    with serve(monkeypatch, FaultyServer(clock=clock)) as server:
        yield World(server, clock, tmp_path / "spill")
    logging.disable(logging.NOTSET)
    close_clients()


def state_of(seed: int, *, large: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {"small": random_tensor((100,), torch.float32, seed), "step": seed}
    return state | ({"large": random_tensor((5 * MIB + 1000,), torch.uint8, seed)} if large else {})


def save(url: str, state: Any, **arguments: Any) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, **arguments), no_dist=True)


def load(url: str, expected: Any) -> None:
    found = blank(expected)
    dcp.load(found, storage_reader=S3StorageReader(url), no_dist=True)
    assert_same(found, expected)


def load_one_of(url: str, new: Any, old: Any) -> None:
    try:
        load(url, new)
    except (AssertionError, CheckpointException):
        load(url, old)


def attempt(act: Callable[[], None]) -> bool:
    """Whether it succeeded. A failure must have a name of ours, or, for a load, a success is the right one."""
    try:
        act()
    except errors.DcpS3Error:
        return False
    except CheckpointException as failure:
        for error, _ in failure.failures.values():
            if not isinstance(error, errors.DcpS3Error):
                raise error from None
        return False
    return True


def meet_every_fault(world: World, act: Callable[[], None], check: Callable[[bool], None]) -> None:
    """Run ``act`` once for each request and fault; ``check`` is told whether it succeeded, and S3 answers again."""
    world.keep()
    world.put_back()
    world.server.s3.reset_counters()
    act()
    requests = len(world.server.s3.request_log)
    check(True)
    assert requests
    names = list(FORGED)
    turn = 0
    failures: list[str] = []
    for number in range(1, requests + 1):
        for lasting in (False, True):
            for _ in range(min(FAULTS, len(names))):
                name = names[turn % len(names)]
                turn += 1
                world.put_back()
                world.server.s3.reset_counters()
                rule = world.server.rule = At(number, FORGED[name], lasting=lasting)
                done = None
                try:
                    done = attempt(act)
                    world.server.rule = lambda _: None
                    check(done)
                except (Exception, CheckpointException) as error:  # noqa: BLE001 - all are reported together
                    outcome = {True: "it succeeded", False: "it failed", None: "it broke"}[done]
                    when = f"request {number} of {requests}{' and all after it' * lasting}"
                    failures.append(f"{when}: {name} ({', '.join(rule.met[:3])}); {outcome}: {error!r:.1000}")
                    print(failures[-1])
    assert not failures, "\n".join([f"{len(failures)} of {turn}", *failures[:50]])


@pytest.mark.quick("one part")
@pytest.mark.parametrize("large", [False, True], ids=["one part", "several parts"])
def test_a_save(world: World, large: bool) -> None:
    new = state_of(2, large=large)

    def check(done: bool) -> None:
        if done or world.has("step-1"):
            load(URL, new)

    meet_every_fault(world, lambda: save(URL, new), check)


@pytest.mark.quick("several parts")
@pytest.mark.parametrize("large", [False, True], ids=["one part", "several parts"])
def test_an_overwrite(world: World, large: bool) -> None:
    old, new = state_of(1), state_of(2, large=large)
    save(URL, old)

    def check(done: bool) -> None:
        if done:
            load(URL, new)
        else:
            load_one_of(URL, new, old)

    meet_every_fault(world, lambda: save(URL, new, overwrite=True), check)


def test_a_save_where_a_checkpoint_is(world: World) -> None:
    """Whoever says that there is none."""
    old = state_of(1)
    save(URL, old)

    def act() -> None:
        with pytest.raises(CheckpointException):
            save(URL, state_of(2))

    meet_every_fault(world, act, lambda _: load(URL, old))


def test_a_load(world: World) -> None:
    state = state_of(1)  # a body cut to 20 bytes, again and again, is progress: nothing large
    save(URL, state)

    def check(_: bool) -> None:
        assert not world.lacks("step-1")

    meet_every_fault(world, lambda: load(URL, state), check)


@pytest.mark.soak
def test_a_prune(world: World) -> None:
    """Of step 1, and of what a save left; 2 is pinned, 3 is being read, 4 is the newest."""
    states = {step: state_of(step) for step in (1, 2, 3, 4)}
    for step, state in states.items():
        save(f"{ROOT}/step-{step}", state)
    save(f"{ROOT}/step-0", state_of(0))
    pin(f"{ROOT}/step-2")
    world.clock.now += 2 * DAY
    client = boto3.Session().client("s3", endpoint_url=world.server.s3.endpoint_url)
    client.delete_object(Bucket=BUCKET, Key="run/step-0/.metadata")
    client.put_object(Bucket=BUCKET, Key=f"run/step-3/{lease_object('ab' * 16, 3600)}", Body=b"{}")
    client.close()
    kept = {key for key in world.server.s3.objects(BUCKET) if not key.startswith(("run/step-0/", "run/step-1/"))}

    def act() -> None:
        report = prune(ROOT, "latest:1", grace="1h")
        if report.ok:
            gone = {each.name for each in report.deleted}
            left = set(world.server.s3.objects(BUCKET))
            assert not {key for key in left for name in gone if key.startswith(f"run/{name}/")}
        else:
            assert report.failures

    seen: set[frozenset[str]] = set()

    def check(_: bool) -> None:
        for step in states:
            assert not world.lacks(f"step-{step}") or (step == 1 and not world.has("step-1"))
        now = frozenset(world.server.s3.objects(BUCKET))
        if now not in seen:  # otherwise it looks the same to whoever comes next
            seen.add(now)
            found = latest(ROOT)
            assert found is not None
            load(found.url, states[4])

    meet_every_fault(world, act, check)
    world.put_back()
    assert prune(ROOT, "latest:1", grace="1h").ok
    assert {key for key in world.server.s3.objects(BUCKET) if "deletion" not in key} == kept


@pytest.mark.soak
@pytest.mark.parametrize("overwrite", [True, False], ids=["an overwrite", "a save"])
def test_a_drain(world: World, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    old, new = state_of(1), state_of(2)
    if overwrite:
        save(URL, old)
    settings = {"durability": "local", "spill_dir": str(world.spill_dir)}
    save(URL, new, overwrite=overwrite, settings=settings)

    def drain() -> bool:
        report = Drainer(SpillStore(world.spill_dir)).run()
        assert not report.refused, report.refused
        assert not report.discarded
        return report.committed == [URL]

    def act() -> None:
        if not drain():
            raise errors.TransferError("it waits")

    def check(done: bool) -> None:
        if done:
            load(URL, new)
            return
        if overwrite:
            load_one_of(URL, new, old)
        elif world.has("step-1"):
            load(URL, new)
        drain()
        load(URL, new)

    meet_every_fault(world, act, check)
