"""verify: damage is found and named, wherever it is; what is good is called good, and read once."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_s3
from dcp_s3 import S3StorageWriter, errors, verify
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.blocks import get_raw_offset
from dcp_s3.memory import ReadTarget
from dcp_s3.offline.verify_plan import StoredData, StoredItem, cut_range, find_mismatches
from dcp_s3.s3.store import S3Store
from tests.end_to_end.states import every_kind, random_tensor
from tests.faulty import BUCKET, FaultyServer
from tests.flipping import flip_in_flight
from tests.memory_s3 import Fault
from tests.offline.conftest import SETTINGS, Saved, small_state
from tests.spread import spread_out

# --- good ones ------------------------------------------------------------------------------------------


def test_a_good_checkpoint(s3: Any, root: str) -> None:
    state = {**every_kind(), "large": random_tensor((1500, 1000), torch.float32)}
    saved = Saved(s3, root).save(state, writer={"max_objects": 2})
    spread_out(s3, root)
    fast, full = saved.verify(full=False), saved.verify()
    items, objects = len(saved.metadata.storage_data), len(saved.data)
    for report in (fast, full):
        assert report.ok, report.problems
        assert (report.url, report.objects, report.items) == (root, objects, items)
        assert (report.objects_without_checksum, report.items_without_checksum) == (0, 0)
    sizes = saved.sizes
    assert full.bytes_read == sum(sizes.values())
    assert fast.bytes_read == sum(size for path, size in sizes.items() if not path.endswith(".distcp"))
    assert (fast.mode, full.mode) == ("fast", "full")
    assert json.loads(json.dumps(full.to_dict()))["ok"] is True


def test_each_byte_is_read_once_and_none_in_fast_mode(memory_server: Any, s3: Any, bucket: str, root: str) -> None:
    state = {f"w{n}": random_tensor((1300, 1024 + n), torch.float32, n) for n in range(3)}
    saved = Saved(s3, root).save(state, writer={"max_objects": 2})
    server, sizes = memory_server.handle, saved.sizes
    totals: list[int] = []
    moved: list[int] = []
    server.reset_counters()
    report = verify(
        root, full=True, settings={**SETTINGS, "concurrency": 2}, on_total=totals.append, on_progress=moved.append
    )
    counters, log = server.counters, server.request_log
    assert report.ok
    assert counters.peak_in_flight <= 2
    data = {path: size for path, size in sizes.items() if path.endswith(".distcp")}
    assert totals == [sum(moved)] == [sum(data.values())]
    asked: dict[str, list[tuple[int, int]]] = {}
    for request in log:
        if request.operation == "GetObject" and request.range:
            first, last = map(int, request.range.removeprefix("bytes=").split("-"))
            asked.setdefault(request.key.removeprefix("run/"), []).append((first, last + 1))
    assert asked.keys() == data.keys()
    for path, ranges in asked.items():
        assert len(ranges) > 1
        ends = sorted(ranges)
        assert [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), data[path]]
    assert counters.requests["ListObjectsV2"] == 1
    assert counters.bytes_out - report.bytes_read < 10_000  # the listing
    server.reset_counters()
    assert saved.verify(full=False).ok
    assert server.counters.requests == {"GetObject": 2, "ListObjectsV2": 1}
    assert not [request.key for request in server.request_log if request.key.endswith(".distcp")]


def test_memory_is_a_block_for_each_connection(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: dict[int, Any] = {}

    def record(view: memoryview, **arguments: Any) -> ReadTarget:
        buffers[id(view.obj)] = view.obj  # kept, so that no other gets its address
        return ReadTarget(view, **arguments)

    monkeypatch.setattr(dcp_s3.offline.verify, "ReadTarget", record)
    monkeypatch.setattr(dcp_s3.offline.verify, "BLOCK", 2**16)
    state = {f"w{n}": random_tensor((1000, 300), torch.float32, n) for n in range(6)}
    saved = Saved(s3, root).save(state, writer={"separate": list(state)})
    saved.flip(saved.data[0], 2**17)
    assert not saved.verify(concurrency=3).ok
    assert 0 < len(buffers) <= 3
    assert {memoryview(buffer).nbytes for buffer in buffers.values()} == {2**16}


# --- damaged data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fqn", ["weight", "half", "step"])
def test_a_flipped_bit_in_an_item_names_its_entry(saved: Saved, fqn: str) -> None:
    info = saved.info(fqn)
    start, length = info.offset + (get_raw_offset(info) or 0), info.length
    if get_raw_offset(info) is not None:
        length = small_state()[fqn].nbytes
    for position in (start, start + length // 2, start + length - 1):
        saved.flip(info.relative_path, position)
        problem = saved.only_problem()
        assert (problem.path, problem.fqn) == (info.relative_path, fqn)
        data = saved.get(info.relative_path)[start : start + length]
        assert f"CRC-64/NVME {crc_hex(crc64nvme(data))}" in problem.what
        assert f"bytes {start} to {start + length - 1}" in problem.what
        assert saved.verify(full=False).ok, "it reads no data"
        saved.flip(info.relative_path, position)


def test_a_flipped_bit_anywhere_is_found(saved: Saved) -> None:
    """Every object of the checkpoint, its metadata and its manifest."""
    saved.sign_manifest()
    assert saved.verify().ok
    sizes = saved.sizes
    assert len(sizes) == 4
    for path, size in sizes.items():
        original = saved.get(path)
        for position in range(0, size, 97):
            saved.flip(path, position)
            report = saved.verify()
            assert {problem.path for problem in report.problems} == {path}, (path, position)
            saved.put(path, original)
    assert saved.verify().ok


def test_an_object_of_another_size(saved: Saved) -> None:
    path = saved.info("weight").relative_path
    data = saved.get(path)
    for changed, outside in ((data[:-1], ["weight"]), (b"", ["weight"]), (data + b"x", [])):
        saved.put(path, changed)
        for full in (False, True):
            first, *rest = saved.verify(full=full).problems
            assert first.path == path
            assert f"has {len(changed)} bytes, recorded were {len(data)}" in first.what
            assert [problem.fqn for problem in rest] == outside
    saved.delete(path)
    for full in (False, True):
        assert str(saved.only_problem(full=full)) == f"{path}: is missing"


@pytest.mark.parametrize("fqn", ["twin", None])
def test_damage_in_flight_is_no_damage(saved: Saved, monkeypatch: pytest.MonkeyPatch, fqn: str | None) -> None:
    info = saved.info("twin")
    start = info.offset + (get_raw_offset(info) or 0) if fqn else info.offset + info.length - 20
    seen = flip_in_flight(monkeypatch, saved.get(info.relative_path)[start : start + 12], times=1)
    size = sum(saved.sizes.values())
    report = saved.verify()
    assert report.ok, report.problems
    assert len(seen) == 1
    again = report.bytes_read - size
    assert again in [saved.sizes[path] for path in saved.data], "one object twice"


# --- what else may happen -------------------------------------------------------------------------------


def test_no_checkpoint_is_an_error(s3: Any, bucket: str, root: str) -> None:
    for full in (False, True):
        with pytest.raises(errors.CheckpointNotFoundError):
            verify(root, full=full)
    saved = Saved(s3, root).save(small_state())
    saved.delete(".metadata")
    with pytest.raises(errors.CheckpointNotFoundError):
        verify(root)


FAULTY_URL = f"s3://{BUCKET}/run/step-1"


def test_failures_of_s3_are_no_damage(faulty: FaultyServer) -> None:
    dcp.save(small_state(), storage_writer=S3StorageWriter(FAULTY_URL), no_dist=True)
    for where in (".metadata", "manifest", ".distcp", ""):
        operation = "GetObject" if where else "ListObjectsV2"
        for fault, error in (
            (Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
            (Fault.reset(), errors.TransferError),
        ):
            faulty.rule = lambda r, f=fault, o=operation, w=where: f if r.operation == o and w in r.key else None
            with pytest.raises(error):
                verify(FAULTY_URL, full=True, settings={"retry_attempts": 1})


def test_an_object_that_goes_while_it_is_read(faulty: FaultyServer) -> None:
    dcp.save(small_state(), storage_writer=S3StorageWriter(FAULTY_URL), no_dist=True)
    for fault, what in (
        (Fault.error(404, "NoSuchKey"), "was deleted while it was read"),
        (Fault.error(412, "PreconditionFailed"), "was replaced while it was read"),
        (Fault.error(416, "InvalidRange"), "became shorter while it was read"),
    ):
        faulty.once("GetObject", fault, key=".distcp")
        (problem,) = verify(FAULTY_URL, full=True).problems
        assert (problem.fqn, problem.what) == (None, what)


def test_a_checkpoint_that_is_replaced_meanwhile_is_verified_anew(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(s3, root).save(small_state())
    plain, times = S3Store.list, [1]

    def list_later(self: S3Store, prefix: str) -> Any:
        if times and prefix == "run/":
            times.pop()
            saved.save({"other": torch.ones(3)}, writer={"overwrite": True})
        return plain(self, prefix)

    monkeypatch.setattr(S3Store, "list", list_later)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items == 1
    times[:] = [1] * 3
    with pytest.raises(errors.CheckpointError, match="was replaced 3 times"):
        saved.verify()


# --- what is planned ------------------------------------------------------------------------------------


def item(start: int, length: int, crc: int | None) -> StoredItem:
    return StoredItem(f"at{start}", "object", start, length, crc, start, length)


def mismatches(
    data: bytes, items: list[StoredItem], crc: int | None, *, part: int = 7, block: int = 4, seed: int = 0
) -> dict[StoredItem | None, str]:
    """What is found in an object with these bytes, read in parts that arrive in any order."""
    stored = StoredData("object", len(data), None if crc is None else crc_hex(crc), tuple(items))
    segments = []
    for start in range(0, len(data), part):
        at = start
        for size in cut_range(stored, start, min(part, len(data) - start), block):
            assert 0 < size <= block
            segments.append((at, size, crc64nvme(data[at : at + size])))
            at += size
        assert at == min(start + part, len(data))
    random.Random(seed).shuffle(segments)
    return find_mismatches(stored, segments)


PLACES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12)


@given(
    data=st.binary(max_size=300),
    places=PLACES,
    part=st.integers(1, 400),
    block=st.integers(1, 50),
    seed=st.integers(0, 9),
    flip=st.integers(0, 299),
)
def test_exactly_what_covers_a_changed_byte_does_not_match(
    data: bytes, places: list[tuple[int, int]], part: int, block: int, seed: int, flip: int
) -> None:
    """Items may lie anywhere, also one over another."""
    spans = [sorted((min(a, len(data)), min(b, len(data)))) for a, b in places]
    items = [item(a, b - a, crc64nvme(data[a:b])) for a, b in spans]
    crc, how = crc64nvme(data), {"part": part, "block": block, "seed": seed}
    assert not mismatches(data, items, crc, **how)
    if flip < len(data):
        changed = data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]
        found = mismatches(changed, items, crc, **how)
        wrong = [(each, a, b) for each, (a, b) in zip(items, spans, strict=True) if a <= flip < b]
        assert found.keys() == {None, *(each for each, _, _ in wrong)}
        for each, a, b in wrong:
            crcs = crc64nvme(changed[a:b]), crc64nvme(data[a:b])
            assert "has CRC-64/NVME {}, recorded was {}".format(*map(crc_hex, crcs)) in found[each]
        assert crc_hex(crc64nvme(changed)) in found[None]
        assert "what is around them does not" in found[None]


def test_checksums_of_nothing_and_of_what_has_none() -> None:
    data = bytes(range(100))
    assert not mismatches(data[:50] + b"x" * 50, [item(10, 20, crc64nvme(data[10:30])), item(30, 5, None)], None)
    wrong = item(0, 0, 5)
    assert mismatches(b"abc", [item(3, 0, 0), wrong], None, part=2) == {
        wrong: f"has CRC-64/NVME {crc_hex(0)}, recorded was {crc_hex(5)}"
    }
    assert cut_range(StoredData("object", 0, crc_hex(0), ()), 0, 0, 10) == []
    assert not mismatches(b"", [], 0)
    assert mismatches(b"", [], 1).keys() == {None}
