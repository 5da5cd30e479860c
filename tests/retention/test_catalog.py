from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcp_s3 import errors, latest, list_checkpoints
from dcp_s3.s3 import listing, retry
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, is_manifest, keys, put, save, save_foreign, save_on_ranks
from tests.spread import spread_out


def _names(root: str) -> dict[str, str]:
    return {info.name: info.state for info in list_checkpoints(root)}


def _drop_user_metadata(s3: Any, url: str) -> None:
    put(s3, url, ".metadata", get(s3, url, ".metadata"))


def test_checkpoints_are_listed_in_order_of_steps(root: str) -> None:
    before = time.time()
    for name in ("step-10", "step-9", "step-100"):
        save(f"{root}/{name}", metrics={"loss": 0.5, "note": name})
    found = list_checkpoints(root)
    assert [(info.name, info.step) for info in found] == [("step-9", 9), ("step-10", 10), ("step-100", 100)]
    for info in found:
        assert info.url == f"{root}/{info.name}"
        assert (info.state, info.world_size, info.foreign) == ("committed", 1, False)
        assert info.metrics == {"loss": 0.5, "note": info.name}
        assert before - 1 <= (info.created_at or 0) <= time.time() + 1


def test_objects_and_size_are_those_of_the_data(root: str, s3: Any) -> None:
    url = save(f"{root}/1", separate=["weight", "half"])
    data = {path: size for path, size in keys(s3, url).items() if path.endswith(".distcp")}
    assert len(data) > 1
    [info] = list_checkpoints(root)
    assert (info.objects, info.size) == (len(data), sum(data.values()))


def test_nothing_there_is_an_empty_list_and_no_latest(root: str) -> None:
    assert list_checkpoints(root) == []
    assert latest(root) is None


def test_a_torn_save_is_incomplete_and_never_latest(root: str, s3: Any) -> None:
    save(f"{root}/step-1")
    torn = save(f"{root}/step-2", metrics={"loss": 1})
    delete(s3, torn, ".metadata")  # the manifest is still there: the last instant before the commit
    bare = save(f"{root}/step-3")
    delete(s3, bare, ".metadata")
    for path in keys(s3, bare):
        if is_manifest(path):
            delete(s3, bare, path)
    assert _names(root) == {"step-1": "committed", "step-2": "incomplete", "step-3": "incomplete"}
    assert [info.foreign for info in list_checkpoints(root)] == [False] * 3
    newest = latest(root)
    assert newest is not None
    assert newest.name == "step-1"


def test_latest_is_the_highest_step_and_then_the_newest(root: str) -> None:
    for name in ("z-5", "b-30", "a-30"):
        save(f"{root}/{name}")
    newest = latest(root)
    assert newest is not None
    assert newest.name == "a-30"


def test_foreign_checkpoints_are_listed(root: str, s3: Any, tmp_path: Path) -> None:
    url = save_foreign(s3, f"{root}/epoch-3", tmp_path)
    data = {path: size for path, size in keys(s3, url).items() if path.endswith(".distcp")}
    [info] = list_checkpoints(root)
    assert (info.state, info.foreign, info.step, info.world_size) == ("committed", True, 3, None)
    assert (info.objects, info.size) == (len(data), sum(data.values()))
    assert abs((info.created_at or 0) - time.time()) < 600
    assert latest(root) == info


def test_ranks_without_collectives_count_when_all_have_committed(root: str, s3: Any) -> None:
    url = save_on_ranks(f"{root}/step-4", 2)
    save(f"{root}/step-1")
    data = {path: size for path, size in keys(s3, url).items() if path.endswith(".distcp")}
    info = latest(root)
    assert info is not None
    assert (info.name, info.state, info.world_size) == ("step-4", "committed", 2)
    assert (info.objects, info.size) == (len(data), sum(data.values()))
    assert info.metrics == {"loss": 0.5}
    for rank in (1, 0):
        delete(s3, url, f"__{rank}.metadata")
        assert _names(root)["step-4"] == "incomplete"
        other = latest(root)
        assert other is not None
        assert other.name == "step-1"


def test_a_rank_with_two_manifests_has_the_one_that_its_commit_names(root: str, s3: Any) -> None:
    url = save_on_ranks(f"{root}/step-4", 2)
    manifest = next(path for path in keys(s3, url) if is_manifest(path) and path.endswith(".1.json"))
    stale = get(s3, url, manifest).replace(b'"world_size": 2', b'"world_size": 3')
    put(s3, url, ".dcp_s3/manifest-00000000000000ff.1.json", stale)
    assert _names(root) == {"step-4": "committed"}


def test_a_copy_that_lost_its_user_metadata_still_has_its_manifest(root: str, s3: Any) -> None:
    url = save(f"{root}/run-12", metrics={"loss": 2.0})
    _drop_user_metadata(s3, url)
    [info] = list_checkpoints(root)
    assert (info.foreign, info.world_size, info.metrics) == (False, 1, {"loss": 2.0})


def test_of_two_manifests_the_one_of_the_committed_save_counts(root: str, s3: Any) -> None:
    url = save(f"{root}/run-12", metrics={"loss": 2.0})
    manifest = next(path for path in keys(s3, url) if is_manifest(path))
    for save_id in ("0000000000000000", "ffffffffffffffff"):
        put(s3, url, f".dcp_s3/manifest-{save_id}.json", get(s3, url, manifest).replace(b"2.0", b"9.0"))
    _drop_user_metadata(s3, url)
    [info] = list_checkpoints(root)
    assert info.metrics == {"loss": 2.0}


def test_the_manifest_of_a_save_in_progress_is_not_that_of_a_commit_which_lost_its_own(root: str, s3: Any) -> None:
    url = save(f"{root}/run-12", metrics={"loss": 2.0})
    manifest = next(path for path in keys(s3, url) if is_manifest(path))
    other = get(s3, url, manifest).replace(b"2.0", b"9.0")
    delete(s3, url, manifest)
    time.sleep(1.1)  # times are of whole seconds
    put(s3, url, ".dcp_s3/manifest-ffffffffffffffff.json", other)
    [info] = list_checkpoints(root)
    assert (info.state, info.foreign, info.metrics) == ("committed", True, {})


def test_a_lost_or_broken_manifest_leaves_the_checkpoint_committed(root: str, s3: Any) -> None:
    for name, data in (("step-1", None), ("step-2", b"{}"), ("step-3", b"\xff\x00")):
        url = save(f"{root}/{name}")
        manifest = next(path for path in keys(s3, url) if is_manifest(path))
        delete(s3, url, manifest) if data is None else put(s3, url, manifest, data)
    found = list_checkpoints(root)
    assert [(info.state, info.objects, info.step) for info in found] == [("committed", 1, step) for step in (1, 2, 3)]


def test_overwriting_shows_the_new_checkpoint(root: str) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 1})
    save(url, metrics={"loss": 2}, overwrite=True)
    [info] = list_checkpoints(root)
    assert (info.metrics, info.objects) == ({"loss": 2}, 1)


def test_latest_passes_over_what_cannot_be_loaded(root: str, s3: Any, caplog: pytest.LogCaptureFixture) -> None:
    good = save(f"{root}/step-1")
    no_data = save(f"{root}/step-2")
    delete(s3, no_data, next(path for path in keys(s3, no_data) if path.endswith(".distcp")))
    short = save(f"{root}/step-3")
    data = next(path for path in keys(s3, short) if path.endswith(".distcp"))
    put(s3, short, data, get(s3, short, data)[:-1])
    torn = save(f"{root}/step-4")
    put(s3, torn, ".metadata", get(s3, torn, ".metadata")[:-10])
    unsafe = save(f"{root}/step-5")
    put(s3, unsafe, ".metadata", pickle.dumps(print))
    with caplog.at_level(logging.WARNING, "dcp_s3"):
        info = latest(root)
    assert info is not None
    assert info.url == good
    [said] = [record.getMessage() for record in caplog.records if "cannot be loaded" in record.getMessage()]
    assert said.startswith(f"{unsafe} cannot be loaded, nor can 3 more (to {no_data}): ")
    assert said.endswith(f"The next one that can be is {good}")


NAMES = [
    "sp ace-step-1", "pl+us-step-2", "per%20cent-step-3", "ünï-コード-step-4", "a&b=c-step-5", "[bold]-step-6",
    "x'\"-step-7",
]  # fmt: skip


def test_names_are_taken_literally(root: str) -> None:
    for name in NAMES:
        save(f"{root} +%2B é/{name}")
    found = list_checkpoints(f"{root} +%2B é/")
    assert [info.name for info in found] == NAMES
    assert all(info.objects == 1 and info.committed for info in found)
    newest = latest(f"{root} +%2B é")
    assert newest is not None
    assert newest.url == f"{root} +%2B é/{NAMES[-1]}"


def test_directories_without_anything_of_a_checkpoint_are_left_out(root: str, s3: Any, bucket: str) -> None:
    save(f"{root}/step-1")
    save(f"{root}/nested/500")  # named like a hash prefix
    torn = save(f"{root}/torn/1000")
    delete(s3, torn, ".metadata")
    put(s3, root, "logs/events.out")
    put(s3, root, "loose-file")
    assert _names(root) == {"step-1": "committed"}
    assert _names(f"{root}/nested") == {"500": "committed"}
    assert _names(f"{root}/torn") == {"1000": "incomplete"}
    assert _names(f"s3://{bucket}") == {}


@pytest.mark.parametrize("committed", [True, False])
def test_hash_prefixes_are_part_of_their_checkpoint(root: str, s3: Any, committed: bool) -> None:
    url = spread_out(s3, save(f"{root}/step-8", separate=["weight", "half"]))
    if not committed:
        for path in keys(s3, url):
            if not path.endswith(".distcp"):
                delete(s3, url, path)
    [info] = list_checkpoints(root)
    assert info.state == ("committed" if committed else "incomplete")
    assert info.objects == sum(path.endswith(".distcp") for path in keys(s3, url)) > 1
    assert not info.foreign
    assert list_checkpoints(url) == []  # the prefixes are no checkpoints


def test_a_bucket_may_be_the_root(bucket: str) -> None:
    save(f"s3://{bucket}/step-3")
    assert _names(f"s3://{bucket}/") == {"step-3": "committed"}


@pytest.mark.parametrize("ask", [list_checkpoints, latest])
def test_a_missing_bucket_is_an_error(bucket: str, ask: Any) -> None:
    with pytest.raises(errors.BucketNotFoundError, match=f"{bucket}-not"):
        ask(f"s3://{bucket}-not/run")


@pytest.mark.servers("rclone", "rgw")
def test_wrong_credentials_are_an_error(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises((errors.CredentialsError, errors.AccessDeniedError)):
        latest(root)


def test_no_server_is_an_error_not_none() -> None:
    settings = {"endpoint_url": "http://127.0.0.1:9", "retry_attempts": 2, "region": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        with pytest.raises(errors.TransferError) as caught:
            latest("s3://bucket/run", settings=settings)
    assert caught.value.attempts == 2


def test_no_credentials_are_an_error() -> None:
    with pytest.raises(errors.CredentialsError):
        latest("s3://bucket/run", settings={"endpoint_url": "http://127.0.0.1:9", "region": "us-east-1"})


@pytest.mark.parametrize("root", ["run", "s3:///run", "http://bucket/run"])
def test_a_bad_url_is_an_error(root: str) -> None:
    with pytest.raises(errors.InvalidURLError):
        list_checkpoints(root)


def test_listings_of_many_pages(root: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_SIZE", 2)
    for i in range(5):
        put(s3, root, f"dir-{i}/file")
    url = save(f"{root}/step-1", separate=["weight", "half"])
    torn = f"{root}/zzz-step-2"
    for i in range(5):
        put(s3, torn, f"__{i}_0.distcp")
    found = list_checkpoints(root)
    assert [(info.url, info.objects) for info in found] == [(url, 3), (torn, 5)]
    newest = latest(root)
    assert newest is not None
    assert newest.url == url


# --- requests ------------------------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)
    with serve(monkeypatch) as server:
        yield server


def _requests(faulty: FaultyServer) -> dict[str, int]:
    counted: dict[str, int] = {}
    for request in faulty.s3.request_log:
        counted[request.operation] = counted.get(request.operation, 0) + 1
    return counted


def test_two_requests_for_each_checkpoint(faulty: FaultyServer) -> None:
    for step in range(5):
        save(f"s3://{BUCKET}/run/step-{step}")
    faulty.s3.reset_counters()
    assert len(list_checkpoints(f"s3://{BUCKET}/run")) == 5
    assert _requests(faulty) == {"ListObjectsV2": 6, "GetObject": 5}
    faulty.s3.reset_counters()
    assert latest(f"s3://{BUCKET}/run") is not None
    assert _requests(faulty) == {"ListObjectsV2": 7, "GetObject": 7}


@pytest.mark.parametrize(
    "fault",
    [Fault.error(503, "SlowDown"), Fault.error(500, "InternalError"), Fault.reset(), Fault.truncate(20)],
    ids=lambda fault: f"{fault.kind}{fault.status or ''}",
)
@pytest.mark.parametrize("operation", ["ListObjectsV2", "HeadObject", "GetObject"])
def test_a_request_that_fails_is_repeated(faulty: FaultyServer, operation: str, fault: Fault) -> None:
    if operation == "HeadObject" and fault.kind == "truncate":
        pytest.skip("a HEAD has no body")
    url = save(f"s3://{BUCKET}/run/step-1", metrics={"loss": 1})
    if operation == "HeadObject":  # of two manifests it tells the right one
        client = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
        put(client, url, ".dcp_s3/manifest-00000000000000ff.json")
        client.close()
    failed = faulty.once(operation, fault)
    [info] = list_checkpoints(f"s3://{BUCKET}/run")
    assert failed
    assert info.metrics == {"loss": 1}


def test_a_request_that_keeps_failing_is_an_error_not_a_gap(faulty: FaultyServer) -> None:
    for step in (1, 2):
        save(f"s3://{BUCKET}/run/step-{step}")
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if "step-2/" in request.key else None
    with pytest.raises(errors.TransferError) as caught:
        latest(f"s3://{BUCKET}/run", settings={"retry_attempts": 3})
    assert (caught.value.operation, caught.value.attempts) == ("GetObject", 3)


def test_requests_in_flight_are_bounded(faulty: FaultyServer) -> None:
    client = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    for i in range(60):
        put(client, f"s3://{BUCKET}/run", f"step-{i}/.metadata")
    client.close()
    faulty.rule = lambda request: Fault.delay(0.05) if request.operation == "ListObjectsV2" else None
    faulty.s3.reset_counters()
    list_checkpoints(f"s3://{BUCKET}/run")
    assert 16 <= faulty.s3.counters.peak_in_flight <= 32
