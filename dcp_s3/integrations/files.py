"""Files of their own that ranks write to S3, as streams, and how they become a checkpoint.

Each rank writes a record before its first file, ``.dcp_s3/files-{rank}.json``, over one that an earlier attempt left.
After a barrier each completes its record, also with what rank 0's says which save it is of, and rank 0 commits what the
records of its own save name. Other files are no part of it.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import make_commit, publish
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, find_manifest
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import FILES_PREFIX, METADATA, step_of
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece, ReadTarget, combine_crc64nvme, crc64nvme, crc_hex, view_bytes
from dcp_s3.store import Store, StreamedObject
from dcp_s3.url import CheckpointURL

_SHORT = 2**18
"""Bytes up to which a write is copied without a look at whose memory it is."""
_CHUNK = 2**23
"""Bytes of copied writes that are sent as one piece, and of the requests that read a whole file."""
BLOCK = 2**20
"""Bytes that are read at once for shorter reads."""
_PAUSES = (0.05, 2.0)
"""Seconds between two looks at the records, the first and the longest."""
_NAME = "torch_checkpointing"


class WriteStream(io.RawIOBase):
    """Sends what is written while it is written. The object is there once the ``with`` block has ended without error.

    Args:
        data: what will be serialised. The memory of its tensors is sent as it is: it must not change before the end.
        done: called with the object once the store has it.
    """

    def __init__(self, store: Store, key: str, data: object, done: Callable[[StreamedObject], None]) -> None:
        self._copied, self._done, self._given_up = bytearray(), done, False
        self._size, self._memory = 0, dict[int, memoryview]()  # of the tensors; that on the CPU by address
        for tensor in _tensors(data):
            self._size += tensor.nbytes
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._memory[whole.data_ptr()] = view_bytes(whole)
        self._starts = sorted(self._memory)
        self._waiting: queue.Queue[Piece | None] = queue.Queue(4)
        thread = ThreadPoolExecutor(1, "dcp_s3-file")
        self._sending = thread.submit(self._send, store, key)
        thread.shutdown(wait=False)

    def __enter__(self) -> WriteStream:
        # Of this thread. CRC-64 guards the bytes; the archive's CRC-32, which no torch.load compares, costs half of the
        # rest's CPU.
        self._computes_crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        return self

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view, own = memoryview(data).cast("B"), memoryview(b"")
        if view.nbytes > _SHORT:  # a view that keeps its tensor alive, if the memory is a tensor's
            address: int = numpy.frombuffer(view, numpy.uint8).ctypes.data
            if (index := bisect.bisect_right(self._starts, address) - 1) >= 0:
                start = self._starts[index]
                own = self._memory[start][address - start :][: view.nbytes]
        is_own = 0 < own.nbytes == view.nbytes
        if not is_own:
            self._copied += view
        if self._copied and (is_own or len(self._copied) >= _CHUNK):
            self._pass_on(Piece.of(self._copied))
            self._copied = bytearray()
        if is_own:
            self._pass_on(Piece.of(own))
        return view.nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.serialization.set_crc32_options(self._computes_crc32)
        self._given_up = kind is not None
        self.close()

    def __del__(self) -> None:
        self._given_up = True
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._copied and not self._given_up:
            self._pass_on(Piece.of(self._copied))
        try:
            self._pass_on(None)
            sent = self._sending.result()
        except Exception:
            if not self._given_up:  # else another failure is on its way
                raise
        else:
            self._done(sent)

    def _pass_on(self, piece: Piece | None) -> None:
        while not self._sending.done():
            with contextlib.suppress(queue.Full):
                self._waiting.put(piece, timeout=0.2)
                return
        self._sending.result()  # its failure

    def _send(self, store: Store, key: str) -> StreamedObject:
        def pieces() -> Iterator[Piece]:
            yield from iter(self._waiting.get, None)
            if self._given_up:
                raise Cancelled

        with store.batch(total=self._size) as batch:
            return batch.put_stream(key, self._size, pieces())


def _tensors(data: object) -> Iterator[torch.Tensor]:
    """The tensors in dicts, lists and tuples; of a DTensor its own."""
    if isinstance(data, torch.Tensor):
        yield getattr(data, "_local_tensor", data)
    elif isinstance(data, (dict, list, tuple)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _tensors(each)


class OpenFile:
    """One version of a file. Checks its CRC once long reads, by any threads and streams, have covered all of it.

    Raises:
        PreconditionFailedError: the file was replaced since it was opened.
        CorruptCheckpointError: its bytes are not those that were committed.
    """

    def __init__(self, store: Store, key: str, size: int, etag: str, crc: str | None) -> None:
        self.key, self.size = key, size
        self._store, self._etag, self._crc = store, etag, crc
        self._read: dict[int, tuple[int, int]] = {}

    def read(self, start: int, into: memoryview, store: Store | None = None) -> None:
        target = ReadTarget(into, checksum=True)
        (store or self._store).read(self.key, start, [target], self._etag)
        self._read[start] = (target.crc or 0, into.nbytes)
        parts, end = [], 0
        while part := self._read.get(end):
            parts.append(part)
            end += part[1]
        if end == self.size and self._crc and combine_crc64nvme(parts) != int(self._crc, 16):
            raise damaged_error(self._store.name, self.key)

    def read_whole(self) -> bytearray:
        """All of the file, in parallel requests."""
        data = bytearray(self.size)
        view = memoryview(data)
        self._store.map(
            lambda store, start: self.read(start, view[start : start + _CHUNK], store), range(0, self.size, _CHUNK)
        )
        return data


def damaged_error(bucket: str, key: str) -> errors.CorruptCheckpointError:
    return errors.CorruptCheckpointError(
        f"s3://{bucket}/{key} is not what was committed: its size or CRC-64/NVME is another. Remedy: load an earlier "
        "checkpoint, or restore the object from a backup"
    )


class ReadStream(io.RawIOBase):
    """A file that is read anywhere, into the reader's memory."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the start of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        # An error must not keep memory exported: torch-checkpointing then unmaps it.
        with memoryview(buffer) as given, given.cast("B") as whole:
            count = max(0, min(whole.nbytes, self._file.size - self._position))
            with whole[:count] as view:
                if count:
                    self._file.read(self._position, view)
        self._position += count
        return count

    def readall(self) -> bytes:
        """The rest, in one request: the default one reads 8 KiB at a time."""
        data = bytearray(max(0, self._file.size - self._position))
        self.readinto(data)
        return bytes(data)


# --- records --------------------------------------------------------------------------------------------


def put_record(
    store: Store, url: CheckpointURL, rank: int, nonce: str, files: Iterable[ObjectEntry] | None = None, of: str = ""
) -> None:
    """Record what a rank has written in this save, whose random id is ``nonce``; ``files`` None: it is still writing.
    ``of`` is rank 0's nonce."""
    entries = None if files is None else [[each.path, each.size, each.crc64nvme] for each in files]
    data = json.dumps({"format_version": 1, "nonce": nonce, "of": of, "files": entries}).encode()
    store.put(url.key(f"{FILES_PREFIX}{rank}.json"), data)


def publish_files(
    store: Store, url: CheckpointURL, rank: int, world_size: int, nonce: str, files: Iterable[ObjectEntry], wait: float
) -> None:
    """Complete this rank's record, and return when the checkpoint is committed with it. Rank 0 commits once all records
    are complete.

    Raises:
        CheckpointExistsError: another save has committed to this URL.
        CheckpointDeletedError: a prune deletes what an earlier attempt left, and files of this one with it.
        TransferError: there is no commit after ``wait`` seconds.
        StorageError
    """
    began, pause, told = time.monotonic(), _PAUSES[0], ""
    records: dict[int, bytes] = {}
    files = list(files)
    if rank == 0:
        put_record(store, url, rank, nonce, files, of=nonce)
    while (manifest := _find_manifest(store, url)) is None:
        missing = [each for each in range(world_size) if each not in records] if rank == 0 else [0]
        if rank == 0:
            for each, data in zip(
                missing, store.map(lambda store, each: _read(store, url, each), missing), strict=True
            ):
                fields = json.loads(data)
                if fields.get("of") == nonce and fields["files"] is not None:
                    records[each] = data
        else:
            first = json.loads(_read(store, url, 0)).get("nonce", "")
            # Only what has this save's record: another attempt may have begun.
            if first != told and (not told or json.loads(_read(store, url, rank)).get("nonce") == nonce):
                put_record(store, url, rank, nonce, files, of=first)
                told = first
        if len(records) == world_size:
            _commit(store, url, [records[each] for each in range(world_size)])
        elif time.monotonic() - began > wait:
            raise errors.TransferError(
                f"{url} was not committed: for {wait:g} s nothing came from ranks {missing}. Remedy: see their logs; "
                "commit must be the finalize_callback of every rank",
                bucket=url.bucket, key=url.key(METADATA), operation="PutObject",
            )  # fmt: skip
        else:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
    if manifest.coordination.get(_NAME, {}).get(str(rank)) != nonce:
        raise errors.CheckpointExistsError(
            f"{url} was committed by another save, without what rank {rank} of this one has written. Remedy: end what "
            "else writes there, and save to another URL",
            url=str(url),
        )


def find_files(store: Store, url: CheckpointURL) -> Mapping[str, ObjectEntry] | None:
    """The files of a committed checkpoint by relative path; None if there is none."""
    manifest = _find_manifest(store, url)
    if manifest is None:
        return None
    return {each.path: each for each in manifest.objects if not each.path.startswith(FILES_PREFIX)}


def _find_manifest(store: Store, url: CheckpointURL) -> Manifest | None:
    try:
        return find_manifest(store, url)
    except errors.ObjectNotFoundError:
        return None


def _read(store: Store, url: CheckpointURL, rank: int) -> bytes:
    """A rank's record; an empty one if there is none."""
    try:
        return store.get(url.key(f"{FILES_PREFIX}{rank}.json")).data
    except errors.ObjectNotFoundError:
        return b"{}"


def _commit(store: Store, url: CheckpointURL, records: list[bytes]) -> None:
    identity, nonces, objects = SaveIdentity(url, secrets.token_hex(8)), {}, []
    for rank, data in enumerate(records):
        fields = json.loads(data)
        nonces[str(rank)] = fields["nonce"]
        objects += [ObjectEntry(f"{FILES_PREFIX}{rank}.json", len(data), crc_hex(crc64nvme(data)))]
        objects += [ObjectEntry(*each) for each in fields["files"]]
    metadata = Metadata({}, {}, {}, StorageMeta(checkpoint_id=str(url), save_id=identity.save_id))
    commit = make_commit(
        identity, metadata, objects, step=step_of(url.name), world_size=len(records), metrics={},
        coordination={_NAME: nonces},
    )  # fmt: skip
    # Names are not this attempt's own: a prune that deletes what another one left may name them at any time.
    publish(store, commit, Previous(), keep_objects=True, is_late=lambda: True)
