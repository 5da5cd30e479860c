"""What counts as a checkpoint and as its own: nothing that may be one is deleted."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, parse_policy, prune, remove
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, from_rank_manifests, with_marks
from dcp_s3.errors import CheckpointProtectedError, SettingsError
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import data_object, new_nonce, spread
from dcp_s3.retention.plan import make_plan
from dcp_s3.s3 import operations
from dcp_s3.store import ListedObject, Page
from dcp_s3.url import CheckpointURL
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.memory_store import MemoryStore
from tests.retention.making import delete, get, is_manifest, keys, put, save, save_locally, save_on_ranks
from tests.retention.runs import DAY, ROOT, Clock
from tests.retention.test_prune_saves import steps

URL = CheckpointURL("bucket", "run/step-20")


def _ranks(paths: list[str], worlds: dict[int, int]) -> CheckpointInfo:
    directory = Directory.of(URL, [ListedObject(URL.key(path), 10, 50.0) for path in paths])
    manifests = {rank: Manifest(f"a{rank}", 1.0 + rank, 20, world, (), 5) for rank, world in worlds.items()}
    return with_marks(from_rank_manifests(URL, directory, manifests), directory)


@pytest.mark.parametrize(
    ("paths", "worlds", "state", "kept"),
    [
        (["__0.metadata", "__1.metadata", "__0_0.distcp", "__1_0.distcp"], {}, "committed", True),
        (["__0.metadata", "__0_0.distcp", "__1_0.distcp"], {}, "incomplete", True),
        (["__1.metadata"], {}, "incomplete", True),
        (["__0.metadata", ".dcp_s3/manifest-ab.0.json"], {}, "incomplete", True),
        (["__0.metadata", "__1.metadata"], {0: 2}, "incomplete", True),
        (["__0.metadata", "__1.metadata", "__2.metadata"], {0: 2, 1: 2, 2: 4}, "incomplete", True),
        (["__0.metadata", "__1.metadata"], {0: 2, 1: 4}, "incomplete", False),
        (["__0.metadata"], {0: 2}, "incomplete", False),
    ],
)
def test_ranks_are_left_over_only_if_some_are_certainly_missing(
    paths: list[str], worlds: dict[int, int], state: str, kept: bool
) -> None:
    info = _ranks(paths, worlds)
    assert info.state == state
    plan = make_plan([info], None, now=1e9, grace=DAY)
    assert (plan.deleted == ()) is kept


@pytest.mark.parametrize("kind", ["foreign", "lost manifests", "newer manifest"])
def test_ranks_without_manifests_that_can_be_read_stay(
    faulty: FaultyServer,
    client: Any,
    clock: Clock,
    tmp_path: Path,
    kind: str,
) -> None:
    url = f"{ROOT}/step-1"
    if kind == "foreign":
        for file in save_locally(tmp_path).iterdir():
            put(client, url, file.name.replace(".metadata", "__0.metadata"), file.read_bytes())
    else:
        save_on_ranks(url, 1)
        [path] = [path for path in keys(client, url) if is_manifest(path)]
        if kind == "lost manifests":
            delete(client, url, path)
        else:
            newer = json.loads(get(client, url, path)) | {"format_version": 2}
            put(client, url, path, json.dumps(newer).encode())
    steps(2)
    before = keys(client, url)
    clock.now += 2 * DAY
    prune(ROOT)
    assert keys(client, url) == before


def _named(directory: str) -> str:
    """A data object whose spread hash is ``directory``."""
    while True:
        name = data_object(0, 0, new_nonce())
        if hashlib.blake2b(name.encode(), digest_size=8).hexdigest().startswith(directory):
            return name


def _own(paths: list[str], needed: list[str] | None = None) -> set[str]:
    return Directory.of_sizes(dict.fromkeys(paths, 1)).own_data(needed or ())


def test_spread_data_that_is_not_the_checkpoints_own() -> None:
    near, other = f"5/{_named('5')}", f"7/{_named('7')}"
    wide = spread(data_object(0, 0, "ab"), 2)
    assert _own([near, other, "__0_0-ab.distcp"], [other]) == {near, other, "__0_0-ab.distcp"}
    assert _own([near, other], ["__0_0-ab.distcp"]) == set()
    assert _own([wide, other], [other]) == {other}
    for marks in ("5/.metadata", "5/.dcp_s3/pin", "5/__0.metadata"):
        assert _own([near, other, marks], [other]) == {other}
        assert _own([near, other, marks]) == set()
    assert _own([near, other]) == {near, other}  # of a save that was not committed
    assert _own([near, other, wide]) == set()
    assert _own([near, "6/__0_0.distcp"]) == set()
    assert _own([near, "__0_0.distcp"]) == {"__0_0.distcp"}


@pytest.mark.parametrize("committed", [True, False])
def test_a_nested_checkpoint_named_like_a_hash_is_not_taken(
    faulty: FaultyServer,
    client: Any,
    clock: Clock,
    committed: bool,
) -> None:
    if committed:
        save(ROOT)
    else:
        put(client, ROOT, "__0_0.distcp")
    nested = [f"5/{_named('5')}", f"10/{_named('10')}"]
    for path in nested:
        put(client, ROOT, path)
    put(client, ROOT, "10/.metadata")
    clock.now += 2 * DAY
    prune(f"s3://{BUCKET}")
    assert set(nested) <= keys(client, ROOT).keys()
    assert ("__0_0.distcp" in keys(client, ROOT)) is False


def test_a_copy_whose_name_has_no_number_is_kept(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2, 3)
    for path in keys(client, f"{ROOT}/step-1"):
        source = {"Bucket": BUCKET, "Key": f"run/step-1/{path}"}
        client.copy_object(Bucket=BUCKET, Key=f"run/final/{path}", CopySource=source)
    found = CheckpointCatalog(ROOT).latest()
    assert found is not None
    assert found.name == "step-3"
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-1", "step-2"]
    assert {info.name: info.step for info in CheckpointCatalog(ROOT).checkpoints()} == {"final": None, "step-3": 3}


def test_without_the_servers_time_a_save_in_progress_is_not_removed(
    faulty: FaultyServer,
    client: Any,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "server_time", lambda _: None)
    clock.now = time.time()
    path = data_object(0, 0, "ab12")
    put(client, f"{ROOT}/step-1", path)
    with pytest.raises(CheckpointProtectedError, match="in progress"):
        remove(f"{ROOT}/step-1")
    assert path in keys(client, f"{ROOT}/step-1")
    remove(f"{ROOT}/step-1", force=True)
    assert keys(client, f"{ROOT}/step-1") == {}


def test_metadata_that_is_listed_and_not_there_ends_the_look(faulty: FaultyServer) -> None:
    steps(1, 2)
    asked = []

    def missing(request: Any) -> Fault | None:
        if request.operation == "HeadObject" and request.key == "run/step-1/.metadata" and len(asked) < 50:
            asked.append(request)
            return Fault.error(404, "NoSuchKey")
        return None

    faulty.rule = missing
    snapshot = CheckpointCatalog(ROOT).scan(deep=True)
    assert len(asked) < 10
    assert {info.name: info.damage for info in snapshot.checkpoints} == {
        "step-1": "its .metadata is listed, but cannot be read", "step-2": None,
    }  # fmt: skip


def test_where_the_store_does_not_tell_its_time_that_of_this_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timeless(MemoryStore):
        def page(self, *arguments: Any, **options: Any) -> Page:
            return replace(super().page(*arguments, **options), server_time=None)

    monkeypatch.setattr(time, "time", lambda: 1445412480.0)
    assert list_directory(Timeless(), URL).now == 1445412480.0


@pytest.mark.parametrize("word", ["within:48", "within:4.5", "within:7."])
def test_within_needs_a_unit(word: str) -> None:
    with pytest.raises(SettingsError, match="unit"):
        parse_policy(word)
