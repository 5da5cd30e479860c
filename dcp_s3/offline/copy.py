"""Copies of a checkpoint from S3 to S3, which S3 makes itself where it can."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.format.layout import What, classify
from dcp_s3.limit import UNLIMITED, Cancelled
from dcp_s3.offline.copy_source import (
    CopyResult,
    CopySource,
    check_unchanged,
    commit_copy,
    etags_in_place,
    known_crcs,
    list_objects,
    make_source,
    replacing,
)
from dcp_s3.offline.destination import open_destination
from dcp_s3.offline.replicate import download, upload
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ListedObject, same_etag
from dcp_s3.url import CheckpointURL, URLLike, is_s3_url, parse_url

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Objects that are copied at once; S3 copies several parts of each."""
_BLOCK = 8 * 2**20


def copy(
    source: URLLike,
    destination: URLLike,
    overwrite: bool = False,
    *,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> CopyResult:
    """Copy a checkpoint. Between two URLs S3 copies the objects itself; a directory is downloaded to or uploaded from.

    The copy has the data, metadata, manifest, attachments and annotations, and other files that lie with them; no pin
    and no leases. ``.metadata`` comes last: a copy that was cut off is no checkpoint, and goes on when it is called
    again. Both URLs are reached with the same settings, so they are on one endpoint; elsewhere, copy by way of a
    directory. Where the store refuses to copy, the bytes pass through this machine.

    >>> copied = copy("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000")
    >>> diff("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000").same
    True

    Args:
        source: URL of the checkpoint, or a directory that torch's FileSystemReader reads.
        destination: URL of the new checkpoint, or a directory.
        overwrite: replace what is at ``destination``. A checkpoint on S3 stays whole until the new one is committed,
            unless objects that must be copied have the names of its own: then it is lost at once.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_total: called once with the number of bytes to copy.
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
        if "://" in os.fspath(each):
            parse_url(each)  # not of S3: it is no directory either
    if not is_s3_url(destination) and is_s3_url(source):
        return download(
            os.fspath(source), destination, overwrite=overwrite, settings=settings, on_total=on_total,
            on_progress=on_progress,
        )  # fmt: skip
    if not is_s3_url(source) and is_s3_url(destination):
        return upload(
            source, os.fspath(destination), overwrite=overwrite, settings=settings, on_total=on_total,
            on_progress=on_progress,
        )  # fmt: skip
    origin, target = parse_url(source), parse_url(destination)  # which refuse two directories
    one, other = f"{origin}/", f"{target}/"
    if one.startswith(other) or other.startswith(one):
        what = "are the same" if one == other else "lie one inside the other"
        raise errors.InvalidURLError(f"{origin} and {target} {what}. Remedy: copy to another prefix")
    resolved = resolve_settings(settings)
    stop = threading.Event()
    limit = replace(UNLIMITED, cancel=stop)
    stores = [S3Store(url.bucket, resolved, limit) for url in (origin, target)]
    job = _Job(stores[0], origin, stores[1], target, stop)
    return job.run(overwrite, on_total or (lambda _: None), on_progress or (lambda _: None))


@dataclass(frozen=True)
class _Job:
    """One copy from S3 to S3."""

    source: S3Store
    origin: CheckpointURL
    store: S3Store
    """Store of the copy."""
    url: CheckpointURL
    """URL of the copy."""
    stop: threading.Event
    """Ends the requests of both stores."""

    def run(self, overwrite: bool, on_total: Callable[[int], None], on_progress: Callable[[int], None]) -> CopyResult:
        listed = list_objects(self.source, self.origin)
        directory = Directory.of_sizes({path: each.size for path, each in listed.items()})
        source = make_source(str(self.origin), directory, lambda path: self.source.get(self.origin.key(path)))
        crcs = known_crcs(source, lambda path: self.source.get(self.origin.key(path)).data)
        there = list_objects(self.store, self.url)
        wanted = source.files.keys() - self._finished(source, listed, there, crcs)

        def copy_one(path: str) -> None:
            self._copy_object(path, source.files[path], crcs.get(path))
            on_progress(source.files[path])

        old = (
            contextlib.nullcontext(set[str]())
            if self._is_begun(source, there)
            else replacing(self.store, self.url, source, wanted, overwrite=overwrite)
        )
        with old as late:
            on_total(sum(source.files[path] for path in wanted))
            _for_each(copy_one, wanted - late, self.stop)
            self._check_whole(source, late)
            check_unchanged(self.source, self.origin, source, etags_in_place(source, listed))
            commit_copy(self.store, self.url, source, overwrite=overwrite)
            _for_each(copy_one, late, self.stop)
        return CopyResult(source.count, source.size, sum(source.files[path] for path in wanted))

    # --- what is there already ----------------------------------------------------------------------------

    def _finished(
        self,
        source: CopySource,
        listed: Mapping[str, ListedObject],
        there: Mapping[str, ListedObject],
        crcs: Mapping[str, str],
    ) -> set[str]:
        """Relative paths of the objects that an earlier call has copied."""
        same_size = [path for path, size in source.files.items() if path in there and there[path].size == size]

        def is_same(path: str) -> bool:
            if listed[path].etag and same_etag(listed[path].etag, there[path].etag):
                return True
            ours, theirs = self.origin.key(path), self.url.key(path)
            if path not in crcs and source.files[path] <= _BLOCK:
                return self.source.get(ours).data == self.store.get(theirs).data
            expected = crcs.get(path) or self.source.head(ours, checksum=True).crc64nvme
            found = self.store.head(theirs, checksum=True).crc64nvme
            # Without a checksum of the store: a name with a nonce is of one save only.
            return bool(classify(path).nonce) if None in (expected, found) else found == expected

        with ThreadPoolExecutor(4 * _AT_ONCE, "dcp_s3-copy-look") as pool:
            return {path for path, same in zip(same_size, pool.map(is_same, same_size), strict=True) if same}

    def _is_begun(self, source: CopySource, there: Collection[str]) -> bool:
        """Whether the commits at the URL are this checkpoint's: an earlier call has come to its end, or nearly."""
        commits = {found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()}
        return bool(commits) and all(
            name in source.commits and self.store.get(self.url.key(name)).data == source.commits[name]
            for name in commits
        )

    # --- one object ---------------------------------------------------------------------------------------

    def _copy_object(self, path: str, size: int, crc: str | None) -> None:
        problem = self._find_problem(path, size, crc) if self._copy_on_s3(path, size) else ""
        if problem is not None:  # also of a store that knows nothing of copies, and wrote an empty object
            self._stream(path, size)
            problem = self._find_problem(path, size, crc)
        if problem is not None:
            self.store.delete([self.url.key(path)])  # so that the next call copies it again
            raise errors.CorruptCheckpointError(
                f"the copy of {path} of {self.origin} is damaged: it {problem}. Remedy: copy again; if it stays so, "
                f"the object itself is damaged: dcp-s3 verify --full {self.origin}",
                url=str(self.origin),
            )

    def _copy_on_s3(self, path: str, size: int) -> bool:
        """Let S3 copy an object, and return whether it did."""
        if classify(path).what is not What.DATA and size <= _BLOCK:
            return False  # as with any save, the storage class is for data
        try:
            self.store.copy(self.source, self.origin.key(path), self.url.key(path))
        except (errors.ObjectNotFoundError, errors.PreconditionFailedError, errors.TransferError,
                errors.CredentialsError, errors.BucketNotFoundError, errors.DeadlineExceededError):  # fmt: skip
            raise
        except errors.StorageError as error:
            logger.warning("%s passes through this machine, as the store does not copy it: %s", path, error)
            return False
        return True

    def _stream(self, path: str, size: int) -> None:
        key = self.origin.key(path)
        if size <= _BLOCK:
            found = self.source.get(key)
            self.store.put(self.url.key(path), found.data, metadata=found.metadata)
            return
        etag = self.source.head(key).etag
        block = memoryview(bytearray(_BLOCK))
        with open_destination(str(self.url), self.store.settings) as files, files.open(path, size) as file:
            for start in range(0, size, _BLOCK):
                piece = block[: min(_BLOCK, size - start)]
                self.source.read(key, start, piece, etag or None)
                file.write(piece)
            file.commit()

    def _find_problem(self, path: str, size: int, crc: str | None) -> str | None:
        """What is wrong with a copy; None if it is good, as far as the store tells."""
        found = self.store.head(self.url.key(path), checksum=crc is not None)
        if found.size != size:
            return f"has {found.size} bytes instead of {size}"
        if crc is not None and found.crc64nvme not in (None, crc):
            return f"has CRC-64/NVME {found.crc64nvme} instead of {crc}"
        return None

    def _check_whole(self, source: CopySource, late: Collection[str]) -> None:
        """Look, before the commit, that nobody took the copy for the leftovers of a failed save."""
        there = Directory.of_sizes({path: each.size for path, each in list_objects(self.store, self.url).items()})
        needed = {path: size for path, size in source.files.items() if path not in late}
        missing = there.lacking(needed, exact=True)
        if missing:
            raise errors.CheckpointDeletedError(
                f"{self.url} was not committed: {len(missing)} of its objects are gone, the first {missing[0]}. "
                "Remedy: copy again, while no prune with a short grace period (DCP_S3_RETENTION_GRACE) runs there",
                url=str(self.url),
            )


def _for_each(work: Callable[[str], None], paths: Collection[str], stop: threading.Event) -> None:
    """Work on several at once; the first that fails ends the others."""
    with ThreadPoolExecutor(_AT_ONCE, "dcp_s3-copy") as pool:
        try:
            done, _ = wait([pool.submit(work, path) for path in sorted(paths)], return_when=FIRST_EXCEPTION)
            failures = [error for each in done if (error := each.exception()) is not None]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        if failures:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise next((each for each in failures if not isinstance(each, Cancelled)), failures[0])
