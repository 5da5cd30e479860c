"""Copies of a checkpoint: from S3 to S3, and between S3 and a directory as torch's FileSystemReader reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, exists_error, find_previous
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.format.control_files import AttachmentEntry, Manifest, attachments_of
from dcp_s3.format.layout import (
    METADATA,
    METADATA_CRC_KEY,
    SAVE_ID_KEY,
    What,
    classify,
    manifest_object,
    metadata_object,
)
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.memory import Piece, crc64nvme, crc_hex
from dcp_s3.offline.place import OnProgress, OnTotal, Place, ahead
from dcp_s3.s3.multipart import MAX_PARTS
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ABSENT, DeleteTarget, Expect, Store, same_etag
from dcp_s3.stores.directory import HIDDEN
from dcp_s3.url import URLLike, is_s3_url, parse_url

BLOCK = 8 * 2**20
"""Bytes of a file that are read at a time."""

_FILES_AT_ONCE = 4  # large ones on their way to a directory; to S3, one fills the connections
_BESIDES = (What.METRICS, What.CONTROL, What.OTHER)  # copied although no metadata names it


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy.

    >>> copy("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000").moved > 0
    True
    """

    files: int
    """Number of files that make up the checkpoint, its metadata included."""
    size: int
    """Bytes of these files."""
    moved: int
    """Bytes that this call moved; less than ``size`` if it continued an earlier one."""


def copy(
    source: URLLike,
    destination: URLLike,
    overwrite: bool = False,
    *,
    settings: SettingsLike = None,
    on_total: OnTotal | None = None,
    on_progress: OnProgress | None = None,
) -> CopyResult:
    """Copy a checkpoint. Between two URLs S3 copies the objects itself; a directory is downloaded to or uploaded from.

    The copy has all but pins and leases. ``.metadata`` comes last: a copy that was cut off is no checkpoint, and goes
    on when it is called again. Both URLs are on one endpoint; elsewhere copy by way of a directory.

    >>> copied = copy("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000")
    >>> verify("s3://bucket/kept/step-00001000").ok
    True

    Args:
        source: URL of the checkpoint, or a directory that torch's FileSystemReader reads.
        overwrite: replace what is at ``destination``. A checkpoint on S3 stays whole until the new one is committed,
            unless objects that must be copied have the names of its own: then it is lost at once.
        on_progress: called with the number of bytes as they are copied, from several threads.

    Raises:
        CheckpointExistsError: another checkpoint is at the destination.
        CheckpointNotFoundError: there is no committed checkpoint at ``source``.
        CorruptCheckpointError: the checkpoint is damaged, or its copy is not what was saved.
        CheckpointError: a checkpoint of another writer was replaced in place meanwhile.
        InvalidURLError: neither is an S3 URL, or one lies inside the other.
        StorageError, OSError
    """
    for each in (source, destination):
        if "://" in os.fspath(each) or not (is_s3_url(source) or is_s3_url(destination)):
            parse_url(each)  # which refuses what is not of S3
    resolved = resolve_settings(settings)
    origin, target = Place.of(source, resolved), Place.of(destination, resolved)
    one, other = f"{origin.name}/", f"{target.name}/"
    if one.startswith(other) or other.startswith(one):
        what = "are the same" if one == other else "lie one inside the other"
        raise errors.InvalidURLError(f"{origin.name} and {target.name} {what}. Remedy: copy to another prefix")
    return _Copy(origin, target, on_progress or (lambda _: None)).run(overwrite, on_total)


class _Copy:
    """One call of `copy`. What it begins with are the parts of the checkpoint.

    Left out are data objects that the metadata does not name (of another save), manifests of other saves, pins, leases,
    lists of deletions, and checkpoints in directories below.
    """

    def __init__(self, origin: Place, target: Place, moved: OnProgress) -> None:
        self.origin, self.target, self.moved = origin, target, moved
        # Large files that pass through this machine at a time: each takes some blocks of memory.
        self.streams = threading.Semaphore(_FILES_AT_ONCE if target.url is None else 1)
        self.commits: dict[str, bytes] = {}
        """Bytes of ``.metadata``, or of every ``__{rank}.metadata``, by relative path."""
        self.save_ids: dict[str, str] = {}
        """Ids of the saves of these commits, as far as their manifests are there."""
        self.is_anonymous = False
        """Whether a commit has no id of its save: that of another one may have the same bytes."""
        where, listed = origin.name, origin.objects()
        directory = Directory.of_sizes({path: each.size for path, each in listed.items()})
        if not directory.commits:
            raise errors.CheckpointNotFoundError(
                f"there is no committed checkpoint at {where}: it has no {METADATA}. Remedy: check the URL or "
                "directory", url=where,
            )  # fmt: skip
        manifests: dict[str, Manifest] = {}
        needed: dict[str, int] = {}
        for rank in reversed(directory.committing):  # the metadata of rank 0 is written last
            name = metadata_object(rank)
            stored = origin.store.get(origin.key(name))
            crc, self.commits[name] = stored.metadata.get(METADATA_CRC_KEY), stored.data
            metadata = load_metadata(stored.data, url=where, crc=crc, of_rank=rank is not None)
            for path, size in needed_objects(metadata).items():
                needed[path] = max(size, needed.get(path, 0))
            save_id = stored.metadata.get(SAVE_ID_KEY) or str(getattr(metadata.storage_meta, "save_id", None))
            self.is_anonymous |= save_id in ("", "None")
            path = manifest_object(save_id, rank)
            if path not in directory.objects:
                continue
            self.save_ids[name] = save_id
            try:
                manifest = manifests[path] = Manifest.from_json(origin.store.get(origin.key(path)).data)
            except ValueError as error:
                raise _damaged(where, f"its manifest {path} cannot be read ({error})") from error
            if rank is not None and manifest.world_size > len(directory.ranks):
                raise errors.CheckpointNotFoundError(
                    f"the checkpoint at {where} is incomplete: {len(directory.ranks)} of {manifest.world_size} ranks "
                    "have committed. Remedy: wait until the save is done, or copy another checkpoint", url=where,
                )  # fmt: skip
        entries = [entry for manifest in reversed(manifests.values()) for entry in manifest.objects]  # rank 0's first
        for entry in entries:  # besides: files with names of their own, which no metadata names
            if isinstance(entry, AttachmentEntry) or classify(entry.path).what is What.OTHER:
                needed[entry.path] = entry.size
        damage = directory.describe_damage(needed)
        if damage is not None:
            raise _damaged(where, damage)
        self.attachments = attachments_of(entries)
        """Attachments by name, which is the relative path of a plain copy. Of several with one name, the first."""
        self.needed = needed.keys()
        """Relative paths of what it cannot be loaded without, and of attachments."""
        belong = needed.keys() | manifests.keys()
        self.files: dict[str, int] = {}
        """Bytes of everything else that belongs to it, by relative path, without the plain copies of attachments."""
        for found in directory.objects.values():
            # Keys may be anything: "./.metadata" must not become the file .metadata, "a/" has no file.
            is_besides = found.kind.what in _BESIDES and not {"", ".", ".."} & {*found.path.split("/")}
            if found.path not in self.attachments and (found.path in belong or is_besides):
                self.files[found.path] = found.size
        self.crcs = {entry.path: entry.crc64nvme for entry in entries if entry.crc64nvme}
        """CRC-64/NVME of data objects, by relative path, as far as manifests record them."""
        ours = (What.METRICS, What.CONTROL, What.MANIFEST)
        fixed = [path for path in self.files if not (kind := classify(path)).nonce and kind.what not in ours]
        self.etags = {path: listed[path].etag for path in (*fixed, *self.commits)} if fixed else {}
        """ETags of what another save may write over while this is copied, by relative path: names without a nonce.
        Empty for what dcp_s3 saved: whoever has copied all that its metadata names has one checkpoint."""

    def run(self, overwrite: bool, on_total: OnTotal | None) -> CopyResult:
        target, there = self.target, self.target.objects()
        commits = [found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()]
        # An earlier call may have begun this very copy, or have come to its end. A directory has nothing else then.
        expected = {**self.files, **{name: each.size for name, each in self.attachments.items()}}
        is_ours = all(self.commits.get(each) == target.store.get(target.key(each)).data for each in commits) and (
            target.url is not None
            or all(
                path in expected and (classify(path).what is not What.OTHER or each.size == expected[path])
                for path, each in there.items()
                if path not in commits
            )
        )
        exists = exists_error(target.url) if target.url else errors.CheckpointExistsError(
            f"{target.name} is not empty, and holds no unfinished download of {self.origin.name}. Remedy: give "
            "another directory, empty this one, or pass overwrite=True", url=self.origin.name,
        )  # fmt: skip
        if not is_ours and not overwrite:
            raise exists
        old = Previous() if is_ours or not target.url else find_previous(target.store, SaveIdentity(target.url, ""))

        # Of the two stores, the one on S3 does many things at once; of two on S3, the one that writes.
        remote = self.origin.store if target.url is None else target.store
        same_size = [path for path, size in self.files.items() if path in there and there[path].size == size]
        same = remote.map(lambda _, path: self._is_same(path, committed=bool(commits)), same_size)
        finished = {path for path, is_same in zip(same_size, same, strict=True) if is_same}
        wanted = {path: size for path, size in self.files.items() if path not in finished}

        # A checkpoint that is to be replaced stays until the commit, if no name is of both.
        of_both = bool(old.keys & set(map(target.key, wanted))) or not commits == [METADATA] == [*self.commits]
        lost = [path for path in wanted if path in self.needed]  # of a copy that was committed once
        if commits and is_ours and self.is_anonymous and not overwrite and not there.keys().isdisjoint(lost):
            raise exists  # other data: it is of another save
        if commits and (lost if is_ours else target.url is None or of_both):
            if target.store.delete([DeleteTarget(there[each].key, there[each].etag) for each in commits]):
                raise exists  # somebody has saved there since
            old = replace(old, etag=None)
        for unfinished in () if target.url else Path(target.name).rglob(f"{HIDDEN}*"):
            unfinished.unlink(missing_ok=True)
        if on_total is not None:
            on_total(sum(wanted.values()))
        remote.map(self._move, sorted(wanted))

        # Somebody may have taken the copy for the leftovers of a failed save.
        copied = Directory.of_sizes({path: each.size for path, each in target.objects().items()})
        missing = copied.lacking(self.files, exact=True)
        if missing:
            raise errors.CheckpointDeletedError(
                f"{target.name} was not committed: {len(missing)} of its objects are gone, the first {missing[0]}."
                " Remedy: copy again, while no prune with a short grace period (DCP_S3_RETENTION_GRACE) runs there",
                url=target.name,
            )
        # Another save may have written to the origin since it was listed: the parts would not be of one checkpoint.
        now = self.origin.objects() if self.etags else {}
        changed = [path for path, etag in self.etags.items() if path not in now or not same_etag(etag, now[path].etag)]
        if changed:
            raise errors.CheckpointError(
                f"{self.origin.name} was not copied: {len(changed)} of its objects have changed meanwhile, the first "
                f"{changed[0]}. Remedy: copy again, when nobody saves to this URL",
                url=self.origin.name,
            )
        written = {**self.files, **self._commit(old.etag)}
        needed = (*self.files, *self.commits, *self.attachments)
        target.store.delete(sorted(old.keys - set(map(target.key, needed))))
        return CopyResult(len(written), sum(written.values()), sum(wanted.values()))

    def _is_same(self, path: str, *, committed: bool) -> bool:
        """Whether a file of the right size is the one that is to be copied: an earlier call has copied it. False if
        that is not known, unless it is of a copy that is ``committed``, which would be lost by that."""
        origin, target = self.origin, self.target
        crc = self.crcs.get(path)
        if crc is None and self.files[path] <= BLOCK:
            return origin.store.get(origin.key(path)).data == target.store.get(target.key(path)).data
        expected = crc or origin.store.head(origin.key(path), checksum=True).crc64nvme
        found = target.store.head(target.key(path), checksum=True).crc64nvme
        if None not in (expected, found):
            return found == expected
        # Without a checksum of the store: a name with a nonce is of one save only.
        if classify(path).nonce or not committed:
            return bool(classify(path).nonce)
        with self.streams:
            for start in range(0, self.files[path], BLOCK):
                blocks = [bytearray(min(BLOCK, self.files[path] - start)) for _ in range(2)]
                for place, block in zip((origin, target), blocks, strict=True):
                    place.store.read(place.key(path), start, memoryview(block))
                if blocks[0] != blocks[1]:
                    return False
        return True

    def _move(self, bounded: Store, path: str) -> None:
        """Copy a file, and compare the copy with what was recorded, as far as the store tells."""
        origin, target = (replace(each, store=each.store.within(bounded.limit)) for each in (self.origin, self.target))
        size, crc = self.files[path], self.crcs.get(path)
        source_key, key, sent = origin.key(path), target.key(path), None
        if size <= BLOCK and classify(path).what is not What.DATA:  # like metadata: the storage class is for data
            stored = origin.store.get(source_key)
            target.store.put(key, stored.data, metadata=stored.metadata)
            sent = crc64nvme(stored.data)
            self.moved(size)
        elif None not in (origin.url, target.url):
            target.store.copy(origin.store, source_key, key)
            self.moved(size)
        else:
            import numpy as np  # here: a copy on S3 needs none

            etag = origin.store.head(source_key).etag or None

            def read(start: int) -> Piece:
                block = np.empty(min(BLOCK, size - start), np.uint8).data  # not zeros
                origin.store.read(source_key, start, block, etag, moved=self.moved)
                return Piece.of(block)

            starts = range(0, size, BLOCK)
            width = origin.store.read_width() // (_FILES_AT_ONCE if target.url is None else 1)
            turn = contextlib.nullcontext() if size <= BLOCK else self.streams
            with turn, ahead(read, starts, max(1, min(width, len(starts)))) as pieces:
                part = max(BLOCK, -(-size // MAX_PARTS))
                sent = target.store.put_stream(key, size, pieces, part_size=part).crc64nvme
        found = target.store.head(key, checksum=crc is not None and sent is None)
        actual = found.crc64nvme if sent is None else crc_hex(sent)
        if found.size != size or (None not in (crc, actual) and actual != crc):
            target.store.delete([key])  # so that the next call copies it again
            verify = "" if origin.url is None else f": dcp-s3 verify --full {origin.url}"
            raise errors.CorruptCheckpointError(
                f"the copy of {path} of {origin.name} is damaged: it has {found.size} bytes with CRC-64/NVME {actual} "
                f"instead of {size} with {crc}. Remedy: copy again; if it stays so, the object itself is damaged"
                f"{verify}",
                url=origin.name,
            )

    def _commit(self, replaced: str | None) -> dict[str, int]:
        """Write the metadata of a copy whose files are all there, in place of the one with this ETag: it is a
        checkpoint then. In a directory, attachments get plain copies for other tools before. Returns the bytes of what
        was written, by relative path."""
        target = self.target
        plain: dict[str, bytes] = {}
        if target.url is None:
            plain = {name: target.store.get(each.path).data for name, each in self.attachments.items()}
            for name, data in plain.items():
                target.store.put(name, data)
        expect = ABSENT if replaced is None else Expect(replaced)
        for name, data in self.commits.items():
            fields = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
            if name in self.save_ids:
                fields[SAVE_ID_KEY] = self.save_ids[name]
            try:
                target.store.put(target.key(name), data, expect=expect, metadata=fields)
            except errors.PreconditionFailedError:
                raise exists_error(parse_url(target.name)) from None
        return {name: len(data) for name, data in (*plain.items(), *self.commits.items())}


def _damaged(where: str, damage: str) -> errors.CorruptCheckpointError:
    return errors.CorruptCheckpointError(
        f"{where} cannot be copied: {damage}. Remedy: it is damaged, or being deleted; copy another checkpoint",
        url=where,
    )
