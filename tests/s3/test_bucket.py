"""Whole small objects: conditional writes, lost answers, deletes, listings."""

import json
import logging
import multiprocessing
import os
import pickle
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.s3.bucket import Bucket
from dcp_s3.s3.client import close_clients, get_client
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault


@pytest.fixture
def target(bucket: str) -> Bucket:
    return Bucket(bucket, Settings())


def test_write_read_exists_delete_list(target: Bucket) -> None:
    keys = ["a/1", "a/ü b+c%20", "a/2/x", "empty"]
    for key in keys:
        target.write(key, b"" if key == "empty" else key.encode(), metadata={"who": "me"})
    assert all(target.exists(key) for key in keys)
    assert target.read("a/ü b+c%20") == "a/ü b+c%20".encode()
    assert sorted(key for key, _ in target.list("a/")) == sorted(keys[:3])
    target.delete([*keys, "never-was"])
    assert not any(target.exists(key) for key in keys)
    assert list(target.list("")) == []


def test_listings_and_deletes_of_more_than_a_page(memory_server: Any, target: Bucket) -> None:
    keys = [f"n/{i:05}" for i in range(2100)]
    for key in keys:
        target.write(key, b"x")
    assert [key for key, _ in target.list("n/")] == keys
    target.delete(keys)
    assert list(target.list("n/")) == []


def test_missing_things_have_their_own_errors(target: Bucket) -> None:
    with pytest.raises(errors.ObjectNotFoundError):
        target.read("missing")
    nowhere = Bucket("no-such-bucket-here", target.settings)
    for action in (lambda: nowhere.read("k"), lambda: nowhere.exists("k"), lambda: nowhere.write("k", b"")):
        with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket-here"):
            action()


def test_conditional_write(server: Any, target: Bucket) -> None:
    target.write("k", b"first", if_absent=True)
    if not server.conditional_writes:
        target.write("k", b"second", if_absent=True)
        assert target.read("k") == b"second"
        return
    with pytest.raises(errors.PreconditionFailedError):
        target.write("k", b"second", if_absent=True)
    assert target.read("k") == b"first"


def test_a_conditional_write_whose_answer_was_lost_succeeds(faulty: FaultyServer) -> None:
    seen = faulty.once("PutObject", Fault.apply_then_reset())
    target = Bucket("bucket", Settings())
    target.write("k", b"mine", if_absent=True)
    assert seen
    assert target.read("k") == b"mine"


def test_a_conditional_write_that_lost_to_another_fails_in_spite_of_a_retry(faulty: FaultyServer) -> None:
    target = Bucket("bucket", Settings())
    target.write("k", b"theirs")
    seen = faulty.once("PutObject", Fault.reset())
    with pytest.raises(errors.PreconditionFailedError):
        target.write("k", b"mine", if_absent=True)
    assert seen
    assert target.read("k") == b"theirs"


def test_a_store_without_conditional_writes_is_said_once(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.rule = lambda r: Fault.error(501, "NotImplemented") if "if-none-match" in r.headers else None
    target = Bucket("bucket", Settings())
    with caplog.at_level(logging.WARNING):
        target.write("k", b"1", if_absent=True)
        target.write("l", b"2", if_absent=True)
    assert target.read("k") == b"1"
    assert sum("conditional" in record.getMessage() for record in caplog.records) == 1


def test_wrong_credentials(memory_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close_clients()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    try:
        with pytest.raises(errors.CredentialsError, match="AWS_ACCESS_KEY_ID"):
            Bucket(bucket, Settings()).read("k")
    finally:
        close_clients()


def test_a_dead_endpoint_fails_with_the_attempts_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    settings = Settings(endpoint_url="http://127.0.0.1:9", retry_attempts=2)
    with pytest.raises(errors.TransferError, match=r"after 2 attempts.*DCP_S3_RETRY_ATTEMPTS"):
        Bucket("bucket", settings).read("k")


def test_encryption_class_and_owner_go_with_the_requests(faulty: FaultyServer) -> None:
    seen: dict[str, dict[str, str]] = {}

    def rule(request: Any) -> None:
        seen[request.operation] = dict(request.headers)

    faulty.rule = rule
    settings = Settings(
        sse="aws:kms", sse_kms_key_id="key-1", storage_class="STANDARD_IA", expected_bucket_owner="123456789012"
    )
    target = Bucket("bucket", settings)
    target.write("k", b"x")
    target.exists("k")
    assert seen["PutObject"]["x-amz-server-side-encryption"] == "aws:kms"
    assert seen["PutObject"]["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert "x-amz-storage-class" not in seen["PutObject"], "only data objects"
    assert target.creation_arguments(data=True)["StorageClass"] == "STANDARD_IA"
    assert {headers["x-amz-expected-bucket-owner"] for headers in seen.values()} == {"123456789012"}


def _in_child(settings: Settings, bucket: str, connection: Any) -> None:
    target = Bucket(bucket, settings)
    connection.send((id(get_client(settings)), target.read("k")))
    os._exit(0)


@pytest.mark.quick("fork")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_process_makes_its_own_client(memory_server: Any, bucket: str, method: str) -> None:
    settings = Settings()
    target = Bucket(bucket, settings)
    target.write("k", b"from parent")
    assert pickle.loads(pickle.dumps(target)) == target
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(settings, bucket, theirs))  # type: ignore[attr-defined]
    child.start()
    assert ours.poll(60), "the child hangs"
    _, data = ours.recv()
    child.join()
    assert data == b"from parent"
    assert target.read("k") == b"from parent", "the parent's connections are whole"


def test_user_metadata_is_kept(target: Bucket) -> None:
    target.write("k", json.dumps({}).encode(), metadata={"dcp-s3-save-id": "abc"})
    assert target.head("k")["Metadata"] == {"dcp-s3-save-id": "abc"}


def test_a_refused_write_of_what_is_there_already_is_done(target: Bucket) -> None:
    """A proxy sent it twice, or the answer to an earlier attempt was lost."""
    target.write("k", b"mine", if_absent=True)
    target.write("k", b"mine", if_absent=True)
    assert target.read("k") == b"mine"


def test_a_write_on_condition_that_nobody_else_wrote(server: Any, target: Bucket) -> None:
    target.write("k", b"first")
    etag = target.get("k").etag
    target.write("k", b"second", if_match=etag)
    assert target.read("k") == b"second", "also where a store refuses a condition that holds (RGW)"
    if not server.conditional_writes:
        return
    with pytest.raises(errors.PreconditionFailedError):
        target.write("k", b"third", if_match=etag)
    assert target.read("k") == b"second"


def test_credentials_are_read_anew_after_they_were_refused(
    memory_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(region="eu-north-1")  # a client of its own
    key = "AWS_ACCESS_KEY_ID"
    right = os.environ[key]
    monkeypatch.delenv(key)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(errors.CredentialsError):
        Bucket(bucket, settings).read("k")
    monkeypatch.setenv(key, right)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", memory_server.secret_key)
    with pytest.raises(errors.ObjectNotFoundError):
        Bucket(bucket, settings).read("k")


def test_keys_that_s3_could_not_delete_are_deleted_by_the_next_attempt(faulty: FaultyServer) -> None:
    target = Bucket(BUCKET, Settings())
    keys = [f"k{number}" for number in range(4)]
    for key in keys:
        target.write(key, b"x")
    faulty.s3.reset_counters()
    seen = faulty.once("DeleteObjects", Fault.delete_partly("InternalError"))
    target.delete(keys)
    assert seen
    assert faulty.s3.objects(BUCKET) == {}
    assert faulty.s3.counters.requests["DeleteObjects"] == 2


@pytest.mark.parametrize(("code", "said"), [("AccessDenied", "s3:DeleteObject"), ("SlowDown", "RETRY_ATTEMPTS")])
def test_keys_that_s3_never_deletes_are_an_error(faulty: FaultyServer, code: str, said: str) -> None:
    target = Bucket(BUCKET, Settings(retry_attempts=3))
    target.write("k", b"x")
    faulty.rule = lambda _: Fault.delete_partly(code)
    with pytest.raises(errors.StorageError, match=said) as failure:
        target.delete(["k"])
    assert code in str(failure.value)
    assert "'k'" in str(failure.value)
    assert list(faulty.s3.objects(BUCKET)) == ["k"]
