"""Every exception that dcp_s3 raises on purpose.

Each message names the thing (bucket, key, setting, FQN), what was expected, what was found and what to do about it.

All of them pickle, because torch.distributed carries them from the failing rank to the others. `dcp.save` and
`dcp.load` raise torch's ``CheckpointException`` (a BaseException), whose ``failures`` maps each failing rank to one of
these. They come without traceback; the full ones are in the log at level DEBUG.

>>> try:
...     read_tensor("s3://bucket/run/step-00009000", "weight")
... except errors.CheckpointNotFoundError as error:
...     print(error.url)
s3://bucket/run/step-00009000
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

_TRACEBACK: Any = BaseException.__dict__["__traceback__"]


class DcpS3Error(Exception):
    """Base of every error of this package. Keyword arguments set the attributes that the class declares."""

    _without_frames = False
    """Whether it leaves through DCP, which sends the text of each rank's traceback to all ranks."""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)

    @property
    def __traceback__(self) -> TracebackType | None:
        # DCP takes it when it has caught the error. `raise` and what prints an uncaught error do not ask here.
        return None if self._without_frames else _TRACEBACK.__get__(self)

    @__traceback__.setter
    def __traceback__(self, trace: TracebackType | None) -> None:
        _TRACEBACK.__set__(self, trace)


class SettingsError(DcpS3Error, ValueError):
    """A setting or an argument is not allowed: a policy, a metric, a number. The message names it, its value and what
    is allowed."""


class InvalidURLError(DcpS3Error, ValueError):
    """A checkpoint URL is not of the form ``s3://bucket/prefix``, or there is none."""


class StorageError(DcpS3Error):
    """A request to S3 failed, and retrying did not help or would not."""

    bucket: str = ""
    key: str = ""
    """The object key or prefix; empty for requests to the bucket itself."""
    operation: str = ""
    """The S3 operation, for example ``UploadPart``."""
    attempts: int = 1
    """Number of attempts."""


class TransferError(StorageError):
    """A request kept failing (throttling, 5xx, resets, timeouts) until its attempts ran out."""


class DeadlineExceededError(StorageError):
    """Work did not finish within its time limit, or made no progress for ``DCP_S3_STALL_TIMEOUT``, and was given up."""

    setting: str = ""
    """Name of the environment variable that sets the limit; empty if none does."""
    seconds: float = 0.0
    """The limit."""


class BucketNotFoundError(StorageError):
    """The bucket does not exist at this endpoint."""


class ObjectNotFoundError(StorageError):
    """A requested object does not exist."""


class CredentialsError(StorageError):
    """No credentials were found, or S3 does not accept them."""


class AccessDeniedError(StorageError):
    """The credentials are valid but lack a permission."""


class OutOfRangeError(StorageError):
    """An object has fewer bytes than were asked for."""


class PreconditionFailedError(StorageError):
    """A conditional request (If-None-Match, If-Match) was refused: the object is not in the expected state."""


class ShardingError(DcpS3Error, ValueError):
    """Shards that a caller describes do not fit their tensor, each other, or those of the other ranks."""

    fqn: str = ""
    """The tensor's fully qualified name; empty where it has none yet."""


class StagingError(DcpS3Error):
    """A state could not be copied for an asynchronous save: there is no room, ``DCP_S3_STAGING_LIMIT`` is exceeded, or
    something in it cannot be copied."""


class SpillError(DcpS3Error):
    """The spill directory cannot take the data: it is full, over its limit, or not writable."""


class CheckpointError(DcpS3Error):
    """Base of errors about a checkpoint as a whole."""

    url: str = ""
    """The checkpoint's URL."""


class CheckpointNotFoundError(CheckpointError):
    """There is no committed checkpoint (no ``.metadata``) at the URL."""


class CheckpointDeletedError(CheckpointNotFoundError):
    """A prune has begun to delete the checkpoint."""


class CheckpointProtectedError(CheckpointError):
    """A checkpoint was not deleted: it is pinned, a reader holds a lease, or a save to it is in progress."""


class CheckpointExistsError(CheckpointError):
    """There is already a committed checkpoint at the URL, and ``overwrite`` is off."""


class UnsafeMetadataError(CheckpointError):
    """``.metadata`` names a global outside the allow-list, or an object outside the checkpoint."""


class UnsafeItemError(CheckpointError):
    """A non-tensor item contains something that could run code, or that no pickler writes."""

    fqn: str = ""
    """The item's fully qualified name."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are not what was saved: a checksum or a length differs, an object is missing, or ``.metadata`` is no
    metadata of DCP."""


class SaveProtocolError(CheckpointError):
    """DCP's calls came out of order, or a planner returned something that cannot be stored."""


class StepFailedError(CheckpointError):
    """Base of what a `CheckpointManager` raises."""

    step: int | None = None
    failures: Mapping[int, BaseException] = {}
    """The causes by rank."""
    rank: int | None = None
    """The rank of this process among those that save or restore together; None if it is unknown."""


class SaveFailedError(StepFailedError):
    """A save by a `CheckpointManager` failed. What was committed before is untouched."""


class RestoreFailedError(StepFailedError):
    """A `CheckpointManager` could not load a checkpoint. The state may be partly loaded."""


class PeerReadError(CheckpointError):
    """Another rank of the load failed to read or send what this rank needs, or did not begin to in time."""

    rank: int = -1
    """The failing rank, in the load's process group."""


class EntryNotFoundError(CheckpointError, IndexError):
    """A checkpoint has no entry, tensor or attachment of the given name, or the tensor has no such index."""

    fqn: str = ""
    """The name or pattern."""


class MissingKeysError(EntryNotFoundError, RuntimeError):
    """Names of the state to load are not in the checkpoint. The message has some of both sides, the error at most the
    first thousand of each."""

    missing: Sequence[str] = ()
    """Names of the state that are not saved."""
    unexpected: Sequence[str] = ()
    """Saved names that are not in the state."""


class TensorMismatchError(CheckpointError, ValueError):
    """Tensors to load into have another shape than the saved ones, or another kind or dtype that is not converted."""

    fqn: str = ""
    """Name of the first one."""
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    """Where shapes differ: the saved and the current one of each, by name, of at most the first thousand."""


class WeightsError(CheckpointError, ValueError):
    """Weights cannot be exported or loaded: a dtype, names, an argument, the files, or what is at the destination."""
