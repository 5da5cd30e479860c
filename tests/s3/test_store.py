"""What S3 alone does with small objects: lost answers, credentials, processes. The rest is the store contract."""

import multiprocessing
import os
import pickle
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.s3.client import close_clients, get_client
from dcp_s3.s3.operations import creation_arguments
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault


def test_a_missing_bucket_has_its_own_error(bucket: str) -> None:
    nowhere = S3Store("no-such-bucket-here", Settings())
    for action in (lambda: nowhere.get("k").data, lambda: nowhere.exists("k"), lambda: nowhere.put("k", b"")):
        with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket-here"):
            action()


def test_a_conditional_write_whose_answer_was_lost_succeeds(faulty: FaultyServer) -> None:
    seen = faulty.once("PutObject", Fault.apply_then_reset())
    target = S3Store("bucket", Settings())
    target.put("k", b"mine", expect=ABSENT)
    assert seen
    assert target.get("k").data == b"mine"


def test_wrong_credentials(memory_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close_clients()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    try:
        with pytest.raises(errors.CredentialsError, match="AWS_ACCESS_KEY_ID"):
            S3Store(bucket, Settings()).get("k")
    finally:
        close_clients()


def test_encryption_class_and_owner_go_with_the_requests(faulty: FaultyServer) -> None:
    seen: dict[str, dict[str, str]] = {}

    def rule(request: Any) -> None:
        seen[request.operation] = dict(request.headers)

    faulty.rule = rule
    settings = Settings(
        sse="aws:kms", sse_kms_key_id="key-1", storage_class="STANDARD_IA", expected_bucket_owner="123456789012"
    )
    target = S3Store("bucket", settings)
    target.put("k", b"x")
    target.exists("k")
    assert seen["PutObject"]["x-amz-server-side-encryption"] == "aws:kms"
    assert seen["PutObject"]["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert "x-amz-storage-class" not in seen["PutObject"], "only data objects"
    assert creation_arguments(settings, data=True)["StorageClass"] == "STANDARD_IA"
    assert {headers["x-amz-expected-bucket-owner"] for headers in seen.values()} == {"123456789012"}


def _in_child(settings: Settings, bucket: str, connection: Any) -> None:
    target = S3Store(bucket, settings)
    connection.send((id(get_client(settings)), target.get("k").data))
    os._exit(0)


@pytest.mark.quick("fork")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_process_makes_its_own_client(memory_server: Any, bucket: str, method: str) -> None:
    settings = Settings()
    target = S3Store(bucket, settings)
    target.put("k", b"from parent")
    assert pickle.loads(pickle.dumps(target)) == target
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(settings, bucket, theirs))  # type: ignore[attr-defined]
    child.start()
    assert ours.poll(60), "the child hangs"
    _, data = ours.recv()
    child.join()
    assert data == b"from parent"
    assert target.get("k").data == b"from parent", "the parent's connections are whole"


def test_credentials_are_read_anew_after_they_were_refused(
    memory_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(region="eu-north-1")  # a client of its own
    key = "AWS_ACCESS_KEY_ID"
    right = os.environ[key]
    monkeypatch.delenv(key)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(errors.CredentialsError):
        S3Store(bucket, settings).get("k")
    monkeypatch.setenv(key, right)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", memory_server.secret_key)
    with pytest.raises(errors.ObjectNotFoundError):
        S3Store(bucket, settings).get("k")
