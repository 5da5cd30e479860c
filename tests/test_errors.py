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
        errors.TensorMismatchError("text", url="s3://b/x", fqn="model.w"),
        errors.EntryNotFoundError("text", url="s3://b/x", fqn="model.w"),
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


def test_an_attribute_that_the_class_has_not_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="SettingsError has no attribute 'url'"):
        errors.SettingsError("text", url="s3://b/x")


def test_one_hierarchy() -> None:
    public = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(value, errors.DcpS3Error) for value in public)


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("AttachmentNotFoundError", (errors.CheckpointError, LookupError)),
        ("CorruptMetadataError", (errors.CheckpointError,)),
        ("DtypeMismatchError", (errors.TensorMismatchError, ValueError)),
        ("ExportError", (errors.CheckpointError, ValueError)),
        ("ImportSourceError", (errors.CheckpointError, ValueError)),
        ("JournalError", (errors.SpillError,)),
        ("MetricsError", (ValueError,)),
        ("MissingExtensionError", (errors.CheckpointError,)),
        ("MissingURLError", (errors.InvalidURLError, ValueError)),
        ("PolicyError", (ValueError,)),
        ("SaveSupersededError", (errors.CheckpointError,)),
        ("ShapeMismatchError", (errors.TensorMismatchError, ValueError)),
        ("StagingLimitError", (errors.StagingError,)),
        ("StepFailedError", (errors.CheckpointError,)),
        ("TensorIndexError", (errors.CheckpointError, IndexError)),
    ],
)
def test_what_catches_a_name_of_an_earlier_version_still_does(name: str, bases: tuple[type, ...]) -> None:
    found = getattr(errors, name)
    assert all(issubclass(found, base) for base in (errors.DcpS3Error, *bases))
    assert issubclass(errors.SaveFailedError, errors.StepFailedError)
    assert issubclass(errors.RestoreFailedError, errors.StepFailedError)


def test_what_an_error_knew_under_another_name_it_knows() -> None:
    assert errors.EntryNotFoundError("text", fqn="model.w").name == "model.w"
    assert errors.DtypeMismatchError("text", fqn="model.w").shapes == {}
