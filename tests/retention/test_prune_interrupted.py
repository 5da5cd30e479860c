"""A prune that is cut off at any request, or meets another one."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_s3 import KeepLatest, Plan, prune
from dcp_s3.errors import TransferError
from dcp_s3.format.layout import CLAIM, joint_object
from dcp_s3.s3.client import close_clients
from tests.killing import AtRequest, begin, kill_all, new_process, running, wait_until_quiet
from tests.retention.catalogs import Catalog, serve_catalog
from tests.retention.runs import DAY, HOUR, ROOT, Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with pytest.MonkeyPatch.context() as patch, serve_catalog(patch, tmp_path_factory.mktemp("foreign")) as catalog:
        yield catalog


@pytest.fixture
def catalog(made: Catalog, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    made.put_back()
    made.server.rule = lambda _: None
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", made.server.s3.endpoint_url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return made


class Mixed:
    """Something of everything that a prune deletes, put back as often as a test wants.

    Committed: step-1 of ours with metrics, step-2 of another writer, step-9 to stay. Left over: step-5, objects in
    step-9, an upload, a board.
    """

    def __init__(self, directory: Path) -> None:
        self.run = run = Run()
        run.save("step-1")
        run.annotate("step-1", {"loss": 1})
        run.save_foreign("step-2", directory)
        run.save("step-9")
        self.commits: dict[str, set[str]] = {}
        """Of each committed checkpoint, by the key of its ``.metadata``, the keys of what it needs."""
        for key in run.objects():
            if not key.endswith((".metadata", "metrics.json")):
                self.commits.setdefault(f"run/{key.split('/')[1]}/.metadata", set()).add(key)
        self.keep = {key for key in run.objects() if key.startswith("run/step-9/")}
        run.save("step-5")
        run.delete("step-5", ".metadata")
        run.put("step-9", "__0_0-abcdef.distcp")
        run.clock.now += 60  # a claim that is no newer than the commit is of the save that committed
        for name in ("step-5", "step-9"):  # of saves without collectives
            for path in (
                CLAIM,
                joint_object("ab", "part", 1),
                joint_object("ab", "intent", 2),
                joint_object("ab", "roll", "ef"),
            ):
                run.put(name, path)
        run.memory.put("run/.dcp_s3/board-ab-queue", b"x")
        run.open_upload("run/step-9/__0_1-abcdef.distcp")
        run.clock.now += 2 * DAY
        self.start = run.memory.snapshot()

    def put_back(self) -> None:
        self.run.rule = lambda method, key: None
        self.run.memory.put_back(self.start)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.run.objects())

    def check_committed(self) -> None:
        """No checkpoint that reads as committed has lost an object."""
        there = self.keys
        for metadata, needed in self.commits.items():
            assert metadata not in there or needed <= there, f"{metadata} lost {needed - there}"

    def check_done(self) -> None:
        assert self.keys == self.keep
        assert self.run.memory.uploads("") == []


@pytest.fixture
def mixed(tmp_path: Path) -> Mixed:
    return Mixed(tmp_path)


def cut_off(mixed: Mixed, plan: Plan, requests: int, *, applied: bool) -> int:
    """Carry out so many requests, the last one without an answer (not at all unless ``applied``). Returns how many were
    not needed."""
    left = requests

    def die(method: str, key: str) -> Exception | None:
        nonlocal left
        mixed.check_committed()
        if not method.startswith("after "):
            left -= 1
            return TransferError("the process is dead") if left < (0 if applied else 1) else None
        return TransferError("the process is dead") if left <= 0 else None

    mixed.run.rule = die
    mixed.run.apply(plan)
    mixed.run.rule = lambda method, key: None
    mixed.check_committed()
    return left


def make_plan(mixed: Mixed) -> Plan:
    return mixed.run.catalog().scan(deep=True).plan(KeepLatest(1), grace=HOUR)


def test_to_plan_changes_nothing(mixed: Mixed) -> None:
    """So only what `apply_plan` does has to be cut off."""
    mixed.run.calls.clear()
    mixed.run.prune("latest:1", dry_run=True)
    assert set(mixed.run.calls) <= {"get", "head", "page", "uploads"}


def test_a_prune_alone_does_all(mixed: Mixed) -> None:
    objects = len(mixed.keys)
    report = mixed.run.prune("latest:1")
    mixed.check_done()
    assert (report.ok, report.left_alone) == (True, ())
    assert [each.name for each in report.deleted] == ["step-1", "step-2", "step-5"]
    assert report.objects == objects - len(mixed.keep)


@pytest.mark.parametrize("applied", [True, False])
def test_cut_off_at_any_request_it_tears_nothing_and_the_next_one_completes_it(mixed: Mixed, applied: bool) -> None:
    plan = make_plan(mixed)
    seen: set[frozenset[str]] = set()
    requests, left = 0, 0
    while left <= 0:
        requests += 1
        mixed.put_back()
        left = cut_off(mixed, plan, requests, applied=applied)
        if mixed.keys not in seen:  # whatever its requests were, the next prune sees only this
            seen.add(mixed.keys)
            assert mixed.run.prune("latest:1").ok
            mixed.check_done()
    assert requests > 20
    assert len(seen) > 10


@pytest.mark.parametrize("seed", range(4))
def test_cut_off_again_and_again_it_gets_there(mixed: Mixed, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        cut_off(mixed, make_plan(mixed), rng.randint(1, 20), applied=rng.random() < 0.5)
    mixed.run.prune("latest:1")
    mixed.check_done()


def cut_off_after_the_commit(mixed: Mixed) -> None:
    """So that lists name what is left."""
    dead = TransferError("the process is dead")
    mixed.run.rule = lambda method, key: dead if method == "delete" and ".metadata" not in key else None
    assert not mixed.run.prune("latest:1").ok
    mixed.run.rule = lambda method, key: None


def test_what_was_written_since_a_deletion_was_cut_off_stays(mixed: Mixed) -> None:
    """A foreign checkpoint is put back under the same names while a list names them."""
    data = {path: mixed.run.get("step-2", path) for path in mixed.run.objects("step-2")}
    cut_off_after_the_commit(mixed)
    assert ".metadata" not in mixed.run.objects("step-2")
    mixed.run.clock.now += 1
    for path, each in data.items():
        mixed.run.put("step-2", path, each)
    mixed.run.prune("latest:1 steps:2")
    assert set(mixed.run.objects("step-2")) == set(data)


def test_a_checkpoint_that_came_back_from_a_copy_is_not_torn_by_an_old_list(mixed: Mixed) -> None:
    metadata = mixed.run.memory.get("run/step-1/.metadata")
    cut_off_after_the_commit(mixed)
    mixed.run.put("step-1", ".metadata", metadata.data, metadata.metadata)
    report = mixed.run.prune("latest:1 steps:1")
    assert "run/step-1/.metadata" in mixed.keys
    mixed.check_committed()
    assert report.ok


# --- two at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_three_at_once_in_random_order_are_harmless(mixed: Mixed, seed: int) -> None:
    rng = random.Random(seed)
    failed: list[AssertionError] = []

    def delay(method: str, key: str) -> None:
        try:
            mixed.check_committed()
        except AssertionError as error:
            failed.append(error)
        time.sleep(rng.choice([0, 0, 0, 0.001]))  # lets the others go first

    plan = make_plan(mixed)
    mixed.run.rule = delay
    with ThreadPoolExecutor(3) as pool:
        prunes = [pool.submit(mixed.run.apply, plan), pool.submit(mixed.run.apply, plan)]
        prunes.append(pool.submit(mixed.run.prune, "latest:1"))
    mixed.run.rule = lambda method, key: None
    assert not failed, failed[0]
    assert all(each.result().ok for each in prunes)
    mixed.run.prune("latest:1")
    mixed.check_done()


# --- real processes ------------------------------------------------------------------------------


def _prune(environment: Mapping[str, str], output: Path) -> None:
    begin(environment, output)
    prune(ROOT, "latest:1")


_KILLS = [("PutObject", 1, True), ("DeleteObject", 1, False), ("DeleteObject", 2, True), ("DeleteObjects", 1, True),
          ("AbortMultipartUpload", 1, False)]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals")
@pytest.mark.parametrize(("operation", "count", "applied"), _KILLS)
def test_after_sigkill_the_next_prune_completes_it(
    catalog: Catalog, tmp_path: Path, operation: str, count: int, applied: bool
) -> None:
    moment = AtRequest(operation, count, applied=applied)
    with running([new_process(_prune, dict(os.environ), tmp_path / "output")]) as [process]:
        with moment.on(catalog.server):
            assert moment.reached.wait(60)
            kill_all([process])
        assert process.exitcode == -9
    close_clients()  # of this process
    gc.collect()  # urllib3 closes connections with their pool, and requests that failed before hold on to it
    wait_until_quiet(catalog.server)
    catalog.check_committed()
    assert prune(ROOT, "latest:1").ok
    catalog.check_done()


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals")
def test_two_processes_at_once(catalog: Catalog, tmp_path: Path) -> None:
    processes = [new_process(_prune, dict(os.environ), tmp_path / f"output-{number}") for number in range(2)]
    with running(processes):
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    catalog.check_done()
