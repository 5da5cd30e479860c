"""Each request of each operation, answered by everything but S3: no success that is none, nothing old lost, no hang.

An operation's requests are counted; then it runs once for each of them and each fault, with the fault at exactly that
request, and once with the fault from that request on. DCP_S3_TEST_FAULTS says how many of the faults each request meets
(1 of about 45, another one each time; more than there are: all).
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import errors, latest, pin, prune
from dcp_s3.format.layout import lease_object
from dcp_s3.s3 import retry
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.end_to_end.loads import assert_loads, save
from tests.end_to_end.states import random_tensor
from tests.faulty import BUCKET, FaultyServer, serve
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


def _forge(status: int, body: bytes = b"", **options: Any) -> Fault:
    return Fault.forge(status, body, HTML if body else None, **options)


# What a proxy says: a page of its own, or S3's words; and the same when S3 has done what was asked.
_PAGES = (200, 203, 403, 404, 407, 429, 500, 502, 503, 504, 505, 507, 509, 520, 522, 529, 530, 598, 599)
_CODES = {
    301: "PermanentRedirect", 403: "AccessDenied", 409: "OperationAborted", 412: "PreconditionFailed",
    429: "TooManyRequests", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown",
}  # fmt: skip
FORGED: dict[str, Fault] = {
    "200": _forge(200),
    "200 XML": _forge(200, b"<html><body/></html>"),
    "200 done": _forge(200, applied=True),
    "status line": Fault.cut_head(0),
    "half a head": Fault.cut_head(60),
    "most of a head": Fault.cut_head(140),
    "half a body": Fault.truncate(20),
    **{f"{status} page done": _forge(status, PAGE, applied=True) for status in (200, 403, 409, 412, 504, 524)},
    "302 page": Fault.forge(302, PAGE, {**HTML, "Location": "http://127.0.0.1:9/login"}),
    **{f"{status}": Fault.error(status, code) for status, code in _CODES.items()},
    "error in 200": Fault.error_in_200("InternalError"),
    "reset": Fault.reset(),
    "reset while it is sent": Fault.reset_request(1),
    "reset when done": Fault.apply_then_reset(),
    "twice": Fault.repeat(),
    **{f"{status} page": _forge(status, PAGE) for status in _PAGES},
}


def at(number: int, fault: Fault, met: list[str], *, lasting: bool) -> Callable[[Any], Fault | None]:
    """A rule for `FaultyServer`: a fault at request ``number`` (from 1), or from there on. ``met``: the requests."""
    numbers = itertools.count(1)

    def rule(request: Any) -> Fault | None:
        here = next(numbers)
        if here != number and not (lasting and here > number):
            return None
        met.append(f"{request.operation} {request.key or request.query.get('prefix', '')}")
        return fault

    return rule


class World:
    """A server, and what is on it and in a spill directory before each run."""

    def __init__(self, server: FaultyServer, clock: Clock, spill_dir: Path) -> None:
        self.server, self.clock, self.spill_dir = server, clock, spill_dir
        self._bucket = server.s3._store._buckets[BUCKET]
        self._aside = spill_dir.with_name("aside")
        self._before: dict[str, Any] = {}

    def keep(self) -> None:
        """What is there now is there before each run."""
        self._before = dict(self._bucket.objects)
        if self.spill_dir.exists():
            shutil.copytree(self.spill_dir, self._aside)

    def put_back(self) -> None:
        self.server.rule = lambda _: None
        with self.server.s3._store._lock:
            self._bucket.objects, self._bucket.uploads, self._bucket._sorted = dict(self._before), {}, None
        if self._aside.exists():
            shutil.rmtree(self.spill_dir)
            shutil.copytree(self._aside, self.spill_dir)
        self.server.s3.reset_counters()

    @property
    def keys(self) -> set[str]:
        return set(self._bucket.objects)

    def has(self, name: str) -> bool:
        return f"run/{name}/.metadata" in self._bucket.objects

    def lacks(self, name: str) -> bool:
        """Whether an object of a checkpoint is not what it was."""
        there = {key: stored for key, stored in self._before.items() if key.startswith(f"run/{name}/")}
        return any(self._bucket.objects.get(key) is not stored for key, stored in there.items())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.002)
    settings = {"PART_SIZE": "5MiB", "CONCURRENCY": "1", "RETRY_ATTEMPTS": "3", "SPILL_AFTER": "5s"}
    for name, value in settings.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)
    monkeypatch.setattr("dcp_s3.save.writer.OBJECTS_PER_RANK", 1)
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)  # the test drains
    clock = Clock()
    logging.disable(logging.CRITICAL)
    with serve(monkeypatch, FaultyServer(clock=clock)) as server:
        yield World(server, clock, tmp_path / "spill")
    logging.disable(logging.NOTSET)


def state_of(seed: int, *, large: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {"small": random_tensor((100,), torch.float32, seed), "step": seed}
    return state | ({"large": random_tensor((5 * MIB + 1000,), torch.uint8, seed)} if large else {})


def check_new_or_old(world: World, done: bool, new: Any, old: Any) -> None:
    """``old`` is what was there before, if anything was."""
    if old is None and not done and not world.has("step-1"):
        return
    try:
        assert_loads(URL, new)
    except (AssertionError, CheckpointException):
        if done or old is None:
            raise
        assert_loads(URL, old)


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
    act()
    requests = len(world.server.s3.request_log)
    check(True)
    assert requests
    failures: list[str] = []
    moments = itertools.product(range(1, requests + 1), (False, True), range(min(FAULTS, len(FORGED))))
    for (number, lasting, _), name in zip(moments, itertools.cycle(FORGED), strict=False):
        world.put_back()
        met: list[str] = []
        world.server.rule = at(number, FORGED[name], met, lasting=lasting)
        done = None
        try:
            done = attempt(act)
            world.server.rule = lambda _: None
            check(done)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - all are reported together
            outcome = {True: "it succeeded", False: "it failed", None: "it broke"}[done]
            when = f"request {number} of {requests}{' and all after it' * lasting}"
            failures.append(f"{when}: {name} ({', '.join(met[:3])}); {outcome}: {error!r:.1000}")
            print(failures[-1])
    assert not failures, "\n".join([f"{len(failures)} failed", *failures[:50]])


@pytest.mark.quick("save-one part", "overwrite-several parts")
@pytest.mark.parametrize("large", [False, True], ids=["one part", "several parts"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["save", "overwrite"])
def test_a_save(world: World, overwrite: bool, large: bool) -> None:
    old, new = state_of(1) if overwrite else None, state_of(2, large=large)
    if overwrite:
        save(old, URL)
    meet_every_fault(
        world, lambda: save(new, URL, overwrite=overwrite), lambda done: check_new_or_old(world, done, new, old)
    )


def test_a_save_where_a_checkpoint_is(world: World) -> None:
    """Whoever says that there is none."""
    old = state_of(1)
    save(old, URL)

    def act() -> None:
        with pytest.raises(CheckpointException):
            save(state_of(2), URL)

    meet_every_fault(world, act, lambda _: assert_loads(URL, old))


def test_a_load(world: World) -> None:
    state = state_of(1)  # a body cut to 20 bytes, again and again, is progress: nothing large
    save(state, URL)

    def check(_: bool) -> None:
        assert not world.lacks("step-1")

    meet_every_fault(world, lambda: assert_loads(URL, state), check)


@pytest.mark.soak
def test_a_prune(world: World) -> None:
    """Of step 1, and of what a save left; 2 is pinned, 3 is being read, 4 is the newest."""
    for step in (1, 2, 3, 4, 0):
        save(state_of(step), f"{ROOT}/step-{step}")
    pin(f"{ROOT}/step-2")
    world.clock.now += 2 * DAY
    store = S3Store(BUCKET, Settings())
    store.delete(["run/step-0/.metadata"])
    store.put(f"run/step-3/{lease_object('ab' * 16, 3600)}", b"{}")
    kept = {key for key in world.keys if not key.startswith(("run/step-0/", "run/step-1/"))}

    def act() -> None:
        report = prune(ROOT, "latest:1", grace="1h")
        if report.ok:
            gone = tuple(f"run/{each.name}/" for each in report.deleted)
            assert not any(key.startswith(gone) for key in world.keys)
        else:
            assert report.failures

    seen: set[frozenset[str]] = set()

    def check(_: bool) -> None:
        for step in (1, 2, 3, 4):
            assert not world.lacks(f"step-{step}") or (step == 1 and not world.has("step-1"))
        now = frozenset(world.keys)
        if now not in seen:  # otherwise it looks the same to whoever comes next
            seen.add(now)
            found = latest(ROOT)
            assert found is not None
            assert_loads(found.url, state_of(4))

    meet_every_fault(world, act, check)
    world.put_back()
    assert prune(ROOT, "latest:1", grace="1h").ok
    assert {key for key in world.keys if "deletion" not in key} == kept


@pytest.mark.soak
@pytest.mark.parametrize("overwrite", [True, False], ids=["an overwrite", "a save"])
def test_a_drain(world: World, overwrite: bool) -> None:
    old, new = state_of(1) if overwrite else None, state_of(2)
    if overwrite:
        save(old, URL)
    settings = {"durability": "local", "spill_dir": str(world.spill_dir)}
    save(new, URL, overwrite=overwrite, settings=settings)

    def drain() -> bool:
        report = Drainer(SpillStore(world.spill_dir)).run()
        assert not report.refused, report.refused
        assert not report.discarded
        return report.committed == [URL]

    def act() -> None:
        if not drain():
            raise errors.TransferError("it waits")

    def check(done: bool) -> None:
        check_new_or_old(world, done, new, old)
        if not done:
            drain()
            assert_loads(URL, new)

    meet_every_fault(world, act, check)
