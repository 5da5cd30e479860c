"""What a listing says of a checkpoint, and manifests."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace

import pytest

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo, age_order, summarize
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import (
    CLAIM,
    data_object,
    joint_object,
    lease_object,
    manifest_object,
)
from dcp_s3.retention.plan import CatalogSnapshot
from dcp_s3.store import ListedObject, Page
from dcp_s3.url import CheckpointURL

URL = CheckpointURL("bucket", "run/step-20")
NOW = 1000.0
MANIFEST = Manifest("ab", 100.0, 20, 2, (ObjectEntry("__0_0-ab.distcp", 10), ObjectEntry("__1_0-ab.distcp", 10)), 5)
COORDINATION = [CLAIM, joint_object("cd", "part", 1), joint_object("cd", "intent", 1), joint_object("cd", "roll", "ef")]
BOARD = ".dcp_s3/board-ab-queue"
NEEDED = {entry.path for entry in MANIFEST.objects} | {manifest_object("ab")}


def directory(*paths: str, now: float = NOW) -> Directory:
    """Objects of 10 bytes."""
    objects = tuple(ListedObject(URL.key(path), 10, 50.0, f'"{path}"') for path in paths)
    return Directory(URL, [Page(objects, (), server_time=now)])


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
    objects = tuple(ListedObject(URL.key(path), 10, at) for path, at in times.items())
    found = Directory(URL, [Page(objects, (), server_time=NOW)])
    removal, seen = found.removal(needed, since=500)
    assert seen == being_saved
    assert being_saved or removal.keys() == times.keys()


def test_without_the_time_of_the_store_that_of_this_host_counts() -> None:
    assert directory(now=7.0).now == 7.0
    assert abs(Directory(URL, [Page((), ())]).now - time.time()) < 3600


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
    info = summarize(URL, found, manifests)
    assert info.committed is committed
    assert ("may be complete" in (info.damage or "")) is not committed
    assert not CatalogSnapshot("s3://bucket/run", 1e9, (info,)).plan(None, grace=1.0).deleted
