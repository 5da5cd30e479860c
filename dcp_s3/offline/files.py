"""Whole files between a store and a directory, several at a time."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_s3.memory import Piece
from dcp_s3.store import ObjectHead, Store

OnProgress = Callable[[int], None]
"""Called from several threads with the number of bytes moved since the last call."""

_BLOCK = 8 * 2**20
_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class FileTransfer:
    """One file and its object."""

    key: str
    """Object key."""
    path: Path
    """Path of the file."""


def download_files(store: Store, files: Sequence[FileTransfer], *, on_progress: OnProgress | None = None) -> None:
    """Fetch objects into files; missing directories are made.

    Each file appears under its name when it is complete: until then it has another extension. No checksum is compared.
    """
    cancel, extension = threading.Event(), f".{secrets.token_hex(4)}"
    store = store.within(replace(store.limit, cancel=cancel))
    partial = {file: file.path.with_name(file.path.name + extension) for file in files}

    def fetch(file: FileTransfer, head: ObjectHead, start: int) -> None:
        memory = memoryview(bytearray(min(_BLOCK, head.size - start)))
        store.read(file.key, start, memory, head.etag, moved=on_progress)
        fd = os.open(partial[file], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while memory:
                written = os.pwrite(fd, memory, start)
                start, memory = start + written, memory[written:]
        finally:
            os.close(fd)

    with ThreadPoolExecutor(store.read_width(), "dcp_s3-files") as pool:
        try:
            heads = list(pool.map(store.head, [file.key for file in files]))
            under_way: list[list[Future[None]]] = []
            for file, head in zip(files, heads, strict=True):
                file.path.parent.mkdir(parents=True, exist_ok=True)
                starts = range(0, max(head.size, 1), _BLOCK)
                under_way.append([pool.submit(fetch, file, head, start) for start in starts])
            for file, parts in zip(files, under_way, strict=True):
                for part in parts:
                    part.result()
                partial[file].rename(file.path)
        except BaseException:
            cancel.set()
            pool.shutdown(cancel_futures=True)
            for path in partial.values():
                path.unlink(missing_ok=True)
            raise


def upload_files(store: Store, files: Sequence[FileTransfer], *, on_progress: OnProgress | None = None) -> None:
    """Store files as data objects, with encryption and storage class from the settings: all of them, or none."""

    def pieces(file: FileTransfer) -> Iterator[Piece]:
        with file.path.open("rb") as opened:
            while block := opened.read(_BLOCK):
                yield Piece.of(block)
                if on_progress is not None:
                    on_progress(len(block))

    sizes = [file.path.stat().st_size for file in files]
    with store.batch(total=sum(sizes), keys=[file.key for file in files]) as batch:
        with ThreadPoolExecutor(_FILES_AT_ONCE, "dcp_s3-files") as pool:
            sent = [
                pool.submit(batch.put_stream, file.key, size, pieces(file))
                for file, size in zip(files, sizes, strict=True)
            ]
            try:
                for each in sent:
                    each.result()
            except BaseException:
                batch.stop()
                pool.shutdown(cancel_futures=True)
                raise
        batch.settle()
