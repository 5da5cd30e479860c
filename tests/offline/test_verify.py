"""verify: damage is found and named, wherever it is; what is good is called good, and read once."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import dcp_s3
from dcp_s3 import S3StorageWriter, VerifyReport, errors, verify
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY
from dcp_s3.format.storage_info import get_raw_offset
from dcp_s3.offline import verify_bytes
from dcp_s3.offline.verify_decode import UnknownExtensionError, find_damage
from dcp_s3.offline.verify_plan import StoredItem
from dcp_s3.s3 import download, ranged
from dcp_s3.s3.store import S3Store
from dcp_s3.url import parse_url
from tests.end_to_end import foreign
from tests.end_to_end.states import every_kind, random_tensor
from tests.end_to_end.test_extensions import Xor
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.retention.making import delete, get, keys, save_on_ranks
from tests.spread import spreading

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SETTINGS = {"part_size": "5MiB", "retry_attempts": 2}


def small_state() -> dict[str, Any]:
    return {
        "weight": random_tensor((30, 10), torch.float32, 1),
        "twin": random_tensor((30, 10), torch.float32, 2),
        "half": random_tensor((7,), torch.bfloat16, 3),
        "step": 17,
    }


class Saved:
    """A checkpoint whose stored objects can be changed behind dcp_s3's back."""

    def __init__(self, s3: Any, url: str) -> None:
        self._s3, self.url = s3, url
        self._where = parse_url(url)

    def save(self, state: Any, *, writer: dict[str, Any] | None = None, **settings: Any) -> Saved:
        storage_writer = S3StorageWriter(self.url, settings={**SETTINGS, **settings}, **(writer or {}))
        dcp.save(state, storage_writer=storage_writer, no_dist=True)
        return self

    def put(self, path: str, data: bytes, fields: dict[str, str] | None = None) -> None:
        """Replace an object; its user metadata stays if no other is given."""
        key = self._where.key(path)
        if fields is None:
            fields = self._s3.head_object(Bucket=self._where.bucket, Key=key)["Metadata"]
        self._s3.put_object(Bucket=self._where.bucket, Key=key, Body=data, Metadata=fields)

    def get(self, path: str) -> bytes:
        return get(self._s3, self.url, path)

    def delete(self, path: str) -> None:
        delete(self._s3, self.url, path)

    def flip(self, path: str, position: int) -> None:
        data = bytearray(self.get(path))
        data[position] ^= 0x10
        self.put(path, bytes(data))

    @property
    def sizes(self) -> dict[str, int]:
        return keys(self._s3, self.url)

    @property
    def data(self) -> list[str]:
        return [path for path in self.sizes if path.endswith(".distcp")]

    @property
    def manifest(self) -> str:
        (path,) = (path for path in self.sizes if "manifest" in path)
        return path

    @property
    def metadata(self) -> Metadata:
        found = pickle.loads(self.get(".metadata"))
        assert isinstance(found, Metadata)
        return found

    def info(self, fqn: str) -> Any:
        (found,) = (info for index, info in self.metadata.storage_data.items() if index.fqn == fqn)
        return found

    def change_metadata(self, change: Callable[[Metadata], None]) -> None:
        """As somebody would who knows how: the user metadata says what it should."""
        metadata = self.metadata
        change(metadata)
        data = pickle.dumps(metadata)
        save_id = metadata.storage_meta.save_id if metadata.storage_meta else ""
        self.put(".metadata", data, {SAVE_ID_KEY: str(save_id), METADATA_CRC_KEY: crc_hex(crc64nvme(data))})

    def change_manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        fields = json.loads(self.get(self.manifest))
        change(fields)
        self.put(self.manifest, json.dumps(fields).encode(), {})

    def sign_manifest(self) -> None:
        """Give it the checksum that `commit.publish` records."""
        data = self.get(self.manifest)
        self.put(self.manifest, data, {METADATA_CRC_KEY: crc_hex(crc64nvme(data))})

    def verify(self, *, full: bool = True, **settings: Any) -> VerifyReport:
        return verify(self.url, full=full, settings={**SETTINGS, **settings})

    def only_problem(self, *, full: bool = True) -> dcp_s3.Problem:
        (problem,) = self.verify(full=full).problems
        return problem


@pytest.fixture
def saved(memory_server: Any, s3: Any, root: str) -> Saved:
    """A small checkpoint in two objects."""
    return Saved(s3, root).save(small_state(), writer={"separate": ["weight"]})


# --- good ones ------------------------------------------------------------------------------------------


def test_a_good_checkpoint(s3: Any, root: str) -> None:
    state = {**every_kind(), "large": random_tensor((1500, 1000), torch.float32)}
    with spreading(2):
        saved = Saved(s3, root).save(state, buckets_per_rank=2)
    fast, full = saved.verify(full=False), saved.verify()
    items, objects = len(saved.metadata.storage_data), len(saved.data)
    for report in (fast, full):
        assert report.ok, report.problems
        assert (report.url, report.objects, report.items) == (root, objects, items)
        assert (report.objects_without_checksum, report.items_without_checksum, report.items_not_decoded) == (0, 0, 0)
    sizes = saved.sizes
    assert full.bytes_read == sum(sizes.values())
    assert fast.bytes_read == sum(size for path, size in sizes.items() if not path.endswith(".distcp"))
    assert (fast.mode, full.mode) == ("fast", "full")
    assert json.loads(json.dumps(full.to_dict()))["ok"] is True


def test_other_checksum_settings(memory_server: Any, s3: Any, root: str) -> None:
    report = Saved(s3, f"{root}/1").save(every_kind(), checksum="crc32c").verify()
    assert report.ok, report.problems
    assert (report.objects_without_checksum, report.items_without_checksum) == (0, 0)
    report = Saved(s3, f"{root}/2").save(every_kind(), checksum="none").verify()
    assert report.ok, report.problems
    assert (report.objects_without_checksum, report.items_without_checksum) == (1, report.items)


def test_each_byte_is_read_once_and_none_in_fast_mode(memory_server: Any, s3: Any, bucket: str, root: str) -> None:
    state = {f"w{n}": random_tensor((1300, 1024 + n), torch.float32, n) for n in range(3)}
    saved = Saved(s3, root).save(state, buckets_per_rank=2)
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

    class Recorded(download.ReadTarget):
        def __init__(self, view: memoryview, **arguments: Any) -> None:
            super().__init__(view, **arguments)
            buffers[id(view.obj)] = view.obj  # kept, so that no other gets its address

    monkeypatch.setattr(verify_bytes, "ReadTarget", Recorded)
    monkeypatch.setattr(verify_bytes, "BLOCK", 2**16)
    names = [f"w{n}" for n in range(6)]
    state = {name: random_tensor((1000, 300), torch.float32, n) for n, name in enumerate(names)}
    saved = Saved(s3, root).save(state, writer={"separate": names})
    assert len(saved.data) == 6
    assert saved.verify(concurrency=3).ok
    assert 0 < len(buffers) <= 3
    assert {memoryview(buffer).nbytes for buffer in buffers.values()} == {2**16}
    saved.flip(saved.data[0], 2**17)
    buffers.clear()
    assert not saved.verify(concurrency=3).ok  # reading again takes no more
    assert 0 < len(buffers) <= 3


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


def test_a_flipped_bit_in_framing(saved: Saved) -> None:
    info = saved.info("weight")
    for position in (info.offset, info.offset + info.length - 1):
        saved.flip(info.relative_path, position)
        problem = saved.only_problem()
        assert (problem.path, problem.fqn) == (info.relative_path, None)
        assert "what is around them does not" in problem.what
        saved.flip(info.relative_path, position)
    assert saved.verify().ok


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


def test_what_is_left_of_a_short_object_is_checked(saved: Saved) -> None:
    path = saved.info("twin").relative_path
    infos = [saved.info(fqn) for fqn in ("twin", "half", "step")]
    first, *_, last = sorted(infos, key=lambda info: info.offset)
    saved.flip(path, first.offset + (get_raw_offset(first) or 0))
    saved.put(path, saved.get(path)[: last.offset + 1])
    named = [problem.fqn for problem in saved.verify().problems]
    fqns = {info.offset: fqn for fqn, info in zip(("twin", "half", "step"), infos, strict=True)}
    assert named == [None, fqns[last.offset], fqns[first.offset]]


def flip_in_flight(monkeypatch: pytest.MonkeyPatch, value: bytes, *, times: int) -> list[int]:
    receive, seen = ranged.readinto_response, []

    def readinto(body: Any, view: memoryview) -> int:
        count = receive(body, view)
        position = bytes(view[:count]).find(value)
        if position >= 0 and len(seen) < times:
            seen.append(position)
            view[position] ^= 1
        return count

    monkeypatch.setattr(ranged, "readinto_response", readinto)
    return seen


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


def test_damage_is_read_twice_and_not_more(memory_server: Any, saved: Saved) -> None:
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset + (get_raw_offset(info) or 0))
    memory_server.handle.reset_counters()
    assert not saved.verify().ok
    gets = Counter(r.key for r in memory_server.handle.request_log if r.operation == "GetObject" and r.range)
    assert gets == {f"run/{path}": 2 if path == info.relative_path else 1 for path in saved.data}


# --- metadata -------------------------------------------------------------------------------------------


def swap(metadata: Metadata) -> None:
    data = metadata.storage_data
    a, b = (next(index for index in data if index.fqn == fqn) for fqn in ("twin", "weight"))
    data[a], data[b] = data[b], data[a]


def change_info(fqn: str, **fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == fqn:
                vars(info).update(fields)

    return change


def test_metadata_that_points_to_another_tensor(saved: Saved) -> None:
    """All checksums are as recorded, but the places belong to each other's entries."""
    saved.change_metadata(swap)  # CRCs move with the places: what is there is not wrong, just not told apart
    assert saved.verify().ok
    place = saved.info("twin").offset
    saved.change_metadata(change_info("half", offset=place, length=saved.info("twin").length))
    problem = saved.only_problem()
    assert problem.fqn == "half"
    assert "the metadata is wrong" in problem.what


def move_to_the_end(metadata: Metadata) -> None:
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "weight")
    info.raw_offset = info.length - 1


WRONG_METADATA: list[tuple[Callable[[Any], Any], str | None, str]] = [
    (change_info("weight", offset=10**6), "weight", "its object ends at"),
    (change_info("weight", relative_path="__7_0-abc.distcp"), None, "is missing"),
    (change_info("weight", raw_offset=10**6), None, "'weight' lies at no possible range of bytes"),
    (move_to_the_end, "weight", "does not fit into its item"),
    (change_info("weight", raw_offset=-1), None, "'weight' lies at no possible range of bytes"),
    (change_info("step", raw_offset=0), "step", "is no tensor"),
    (change_info("step", length=0), "step", "has no bytes"),
    (lambda m: m.storage_data.pop(MetadataIndex("step")), "step", "lies in no object"),
    (lambda m: m.storage_data.pop(MetadataIndex("half", torch.Size([0]))), "half", "lies in no object"),
    (lambda m: setattr(m.state_dict_metadata["half"], "chunks", []), "half", "has no chunk at"),
    (lambda m: setattr(m, "storage_data", None), None, "does not say where its items lie"),
]


def test_metadata_that_is_wrong_is_found_without_reading_data(saved: Saved) -> None:
    original = saved.get(".metadata")
    for change, fqn, what in WRONG_METADATA:
        saved.change_metadata(change)
        for full in (False, True):
            problems = saved.verify(full=full).problems
            assert [problem for problem in problems if problem.fqn == fqn and what in problem.what], (what, problems)
        saved.put(".metadata", original)


def test_metadata_that_can_not_be_loaded(saved: Saved) -> None:
    original, outside = saved.get(".metadata"), change_info("weight", relative_path="../other/__0_0.distcp")
    for damage in (
        lambda: saved.flip(".metadata", 100),
        lambda: saved.put(".metadata", original[:50], {}),
        lambda: saved.put(".metadata", pickle.dumps(Path), {}),
        lambda: saved.change_metadata(outside),
    ):
        damage()
        for full in (False, True):
            problem = saved.only_problem(full=full)
            assert (problem.path, problem.fqn) == (".metadata", None)
        saved.put(".metadata", original)


def test_objects_are_checked_by_the_manifest_if_the_metadata_can_not_be_loaded(saved: Saved) -> None:
    path = saved.info("weight").relative_path
    saved.flip(path, 0)
    saved.flip(".metadata", 100)
    report = saved.verify()
    assert [problem.path for problem in report.problems] == [".metadata", path]
    assert (report.objects, report.items) == (2, 0)


# --- the manifest ---------------------------------------------------------------------------------------


def test_a_manifest_with_a_checksum(saved: Saved) -> None:
    saved.sign_manifest()
    assert saved.verify(full=False).ok
    data = saved.get(saved.manifest)
    saved.put(saved.manifest, data.replace(b'"world_size": 1', b'"world_size": 3'))
    problem = saved.only_problem(full=False)
    assert problem.path == saved.manifest
    assert "CRC-64/NVME" in problem.what


def set_field(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(fields)


def set_objects(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["objects"][0].update(fields)


WRONG_MANIFESTS: list[tuple[Callable[[Any], Any], str]] = [
    (set_field(save_id="0123456789abcdef"), "is of the save '0123456789abcdef'"),
    (set_field(rank=1), "is of rank 1"),
    (set_field(items=5), "counts 5 items, the metadata 4"),
    (set_field(format_version=2), "has format version 2"),
    (set_field(objects=[]), "in which items lie"),
    (lambda manifest: manifest["objects"].append(manifest["objects"][0]), "twice"),
    (set_objects(path="../x"), "outside of the checkpoint: '../x'"),
    (set_objects(crc64nvme="12"), "no possible checksum"),
    (set_objects(size=3), "recorded were 3"),
    (lambda manifest: manifest["objects"].append({"path": "gone", "size": 3}), "gone: is missing"),
]


def test_a_manifest_that_disagrees(saved: Saved) -> None:
    original = saved.get(saved.manifest)
    for change, what in WRONG_MANIFESTS:
        saved.change_manifest(change)
        problems = saved.verify(full=False).problems
        assert [problem for problem in problems if what in str(problem)], (what, problems)
        saved.put(saved.manifest, original)


def test_a_manifest_with_another_checksum_of_an_object(saved: Saved) -> None:
    saved.change_manifest(set_objects(crc64nvme="0" * 16))
    assert saved.verify(full=False).ok
    problem = saved.only_problem()
    assert problem.fqn is None
    assert "recorded was 0000000000000000" in problem.what


def test_a_manifest_that_is_lost_or_no_manifest(saved: Saved) -> None:
    path = saved.manifest
    saved.put(path, b"{}", {})
    assert "not a dcp_s3 manifest" in saved.only_problem(full=False).what
    saved.delete(path)
    problem = saved.only_problem(full=False)
    assert problem.path == path
    assert "is missing" in problem.what


def test_a_copy_without_user_metadata_and_manifest_is_good_but_says_less(saved: Saved) -> None:
    """As made by a tool that copies only what torch needs."""
    saved.put(".metadata", saved.get(".metadata"), {})
    assert saved.verify().objects_without_checksum == 0, "the metadata itself says which manifest is its own"
    saved.delete(saved.manifest)
    report = saved.verify()
    assert report.ok, report.problems
    assert (report.objects_without_checksum, report.items_without_checksum) == (2, 0)
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset + (get_raw_offset(info) or 0))
    assert saved.only_problem().fqn == "weight"


# --- single ranks ---------------------------------------------------------------------------------------


def test_ranks_that_commit_for_themselves(memory_server: Any, s3: Any, root: str) -> None:
    saved = Saved(s3, save_on_ranks(root, 2))
    report = saved.verify()
    assert report.ok, report.problems
    assert (report.objects, report.items) == (2, 6)
    assert report.bytes_read == sum(saved.sizes.values())

    manifest = next(path for path in saved.sizes if path.endswith(".0.json"))
    original = saved.get(manifest)
    saved.put(manifest, json.dumps(json.loads(original) | {"world_size": 3, "created_at": 1.0}).encode(), {})
    problem = saved.only_problem(full=False)
    assert str(problem) == "__0.metadata: is of a save by 3 ranks, the last one was by 2"
    saved.put(manifest, original)

    path = next(path for path in saved.data if path.startswith("__1_"))
    saved.flip(path, saved.sizes[path] // 2)
    assert {problem.path for problem in saved.verify().problems} == {path}
    saved.flip(path, saved.sizes[path] // 2)
    saved.flip("__1.metadata", 50)
    assert [problem.path for problem in saved.verify().problems] == ["__1.metadata"]
    saved.flip("__1.metadata", 50)

    saved.put("__2.metadata", b"of a save with more ranks", {})
    assert saved.verify().ok, "nobody loads it"
    saved.delete("__1.metadata")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"of 2 ranks, \[1\] have not committed"):
        saved.verify(full=False)


# --- other writers' -------------------------------------------------------------------------------------


class NeedsCode:
    """What weights_only refuses to load."""

    ran = False

    def __init__(self) -> None:
        self.values = list(range(50))

    def __setstate__(self, state: dict[str, Any]) -> None:
        NeedsCode.ran = True
        self.__dict__.update(state)


@pytest.fixture
def foreign_saved(memory_server: Any, s3: Any, root: str, tmp_path: Path) -> Saved:
    """Written by torch, uploaded as it is."""
    state = {**small_state(), "object": NeedsCode(), "text": "something"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    saved = Saved(s3, root)
    for file in tmp_path.iterdir():
        saved.put(file.name, file.read_bytes(), {})
    return saved


def test_a_checkpoint_of_torch(memory_server: Any, foreign_saved: Saved) -> None:
    fast = foreign_saved.verify(full=False)
    assert fast.ok
    memory_server.handle.reset_counters()
    report = foreign_saved.verify()
    assert report.ok, report.problems
    assert (report.objects, report.items, report.items_not_decoded) == (2, 6, 0)
    assert (report.objects_without_checksum, report.items_without_checksum) == (2, 6)
    assert report.bytes_read == sum(foreign_saved.sizes.values())
    assert memory_server.handle.counters.requests["GetObject"] == 1 + 2, "neighbours share a request"
    assert not NeedsCode.ran


@pytest.mark.parametrize("fqn", ["weight", "half", "step", "object", "text"])
def test_flipped_bits_in_what_torch_wrote(foreign_saved: Saved, fqn: str) -> None:
    """By the CRC-32 of the zip records; bytes between them have none."""
    info = foreign_saved.info(fqn)
    original = foreign_saved.get(info.relative_path)
    item = original[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    for name, content in records.items():
        position = info.offset + item.index(content) + len(content) // 2
        foreign_saved.flip(info.relative_path, position)
        problem = foreign_saved.only_problem()
        assert (problem.path, problem.fqn) == (info.relative_path, fqn), name
        assert "cannot be decoded" in problem.what
        foreign_saved.put(info.relative_path, original)
    assert not NeedsCode.ran


def test_other_damage_to_what_torch_wrote(foreign_saved: Saved) -> None:
    info = foreign_saved.info("weight")
    data = foreign_saved.get(info.relative_path)
    foreign_saved.put(info.relative_path, bytes(len(data)))
    assert "weight" in {problem.fqn for problem in foreign_saved.verify().problems}
    foreign_saved.put(info.relative_path, data[: info.offset + info.length - 1])
    assert "weight" in {problem.fqn for problem in foreign_saved.verify(full=False).problems}
    foreign_saved.delete(info.relative_path)
    assert "is missing" in foreign_saved.only_problem(full=False).what


def test_damage_in_flight_to_what_torch_wrote(foreign_saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    value = small_state()["twin"].view(torch.uint8).flatten()[:12].numpy().tobytes()
    seen = flip_in_flight(monkeypatch, value, times=1)
    report = foreign_saved.verify()
    assert report.ok, report.problems
    assert len(seen) == 1
    assert report.bytes_read == sum(foreign_saved.sizes.values()) + foreign_saved.info("twin").length


@pytest.mark.parametrize("client", ["fsspec", "s3torchconnector"])
def test_checkpoints_of_other_s3_clients(memory_server: Any, s3: Any, root: str, client: str) -> None:
    env = {"AWS_ENDPOINT_URL": memory_server.endpoint_url}
    run_ranks(1, foreign.write, client, root, {"thread_count": 2}, env=env, forget="dcp_s3")
    saved = Saved(s3, root)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_without_checksum == report.items > 40
    path = max(saved.sizes, key=saved.sizes.__getitem__)
    saved.flip(path, saved.sizes[path] // 2)
    assert not saved.verify().ok


def test_framing_of_what_was_saved_without_checksums(memory_server: Any, s3: Any, root: str) -> None:
    saved = Saved(s3, root).save(small_state(), checksum="none")
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"
    saved.flip(info.relative_path, info.offset)
    step = saved.info("step")
    saved.flip(step.relative_path, step.offset + step.length // 2)
    assert saved.only_problem().fqn == "step"


@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_what_went_through_stream_extensions(memory_server: Any, s3: Any, root: str, checksum: str) -> None:
    saved = Saved(s3, f"{root}/xor").save(small_state(), writer={"_extensions": [Xor()]}, checksum=checksum)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_not_decoded == (4 if checksum == "none" else 0)
    if not ZStandard.is_available():
        return
    saved = Saved(s3, f"{root}/zstd").save(small_state(), writer={"_extensions": [ZStandard()]}, checksum=checksum)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items_not_decoded == 0
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"


# --- decoding -------------------------------------------------------------------------------------------


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def make_item(data: bytes, *, shape: tuple[int, ...] | None = None, transforms: tuple[str, ...] = ()) -> StoredItem:
    size = None if shape is None else torch.Size(shape)
    return StoredItem("a", "o", 0, len(data), size, False, transforms, None, 0, len(data))


def damage(data: bytes, **arguments: Any) -> str | None:
    return find_damage(io.BytesIO(data), make_item(data, **arguments))


def test_containers_are_told_from_damage() -> None:
    assert damage(torch_saved(torch.ones(2, 3)), shape=(2, 3)) is None
    assert damage(torch_saved({"a": torch.ones(2)})) is None
    assert damage(pickle.dumps(NeedsCode())) is None
    assert "neither a zip archive nor a pickle" in (damage(b"anything else") or "")
    assert damage(pickle.dumps(NeedsCode())[:-5]) is not None
    assert damage(b"") is not None
    assert damage(torch_saved("text"), shape=(2,)) is not None
    assert "recorded was (3, 2)" in (damage(torch_saved(torch.ones(2, 2)), shape=(3, 2)) or "")
    assert damage(torch_saved(torch.ones(2)), shape=(2, 1)) is not None
    assert not NeedsCode.ran


def test_archives_without_crc32_are_good() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = torch_saved(torch.ones(20))
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is not None
    assert damage(data, shape=(20,)) is None


def test_what_pretends_to_be_larger_than_it_is_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    assert len(buffer.getvalue()) < 10**4
    for shape in (None, (3,)):
        assert "pretends to have 1000000 bytes" in (damage(buffer.getvalue(), shape=shape) or "")


def test_an_unknown_extension_is_no_damage() -> None:
    with pytest.raises(UnknownExtensionError):
        damage(b"abc", transforms=("somebody.else/1",))


def test_a_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    data = torch_saved(torch.ones(2))
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError):
        damage(data, shape=(2,))


# --- what else may happen -------------------------------------------------------------------------------


def test_no_checkpoint_is_an_error(s3: Any, bucket: str, root: str) -> None:
    for full in (False, True):
        with pytest.raises(errors.CheckpointNotFoundError):
            verify(root, full=full)
    saved = Saved(s3, root).save(small_state())
    saved.delete(".metadata")
    with pytest.raises(errors.CheckpointNotFoundError):
        verify(root)


@pytest.mark.servers("memory", "moto", "rgw")
def test_a_missing_bucket_is_an_error(bucket: str) -> None:
    with pytest.raises(errors.BucketNotFoundError):
        verify(f"s3://{bucket}-not/run")


def test_a_bad_url_or_setting_is_an_error() -> None:
    with pytest.raises(errors.InvalidURLError):
        verify("/local")
    with pytest.raises(errors.SettingsError):
        verify("s3://bucket/run", settings={"speed": 1})


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


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


def test_a_body_that_breaks_is_gone_on_with(faulty: FaultyServer) -> None:
    dcp.save(
        {"w": random_tensor((1500, 1000), torch.float32)}, storage_writer=S3StorageWriter(FAULTY_URL), no_dist=True
    )
    seen = faulty.once("GetObject", Fault.truncate(2_500_000), key=".distcp")
    assert verify(FAULTY_URL, full=True).ok
    assert len(seen) == 1


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


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(s3, root).save(small_state())
    plain = S3Store.list

    def list_later(self: S3Store, prefix: str) -> Any:
        for path in saved.sizes:
            saved.delete(path)
        return plain(self, prefix)

    monkeypatch.setattr(S3Store, "list", list_later)
    with pytest.raises(errors.CheckpointNotFoundError):
        saved.verify()


def test_reports_are_values() -> None:
    problem = dcp_s3.Problem("a.distcp", "w", "is wrong")
    report = VerifyReport("s3://b/c", "fast", 1, 2, 3, 0, 0, 0, (problem,))
    assert not report.ok
    assert report.to_dict()["problems"] == ({"path": "a.distcp", "fqn": "w", "what": "is wrong"},)
    assert report.to_dict()["ok"] is False
    assert str(problem) == "a.distcp: 'w' is wrong"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.url = "x"  # type: ignore[misc]
