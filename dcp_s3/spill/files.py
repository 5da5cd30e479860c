"""Objects as files on disk: written like an upload, and uploaded later."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checksum import combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.s3 import multipart
from dcp_s3.s3.parts import Piece
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import ObjectUpload, UploadedObject, Uploader
from dcp_s3.spill.durable import as_spill_error
from dcp_s3.spill.journal import SpilledObject
from dcp_s3.spill.store import DamagedFileError, SaveWriter
from dcp_s3.store import ObjectHead, Upload
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

_CHUNK = 4 * 2**20  # bytes read at a time to check a file


class ObjectFile:
    """Writes one object to a file, front to back. Has the same methods as an `ObjectUpload`.

    Args:
        writer: writer of the save's directory.
        name: name of the file.
        key: key of the object on S3.
        estimated_size: bytes to reserve; the object may become larger.

    Raises:
        SpillError: the disk is full, over its limit, or fails.
    """

    def __init__(self, writer: SaveWriter, name: str, key: str, estimated_size: int) -> None:
        self.size = 0
        self._writer = writer
        self._name = name
        self._key = key
        self._crcs: list[tuple[int, int]] = []
        self._fd = writer.open_file(name, estimated_size)

    def write(self, piece: Piece) -> list[Piece]:
        """Append a buffer, and compute the CRC of the piece."""
        view = piece.view
        assert view is not None  # noqa: S101 - a piece has its view until it is written
        self._crcs.append((piece.checksum(), piece.size))
        with as_spill_error(self._writer.directory, f"write {format_size(piece.size)}"):
            start = 0
            while start < piece.size:
                start += os.pwrite(self._fd, view[start:], self.size + start)
        self.size += piece.size
        piece.view = None
        return [piece]

    def finish(self) -> UploadedObject:
        """Flush the file to the disk."""
        with as_spill_error(self._writer.directory, "flush a file"):
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
        os.close(self._fd)
        return UploadedObject(self._key, self.size, combine_crc64nvme(self._crcs))

    def abort(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        self._writer.drop_file(self._name)


def upload_file(
    store: S3Store, key: str, path: Path, spilled: SpilledObject, on_progress: Callable[[int], None]
) -> None:
    """Put a spilled object on S3: nothing if it is there already, the missing parts if a multipart upload is open.

    Args:
        store: the S3 store.
        key: key of the object.
        path: path of the file.
        spilled: the journal's record of the file.
        on_progress: called with the number of bytes just done.

    Raises:
        DamagedFileError: the file is gone or has changed. Nothing was uploaded.
        StorageError: S3 refuses the request.
        Cancelled: never.
    """
    size = spilled.entry.size
    stored = _find(store, key, size)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if stored is None:
            raise DamagedFileError(f"{path.name} is gone") from None
        on_progress(size)  # uploaded by a drain that died before it could update the journal
        return
    try:
        _check(fd, path, spilled)
        if stored is not None and _is_same(stored, fd, spilled):
            on_progress(size)
        elif size:
            _upload_mapped(store, key, spilled, fd, on_progress)
        else:
            _upload(store, key, spilled, memoryview(b""), on_progress)
    finally:
        os.close(fd)


def _find(store: S3Store, key: str, size: int) -> ObjectHead | None:
    """What S3 reports for the object, if it exists with this size."""
    try:
        found = store.head(key, checksum=True)
    except errors.ObjectNotFoundError:
        return None
    return found if found.size == size else None


def _is_same(stored: ObjectHead, fd: int, spilled: SpilledObject) -> bool:
    """Whether an object on S3 has the same bytes as the file.

    S3 may have carried out a request of the save before it spilled, and pickling the same value twice may give
    different bytes.
    """
    if stored.crc64nvme is not None:
        return stored.crc64nvme == spilled.crc64nvme
    digests = [hashlib.md5(block, usedforsecurity=False) for block in _blocks(fd, spilled.part_size)]
    etag = stored.etag.strip('"')
    if "-" in etag:  # of a multipart upload: the digest of the parts' digests
        joined = hashlib.md5(b"".join(each.digest() for each in digests), usedforsecurity=False)
        return bool(etag == f"{joined.hexdigest()}-{len(digests)}")
    return len(digests) == 1 and bool(etag == digests[0].hexdigest())


def _blocks(fd: int, size: int) -> Iterator[bytes]:
    offset = 0
    while block := os.pread(fd, size, offset):
        yield block
        offset += len(block)


def crc_of_file(fd: int) -> tuple[int, int]:
    """(CRC-64/NVME, bytes) of a file.

    Raises:
        OSError: the file cannot be read.
    """
    crc = size = 0
    for block in _blocks(fd, _CHUNK):
        crc = crc64nvme(block, crc)
        size += len(block)
    return crc, size


def _check(fd: int, path: Path, spilled: SpilledObject) -> None:
    crc, size = crc_of_file(fd)
    if size != spilled.entry.size:
        raise DamagedFileError(f"{path.name} has {size} bytes, expected {spilled.entry.size}")
    if crc_hex(crc) != spilled.crc64nvme:
        raise DamagedFileError(
            f"{path.name} has CRC-64 {crc_hex(crc)}, expected {spilled.crc64nvme}: the disk damaged it"
        )


def _upload_mapped(
    store: S3Store, key: str, spilled: SpilledObject, fd: int, on_progress: Callable[[int], None]
) -> None:
    mapped = mmap.mmap(fd, spilled.entry.size, access=mmap.ACCESS_READ)
    view = memoryview(mapped)
    try:
        _upload(store, key, spilled, view, on_progress)
    finally:
        with contextlib.suppress(BufferError):  # a view of it is still held: it is unmapped with that
            view.release()
            mapped.close()


def _upload(
    store: S3Store, key: str, spilled: SpilledObject, view: memoryview, on_progress: Callable[[int], None]
) -> None:
    size, part_size = spilled.entry.size, spilled.part_size
    with Uploader(store) as uploader:
        upload = uploader.start(key, size, part_size=part_size)
        try:
            if size > part_size:
                _resume(store, upload)
            for start in range(0, size, part_size):
                upload.write(Piece.of(view[start : start + part_size]))
                on_progress(min(part_size, size - start))
            upload.finish()
        except BaseException as error:
            if isinstance(error, errors.TransferError) or not isinstance(error, errors.StorageError):
                upload.leave()  # the next attempt continues with the parts that S3 has
            raise


def _resume(store: S3Store, upload: ObjectUpload) -> None:
    """Continue an open multipart upload of this key from an earlier process. Abort any others."""
    parts = store.run(multipart.find_parts(store, upload.key))
    if not parts:
        return
    best = max(parts, key=lambda upload_id: len(parts[upload_id]))
    for upload_id in parts:
        if upload_id != best:
            store.abort_quietly(Upload(upload.key, upload_id))
    logger.info("%s: continuing a multipart upload of which S3 has %d parts", upload.key, len(parts[best]))
    upload.resume(best, parts[best])
