"""Errors travel between ranks by pickle and keep what they know."""

import pickle

import pytest

from dcp_s3 import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.TransferError("text", bucket="b", key="k", operation="PutObject", attempts=3),
        errors.DeadlineExceededError("text", setting="DCP_S3_SAVE_TIMEOUT", seconds=5, key="k"),
        errors.CheckpointExistsError("text", url="s3://b/x"),
        errors.ShapeMismatchError("text", url="s3://b/x", fqn="model.w"),
        errors.EntryNotFoundError("text", url="s3://b/x", fqn="model.w"),
        errors.TensorIndexError("text", url="s3://b/x", fqn="model.w"),
        errors.SettingsError("text"),
        errors.ShardingError("text", fqn="model.w"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_pickle_round_trip(error: errors.DcpS3Error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == "text"
    assert vars(copy) == vars(error)


def test_one_hierarchy() -> None:
    public = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(value, errors.DcpS3Error) for value in public)
