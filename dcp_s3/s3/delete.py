"""Deletion of objects without I/O: in batches, and only while they have the expected ETag. See `operations`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3.diagnosis import answered_code, answered_status, is_retryable
from dcp_s3.s3.listing import StoredVersion
from dcp_s3.s3.operations import Operation, Request, head
from dcp_s3.s3.quirks import Place, Quirk, knows, learn
from dcp_s3.store import DeleteTarget, same_etag

logger = logging.getLogger(__name__)

# https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
BATCH = 1000

# Error codes for a key that was not deleted because it has another ETag, and for one that is not there.
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_GONE = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound"})

# Statuses from stores that have no DeleteObjects, or want it with headers of former times (Content-MD5).
_NO_BATCHES = frozenset({400, 405, 411, 501})


def batches(targets: Sequence[DeleteTarget]) -> list[Sequence[DeleteTarget]]:
    """Split the targets into runs that one request takes."""
    return [targets[start : start + BATCH] for start in range(0, len(targets), BATCH)]


def delete(place: Place, targets: Iterable[DeleteTarget], *, data: bool = False) -> Operation[list[str]]:
    """Delete objects, a thousand per request, or one per request if the store has no DeleteObjects.

    Those that do not exist count as deleted. Single keys that S3 throttles or that fail temporarily are retried.

    Args:
        place: bucket of the keys.
        targets: objects to delete.
        data: whether each request waits for its turn while S3 throttles.

    Returns:
        Keys left alone because their objects have another ETag. Stores without conditional deletes ignore ETags.
    """
    left: list[str] = []
    for batch in batches(list(targets)):
        left += yield from _delete_batch(place, batch, data=data)
    return left


def _delete_batch(place: Place, targets: Sequence[DeleteTarget], *, data: bool) -> Operation[list[str]]:
    if len(targets) == 1 or knows(Quirk.NO_BATCH_DELETES, place):
        return (yield from _delete_each(targets, data=data))
    batch = _Batch(list(targets))
    while batch.pending:
        before = len(batch.pending)
        try:
            yield Request("DeleteObjects", batch.pending[0].key, batch.arguments, batch.parse, data=data)
        except errors.TransferError:
            if len(batch.pending) == before:
                raise  # nothing of it went through
        except errors.StorageError as error:
            status = answered_status(error)
            if status not in _NO_BATCHES:
                raise
            if status in (405, 501):
                learn(Quirk.NO_BATCH_DELETES, place, error)
            else:  # maybe it refuses one strange key
                logger.warning("objects are deleted one by one: %s", error)
            return (yield from _delete_each([*batch.changed, *batch.pending], data=data))
    return (yield from _delete_each(batch.changed, refused=True, data=data))


def _delete_each(targets: Iterable[DeleteTarget], *, refused: bool = False, data: bool) -> Operation[list[str]]:
    left = []
    for target in targets:
        is_gone = yield from _delete_one(target, refused=refused, data=data)
        left += [] if is_gone else [target.key]
    return left


@dataclass
class _Batch:
    """The state of one DeleteObjects after its attempts so far."""

    pending: list[DeleteTarget]
    changed: list[DeleteTarget] = field(default_factory=list)
    """Targets that S3 left alone because they have another ETag."""

    def arguments(self) -> dict[str, Any]:
        return {"Delete": {"Objects": [_to_request(target) for target in self.pending], "Quiet": True}}

    def parse(self, answer: Mapping[str, Any]) -> None:
        failed = {}
        for entry in answer.get("Errors", ()):
            code = str(entry.get("Code"))
            failed[str(entry.get("Key")), str(entry.get("VersionId") or "")] = code, str(entry.get("Message"))
        left = []
        worst: ClientError | None = None
        for target in self.pending:
            code, message = failed.pop((target.key, target.version_id), ("", ""))
            if code in _CHANGED and target.etag:
                self.changed.append(target)
            elif code and code not in _GONE:
                left.append(target)
                error = _error(target.key, code, message)
                if worst is None or not is_retryable(error):
                    worst = error  # a permanent failure, if there is one
        if failed:
            (key, _), (code, message) = failed.popitem()  # a key that nobody asked for: believe nothing
            worst = _error(key, code, message)
            left = list(self.pending)
        self.pending = left
        if worst is not None:
            raise worst


def _to_request(target: DeleteTarget) -> dict[str, str]:
    fields = {"Key": target.key, "ETag": target.etag, "VersionId": target.version_id}
    return {name: value for name, value in fields.items() if value}


def _error(key: str, code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": f"{key!r} was not deleted: {message}"}}, "DeleteObjects")


def _delete_one(target: DeleteTarget, *, refused: bool = False, data: bool) -> Operation[bool]:
    """Delete one object; return whether it is gone. A missing one is; one that has another ETag is not.

    A refusal is believed only after a look: some stores refuse a condition that holds, and are then asked without.
    ``refused``: whether the store has refused it already.
    """
    arguments = {"Key": target.key} | ({"VersionId": target.version_id} if target.version_id else {})
    condition = {"IfMatch": target.etag} if target.etag else {}
    try:
        if not refused:
            yield Request("DeleteObject", target.key, {**arguments, **condition}, data=data)
            return True
    except errors.ObjectNotFoundError:
        return True
    except errors.StorageError as error:
        is_refusal = answered_status(error) in (412, 501) or answered_code(error) in _CHANGED
        if not condition or not is_refusal:
            raise
    try:
        found = yield from head(target.key)
        if not same_etag(found.etag, target.etag):
            return False
        yield Request("DeleteObject", target.key, arguments, data=data)
    except errors.ObjectNotFoundError:
        pass
    return True


def old_versions(
    versions: Sequence[StoredVersion], first: Collection[str], keys: Collection[str]
) -> list[list[DeleteTarget]]:
    """The versions of ``first`` and ``keys`` to delete permanently, in steps to be done in order. Pure.

    Delete markers go last: without its marker, an object that is still there would reappear. A current version that
    is not a marker was written since, and stays.
    """
    old = [each for each in versions if not each.is_current and not each.is_marker]
    steps = [
        [each for each in old if each.key in first],
        [each for each in old if each.key in keys and each.key not in first],
        [each for each in versions if each.is_marker and (each.key in keys or each.key in first)],
    ]
    return [[DeleteTarget(each.key, version_id=each.version_id) for each in step] for step in steps if step]
