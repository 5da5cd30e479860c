"""What a listing says of a checkpoint. A reader's lease: there while it loads, renewed, gone afterwards; and what a
reader does about a deletion."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, S3StorageReader
from dcp_s3.checkpoint import lease as lease_module
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo, age_order, summarize
from dcp_s3.checkpoint.lease import DELETION_BEGINS, ReaderLease
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    SettingsError,
    TransferError,
)
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import (
    CLAIM,
    LEASE_PREFIX,
    data_object,
    deletion_object,
    joint_object,
    lease_object,
    manifest_object,
)
from dcp_s3.retention.plan import CatalogSnapshot
from dcp_s3.store import ListedObject, Page
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads, failure, load
from tests.faulty import BUCKET, FaultyServer
from tests.retention.making import save, state, zeros
from tests.retention.runs import Run

ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/step-1"
PARSED = parse_url(URL)
NOW = 1000.0
BOARD = ".dcp_s3/board-ab-queue"
COORDINATION = [CLAIM, joint_object("cd", "part", 1), joint_object("cd", "intent", 1), joint_object("cd", "roll", "ef")]
MANIFEST = Manifest("ab", 100.0, 1, 2, (ObjectEntry("__0_0-ab.distcp", 10), ObjectEntry("__1_0-ab.distcp", 10)), 5)
NEEDED = {entry.path for entry in MANIFEST.objects} | {manifest_object("ab")}


def directory(*paths: str, now: float = NOW) -> Directory:
    """Objects of 10 bytes."""
    objects = tuple(ListedObject(PARSED.key(path), 10, 50.0, f'"{path}"') for path in paths)
    return Directory(PARSED, [Page(objects, (), server_time=now)])


def test_what_goes_with_a_checkpoint() -> None:
    kept = [
        "model.pt",
        "notes/__0_0-ab.distcp",
        "500/.metadata",
        ".dcp_s3/pin",
        ".dcp_s3/other",
        "../__0_0.distcp",
        BOARD,
    ]
    gone = [*NEEDED, *COORDINATION, "__0_7.distcp", "__0_0-cd.distcp", manifest_object("cd"), ".dcp_s3/metrics.json"]
    ended, lasting = lease_object("ab", 889), lease_object("ab", 891)  # of the time 50, with a margin of 60
    removal, being_saved = directory(".metadata", *kept, *gone, ended, lasting).removal(NEEDED, since=500)
    assert removal.keys() == {".metadata", *gone, ended}
    assert being_saved is None
    assert (directory(ended).protection(), directory(lasting).protection()) == (None, "a reader has a lease")
    etags = {path: found.etag for path, found in removal.items()}
    assert {found.path for found in directory(*gone).unchanged(etags)} == set(gone)
    assert directory(*gone).unchanged(etags, until=49) == []
    assert directory(*gone).unchanged(dict.fromkeys(gone, '"other"')) == []
    removal, _ = directory(*kept, *gone, ended, lasting).removal(None, since=500)
    assert removal.keys() == {*gone, ended, ".dcp_s3/other"}


DATA, FOREIGN = "__0_0-ab.distcp", "__0_0.distcp"


@pytest.mark.parametrize(
    ("times", "needed", "being_saved"),
    [
        ({".metadata": 50, DATA: 50, "__0_0-cd.distcp": 501}, {DATA}, "__0_0-cd.distcp"),
        ({".metadata": 50, DATA: 50, manifest_object("cd"): 501}, {DATA}, manifest_object("cd")),
        ({".metadata": 50, DATA: 50, "__0_0-cd.distcp": 499}, {DATA}, None),
        # Another library writes over names that are in use.
        ({".metadata": 501, FOREIGN: 502}, {FOREIGN}, FOREIGN),
        ({".metadata": 503, FOREIGN: 502}, {FOREIGN}, None),
        ({"__0_0-cd.distcp": 501}, None, "__0_0-cd.distcp"),
        ({"__0.metadata": 501}, None, "__0.metadata"),
        # The ranks of the committed save left it: its merger died, or a sign of life came late.
        ({".metadata": 50, **dict.fromkeys(NEEDED, 50), joint_object("ab", "intent", 1): 501}, NEEDED, None),
    ],
)
def test_a_save_in_progress(times: dict[str, float], needed: set[str] | None, being_saved: str | None) -> None:
    objects = tuple(ListedObject(PARSED.key(path), 10, at) for path, at in times.items())
    found = Directory(PARSED, [Page(objects, (), server_time=NOW)])
    removal, seen = found.removal(needed, since=500)
    assert seen == being_saved
    assert being_saved or removal.keys() == times.keys()


def test_without_the_time_of_the_store_that_of_this_host_counts() -> None:
    assert directory(now=7.0).now == 7.0
    assert abs(Directory(PARSED, [Page((), ())]).now - time.time()) < 3600


def named(directory: str) -> str:
    """A data object whose spread hash is ``directory``."""
    while True:
        name = data_object(0, 0, secrets.token_hex(8))
        if hashlib.blake2b(name.encode(), digest_size=8).hexdigest().startswith(directory):
            return name


def test_spread_data_belongs_to_the_checkpoint_that_names_it() -> None:
    own, other = f"5/{named('5')}", f"7/{named('7')}"
    found = directory(".metadata", own, other, "5/.metadata")
    assert found.removal({own}, since=500)[0].keys() == {".metadata", own}
    assert found.removal({own}, since=40)[1] == other
    assert found.leftovers(MANIFEST) == []
    assert not directory(own).shows_checkpoint
    name, _, data = own.partition("/")
    assert directory(data, "notes.txt").is_spread_of(name)
    assert not directory(data).is_spread_of("zz")
    for more in (".metadata", ".dcp_s3/pin", "__0_0.distcp", f"x/{data}"):
        assert not directory(data, more).is_spread_of(name)
    assert not directory("notes.txt").is_spread_of(name)


def test_order_is_step_then_time_then_name_and_no_step_comes_first() -> None:
    rows: list[tuple[str, int | None, float | None]] = [
        ("b", 10, 2.0), ("a", 10, 2.0), ("late", 9, 99.0), ("early", 10, 1.0), ("stepless", None, 1000.0),
        ("zero", 0, None), ("uncommitted", 11, 5.0),
    ]  # fmt: skip
    infos = [
        CheckpointInfo(f"s3://b/{row[0]}", row[0], "incomplete" if row[1] == 11 else "committed", *row[1:], 1, 1, 1)
        for row in rows
    ]
    names = [info.name for info in sorted(infos, key=age_order)]
    assert names == ["stepless", "zero", "late", "early", "a", "b", "uncommitted"]


OTHERS = "__0_0.distcp __1_0.distcp"


@pytest.mark.parametrize(
    ("ranks", "worlds", "others", "committed"),
    [
        pytest.param("01", {0: 2, 1: 2}, "", True, id="all"),
        pytest.param("0", {0: 2}, "", False, id="one of two"),
        pytest.param("01", {0: 2}, "", False, id="commit without manifest"),
        pytest.param("0123", {0: 2, 1: 2, 2: 4, 3: 4}, "", False, id="of two saves"),
        pytest.param("01", {}, OTHERS, True, id="no manifests"),
        pytest.param("01", {}, f"{OTHERS} {manifest_object('ab')}", True, id="a save in progress"),
        pytest.param("01", {}, f"{OTHERS} sub/__2_0.distcp sub/.metadata", True, id="no manifests, another below"),
        pytest.param("01", {}, f"{OTHERS} sub/__2_0.distcp", False, id="no manifests, data of a rank below"),
        pytest.param("0", {}, OTHERS, False, id="no manifests, data of more ranks"),
        pytest.param("1", {}, "", False, id="no manifests, a rank is missing"),
        pytest.param("0", {}, manifest_object("ab", 0), False, id="a manifest that is not clear"),
    ],
)
def test_ranks_that_commit_for_themselves_stay_unless_all_are_there(
    ranks: str, worlds: dict[int, int], others: str, committed: bool
) -> None:
    """``worlds``: the number of ranks that each manifest says."""
    found = directory(*(f"__{rank}.metadata" for rank in ranks), *others.split())
    manifests: dict[int | None, Manifest] = {
        rank: replace(MANIFEST, rank=rank, world_size=size) for rank, size in worlds.items()
    }
    info = summarize(PARSED, found, manifests)
    assert info.committed is committed
    assert ("may be complete" in (info.damage or "")) is not committed
    assert not CatalogSnapshot("s3://bucket/run", 1e9, (info,)).plan(None, grace=1.0).deleted


# --- leases --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """With step-1, and no patience for deletions that are withdrawn."""
    monkeypatch.setattr(lease_module, "_WITHDRAWAL", 0.0)
    run = Run()
    run.steps(1)
    return run


def leases(run: Run) -> list[str]:
    return [path for path in run.objects("step-1") if path.startswith(LEASE_PREFIX)]


def take(run: Run) -> ReaderLease:
    lease = ReaderLease(run.store, run.url("step-1"), 600.0)
    lease.take()
    return lease


def of_loads(faulty: FaultyServer) -> list[str]:
    return [key for key in faulty.s3.objects(BUCKET) if "/lease-" in key]


@pytest.fixture
def leasing(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    monkeypatch.setenv("DCP_S3_READER_LEASE", "10m")
    save(URL)
    return faulty


def test_there_is_a_lease_while_it_loads_and_none_afterwards(leasing: FaultyServer) -> None:
    seen: list[Any] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith((".metadata", ".distcp")):
            leasing.rule = lambda _: None
            seen.extend(info.leased_until for info in CheckpointCatalog(ROOT).checkpoints())
            leasing.rule = note

    leasing.rule = note
    assert_loads(URL, state())
    assert len(seen) >= 2
    assert None not in seen
    assert of_loads(leasing) == []
    leasing.rule = lambda _: None
    leasing.s3.reset_counters()
    assert_loads(URL, state(), settings={"reader_lease": None})
    assert set(leasing.s3.counters.requests) == {"GetObject"}
    for value in ("5s", "31d"):
        with pytest.raises(SettingsError, match="reader_lease"):
            S3StorageReader(URL, settings={"reader_lease": value})


def test_a_load_that_fails_and_a_reader_that_is_reset_leave_no_lease(leasing: FaultyServer) -> None:
    reader = S3StorageReader(URL)
    reader.read_metadata()
    assert len(of_loads(leasing)) == 1
    reader.reset()
    assert of_loads(leasing) == []
    with pytest.raises(CheckpointNotFoundError):
        S3StorageReader(f"{ROOT}/none").read_metadata()
    assert of_loads(leasing) == []
    [data] = [key for key in leasing.s3.objects(BUCKET) if key.endswith(".distcp")]
    leasing.s3._store.delete(BUCKET, [data])
    failure(lambda: load(zeros(), URL))
    assert of_loads(leasing) == []


def test_it_is_renewed_while_it_is_needed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    lease, renewals, failed = take(run), threading.Semaphore(0), list[str]()
    lease._seconds = 0.03  # type: ignore[assignment]

    def note(method: str, key: str) -> Exception | None:
        if method != "put":
            return None
        renewals.release()
        if not failed:
            failed.append(key)
            return TransferError("InternalError")
        return None

    run.rule = note
    run.clock.now += 3000
    with lease.renewed():
        for _ in range(4):
            assert renewals.acquire(timeout=30)
        assert run.only().leased_until == run.clock.now + 600
    assert "could not be renewed now" in caplog.text
    assert leases(run) == []


@pytest.mark.parametrize(
    ("method", "said", "left"),
    [("put", "no lease could be written", 0), ("delete", "stays until it ends, in at most 600 s", 1)],
)
def test_a_lease_that_can_not_be_written_or_deleted_is_a_warning(
    run: Run, caplog: pytest.LogCaptureFixture, method: str, said: str, left: int
) -> None:
    run.rule = lambda found, _: AccessDeniedError("no") if found == method else None
    with take(run).renewed():
        pass
    assert said in caplog.text
    assert len(leases(run)) == left


def test_a_deletion_that_has_begun_is_seen(run: Run) -> None:
    lease, own = take(run), {run.only().deletion_id}
    run.put("step-1", deletion_object("00ff"))  # of an earlier save
    lease.check_not_deleted(own)
    with pytest.raises(CheckpointDeletedError, match="is being deleted"):
        lease.check_not_deleted(None)  # without collectives a rank does not know the other ranks' ids
    run.put("step-1", deletion_object(*own))
    with pytest.raises(CheckpointDeletedError, match="is being deleted"):
        lease.check_not_deleted(own)
    run.clock.now += DELETION_BEGINS + 1  # whoever began it has not gone on
    lease.check_not_deleted(own)
    run.once("page", "deletion-", lambda: run.delete("step-1", ".metadata"))  # done before the look
    with pytest.raises(CheckpointDeletedError):
        lease.check_not_deleted(own)


def test_a_deletion_that_is_withdrawn_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_WITHDRAWAL", 60.0)
    lease, own = take(run), run.only().deletion_id
    run.put("step-1", deletion_object(own))
    looks: list[str] = []

    def withdraw(method: str, key: str) -> None:
        if method == "page" and "deletion-" in key:
            looks.append(key)
            if len(looks) == 2:
                run.delete("step-1", deletion_object(own))

    run.rule = withdraw
    lease.check_not_deleted({own})
    assert len(looks) == 2
