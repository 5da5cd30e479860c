"""The commit: what makes uploaded objects a checkpoint, and what removes the one it replaces.

A checkpoint exists when its ``.metadata`` does. Everything else is written under names that no other save uses
(nonce, save id), so at every instant the URL holds the old checkpoint, whole, or the new one, whole.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import (
    Previous,
    SaveIdentity,
    exists_error,
    find_loss,
    find_previous,
    find_save_id,
    is_committed,
)
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import METADATA, METADATA_CRC_KEY, SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.process import __version__
from dcp_s3.store import DeleteTarget, Expect, Store, StoredObject
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger(__name__)

LATE = 1800.0
"""Seconds after which a save looks for its objects before and after its commit: half of the shortest grace period, for
which a prune leaves them alone."""


@dataclass(frozen=True)
class Beginning:
    """When a save began."""

    at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    monotonic: float | None = field(default_factory=time.monotonic)
    """Seconds of time.monotonic; None if another process began the save."""

    def is_late(self) -> bool:
        """Whether `LATE` seconds have passed on either clock: one may be set back, the other stops in host sleep."""
        awake = 0.0 if self.monotonic is None else time.monotonic() - self.monotonic
        return max(awake, time.time() - self.at) > LATE


@dataclass(frozen=True)
class Commit:
    """The files that make the objects of one save a checkpoint."""

    identity: SaveIdentity
    """The save that commits."""
    manifest: bytes
    """Bytes of the manifest."""
    metadata: bytes
    """Bytes of ``.metadata``."""
    objects: tuple[ObjectEntry, ...]
    """The data objects that it names."""

    @property
    def keys(self) -> set[str]:
        """Keys of all objects except ``.metadata``."""
        url, manifest = self.identity.url, manifest_object(self.identity.save_id, self.identity.rank)
        return {url.key(manifest), *(url.key(entry.path) for entry in self.objects)}


def make_commit(identity: SaveIdentity, metadata: Metadata, objects: Sequence[ObjectEntry], **facts: Any) -> Commit:
    """The commit of a save whose ranks have all written. ``facts``: what else its `Manifest` says of it."""
    from dcp_s3.format.metadata import VERSIONS, dump_metadata

    manifest = Manifest(
        save_id=identity.save_id,
        created_at=time.time(),
        objects=tuple(objects),
        items=len(metadata.storage_data or {}),
        rank=identity.rank,
        writer=VERSIONS,
        **facts,
    )
    data = dump_metadata(metadata)
    check_readable(data, identity.url, of_rank=identity.rank is not None)
    return Commit(identity, manifest.to_json(), data, tuple(objects))


def publish(
    store: Store,
    commit: Commit,
    previous: Previous,
    *,
    look_again: Callable[[], Previous] | None = None,
    keep_objects: bool = False,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Write the manifest, then ``.metadata``; then remove the objects that it replaced.

    Args:
        look_again: called once if that checkpoint is no longer there; the one that it finds is replaced instead.
        keep_objects: do not delete what this save uploaded, whatever happens.
        is_late: whether the save began so long ago that a prune may take its objects for leftovers. If so, it looks
            for them before and after it writes ``.metadata``.

    Raises:
        CheckpointDeletedError: objects of this save are gone; the old checkpoint is unchanged.
        CheckpointExistsError: another save committed to this URL meanwhile; what this save uploaded has been deleted.
        DeadlineExceededError: the store's deadline has passed. What this save uploaded has been deleted, unless S3 may
            still carry out the commit.
        StorageError: nothing was committed, as far as the answers of S3 tell.
    """
    identity, replaced = commit.identity, None
    key = identity.url.key(metadata_object(identity.rank))

    def give_up(store: Store, whose: str = "of a save that was given up") -> None:
        if not keep_objects:
            delete_quietly(store, commit.keys, whose)

    try:
        manifest = identity.url.key(manifest_object(identity.save_id, identity.rank))
        store.put(manifest, commit.manifest, metadata={METADATA_CRC_KEY: crc_hex(crc64nvme(commit.manifest))})
    except errors.DeadlineExceededError:
        give_up(store.within(store.limit.for_cleanup()))
        raise
    if is_late():
        if loss := find_loss(store, identity.url, commit.objects):
            give_up(store)
            raise _lost_error(commit, loss)
        if previous.etag is not None:  # the commit may have to be taken back
            with contextlib.suppress(errors.ObjectNotFoundError):
                found = store.get(key)
                replaced = found if found.etag == previous.etag else None

    # The commit itself.
    try:
        store.put(
            key,
            commit.metadata,
            expect=Expect(previous.etag or ""),
            metadata={SAVE_ID_KEY: identity.save_id, METADATA_CRC_KEY: crc_hex(crc64nvme(commit.metadata))},
        )
    except errors.ObjectNotFoundError:
        if previous.etag is None:
            raise
        without = replace(previous, etag=None)  # a prune has deleted the old checkpoint
        publish(store, commit, without, look_again=look_again, keep_objects=keep_objects, is_late=is_late)
        return
    except errors.PreconditionFailedError:
        try:
            if look_again is None:
                raise exists_error(identity.url) from None
            now = look_again()
        except errors.CheckpointExistsError:
            give_up(store, "of the save that lost")
            raise
        publish(store, commit, now, keep_objects=keep_objects, is_late=is_late)
        return
    except errors.DeadlineExceededError:
        carried_out = False  # without an answer
        with contextlib.suppress(errors.StorageError):
            carried_out = is_committed(store.within(store.limit.for_cleanup()), identity)
        if not carried_out:
            raise

    # A prune first writes its list, then looks for commits: one of the two sees the other.
    if is_late():
        after = store.within(store.limit.for_cleanup())
        if loss := find_loss(after, identity.url, commit.objects):
            _withdraw(after, key, commit, replaced)
            give_up(after)
            raise _lost_error(commit, loss)
    if previous.keys:
        _delete_replaced(store, key, commit, previous)
    size = sum(entry.size for entry in commit.objects)
    logger.debug("committed %s: %d objects, %d bytes", identity.url, len(commit.objects), size)


def _withdraw(store: Store, key: str, commit: Commit, replaced: StoredObject | None) -> None:
    """Take back a commit whose objects are gone, or about to be deleted. ``key`` is that of its ``.metadata``."""
    try:
        found = store.get(key)
        if found.data != commit.metadata:
            return
        if replaced is None:
            store.delete([DeleteTarget(key, found.etag)])
        else:
            store.put(key, replaced.data, expect=Expect(found.etag), metadata=replaced.metadata)
    except (errors.ObjectNotFoundError, errors.PreconditionFailedError):
        pass  # somebody else deleted or replaced it


def _delete_replaced(store: Store, key: str, commit: Commit, previous: Previous) -> None:
    """Delete what only the old checkpoint needs, once the new one is seen in its place, at ``key``."""
    identity, keys = commit.identity, previous.keys - commit.keys
    if not keys:
        return
    try:
        found = store.head(key)
        etag, committed = found.etag or None, find_save_id(store, identity, found) == identity.save_id
    except errors.ObjectNotFoundError:
        etag, committed = None, False
    except errors.StorageError as error:
        logger.warning("%d objects of the checkpoint that was overwritten are left for pruning: %s", len(keys), error)
        return
    if committed:
        delete_quietly(store, keys, "of the checkpoint that was overwritten")
    elif etag in (None, previous.etag):
        raise errors.TransferError(
            f"{identity.url} was not committed: its {METADATA} is not there, although its PutObject was answered with "
            "success; what was there before is untouched. Remedy: check what is between this host and the endpoint (a "
            "proxy?), and save again",
            bucket=store.name, key=key, operation="PutObject",
        )  # fmt: skip


def _lost_error(commit: Commit, loss: str) -> errors.CheckpointDeletedError:
    return errors.CheckpointDeletedError(
        f"the save to {commit.identity.url} was not committed: {loss}. It took longer than a prune waits for saves, so "
        "that one took it for a leftover; what was there before is untouched. Remedy: save again, and prune with a "
        "grace period (DCP_S3_RETENTION_GRACE) that is longer than any save",
        url=str(commit.identity.url),
    )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that JSON cannot hold."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, (int, float, str, bool, type(None))):
            raise errors.SaveProtocolError(
                f"metric {name!r} is a {type(value).__name__} and cannot be stored: names are text, values numbers, "
                "text, bools or None (a tensor: pass tensor.item())"
            )


def delete_quietly(store: Store, keys: set[str] | frozenset[str], whose: str) -> None:
    try:
        store.delete(sorted(keys))
    except errors.StorageError as error:
        logger.warning("%d objects %s are left for pruning: %s", len(keys), whose, error)


@dataclass
class Committer:
    """Makes what one save has written a checkpoint. The store of each call has the save's limit."""

    identity: SaveIdentity
    beginning: Beginning
    overwrite: bool
    previous: Previous = field(default_factory=Previous)
    """What is overwritten, as it was found before any data was written."""

    def check_url(self, store: Store) -> None:
        """Look at what is at the URL, before any data is written. Raises CheckpointExistsError, StorageError."""
        if self.overwrite:
            self.previous = find_previous(store, self.identity)
            return
        # One with collectives hides those of ranks: both kinds count. Both at once: a save begins with this wait.
        url, rank = self.identity.url, self.identity.rank
        keys = [url.key(metadata_object(each)) for each in (None, rank or 0)]
        if any(store.map(lambda store, key: store.exists(key), keys)):
            raise exists_error(url)

    def look_again(self, store: Store) -> Previous:
        """What to overwrite instead, now that something else is there. Raises CheckpointExistsError: nothing."""
        raise exists_error(self.identity.url)

    def commit(self, store: Store, commit: Commit, *, spilled: bool) -> bool:
        """Commit, and return True; False if another process does, so that it is not known when. Errors: see `publish`.
        ``spilled``: whether objects of the save wait on the disks of hosts."""
        if spilled:
            raise errors.SpillError(
                f"{commit.identity.url} cannot be committed: objects of it wait in the spill directory of another "
                "rank, but this rank, which would commit them once they are on S3, has no spill directory. "
                "Remedy: set DCP_S3_SPILL_DIR on every rank"
            )
        try:
            look_again = functools.partial(self.look_again, store)
            publish(store, commit, self.previous, look_again=look_again, is_late=self.beginning.is_late)
        except errors.DeadlineExceededError as error:
            deadline = store.limit.deadline
            if deadline is None or error.setting != deadline.setting:
                raise
            progress = "every rank had written its data, but it was not committed"
            if error.key == self.identity.url.key(metadata_object(self.identity.rank)) and error.attempts:
                progress += "; S3 may still carry out the commit request that it did not answer"
            raise deadline.error(f"the save to {commit.identity.url}", progress) from error
        return True


# --- reading back --------------------------------------------------------------------------------------

# A torch whose pickles changed must not cost a week: after a commit earlier checkpoints are deleted. So before the
# first commit of a process, and whenever a pickle names something new, the reader's own code loads what was written.
_known: set[bytes] = set()  # names in pickles that could be read back


def check_readable(data: bytes, url: CheckpointURL, *, of_rank: bool = False) -> None:
    """Load ``.metadata``, and an item of each dtype in it and one that is no tensor, as a reader would, unless earlier
    commits of this process had the same names in them."""
    names: set[bytes] = set()  # of classes and constants that a pickle of protocol 4 or later looks up
    end = data.find(b"\x94\x93")  # MEMOIZE, STACK_GLOBAL
    while end >= 0:
        name = data[max(0, end - 256) : end].rpartition(b"\x8c")[2]  # its length, and itself
        if name and name[0] == len(name) - 1:
            names.add(name[1:])
        end = data.find(b"\x94\x93", end + 2)
    if names <= _known:
        return
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dcp_s3.format.metadata import load_metadata

    try:
        metadata = load_metadata(data, url=str(url), of_rank=of_rank)
        saved = [each for each in metadata.state_dict_metadata.values() if isinstance(each, TensorStorageMetadata)]
        _check_items({each.properties.dtype for each in saved}, str(url))
    except Exception as error:
        raise errors.SaveProtocolError(
            f"{url} was not committed: what was written cannot be read back with torch {torch.__version__} and dcp_s3 "
            f"{__version__}: {type(error).__name__}: {error}. What was there before is untouched. Remedy: save with a "
            "torch that README names as tested, or with a newer dcp_s3",
            url=str(url),
        ) from error
    _known.update(names)


def _check_items(dtypes: Iterable[torch.dtype], url: str) -> None:
    import torch

    from dcp_s3.format.archive import FramingError, compute_frame
    from dcp_s3.format.safe_items import check_item
    from dcp_s3.memory import view_bytes

    shape = torch.Size((2, 3))
    for dtype in dtypes:
        try:
            frame = compute_frame(dtype, shape)
        except (FramingError, RuntimeError):  # torch.save writes its items
            continue
        raw = bytes(range(frame.nbytes))
        found = torch.load(io.BytesIO(frame.header + raw + frame.trailer), map_location="cpu", weights_only=True)
        if (found.dtype, found.shape, bytes(view_bytes(found))) != (dtype, shape, raw):
            raise errors.CorruptCheckpointError(f"torch.load makes another tensor of a {dtype}", url=url)
    stream = io.BytesIO()
    torch.save({"a": [1, 0.5, "text", None]}, stream)
    stream.seek(0)
    check_item(stream, fqn="a", url=url, verified=True)
    if torch.load(stream, weights_only=False) != {"a": [1, 0.5, "text", None]}:
        raise errors.CorruptCheckpointError("torch.load makes another object of a dict", url=url)
