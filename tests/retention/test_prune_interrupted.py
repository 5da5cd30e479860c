"""A prune that is cut off at any request, or meets another one."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, KeepLatest, Plan, PruneReport, apply_plan, prune
from dcp_s3.s3.client import close_clients
from tests.killing import AtRequest, begin, kill_all, new_process, running, wait_until_quiet
from tests.memory_s3 import Fault
from tests.retention.catalogs import ROOT, Catalog, serve_catalog

ONCE = {"retry_attempts": 1}


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


class Death:
    """The server carries out ``requests`` requests, the last of them without an answer, and no other."""

    def __init__(self, catalog: Catalog, requests: int, *, applied: bool) -> None:
        self.left, self.applied, self.catalog = requests, applied, catalog
        self.failed: list[AssertionError] = []
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> Fault | None:
        with self._lock:
            self.left -= 1
            try:
                self.catalog.check_committed()
            except AssertionError as error:
                self.failed.append(error)
            if self.left > 0:
                return None
            return Fault.apply_then_reset() if self.left == 0 and self.applied else Fault.reset()


def cut_off(catalog: Catalog, plan: Plan, requests: int, *, applied: bool) -> Death:
    death = Death(catalog, requests, applied=applied)
    catalog.server.rule = death
    apply_plan(ROOT, plan, settings=ONCE)
    catalog.server.rule = lambda _: None
    assert not death.failed, death.failed[0]
    catalog.check_committed()
    return death


def make_plan() -> Plan:
    return CheckpointCatalog(ROOT).scan(deep=True).plan(KeepLatest(1), grace=3600)


def test_to_plan_changes_nothing(catalog: Catalog) -> None:
    """So only what `apply_plan` does has to be cut off."""
    catalog.server.s3.reset_counters()
    prune(ROOT, "latest:1", dry_run=True)
    assert {request.method for request in catalog.server.s3.request_log} <= {"GET", "HEAD"}


def test_a_prune_alone_does_all(catalog: Catalog) -> None:
    report = prune(ROOT, "latest:1")
    catalog.check_done()
    assert (report.ok, report.left_alone) == (True, ())
    assert [each.name for each in report.deleted] == ["step-1", "step-2", "step-5"]
    assert report.objects == len(catalog.start) - len(catalog.keep)


@pytest.mark.quick("True")
@pytest.mark.parametrize("applied", [True, False])
def test_cut_off_at_any_request_it_tears_nothing_and_the_next_one_completes_it(catalog: Catalog, applied: bool) -> None:
    plan = make_plan()
    seen: set[frozenset[str]] = set()
    requests = 0
    while True:
        requests += 1
        catalog.put_back()
        death = cut_off(catalog, plan, requests, applied=applied)
        state = frozenset(catalog.keys)
        if state not in seen:  # whatever its requests were, the next prune sees only this
            seen.add(state)
            assert prune(ROOT, "latest:1").ok
            catalog.check_done()
        if death.left > 0:
            break
    assert requests > 20
    assert len(seen) > 10


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(2))
def test_cut_off_again_and_again_it_gets_there(catalog: Catalog, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        cut_off(catalog, make_plan(), rng.randint(1, 20), applied=rng.random() < 0.5)
    prune(ROOT, "latest:1")
    catalog.check_done()


def test_what_was_written_since_a_deletion_was_cut_off_stays(catalog: Catalog) -> None:
    """A foreign checkpoint is put back under the same names while a list names them."""
    catalog.server.rule = lambda request: Fault.reset() if request.operation == "DeleteObjects" else None
    assert not prune(ROOT, "latest:1", settings=ONCE).ok
    catalog.server.rule = lambda _: None
    left = catalog.keys
    assert "run/step-2/.metadata" not in left
    bucket = catalog._bucket
    for key in [key for key in catalog.start if key.startswith("run/step-2/")]:
        catalog.server.s3._store.put("bucket", key, catalog.start[key].body, headers={})
    assert bucket.objects["run/step-2/.metadata"].etag != catalog.start["run/step-2/.metadata"].etag
    prune(ROOT, "latest:1 steps:2")
    assert {key for key in catalog.keys if key.startswith("run/step-2/")} == {
        key for key in catalog.start if key.startswith("run/step-2/")
    }


def test_a_checkpoint_that_came_back_from_a_copy_is_not_torn_by_an_old_list(catalog: Catalog) -> None:
    catalog.server.rule = lambda request: Fault.reset() if request.operation == "DeleteObjects" else None
    prune(ROOT, "latest:1", settings=ONCE)
    catalog.server.rule = lambda _: None
    metadata = catalog.start["run/step-1/.metadata"]
    catalog.server.s3._store.put("bucket", "run/step-1/.metadata", metadata.body, headers=metadata.headers)
    report = prune(ROOT, "latest:1 steps:1")
    assert "run/step-1/.metadata" in catalog.keys
    catalog.check_committed()
    assert report.ok


# --- two at once ---------------------------------------------------------------------------------


def in_threads(*functions: Any) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def work(number: int) -> None:
        results[number] = functions[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("seed", range(4))
def test_two_at_once_in_random_order_are_harmless(catalog: Catalog, seed: int) -> None:
    rng = random.Random(seed)
    failed: list[AssertionError] = []

    def delay(request: Any) -> None:
        try:
            catalog.check_committed()
        except AssertionError as error:
            failed.append(error)
        time.sleep(rng.choice([0, 0, 0.005, 0.02]))  # lets the other one go first

    plan = make_plan()
    catalog.server.rule = delay
    reports: list[PruneReport | None] = in_threads(
        lambda: apply_plan(ROOT, plan), lambda: apply_plan(ROOT, plan), lambda: prune(ROOT, "latest:1")
    )
    catalog.server.rule = lambda _: None
    assert not failed, failed[0]
    assert all(report is not None and report.ok for report in reports), reports
    prune(ROOT, "latest:1")
    catalog.check_done()


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
