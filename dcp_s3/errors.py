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

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

_SENT_NAMES = 1000  # names that an error carries to each other rank
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]


class DcpS3Error(Exception):
    """Base of every error of this package."""

    _without_frames = False
    """Whether it leaves through DCP, which sends the text of each rank's traceback to all ranks."""

    @property
    def __traceback__(self) -> TracebackType | None:
        # DCP takes it when it has caught the error. `raise` and what prints an uncaught error do not ask here.
        return None if self._without_frames else _TRACEBACK.__get__(self)

    @__traceback__.setter
    def __traceback__(self, trace: TracebackType | None) -> None:
        _TRACEBACK.__set__(self, trace)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword arguments; the default would replay ``args`` into ``__init__`` and fail.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[DcpS3Error], args: tuple[Any, ...], state: dict[str, Any]) -> DcpS3Error:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class SettingsError(DcpS3Error, ValueError):
    """A setting or an argument is not allowed: a policy, a metric, a number. The message names it, its value and what
    is allowed."""


class InvalidURLError(DcpS3Error, ValueError):
    """A checkpoint URL is not of the form ``s3://bucket/prefix``, or there is none."""


# --- storage -------------------------------------------------------------------------------------


class StorageError(DcpS3Error):
    """A request to S3 failed, and retrying did not help or would not.

    Attributes:
        bucket: the bucket.
        key: the object key or prefix; empty for requests to the bucket itself.
        operation: the S3 operation, for example ``UploadPart``.
        attempts: number of attempts.
    """

    def __init__(
        self,
        message: str,
        *,
        bucket: str = "",
        key: str = "",
        operation: str = "",
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.bucket = bucket
        self.key = key
        self.operation = operation
        self.attempts = attempts


class TransferError(StorageError):
    """A request kept failing (throttling, 5xx, resets, timeouts) until its attempts ran out."""


class DeadlineExceededError(StorageError):
    """A save or load did not finish within ``DCP_S3_SAVE_TIMEOUT`` or ``DCP_S3_LOAD_TIMEOUT``, and was given up.

    Attributes:
        setting: name of the environment variable.
        seconds: its value.
    """

    def __init__(self, message: str, *, setting: str = "", seconds: float = 0.0, **request: Any) -> None:
        super().__init__(message, **request)
        self.setting = setting
        self.seconds = seconds


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


# --- sharding ------------------------------------------------------------------------------------


class ShardingError(DcpS3Error, ValueError):
    """Shards that a caller describes do not fit their tensor, each other, or those of the other ranks.

    Attributes:
        fqn: the tensor's fully qualified name; empty where it has none yet.
    """

    def __init__(self, message: str, *, fqn: str = "") -> None:
        super().__init__(message)
        self.fqn = fqn


# --- staging -------------------------------------------------------------------------------------


class StagingError(DcpS3Error):
    """A state could not be copied for an asynchronous save: there is no room, ``DCP_S3_STAGING_LIMIT`` is exceeded, or
    something in it cannot be copied."""


# --- spilling ------------------------------------------------------------------------------------


class SpillError(DcpS3Error):
    """The spill directory cannot take the data: it is full, over its limit, or not writable."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointError(DcpS3Error):
    """Base of errors about a checkpoint as a whole.

    Attributes:
        url: the checkpoint's URL.
    """

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


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


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are not what was saved: a checksum or a length differs, an object is missing, or ``.metadata`` is no
    metadata of DCP."""


class PeerReadError(CheckpointError):
    """Another rank of the load failed to read or send what this rank needs, or did not begin to in time.

    Attributes:
        rank: the failing rank, in the load's process group.
    """

    def __init__(self, message: str, *, url: str = "", rank: int = -1) -> None:
        super().__init__(message, url=url)
        self.rank = rank


class UnsafeItemError(CheckpointError):
    """A non-tensor item contains something that could run code, or that no pickler writes.

    Attributes:
        fqn: the item's fully qualified name.
    """

    def __init__(self, message: str, *, url: str = "", fqn: str = "") -> None:
        super().__init__(message, url=url)
        self.fqn = fqn


class SaveProtocolError(CheckpointError):
    """DCP's calls came out of order, or a planner returned something that cannot be stored."""


class _StepFailedError(CheckpointError):
    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        step: int | None = None,
        failures: dict[int, BaseException] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, url=url)
        self.step = step
        self.failures = failures or {}
        self.rank = rank


class SaveFailedError(_StepFailedError):
    """A save by a `CheckpointManager` failed. What was committed before is untouched.

    Attributes:
        step: the step.
        failures: the causes by rank.
        rank: the rank of this process among those that save together; None if it is unknown.
    """


class RestoreFailedError(_StepFailedError):
    """A `CheckpointManager` could not load a checkpoint. The state may be partly loaded.

    Attributes:
        step: the step.
        failures: the causes by rank.
        rank: the rank of this process among those that restore together; None if it is unknown.
    """


# --- loading -------------------------------------------------------------------------------------


class EntryNotFoundError(CheckpointError, IndexError):
    """A checkpoint has no entry, tensor or attachment of the given name, or the tensor has no such index.

    Attributes:
        fqn: the name or pattern; ``name`` is the same.
    """

    def __init__(self, message: str, *, url: str = "", fqn: str = "", name: str = "") -> None:
        super().__init__(message, url=url)
        self.fqn = self.name = fqn or name


class MissingKeysError(EntryNotFoundError, RuntimeError):
    """Names of the state to load are not in the checkpoint. The message has the closest ones, or how all names differ.

    Attributes:
        missing: names of the state that are not saved.
        unexpected: saved names that are not in the state. Of both, other ranks get the first thousand.
    """

    def __init__(
        self, message: str, *, url: str = "", missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        super().__init__(message, url=url, fqn=missing[0] if missing else "")
        self.missing = list(missing)
        self.unexpected = list(unexpected)

    def __reduce__(self) -> tuple[Any, ...]:
        first = {"missing": self.missing[:_SENT_NAMES], "unexpected": self.unexpected[:_SENT_NAMES]}
        return _rebuild, (type(self), self.args, {**self.__dict__, **first})


class WeightsError(CheckpointError, ValueError):
    """Weights cannot be exported or imported: a dtype, names, an argument, the files, or what is at the destination."""


class TensorMismatchError(CheckpointError, ValueError):
    """Tensors to load into have another shape than the saved ones, or another kind or dtype that is not converted.

    Attributes:
        fqn: name of the first one.
        shapes: where shapes differ: the saved and the current one of each, by name. Other ranks get the first thousand.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        fqn: str = "",
        shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(message, url=url)
        self.fqn = fqn
        self.shapes = dict(shapes or {})

    def __reduce__(self) -> tuple[Any, ...]:
        first = dict(itertools.islice(self.shapes.items(), _SENT_NAMES))
        return _rebuild, (type(self), self.args, {**self.__dict__, "shapes": first})


# --- names of earlier versions, for one release --------------------------------------------------

AttachmentNotFoundError = EntryNotFoundError
CorruptMetadataError = CorruptCheckpointError
DtypeMismatchError = TensorMismatchError
ExportError = WeightsError
ImportSourceError = WeightsError
JournalError = SpillError
MetricsError = SettingsError
MissingExtensionError = CheckpointError
MissingURLError = InvalidURLError
PolicyError = SettingsError
SaveSupersededError = SaveFailedError
ShapeMismatchError = TensorMismatchError
StagingLimitError = StagingError
StepFailedError = _StepFailedError
TensorIndexError = EntryNotFoundError
