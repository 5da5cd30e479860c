"""Files that frameworks write by themselves: streams to and from a store, and how ranks commit what they wrote."""

from __future__ import annotations

import contextlib
import io
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dcp_s3
from dcp_s3 import errors
from dcp_s3.format.control_files import DeletionList, ObjectEntry
from dcp_s3.format.layout import deletion_object
from dcp_s3.integrations.files import BLOCK, OpenFile, ReadStream, WriteStream, find_files, publish_files, put_record
from dcp_s3.memory import Piece, crc64nvme, crc_hex
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.prune import apply_plan, remove
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import Store, StreamedObject
from dcp_s3.url import parse_url
from tests.memory_store import FaultyStore, MemoryStore

URL = parse_url("s3://bucket/run/step-7")
LARGE = 300_000  # elements; more than what is copied without a look


class OneBatch(MemoryStore):
    """Its batches use `put_stream` of this very store."""

    def within(self, limit: Any) -> MemoryStore:
        return self


class Recorder(OneBatch):
    """Keeps the addresses of the long pieces that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def put_stream(self, key: str, size: int, pieces: Iterable[Piece], **options: Any) -> StreamedObject:
        def seen() -> Iterable[Piece]:
            for piece in pieces:
                if piece.view is not None and piece.size > 2**20:
                    self.addresses.append(torch.frombuffer(piece.view, dtype=torch.uint8).data_ptr())
                yield piece

        return super().put_stream(key, size, seen(), **options)


def save(store: MemoryStore, value: object) -> StreamedObject:
    done: list[StreamedObject] = []
    with WriteStream(store, "file", value, done.append) as stream:
        torch.save(value, stream)  # type: ignore[arg-type]
    return done[0]


def test_what_is_written_is_what_torch_saves_from_the_tensors_memory() -> None:
    whole = torch.arange(2 * LARGE, dtype=torch.float64)
    value = {"a": [torch.arange(LARGE)], "b": (whole[LARGE:], {"c": "text"}), "small": torch.ones(3), "n": 5}
    store = Recorder()
    stored = save(store, value)
    assert torch.serialization.get_crc32_options()
    expected = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, expected)
    finally:
        torch.serialization.set_crc32_options(True)
    assert store.get("file").data == expected.getvalue()
    assert (stored.size, stored.crc64nvme) == (len(expected.getvalue()), crc64nvme(expected.getvalue()))
    assert store.addresses == [value["a"][0].data_ptr(), whole.data_ptr()]


def test_long_writes_that_are_no_tensors_memory_are_sent_too() -> None:
    store, data = MemoryStore(), random.Random(2).randbytes(2**20)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with WriteStream(store, "file", tensor[: 2**19], lambda _: None) as stream:
        for part in (data[::-1], tensor.numpy(), data):
            stream.write(part)
    assert store.get("file").data == data[::-1] + data + data


@pytest.mark.parametrize("how", ["an error in the block", "forgotten"])
def test_a_stream_that_is_given_up_leaves_nothing(how: str) -> None:
    store, done = MemoryStore(), list[StreamedObject]()
    if how == "forgotten":
        stream = WriteStream(store, "file", None, done.append)
        stream.write(b"half")
        stream.__del__()
    else:
        with contextlib.suppress(KeyError), WriteStream(store, "file", None, done.append) as stream:
            stream.write(b"half")
            raise KeyError
    assert not store.exists("file")
    assert not done


@pytest.mark.parametrize("in_the_end", [False, True])
def test_a_store_that_fails_stops_the_writer_and_is_an_error_of_the_file(in_the_end: bool) -> None:
    class Full(OneBatch):
        def put_stream(self, key: str, size: int, pieces: Iterable[Piece], **options: Any) -> StreamedObject:
            for _ in pieces if in_the_end else ():
                pass
            raise errors.TransferError("the store is full")

    def write_all() -> None:
        with WriteStream(Full(), "f", None, done.append) as stream:
            for _ in range(1 if in_the_end else 100):
                stream.write(bytes(2**22))

    done: list[StreamedObject] = []
    with pytest.raises(errors.TransferError, match="full"):
        write_all()
    assert done == []


def opened(data: bytes, *, committed: bytes | None = None) -> io.BufferedReader:
    store = MemoryStore()
    store.put("file", data)
    crc = crc_hex(crc64nvme(data if committed is None else committed))
    return io.BufferedReader(ReadStream(OpenFile(store, "file", len(data), store.head("file").etag, crc)), BLOCK)


@pytest.mark.parametrize("size", [0, 1, 2**20, 3 * 2**20 + 17])
def test_reads_anywhere_are_those_of_a_file(size: int) -> None:
    dice = random.Random(size)
    data = dice.randbytes(size)
    stream, expected = opened(data), io.BytesIO(data)
    for _ in range(60):
        offset, whence = dice.choice([(dice.randrange(size + 10), 0), (dice.randrange(50), 1), (-min(size, 22), 2)])
        assert stream.seek(offset, whence) == expected.seek(offset, whence)
        count = dice.choice([1, 30, 5000, 2**20, 2**21])
        mine, theirs = bytearray(count), bytearray(count)
        assert stream.readinto(mine) == expected.readinto(theirs)
        assert mine == theirs
        assert stream.tell() == expected.tell()
    stream.seek(0)
    assert stream.read() == data
    with pytest.raises(ValueError, match="before the start"):
        stream.seek(-1)


def test_what_is_read_to_the_end_takes_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    data, sizes, read = random.Random(2).randbytes(3 * 2**20), list[int](), OpenFile.read

    def count(file: OpenFile, start: int, into: memoryview) -> None:
        sizes.append(into.nbytes)
        read(file, start, into)

    monkeypatch.setattr(OpenFile, "read", count)
    stream = opened(data)
    assert stream.read(10) + stream.read() == data
    assert stream.read() == b""
    assert sizes == [BLOCK, len(data) - BLOCK]


def test_bytes_that_were_not_committed_are_found_once_all_are_read() -> None:
    data = random.Random(1).randbytes(2**22)
    stream = opened(data, committed=data[:-1] + b"x")
    half = memoryview(bytearray(2**21))
    stream.seek(2**21)
    assert stream.readinto(half) == 2**21
    stream.seek(0)
    with pytest.raises(errors.CorruptCheckpointError, match="file"):
        stream.readinto(half)


# --- records --------------------------------------------------------------------------------------------


def write(store: Store, rank: int, nonce: str, names: Iterable[str]) -> list[ObjectEntry]:
    """What a rank does before the barrier."""
    put_record(store, URL, rank, nonce)
    entries = []
    for name in names:
        data = f"{name} {nonce}".encode()
        store.put(URL.key(name), data)
        entries.append(ObjectEntry(name, len(data), crc_hex(crc64nvme(data))))
    return entries


def commit(store: Store, rank: int, nonce: str, entries: list[ObjectEntry], world: int, wait: float = 30) -> None:
    publish_files(store, URL, rank, world, nonce, entries, wait)


def test_ranks_commit_what_all_have_written_and_nothing_of_an_earlier_attempt() -> None:
    store = MemoryStore()
    for rank in range(3):  # of which none commits
        put_record(store, URL, rank, "old", write(store, rank, "old", [f"model_{rank}.pt", f"old_{rank}.pt"]), of="old")
    written = [write(store, rank, f"new{rank}", [f"model_{rank}.pt", "sub/data.json"][: 2 - rank]) for rank in range(2)]
    assert find_files(store, URL) is None
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: commit(store, rank, f"new{rank}", written[rank], 2), [1, 0]))
    files = find_files(store, URL)
    assert sorted(files) == ["model_0.pt", "model_1.pt", "sub/data.json"]
    assert all(crc_hex(crc64nvme(store.get(URL.key(path)).data)) == entry.crc64nvme for path, entry in files.items())


def test_the_complete_record_of_an_earlier_attempt_is_not_taken() -> None:
    store = MemoryStore()
    for rank in range(2):  # of which rank 0 has died before it committed
        put_record(store, URL, rank, f"old{rank}", write(store, rank, f"old{rank}", [f"model_{rank}.pt"]), of="old0")
    entries = write(store, 0, "new0", ["model_0.pt"])
    with pytest.raises(errors.TransferError, match=r"ranks \[1\]"):
        commit(store, 0, "new0", entries, 2, wait=0.2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(commit, store, 0, "new0", entries, 2)
        pool.submit(commit, store, 1, "new1", write(store, 1, "new1", []), 2).result()
        first.result()
    assert sorted(find_files(store, URL) or {}) == ["model_0.pt"]


def test_a_rank_that_waits_in_an_earlier_attempt_does_not_join_the_next() -> None:
    store = MemoryStore()
    write(store, 0, "old0", [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(commit, store, 1, "old1", write(store, 1, "old1", ["model_1.pt"]), 2)
        while b'"of": "old0"' not in store.get(URL.key(".dcp_s3/files-1.json")).data:
            pass
        entries = [write(store, rank, f"new{rank}", [f"model_{rank}.pt"]) for rank in (1, 0)]
        with pytest.raises(errors.TransferError, match=r"ranks \[1\]"):
            commit(store, 0, "new0", entries[1], 2, wait=0.5)
        put_record(store, URL, 1, "new1", entries[0], of="new0")
        commit(store, 0, "new0", entries[1], 2)
        with pytest.raises(errors.CheckpointExistsError, match="rank 1"):
            waiting.result()


@pytest.mark.parametrize("begins", ["after the plan", "during the deletion"])
def test_a_prune_leaves_the_files_of_an_attempt_that_begins_meanwhile(begins: str) -> None:
    now, entries = [time.time()], list[ObjectEntry]()

    def begin(method: str, key: str) -> None:
        if method == "after put" and "/deletion-" in key and begins == "during the deletion":
            entries.extend(write(memory, 0, "new", ["model_0.pt"]))

    memory = MemoryStore(clock=lambda: now[0])
    store = FaultyStore(memory, begin)
    write(store, 0, "old", ["model_0.pt", "old.pt"])
    now[0] += 2 * 86400
    plan = CheckpointCatalog("s3://bucket/run", store=store).scan().plan(None, grace=86400)
    assert [info.name for info in plan.deleted] == ["step-7"]
    if begins == "after the plan":
        entries += write(store, 0, "new", ["model_0.pt"])
    report = apply_plan("s3://bucket/run", plan, store=store)
    assert [each.reason.partition(":")[0] for each in report.left_alone] == ["a save is in progress"]
    commit(store, 0, "new", entries, 1)
    assert store.get(URL.key("model_0.pt")).data == b"model_0.pt new"


def test_files_that_a_prune_is_about_to_delete_are_not_committed() -> None:
    store = MemoryStore()
    entries = write(store, 0, "new", ["model_0.pt"])
    listed = DeletionList(None, {}, {"model_0.pt": store.head(URL.key("model_0.pt")).etag})
    store.put(URL.key(deletion_object("aa")), listed.to_json())
    with pytest.raises(errors.CheckpointDeletedError, match=r"model_0\.pt"):
        commit(store, 0, "new", entries, 1)
    assert find_files(store, URL) is None


def test_what_earlier_attempts_left_goes_with_the_checkpoint() -> None:
    store = MemoryStore()
    write(store, 2, "old", ["old_2.pt"])
    commit(store, 0, "new", write(store, 0, "new", ["model_0.pt"]), 1)
    nested = URL.child("other")
    put_record(store, nested, 0, "n")
    store.put(nested.key("model_0.pt"), b"another's")
    remove(str(URL), store=store, force=True)
    assert sorted(each.key for each in store.list(URL.key("")).objects) == [
        nested.key(".dcp_s3/files-0.json"), nested.key("model_0.pt"),
    ]  # fmt: skip


@pytest.mark.servers("memory")
def test_copies_look_at_files(root: str) -> None:
    store = store_of(parse_url(root), Settings())
    urls = [parse_url(f"{root}/step-{number}") for number in range(3)]
    for url, nonce in zip(urls, ["a", "a", "b"], strict=True):
        put_record(store, url, 0, nonce)
        data = nonce.encode()
        store.put(url.key("model_0.pt"), data)
        entry = ObjectEntry("model_0.pt", len(data), crc_hex(crc64nvme(data)))
        publish_files(store, url, 0, 1, nonce, [entry], 30)
    dcp_s3.copy(str(urls[0]), str(urls[2]), overwrite=True)
    assert store.get(urls[2].key("model_0.pt")).data == b"a"
    assert dcp_s3.verify(str(urls[2]), full=True).ok
    store.delete([urls[1].key("model_0.pt")])
    with pytest.raises(errors.CorruptCheckpointError, match=r"model_0\.pt is not there"):
        dcp_s3.copy(str(urls[1]), f"{root}/copy")
    assert dcp_s3.latest(root).name == "step-2"  # type: ignore[union-attr]


def test_of_two_that_commit_at_once_one_wins() -> None:
    store, verdicts, refused, barrier = MemoryStore(), list[str](), list[str](), threading.Barrier(2)

    def run(nonce: str) -> None:
        entries = write(store, 0, nonce, [f"{nonce}.pt"])
        barrier.wait()
        try:
            commit(store, 0, nonce, entries, 1)
            verdicts.append(nonce)
        except errors.CheckpointExistsError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ["a", "b"]))
    assert [f"{each}.pt" for each in verdicts] == list(find_files(store, URL) or [])
    assert len(refused) == 1
    assert URL.name in refused[0]
