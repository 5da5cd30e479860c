"""What every store must do: memory, a directory, an overlay, and S3 on every server."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Deadline, Limit
from dcp_s3.memory import Piece, ReadTarget, combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.s3 import listing
from dcp_s3.s3.bucket import Quirk
from dcp_s3.s3.pressure import known_buckets
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.saving import SpillingStore
from dcp_s3.spill.store import SpillStore
from dcp_s3.store import ABSENT, DeleteTarget, Expect, Store
from dcp_s3.stores.directory import HIDDEN, DirectoryStore
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore
from tests.servers import NAMES, S3Server, ServerUnavailable

MIB = 2**20
PAGE = 3
ODD_KEYS = [
    "a b", "a+b", "a%20b", "a%2Fb", "ü/\U0001f600", "&<>\"'", "]]>", "a=b&c=d", "x.y/.dotted", "~tilde", "a", "ab",
]  # fmt: skip


LOCAL: dict[str, Callable[[Path], Store]] = {
    "memory store": lambda _: MemoryStore(page_size=PAGE),
    "directory": lambda path: DirectoryStore(path / "store"),
    "overlay": lambda path: LocalObjects(
        MemoryStore(page_size=PAGE), Settings(spill_dir=str(path)), parse_url("s3://bucket/run")
    ),
}
STORES = [*LOCAL, *NAMES, "spilling"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """One that is empty; pages of its listings are short."""
    if request.param in LOCAL:
        return LOCAL[request.param](tmp_path)
    known_buckets.clear()
    monkeypatch.setattr(listing, "PAGE_SIZE", PAGE)
    s3 = S3Store(request.getfixturevalue("bucket"), Settings(spill_dir=str(tmp_path / "spill")))
    if request.param == "spilling":
        return SpillingStore(s3, SpillStore(tmp_path / "spill"), f"s3://{s3.name}/run", "save", 0)
    return s3


@pytest.fixture
def server(request: pytest.FixtureRequest, _servers: Any) -> S3Server:
    """That of `store`'s parameter."""
    name = request.node.callspec.params["store"].replace("spilling", "memory")
    try:
        server: S3Server = _servers.get(name)
    except ServerUnavailable as error:
        pytest.skip(str(error))
    return server


@pytest.fixture
def knows_conditions(store: Store, request: pytest.FixtureRequest) -> bool:
    """Whether a condition that does not hold is refused. A store that does not know conditions says so, or
    ignores them without a word (rclone, a directory)."""
    if not isinstance(store, S3Store):
        return not isinstance(store, DirectoryStore)
    return bool(request.getfixturevalue("server").conditional_writes)


def metadata_of(store: Store, metadata: dict[str, str]) -> dict[str, str]:
    """Those that the store gives back of what it was given."""
    return {} if isinstance(store, DirectoryStore) else metadata


def read(store: Store, key: str, start: int, size: int, etag: str | None = None) -> bytes:
    memory = bytearray(size)
    store.read(key, start, memoryview(memory), etag)
    return bytes(memory)


def test_many_requests_give_their_results_in_order_and_the_first_failure(store: Store) -> None:
    keys = [f"k/{number:02}" for number in range(40)]
    store.map(lambda store, key: store.put(key, key.encode()), keys)
    assert store.map(lambda store, key: store.get(key).data, keys) == [key.encode() for key in keys]
    with pytest.raises(errors.ObjectNotFoundError, match="missing"):
        store.map(lambda store, key: store.get(key), [*keys[:3], "missing", *keys])
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        store.within(Limit(cancel=cancelled)).map(lambda store, key: store.get(key), keys)


# --- whole objects, and ranges of them ---------------------------------------------------------------


def test_what_was_put_is_there_whole_with_its_metadata_until_it_is_replaced(store: Store) -> None:
    assert not store.exists("k")
    for call in (store.get, store.head, lambda key: read(store, key, 0, 1)):
        with pytest.raises(errors.ObjectNotFoundError):
            call("k")
    store.delete(["k"])
    store.put("k", b"some bytes", metadata={"dcp-s3-save-id": "abc"})
    assert store.exists("k")
    first = store.get("k")
    assert (first.data, first.metadata) == (b"some bytes", metadata_of(store, {"dcp-s3-save-id": "abc"}))
    assert first.etag
    head = store.head("k")
    assert (head.key, head.size, head.etag, head.metadata) == ("k", 10, first.etag, first.metadata)
    known = store.head("k", checksum=True).crc64nvme
    assert known == crc_hex(crc64nvme(b"some bytes")) or (known is None and isinstance(store, S3Store))
    assert abs(head.modified_at - time.time()) < 3600
    assert head.server_time is None or abs(head.server_time - time.time()) < 3600
    store.put("k", memoryview(b"second!"), metadata={"b": "2"})
    second = store.get("k")
    assert (second.data, second.metadata) == (b"second!", metadata_of(store, {"b": "2"}))
    assert second.etag != first.etag
    store.put("k", b"")
    assert (store.get("k").data, store.get("k").metadata, store.head("k").size) == (b"", {}, 0)
    assert store.exists("k"), "an empty object is one"


def test_ranges_of_the_version_that_is_asked_for(store: Store) -> None:
    data = bytes(range(256)) * 100
    store.put("k", data)
    etag = store.head("k").etag
    for start, size in [(0, 0), (0, 1), (0, len(data)), (1000, 20000), (len(data) - 1, 1)]:
        assert read(store, "k", start, size) == data[start : start + size]
        assert read(store, "k", start, size, etag) == data[start : start + size]
    for start in (len(data) - 5, len(data) - 1, len(data), len(data) + 1):
        with pytest.raises(errors.OutOfRangeError):
            read(store, "k", start, 6)
    store.put("k", b"another version")
    with pytest.raises(errors.PreconditionFailedError):
        read(store, "k", 0, 5, etag)


def test_a_range_into_several_places_with_their_checksums(store: Store) -> None:
    data = random.Random(1).randbytes(3 * MIB)
    store.put("k", data)
    sizes, moved = [7, 0, 2 * MIB, 100_000], []
    targets = [ReadTarget(memoryview(bytearray(size)), checksum=size != 7) for size in sizes]
    store.read("k", 1000, targets, store.head("k").etag, moved=moved.append)
    assert b"".join(target.view for target in targets) == data[1000 : 1000 + sum(sizes)]
    assert [each.crc for each in targets] == [None, *(crc64nvme(each.view) for each in targets[1:])]
    assert sum(moved) == sum(sizes)


def test_a_copy_has_the_bytes_and_the_metadata(store: Store) -> None:
    for key in ("k", "a b+%é"):
        store.put(key, b"some bytes", metadata={"dcp-s3-save-id": "abc"})
        store.put("copy", b"what was there before")
        store.copy(store, key, "copy")
        found = store.get("copy")
        assert found.data == b"some bytes"
        assert found.metadata.items() >= metadata_of(store, {"dcp-s3-save-id": "abc"}).items()  # rclone adds a time
        assert store.get(key).data == b"some bytes"
    with pytest.raises(errors.ObjectNotFoundError):
        store.copy(store, "nothing", "copy")
    assert store.get("copy").data == b"some bytes"


# --- data objects ------------------------------------------------------------------------------------------


def cut(data: bytes, *, ends: Sequence[int] = (0, 1, 7, 4096, 5 * MIB, 6 * MIB)) -> list[Piece]:
    pairs = zip(ends, [*ends[1:], len(data)], strict=True)
    return [Piece.of(memoryview(data)[low:high], cuts=[(high - low) // 2]) for low, high in pairs if low < len(data)]


@pytest.mark.parametrize("size", [0, 1, 5000, 5 * MIB, 12 * MIB + 345])
def test_a_stream_becomes_one_object_and_its_pieces_have_their_checksums(store: Store, size: int) -> None:
    data = random.Random(size).randbytes(size)
    store.put("run/k", b"what was there before")
    pieces = cut(data)
    stored = store.put_stream("run/k", size, iter(pieces), part_size=5 * MIB)
    assert (stored.size, stored.crc64nvme) == (size, crc64nvme(data))
    assert store.head("run/k").size == size
    assert read(store, "run/k", 0, size) == data
    sent = [part for piece in pieces for part in piece.parts or (piece,)]
    assert all(piece.view is None for piece in [*pieces, *sent]), "the memory is free"
    assert combine_crc64nvme((each.checksum(), each.size) for each in sent) == crc64nvme(data)
    assert all(len(piece.marks) == len(piece.cuts) for piece in sent)


def test_a_stream_that_breaks_off_leaves_nothing(store: Store) -> None:
    store.put("k", b"what was there before")
    assert list(store.uploads("")) == []

    def pieces() -> Iterator[Piece]:
        yield Piece.of(bytes(6 * MIB))
        raise RuntimeError("the planner failed")

    with pytest.raises(RuntimeError, match="the planner failed"):
        store.put_stream("k", 6 * MIB, pieces(), part_size=5 * MIB)
    assert store.get("k").data == b"what was there before"
    assert list(store.uploads("")) == []


def test_a_batch_of_streams_is_written_by_many_threads(store: Store) -> None:
    data = {f"run/{number}": random.Random(number).randbytes(MIB + number) for number in range(8)}
    with store.batch(total=8 * MIB, keys=list(data)) as batch, ThreadPoolExecutor(4) as pool:
        stored = dict(zip(data, pool.map(lambda k: batch.put_stream(k, MIB, cut(data[k])), data), strict=True))
    assert {key: each.crc64nvme for key, each in stored.items()} == {k: crc64nvme(each) for k, each in data.items()}
    assert batch.sent == sum(map(len, data.values()))
    assert {key: store.get(key).data for key in data} == data


@pytest.mark.parametrize("stopped", [False, True])
def test_a_batch_that_fails_or_was_stopped_leaves_nothing(store: Store, stopped: bool) -> None:
    def fail() -> None:
        with store.batch(total=2 * MIB, keys=["a", "b"]) as batch:
            batch.put_stream("a", MIB, cut(bytes(MIB)))
            if stopped:
                batch.stop()
                batch.put_stream("b", 1, [Piece.of(b"b")])
            raise RuntimeError("another rank failed")

    with pytest.raises(Cancelled if stopped else RuntimeError):
        fail()
    assert store.list("").objects == ()


def test_odd_keys(store: Store) -> None:
    for key in ODD_KEYS:
        store.put(f"run/{key}", key.encode())
    assert [each.key for each in store.list("run/").objects] == [
        f"run/{key}" for key in sorted(ODD_KEYS, key=str.encode)
    ]
    for key in ODD_KEYS:
        assert store.get(f"run/{key}").data == key.encode()
        assert store.head(f"run/{key}").size == len(key.encode())
    store.delete([f"run/{key}" for key in ODD_KEYS[1:]])
    assert [each.key for each in store.list("").objects] == [f"run/{ODD_KEYS[0]}"]


def test_listings_of_more_than_a_page(store: Store) -> None:
    keys = [f"run/{number:02}" for number in range(2 * PAGE + 1)]
    store.map(lambda store, key: store.put(key, b"x"), [*keys, "other", "runner"])
    found = store.list("run/")
    assert [each.key for each in found.objects] == keys
    assert {each.size for each in found.objects} == {1}
    assert all(abs(each.modified_at - time.time()) < 3600 for each in found.objects)
    assert found.server_time is None or abs(found.server_time - time.time()) < 3600
    assert store.list("nothing").objects == ()
    if isinstance(store, DirectoryStore):
        return  # its listings are one page
    page = store.page("run/")
    assert [each.key for each in page.objects] == keys[:PAGE]
    assert page.next_token is not None
    assert [each.key for each in store.page("run/", token=page.next_token).objects] == keys[PAGE : 2 * PAGE]


def test_listings_with_a_delimiter(store: Store) -> None:
    for key in ["run/a/1", "run/a/2", "run/b/c/3", "run/d", "run/e", "run/f/4", "run2/g"]:
        store.put(key, b"x")
    found = store.list("run/", "/")
    assert [each.key for each in found.objects] == ["run/d", "run/e"]
    assert list(found.prefixes) == ["run/a/", "run/b/", "run/f/"]
    assert list(store.list("", "/").prefixes) == ["run/", "run2/"]
    assert list(store.list("run/b", "/").prefixes) == ["run/b/"]
    names = sorted(["step 2", "step+3", "%20 step 4", "ü-step5", "step&<6>", "a\"b'step7"], key=str.encode)
    for name in names:
        store.put(f"läuf +%2B/{name}/x", b"x")
    assert list(store.list("läuf +%2B/", "/").prefixes) == [f"läuf +%2B/{name}/" for name in names]


def test_a_put_where_nothing_may_be(store: Store, knows_conditions: bool) -> None:
    store.put("k", b"first", expect=ABSENT)
    assert store.get("k").data == b"first"
    store.put("k", b"first", expect=ABSENT)  # as an attempt whose answer was lost left it
    if not knows_conditions:
        return
    with pytest.raises(errors.PreconditionFailedError):
        store.put("k", b"second", expect=ABSENT)
    assert store.get("k").data == b"first"


def test_a_put_in_place_of_what_was_seen(
    store: Store, knows_conditions: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("k", b"first")
    etag = store.get("k").etag
    store.put("k", b"second", expect=Expect(etag))
    assert store.get("k").data == b"second", "also where a store refuses a condition that holds, which it says"
    quirk = isinstance(store, S3Store) and Quirk.NO_CONDITIONAL_WRITES in store.known.quirks
    assert quirk == ("conditional writes" in caplog.text)
    if not knows_conditions:
        return
    with pytest.raises(errors.PreconditionFailedError):
        store.put("k", b"third", expect=Expect(etag))
    assert store.get("k").data == b"second"


def test_deletes_leave_alone_what_has_another_etag(store: Store) -> None:
    store.map(lambda store, key: store.put(key, b"1"), "abc")
    first, seen = (DeleteTarget(key, store.head(key).etag) for key in ("a", "b"))
    store.put("b", b"22")
    left = list(store.delete([first, seen, DeleteTarget("c"), DeleteTarget("d", '"x"')]))
    found = [each.key for each in store.list("").objects]
    assert found in (["b"], []), "a store that knows no conditional deletes deletes it"
    assert left == found
    if isinstance(store, MemoryStore):
        assert found == ["b"]
    store.put("b", b"22")
    left = list(store.delete([seen]))  # by itself
    assert left == [each.key for each in store.list("").objects]
    assert list(store.delete([DeleteTarget("b", store.head("b").etag)] if left else [])) == []
    assert not store.exists("b")


def test_a_deadline_that_has_passed_ends_everything_but_the_clean_up(store: Store) -> None:
    store.put("k", b"x")
    late = store.within(Limit(deadline=Deadline("DCP_S3_SAVE_TIMEOUT", 0.0, time.monotonic())))
    for call in (
        lambda: late.get("k"), lambda: late.delete(["k"]), lambda: late.put_stream("new", 1, [Piece.of(b"x")]),
    ):  # fmt: skip
        with pytest.raises(errors.DeadlineExceededError, match="DCP_S3_SAVE_TIMEOUT"):
            call()
    assert [each.key for each in store.list("").objects] == ["k"]
    cleaning = late.within(late.limit.for_cleanup())
    assert cleaning.limit.deadline is not None
    assert 5 < cleaning.limit.deadline.left <= 10
    cleaning.delete(["k"])
    assert not store.exists("k")


def test_what_is_cancelled_gives_up(store: Store) -> None:
    store.put("k", b"x")
    cancel = threading.Event()
    limited = store.within(Limit(cancel=cancel))
    assert limited.get("k").data == b"x"
    cancel.set()
    for call in (lambda: limited.get("k"), lambda: read(limited, "k", 0, 1)):
        with pytest.raises(Cancelled):
            call()
    limited.within(limited.limit.for_cleanup()).delete(["k"])
    assert not store.exists("k")


# --- what only some have -----------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.mark.parametrize("key", ["", "/", "a//b", "../a", "a/..", "./a", "a/", "a\0b", ".dcp_s3-store-x"])
def test_a_key_that_no_path_can_say_is_refused(directory: DirectoryStore, key: str, tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError):
        directory.put(key, b"x")
    with pytest.raises(errors.StorageError):
        directory.get(key)
    assert sorted(os.listdir(tmp_path)) in ([], ["store"])


def test_a_directory_has_nothing_but_whole_objects(directory: DirectoryStore, tmp_path: Path) -> None:
    directory.put("a/b", b"whole")

    def pieces() -> Iterator[Piece]:
        yield Piece.of(memoryview(b"ha"))
        assert directory.get("a/b").data == b"whole", "what is half written is not seen"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        directory.put_stream("a/b", 4, pieces())
    assert [each.key for each in directory.list("").objects] == ["a/b"]
    assert os.listdir(tmp_path / "store/a") == ["b"]
    (half := tmp_path / f"store/a/{HIDDEN}1").write_bytes(b"half")
    assert [each.key for each in directory.list("").objects] == ["a/b"]
    half.unlink()
    directory.delete(["a/b", "a/c"])
    assert os.listdir(tmp_path / "store") == []
