"""The exit statuses of ``dcp-s3``, the same for all commands."""

from __future__ import annotations

from dcp_s3 import errors

DONE = 0
FAILED = 1
USAGE = 2
NOTHING_THERE = 3
DAMAGED = 4
DIFFERENT = 5
INTERRUPTED = 130
NOBODY_READS = 141
"""The reader of the output has gone: what a shell makes of SIGPIPE. No mistake, so the table leaves it out."""

MEANINGS = {
    DONE: "done; of verify: good",
    FAILED: "failed: S3 or the disk refused, or something is protected, exists already, or waits",
    USAGE: "wrong usage: an argument, an option, a URL or a setting",
    NOTHING_THERE: "nothing is there",
    DAMAGED: "damaged: a checkpoint is not what was saved",
    DIFFERENT: "different: of diff, or not known to be the same",
    INTERRUPTED: "ended by Ctrl-C",
}

_STATUSES: dict[int, tuple[type[Exception], ...]] = {
    USAGE: (errors.SettingsError, errors.InvalidURLError),
    NOTHING_THERE: (errors.CheckpointNotFoundError,),
    DAMAGED: (errors.CorruptCheckpointError, errors.UnsafeMetadataError),
}


def status_of(error: Exception) -> int:
    """The exit status for an error."""
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), FAILED)


def table() -> str:
    """The statuses and what they mean, a line each, for ``--help``."""
    return "\n".join(["Exit status:", *(f"  {status:3} {meaning}" for status, meaning in MEANINGS.items())])
