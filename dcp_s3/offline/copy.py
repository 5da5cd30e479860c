"""Copies of a checkpoint: from S3 to S3, and between S3 and a directory as torch's FileSystemReader reads it.

The commit comes last, so that an interrupted copy is no checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.format.control_files import attachments_of
from dcp_s3.format.layout import CONTROL_PREFIX, What, classify
from dcp_s3.memory import Piece
from dcp_s3.offline.copy_source import (
    DOWNLOAD_MARKER,
    CopyResult,
    CopySource,
    check_unchanged,
    commit_copy,
    directory_of,
    etags_in_place,
    fetch_source,
    list_objects,
    make_source,
    replacing,
)
from dcp_s3.offline.files import FileTransfer, OnProgress, download_files, upload_files
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ListedObject, same_etag
from dcp_s3.stores.directory import DirectoryStore
from dcp_s3.url import CheckpointURL, URLLike, is_s3_url, parse_url

logger = logging.getLogger(__name__)

_BLOCK = 8 * 2**20
_PARTIAL = re.compile(r"\.[0-9a-fA-F]{8}")  # suffix of an incomplete file

OnTotal = Callable[[int], None]


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
    again. Both URLs are reached with the same settings, so they are on one endpoint; elsewhere, copy by way of a
    directory. Where the store refuses to copy, the bytes pass through this machine.

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
        if "://" in os.fspath(each):
            parse_url(each)  # not of S3: it is no directory either
    if is_s3_url(source) != is_s3_url(destination):
        move = download if is_s3_url(source) else upload
        return move(
            os.fspath(source), os.fspath(destination), overwrite=overwrite, settings=settings, on_total=on_total,
            on_progress=on_progress,
        )  # fmt: skip
    origin, target = parse_url(source), parse_url(destination)  # which refuse two directories
    one, other = f"{origin}/", f"{target}/"
    if one.startswith(other) or other.startswith(one):
        what = "are the same" if one == other else "lie one inside the other"
        raise errors.InvalidURLError(f"{origin} and {target} {what}. Remedy: copy to another prefix")
    resolved = resolve_settings(settings)
    job = _Job(store_of(origin, resolved), origin, store_of(target, resolved), target)
    return job.run(overwrite, on_total or (lambda _: None), on_progress or (lambda _: None))


# --- from S3 to S3 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    source: S3Store
    origin: CheckpointURL
    store: S3Store
    """Store of the copy."""
    url: CheckpointURL
    """URL of the copy."""
    streaming: threading.Lock = field(default_factory=threading.Lock)
    """Held while an object passes through this machine: a few MiB for each connection."""

    def run(self, overwrite: bool, on_total: OnTotal, on_progress: OnProgress) -> CopyResult:
        listed, source = fetch_source(self.source, self.origin)
        there = list_objects(self.store, self.url)
        wanted = source.files.keys() - self._finished(source, listed, there)

        def copy_one(store: S3Store, path: str) -> None:
            job = replace(self, store=store, source=self.source.within(store.limit))
            job._copy_object(path, source.files[path], source.crcs.get(path))
            on_progress(source.files[path])

        old = (
            contextlib.nullcontext(set[str]())
            if self._is_begun(source, there)
            else replacing(self.store, self.url, source, wanted, overwrite=overwrite)
        )
        with old as late:
            on_total(sum(source.files[path] for path in wanted))
            self.store.map(copy_one, sorted(wanted - late))
            self._check_whole(source, late)
            check_unchanged(self.source, self.origin, source, etags_in_place(source, listed))
            commit_copy(self.store, self.url, source, overwrite=overwrite)
            self.store.map(copy_one, sorted(late))
        return CopyResult(source.count, source.size, sum(source.files[path] for path in wanted))

    def _finished(
        self, source: CopySource, listed: Mapping[str, ListedObject], there: Mapping[str, ListedObject]
    ) -> set[str]:
        """Relative paths of the objects that an earlier call has copied."""
        same_size = [path for path, size in source.files.items() if path in there and there[path].size == size]

        def is_same(path: str) -> bool:
            if listed[path].etag and same_etag(listed[path].etag, there[path].etag):
                return True
            ours, theirs = self.origin.key(path), self.url.key(path)
            if path not in source.crcs and source.files[path] <= _BLOCK:
                return self.source.get(ours).data == self.store.get(theirs).data
            expected = source.crcs.get(path) or self.source.head(ours, checksum=True).crc64nvme
            found = self.store.head(theirs, checksum=True).crc64nvme
            # Without a checksum of the store: a name with a nonce is of one save only.
            return bool(classify(path).nonce) if None in (expected, found) else found == expected

        found = self.store.map(lambda _, path: is_same(path), same_size)
        return {path for path, same in zip(same_size, found, strict=True) if same}

    def _is_begun(self, source: CopySource, there: Collection[str]) -> bool:
        """Whether the commits at the URL are this checkpoint's: an earlier call has come to its end, or nearly."""
        commits = {found.path for found in Directory.of_sizes(dict.fromkeys(there, 0)).commits.values()}
        return bool(commits) and all(
            name in source.commits and self.store.get(self.url.key(name)).data == source.commits[name]
            for name in commits
        )

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

        def pieces() -> Iterator[Piece]:
            for start in range(0, size, _BLOCK):
                block = memoryview(bytearray(min(_BLOCK, size - start)))
                self.source.read(key, start, block, etag or None)
                yield Piece.of(block)

        with self.streaming:
            self.store.put_stream(self.url.key(path), size, pieces(), part_size=max(_BLOCK, -(-size // MAX_PARTS)))

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
        needed = {path: size for path, size in source.files.items() if path not in late}
        missing = directory_of(list_objects(self.store, self.url)).lacking(needed, exact=True)
        if missing:
            raise errors.CheckpointDeletedError(
                f"{self.url} was not committed: {len(missing)} of its objects are gone, the first {missing[0]}. "
                "Remedy: copy again, while no prune with a short grace period (DCP_S3_RETENTION_GRACE) runs there",
                url=str(self.url),
            )


# --- between S3 and a directory ------------------------------------------------------------------------


def download(
    url: str,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: OnTotal | None = None,
    on_progress: OnProgress | None = None,
) -> CopyResult:
    """Copy a checkpoint into a directory, which torch's FileSystemReader then reads; see `copy`.

    An interrupted download continues when it is called again: complete files stay. Sizes are compared with what was
    saved; for checkpoints of dcp_s3 also the CRC-64 of every data object.
    """
    parsed = parse_url(url)
    store = store_of(parsed, resolve_settings(settings))
    target = Path(directory)
    listed, source = fetch_source(store, parsed)
    etags = etags_in_place(source, listed)
    _prepare_directory(target, parsed, source, etags, overwrite=overwrite)
    present = {path for path, size in source.files.items() if _size_of(target / path) == size}
    wanted = {path: size for path, size in source.files.items() if path not in present}
    if on_total is not None:
        on_total(sum(wanted.values()))
    files = [FileTransfer(parsed.key(path), target / path) for path in wanted]
    download_files(store, files, on_progress=on_progress)
    _verify(target, parsed, source)
    check_unchanged(store, parsed, source, etags)
    for attachment, entry in attachments_of(source.attachments).items():
        plain, data = target / attachment, (target / entry.path).read_bytes()
        if not plain.is_file() or plain.read_bytes() != data:  # S3 may lack the plain copy, or have an older one
            _write_whole(plain, data)
    for name, data in source.commits.items():
        _write_whole(target / name, data)
    (target / DOWNLOAD_MARKER).unlink()
    if not any((target / CONTROL_PREFIX).iterdir()):
        (target / CONTROL_PREFIX).rmdir()
    return CopyResult(source.count, source.size, sum(wanted.values()))


def _prepare_directory(
    target: Path, url: CheckpointURL, source: CopySource, etags: Mapping[str, str], *, overwrite: bool
) -> None:
    marker = target / DOWNLOAD_MARKER
    digest = hashlib.sha256(b"".join(source.commits[name] for name in sorted(source.commits))).hexdigest()
    same: dict[str, object] = {"url": str(url), "metadata_sha256": digest}
    if etags:  # the metadata of another save with the same names may be the same
        same["etags_sha256"] = hashlib.sha256(json.dumps(sorted(etags.items())).encode()).hexdigest()
    mark = json.dumps(same).encode()
    if target.exists() and any(target.iterdir()):
        if marker.is_file() and marker.read_bytes() == mark:
            _remove_partial(target, source)
            return
        if not overwrite:
            raise errors.CheckpointExistsError(
                f"{target} is not empty, and holds no unfinished download of {url}. Remedy: give another directory, "
                "empty this one, or pass overwrite=True",
                url=str(url),
            )
        # Existing files may have the right size by chance.
        commits = Directory.of_sizes(dict.fromkeys(os.listdir(target), 0)).commits.values()
        for name in [*(found.path for found in commits), *source.files]:
            (target / name).unlink(missing_ok=True)
    _write_whole(marker, mark)


def _remove_partial(target: Path, source: CopySource) -> None:
    whole = {target / path for path in source.files}
    for folder in {path.parent for path in whole}:
        for file in folder.iterdir() if folder.is_dir() else ():
            if _PARTIAL.fullmatch(file.suffix) and file.with_suffix("") in whole and file not in whole:
                file.unlink()


def _verify(target: Path, url: CheckpointURL, source: CopySource) -> None:
    files = DirectoryStore(target)
    for path, size in source.files.items():
        found = _size_of(target / path)
        if found != size:
            problem = f"has {found} bytes instead of {size}"
        elif path in source.crcs and (crc := files.head(path, checksum=True).crc64nvme) != source.crcs[path]:
            problem = f"has CRC-64/NVME {crc} instead of {source.crcs[path]}"
        else:
            continue
        (target / path).unlink(missing_ok=True)  # so that the next call fetches it again
        raise errors.CorruptCheckpointError(
            f"{path} of {url} arrived damaged: it {problem}. Remedy: call download again; if it stays so, the object "
            "itself is damaged: use another checkpoint",
            url=str(url),
        )


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _write_whole(path: Path, data: bytes) -> None:
    """Write under another name, then rename. No `DirectoryStore`: it locks, which not every filesystem can."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def upload(
    directory: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: OnTotal | None = None,
    on_progress: OnProgress | None = None,
) -> CopyResult:
    """Copy a checkpoint in a directory (of torch's FileSystemWriter, or a download) to S3; see `copy`."""
    parsed = parse_url(url)
    store = store_of(parsed, resolve_settings(settings))
    origin = Path(directory)
    here = DirectoryStore(origin)
    there = Directory.of_sizes({each.key: each.size for each in here.list("").objects})
    source = make_source(str(origin), there, here.get)

    def send(paths: Collection[str]) -> None:
        files = [FileTransfer(parsed.key(path), origin / path) for path in paths]
        upload_files(store, files, on_progress=on_progress)

    with replacing(store, parsed, source, source.files, overwrite=overwrite) as late:
        if on_total is not None:
            on_total(sum(source.files.values()))
        send(source.files.keys() - late)
        commit_copy(store, parsed, source, overwrite=overwrite)
        send(late)
    return CopyResult(source.count, source.size, source.size)
