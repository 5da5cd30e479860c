"""Copies of a checkpoint: from S3 to S3, and between S3 and a directory as torch's FileSystemReader reads it.

The commit comes last, so that an interrupted copy is no checkpoint, and goes on when it is called again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, exists_error, find_previous
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry
from dcp_s3.format.control_files import AttachmentEntry, Manifest, attachments_of
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
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
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.offline.place import BLOCK, OnProgress, OnTotal, Place, read_ahead
from dcp_s3.s3.multipart import MAX_PARTS
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ABSENT, Expect, ListedObject, Store, same_etag
from dcp_s3.stores.directory import HIDDEN
from dcp_s3.units import format_size, one_line, plural
from dcp_s3.url import URLLike, is_s3_url, parse_url

_FILES_AT_ONCE = 4  # large ones on their way to a directory; to S3, one fills the connections
_MARKER = CONTROL_PREFIX + "download.json"  # of a directory into which a download has begun: says of which checkpoint


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        found = f"{plural(self.files, 'file')}, {format_size(self.size)}, {format_size(self.moved)} moved"
        return one_line("CopyResult", found)


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

    The copy has the data, metadata, manifest, attachments and annotations, and other files that lie with them; no pin
    and no leases. ``.metadata`` comes last: a copy that was cut off is no checkpoint, and goes on when it is called
    again. Both URLs are reached with the same settings, so they are on one endpoint; elsewhere, and on a store that
    does not copy, copy by way of a directory.

    >>> copied = copy("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000")
    >>> diff("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000").same
    True

    Args:
        source: URL of the checkpoint, or a directory that torch's FileSystemReader reads.
        overwrite: replace what is at ``destination``. A checkpoint on S3 stays whole until the new one is committed,
            unless objects that must be copied have the names of its own: then it is lost at once.
        on_progress: called with the number of bytes as they are copied, from several threads.

    Returns:
        What was copied. ``moved`` counts the bytes that this call copied, through this host or inside of S3.

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
    return _Copy(_find_source(origin), target, on_progress or (lambda _: None)).run(overwrite, on_total)


# --- what is copied --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A checkpoint to be copied."""

    place: Place
    commits: Mapping[str, bytes]
    """Bytes of ``.metadata``, or of every ``__{rank}.metadata``, by relative path."""
    save_ids: Mapping[str, str]
    """Ids of the saves of these commits, as far as their manifests are there."""
    files: Mapping[str, int]
    """Bytes of everything else that belongs to it, by relative path, without the plain copies of attachments."""
    crcs: Mapping[str, str]
    """CRC-64/NVME of data objects, by relative path, as far as manifests record them."""
    attachments: Mapping[str, AttachmentEntry]
    """Attachments by name, which is the relative path of a plain copy. Of several with one name, the first."""
    etags: Mapping[str, str]
    """ETags of what another save may write over while this is copied, by relative path: names without a nonce. Empty
    for what dcp_s3 saved: whoever has copied all that its metadata names has one checkpoint."""

    def check_unchanged(self) -> None:
        """Fail if another save wrote to the source since it was listed: the parts are not of one checkpoint."""
        now = self.place.objects() if self.etags else {}
        changed = [path for path, etag in self.etags.items() if path not in now or not same_etag(etag, now[path].etag)]
        if changed:
            raise errors.CheckpointError(
                f"{self.place.name} was not copied: {len(changed)} of its objects have changed meanwhile, the first "
                f"{changed[0]}. Remedy: copy again, when nobody saves to this URL",
                url=self.place.name,
            )


def _find_source(place: Place) -> _Source:
    """Find what belongs to the checkpoint at a place.

    Left out are data objects that the metadata does not name (of another save), manifests of other saves, pins, leases,
    lists of deletions, and checkpoints in directories below.
    """
    where, listed = place.name, place.objects()
    directory = Directory.of_sizes({path: each.size for path, each in listed.items()})
    if not directory.commits:
        raise errors.CheckpointNotFoundError(
            f"there is no committed checkpoint at {where}: it has no {METADATA}. Remedy: check the URL or directory",
            url=where,
        )
    commits: dict[str, bytes] = {}
    save_ids: dict[str, str] = {}
    manifests: dict[str, Manifest] = {}
    needed: dict[str, int] = {}
    for rank in reversed(directory.committing):  # the metadata of rank 0 is written last
        name = metadata_object(rank)
        stored = place.store.get(place.key(name))
        crc, commits[name] = stored.metadata.get(METADATA_CRC_KEY), stored.data
        metadata = load_metadata(stored.data, url=where, crc=crc, of_rank=rank is not None)
        for path, size in needed_objects(metadata).items():
            needed[path] = max(size, needed.get(path, 0))
        save_id = stored.metadata.get(SAVE_ID_KEY) or str(getattr(metadata.storage_meta, "save_id", None))
        path = manifest_object(save_id, rank)
        if path not in directory.objects:
            continue
        save_ids[name] = save_id
        try:
            manifest = manifests[path] = Manifest.from_json(place.store.get(place.key(path)).data)
        except ValueError as error:
            raise _damaged(where, f"its manifest {path} cannot be read ({error})") from error
        if rank is not None and manifest.world_size > len(directory.ranks):
            raise errors.CheckpointNotFoundError(
                f"the checkpoint at {where} is incomplete: {len(directory.ranks)} of {manifest.world_size} ranks have "
                "committed. Remedy: wait until the save is done, or copy another checkpoint",
                url=where,
            )
    entries = [entry for manifest in reversed(manifests.values()) for entry in manifest.objects]  # rank 0's first
    needed |= {entry.path: entry.size for entry in entries if isinstance(entry, AttachmentEntry)}
    needed |= {path: entry.size for manifest in manifests.values() for path, entry in manifest.files.items()}
    damage = directory.describe_damage(needed)
    if damage is not None:
        raise _damaged(where, damage)
    attachments, belong = attachments_of(entries), needed.keys() | manifests.keys()
    files = {
        found.path: found.size
        for found in directory.objects.values()
        if found.path not in attachments and (found.path in belong or _is_besides(found))
    }
    crcs = {entry.path: entry.crc64nvme for entry in entries if entry.crc64nvme}
    ours = (What.METRICS, What.CONTROL, What.MANIFEST)
    fixed = [path for path in files if not (kind := classify(path)).nonce and kind.what not in ours]
    etags = {path: listed[path].etag for path in (*fixed, *commits)} if fixed else {}
    return _Source(place, commits, save_ids, files, crcs, attachments, etags)


def _damaged(where: str, damage: str) -> errors.CorruptCheckpointError:
    return errors.CorruptCheckpointError(
        f"{where} cannot be copied: {damage}. Remedy: it is damaged, or being deleted; copy another checkpoint",
        url=where,
    )


def _is_besides(found: DirectoryEntry) -> bool:
    """Whether an object is copied although no metadata names it: metrics, and files that users put there."""
    if found.kind.what not in (What.METRICS, What.CONTROL, What.OTHER) or found.path == _MARKER:
        return False
    # Keys may be anything: "./.metadata" must not become the file .metadata, "a/" has no file.
    return not any(segment in ("", ".", "..") for segment in found.path.split("/"))


# --- the copy --------------------------------------------------------------------------------------------


class _Copy:
    def __init__(self, source: _Source, target: Place, moved: OnProgress) -> None:
        self.source, self.origin, self.target, self.moved = source, source.place, target, moved
        # Of the two stores, the one on S3; of two on S3, the one that writes.
        self.remote = self.origin.store if target.url is None else target.store
        # Large files that pass through this machine at a time: each takes some blocks of memory.
        self.streams = threading.Semaphore(_FILES_AT_ONCE if target.url is None else 1)

    def run(self, overwrite: bool, on_total: OnTotal | None) -> CopyResult:
        source, target = self.source, self.target
        old = self._make_room(overwrite)
        there = target.objects()
        finished = self._finished(there)
        wanted = {path: size for path, size in source.files.items() if path not in finished}
        if old is not None:
            commits = [found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()]
            if old.keys & set(map(target.key, wanted)) or not commits == [METADATA] == [*source.commits]:
                target.store.delete(map(target.key, commits))
                old = replace(old, etag=None)
        if on_total is not None:
            on_total(sum(wanted.values()))
        self.remote.map(self._move, sorted(wanted))
        # Nobody took the copy for the leftovers of a failed save, nor wrote to the source.
        copied = Directory.of_sizes({path: each.size for path, each in target.objects().items()})
        missing = copied.lacking(source.files, exact=True)
        if missing:
            raise errors.CheckpointDeletedError(
                f"{target.name} was not committed: {len(missing)} of its objects are gone, the first {missing[0]}."
                " Remedy: copy again, while no prune with a short grace period (DCP_S3_RETENTION_GRACE) runs there",
                url=target.name,
            )
        source.check_unchanged()
        written = {**source.files, **self._commit(None if old is None else old.etag)}
        if old is not None:
            needed = (*source.files, *source.commits, *source.attachments)
            target.store.delete(sorted(old.keys - set(map(target.key, needed))))
        return CopyResult(len(written), sum(written.values()), sum(wanted.values()))

    def _make_room(self, overwrite: bool) -> Previous | None:
        """Refuse to replace another checkpoint, or say what it is on S3; None if there is none. Mark a directory, which
        must be empty or have the mark of this very checkpoint, or loses what is in the way."""
        source, target = self.source, self.target
        there, mark = target.objects(), b""
        commits = [found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()]
        if target.url is not None:
            is_ours = all(map(self._is_ours, commits))  # an earlier call has come to its end, or nearly
            error = exists_error(target.url)
        else:
            digest = hashlib.sha256(b"".join(source.commits[name] for name in sorted(source.commits))).hexdigest()
            # The metadata of another save with the same names may be the same.
            of = {"url": self.origin.name, "metadata_sha256": digest, "etags": sorted(source.etags.items())}
            mark = json.dumps(of).encode()
            is_marked = _MARKER in there and target.store.get(_MARKER).data == mark
            for unfinished in target.directory.rglob(f"{HIDDEN}*") if target.directory and is_marked else ():
                unfinished.unlink()
            is_ours = is_marked or not there
            error = errors.CheckpointExistsError(
                f"{target.name} is not empty, and holds no unfinished download of {self.origin.name}. Remedy: give "
                "another directory, empty this one, or pass overwrite=True",
                url=self.origin.name,
            )
        if not is_ours and not overwrite:
            raise error
        if target.url is not None:
            return None if is_ours else find_previous(target.store, SaveIdentity(target.url, ""))
        if not is_ours:  # files may have the right size by chance
            target.store.delete(commits)
            target.store.delete(sorted(source.files))
        target.store.put(_MARKER, mark)
        return None

    def _is_ours(self, commit: str) -> bool:
        expected = self.source.commits.get(commit)
        return expected is not None and self.target.store.get(self.target.key(commit)).data == expected

    def _finished(self, there: Mapping[str, ListedObject]) -> set[str]:
        """Relative paths of the files that an earlier call has copied."""
        source, origin, target = self.source, self.origin, self.target
        same_size = [path for path, size in source.files.items() if path in there and there[path].size == size]

        def is_same(path: str) -> bool:
            crc = source.crcs.get(path)
            if crc is None and target.url is None:
                return True  # the marker says so, and files appear complete
            if crc is None and source.files[path] <= BLOCK:
                return origin.store.get(origin.key(path)).data == target.store.get(target.key(path)).data
            expected = crc or origin.store.head(origin.key(path), checksum=True).crc64nvme
            found = target.store.head(target.key(path), checksum=True).crc64nvme
            # Without a checksum of the store: a name with a nonce is of one save only.
            return bool(classify(path).nonce) if None in (expected, found) else found == expected

        same = self.remote.map(lambda _, path: is_same(path), same_size)
        return {path for path, found in zip(same_size, same, strict=True) if found}

    def _move(self, bounded: Store, path: str) -> None:
        """Copy a file, and compare the copy with what was recorded, as far as the store tells."""
        origin, target = (replace(each, store=each.store.within(bounded.limit)) for each in (self.origin, self.target))
        size, crc = self.source.files[path], self.source.crcs.get(path)
        key, sent = target.key(path), None
        if size <= BLOCK and classify(path).what is not What.DATA:  # like metadata: the storage class is for data
            stored = origin.store.get(origin.key(path))
            target.store.put(key, stored.data, metadata=stored.metadata)
            sent = crc64nvme(stored.data)
            self.moved(size)
        elif None not in (origin.url, target.url):
            target.store.copy(origin.store, origin.key(path), key)
            self.moved(size)
        else:
            with contextlib.nullcontext() if size <= BLOCK else self.streams:
                width = origin.store.read_width() // (_FILES_AT_ONCE if target.url is None else 1)
                with read_ahead(origin.store, origin.key(path), size, width=max(1, width), moved=self.moved) as pieces:
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
        """Write the metadata of a copy whose files are all there: it is a checkpoint then. In a directory, attachments
        get plain copies for other tools before. Returns the bytes of what was written, by relative path.

        Args:
            replaced: ETag of the ``.metadata`` that is replaced.
        """
        source, target = self.source, self.target
        plain: dict[str, bytes] = {}
        if target.url is None:
            plain = {name: target.store.get(each.path).data for name, each in source.attachments.items()}
            for name, data in plain.items():
                target.store.put(name, data)
        expect = ABSENT if replaced is None else Expect(replaced)
        for name, data in source.commits.items():
            fields = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
            if name in source.save_ids:
                fields[SAVE_ID_KEY] = source.save_ids[name]
            try:
                target.store.put(target.key(name), data, expect=expect, metadata=fields)
            except errors.PreconditionFailedError:
                raise exists_error(parse_url(target.name)) from None
        if target.url is None:
            target.store.delete([_MARKER])
        return {name: len(data) for name, data in (*plain.items(), *source.commits.items())}
