"""Copies of a checkpoint: from S3 to S3, and between S3 and a directory as torch's FileSystemReader reads it.

The commit comes last, so that an interrupted copy is no checkpoint, and goes on when it is called again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import SaveIdentity, check_absent, exists_error, find_previous
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.format.layout import CONTROL_PREFIX, METADATA, METADATA_CRC_KEY, SAVE_ID_KEY, What, classify
from dcp_s3.memory import Piece, crc64nvme, crc_hex
from dcp_s3.offline.copy_source import DOWNLOAD_MARKER, CopySource, find_source
from dcp_s3.offline.place import BLOCK, OnProgress, OnTotal, Place, read_ahead
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ABSENT, ListedObject, Store
from dcp_s3.stores.directory import HIDDEN
from dcp_s3.units import format_size, one_line, plural
from dcp_s3.url import URLLike, is_s3_url, parse_url

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4  # large ones on their way to a directory; to S3, one fills the connections


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
        What was copied; ``moved`` counts bytes copied by this call, wherever they passed.

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
    job = _Copy(find_source(origin), target, on_progress or (lambda _: None))
    return job.run(overwrite, on_total or (lambda _: None))


class _Copy:
    def __init__(self, source: CopySource, target: Place, moved: OnProgress) -> None:
        self.source, self.origin, self.target, self.moved = source, source.place, target, moved
        # Of the two stores, the one on S3; of two on S3, the one that writes.
        self.remote = self.origin.store if target.url is None else target.store
        # Large files that pass through this machine at a time: each takes some blocks of memory.
        self.streams = threading.Semaphore(_FILES_AT_ONCE if target.url is None else 1)

    def run(self, overwrite: bool, on_total: OnTotal) -> CopyResult:
        source, target = self.source, self.target
        if target.directory is not None:
            _prepare_directory(target, target.directory, source, overwrite=overwrite)
        there = target.objects()
        finished = self._finished(there)
        wanted = {path: size for path, size in source.files.items() if path not in finished}
        with self._replacing(there, wanted, overwrite=overwrite):
            on_total(sum(wanted.values()))
            self.remote.map(self._move, sorted(wanted))
            self._check_whole()
            source.check_unchanged()
            self._commit(overwrite=overwrite)
        if target.directory is not None:
            target.remove([DOWNLOAD_MARKER])
            with contextlib.suppress(OSError):  # not empty
                (target.directory / CONTROL_PREFIX).rmdir()
        plain = [each.size for each in source.attachments.values()] if target.url is None else []
        return CopyResult(source.count + len(plain), source.size + sum(plain), sum(wanted.values()))

    # --- what is there -----------------------------------------------------------------------------------

    def _finished(self, there: Mapping[str, ListedObject]) -> set[str]:
        """Relative paths of the files that an earlier call has copied."""
        source, origin, target = self.source, self.origin, self.target
        same_size = [path for path, size in source.files.items() if path in there and there[path].size == size]

        def is_same(path: str) -> bool:
            crc = source.crcs.get(path)
            if crc is None and target.directory is not None:
                return True  # the marker says so, and files appear complete
            if crc is None and source.files[path] <= BLOCK:
                return origin.store.get(origin.key(path)).data == target.store.get(target.key(path)).data
            expected = crc or origin.store.head(origin.key(path), checksum=True).crc64nvme
            found = target.store.head(target.key(path), checksum=True).crc64nvme
            # Without a checksum of the store: a name with a nonce is of one save only.
            return bool(classify(path).nonce) if None in (expected, found) else found == expected

        same = self.remote.map(lambda _, path: is_same(path), same_size)
        return {path for path, found in zip(same_size, same, strict=True) if found}

    @contextlib.contextmanager
    def _replacing(self, there: Collection[str], paths: Collection[str], *, overwrite: bool) -> Iterator[None]:
        """Refuse to replace a checkpoint, or delete what only the replaced one needed when the copy is complete.

        If it needs one of ``paths`` (what is to be written before the commit), its commit is removed at once.
        """
        source, store, url = self.source, self.target.store, self.target.url
        commits = {found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()}
        if url is None or (commits and all(self._is_ours(name) for name in commits)):
            yield  # an earlier call has come to its end, or nearly
            return
        if not overwrite:
            for name in source.commits:
                check_absent(store, SaveIdentity(url, "", classify(name).rank))
            yield
            return
        # This takes few requests, and only for an overwrite.
        old = [found.path for found in list_directory(store, url, METADATA, "__").commits.values()]
        replaced = find_previous(store, SaveIdentity(url, "")).keys
        if old and (replaced & set(map(url.key, paths)) or old != [METADATA] or METADATA not in source.commits):
            store.delete([url.key(path) for path in old])
        yield
        needed = (*source.files, *source.commits, *source.attachments)
        store.delete(sorted(replaced - {url.key(path) for path in needed}))

    def _is_ours(self, commit: str) -> bool:
        expected = self.source.commits.get(commit)
        return expected is not None and self.target.store.get(self.target.key(commit)).data == expected

    def _check_whole(self) -> None:
        """Look, before the commit, that nobody took the copy for the leftovers of a failed save."""
        there = Directory.of_sizes({path: each.size for path, each in self.target.objects().items()})
        missing = there.lacking(self.source.files, exact=True)
        if missing:
            raise errors.CheckpointDeletedError(
                f"{self.target.name} was not committed: {len(missing)} of its objects are gone, the first {missing[0]}."
                " Remedy: copy again, while no prune with a short grace period (DCP_S3_RETENTION_GRACE) runs there",
                url=self.target.name,
            )

    # --- the files ---------------------------------------------------------------------------------------

    def _move(self, bounded: Store, path: str) -> None:
        one, other = (replace(each, store=each.store.within(bounded.limit)) for each in (self.origin, self.target))
        size, crc = self.source.files[path], self.source.crcs.get(path)
        sent = None
        if None in (one.url, other.url) or _is_small(path, size):
            sent = self._stream(one, other, path, size)
        else:
            other.store.copy(one.store, one.key(path), other.key(path))
            self.moved(size)
        problem = _find_problem(other, path, size, crc, sent)
        if problem is not None:
            other.remove([path])  # so that the next call copies it again
            verify = "" if one.url is None else f": dcp-s3 verify --full {one.url}"
            raise errors.CorruptCheckpointError(
                f"the copy of {path} of {one.name} is damaged: it {problem}. Remedy: copy again; if it stays so, "
                f"the object itself is damaged{verify}",
                url=one.name,
            )

    def _stream(self, one: Place, other: Place, path: str, size: int) -> int | None:
        """Move a file through this machine. Returns its CRC, None if that is not known."""
        if other.url is not None and _is_small(path, size):
            found = one.store.get(one.key(path))
            other.store.put(other.key(path), found.data, metadata=found.metadata)
            self.moved(size)
            return crc64nvme(found.data)
        with contextlib.nullcontext() if size <= BLOCK else self.streams:
            width = one.store.read_width()
            if other.url is None:
                width = max(1, width // _FILES_AT_ONCE)
            etag = one.store.head(one.key(path)).etag or None
            with read_ahead(one.store, one.key(path), size, etag, width=width, moved=self.moved) as pieces:
                return other.write(path, size, pieces, part_size=max(BLOCK, -(-size // MAX_PARTS)))

    # --- the commit --------------------------------------------------------------------------------------

    def _commit(self, *, overwrite: bool) -> None:
        """Write the metadata of a copy whose files are all there: it is a checkpoint then.

        In a directory, attachments get plain copies for other tools.
        """
        source, target = self.source, self.target
        if target.url is None:
            attached = {name: target.store.get(each.path).data for name, each in source.attachments.items()}
            for name, data in (*attached.items(), *source.commits.items()):
                target.write(name, len(data), [Piece.of(data)])
            return
        for name, data in source.commits.items():
            fields = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
            if name in source.save_ids:
                fields[SAVE_ID_KEY] = source.save_ids[name]
            try:
                target.store.put(target.key(name), data, expect=None if overwrite else ABSENT, metadata=fields)
            except errors.PreconditionFailedError:
                raise exists_error(target.url) from None


def _is_small(path: str, size: int) -> bool:
    """Whether a file is written like metadata: as with any save, the storage class is for data."""
    return classify(path).what is not What.DATA and size <= BLOCK


def _find_problem(place: Place, path: str, size: int, crc: str | None, sent: int | None = None) -> str | None:
    """What is wrong with a copy; None if it is good, as far as the store tells. ``sent``: CRC of what was written."""
    if sent is not None and crc not in (None, crc_hex(sent)):
        return f"has CRC-64/NVME {crc_hex(sent)} instead of {crc}"
    found = place.store.head(place.key(path), checksum=crc is not None and sent is None)
    if found.size != size:
        return f"has {found.size} bytes instead of {size}"
    if crc is not None and found.crc64nvme not in (None, crc):
        return f"has CRC-64/NVME {found.crc64nvme} instead of {crc}"
    return None


def _prepare_directory(target: Place, directory: Path, source: CopySource, *, overwrite: bool) -> None:
    """Mark a directory, which must be empty or hold an unfinished download of this very checkpoint."""
    digest = hashlib.sha256(b"".join(source.commits[name] for name in sorted(source.commits))).hexdigest()
    same: dict[str, object] = {"url": source.place.name, "metadata_sha256": digest}
    if source.etags:  # the metadata of another save with the same names may be the same
        same["etags_sha256"] = hashlib.sha256(json.dumps(sorted(source.etags.items())).encode()).hexdigest()
    marker, mark = directory / DOWNLOAD_MARKER, json.dumps(same).encode()
    if directory.exists() and any(directory.iterdir()):
        if marker.is_file() and marker.read_bytes() == mark:
            for unfinished in directory.rglob(f"{HIDDEN}*"):
                unfinished.unlink()
            return
        if not overwrite:
            raise errors.CheckpointExistsError(
                f"{directory} is not empty, and holds no unfinished download of {source.place.name}. Remedy: give "
                "another directory, empty this one, or pass overwrite=True",
                url=source.place.name,
            )
        # Existing files may have the right size by chance.
        commits = Directory.of_sizes(dict.fromkeys(os.listdir(directory), 0)).commits.values()
        target.remove([*(found.path for found in commits), *source.files])
    target.write(DOWNLOAD_MARKER, len(mark), [Piece.of(mark)])
