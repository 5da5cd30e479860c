"""Bad input: each its own exception with a remedy, and nothing on S3 changed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.s3.client import close_clients
from tests.end_to_end.loads import failure, save


def failure_of_save(url: str, state: Any = None) -> BaseException:
    return pickled(failure(lambda: save(state or {"x": torch.ones(3)}, url)))


def failure_of_load(url: str, state: Any = None, planner: Any = None, **arguments: Any) -> BaseException:
    reader = S3StorageReader(url, **arguments)
    return pickled(failure(lambda: dcp.load(state or {"x": torch.ones(3)}, storage_reader=reader, planner=planner)))


def pickled(error: BaseException) -> BaseException:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error), "it must reach other ranks as what it is"
    assert str(copy) == str(error)
    return error


@pytest.mark.parametrize("make", [S3StorageWriter, S3StorageReader])
@pytest.mark.parametrize("url", ["/tmp/x", "gs://bucket/x", "s3://", "bucket/x"])
def test_wrong_url(make: Any, url: str) -> None:
    with pytest.raises(errors.InvalidURLError, match="s3://bucket/prefix"):
        make(url)
    with pytest.raises(errors.InvalidURLError, match="s3://bucket/prefix"):
        make().reset(url)


def test_missing_bucket(s3_env: Any) -> None:
    for error in (failure_of_save("s3://no-such-bucket-here/x"), failure_of_load("s3://no-such-bucket-here/x")):
        assert isinstance(error, errors.BucketNotFoundError)
        assert "no-such-bucket-here" in str(error)
        assert "create the bucket" in str(error)


@pytest.fixture
def _own_clients() -> Iterator[None]:
    close_clients()
    yield
    close_clients()


@pytest.mark.usefixtures("_own_clients")
def test_no_credentials(memory_server: Any, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for error in (failure_of_save(root), failure_of_load(root)):
        assert isinstance(error, errors.CredentialsError)
        assert "AWS_ACCESS_KEY_ID" in str(error)


@pytest.mark.servers("rgw", "rclone")
@pytest.mark.usefixtures("_own_clients")
def test_wrong_credentials(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    for error in (failure_of_save(root), failure_of_load(root)):
        assert isinstance(error, (errors.CredentialsError, errors.AccessDeniedError))


def test_missing_checkpoint(root: str, caplog: pytest.LogCaptureFixture) -> None:
    error = failure_of_load(f"{root}/step-7")
    assert "Global metadata" not in caplog.text, "torch's own guess, with a traceback"
    assert isinstance(error, errors.CheckpointNotFoundError)
    assert "step-7" in str(error)
    assert "dcp-s3 ls" in str(error)
    with pytest.raises(errors.CheckpointNotFoundError):
        S3StorageReader(f"{root}/step-7").read_metadata()
