"""verify: damage is found and named, wherever it is; what is good is called good, and read once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import dcp_s3
from dcp_s3 import errors, verify
from dcp_s3.format.blocks import get_facts
from dcp_s3.format.layout import METADATA_CRC_KEY
from dcp_s3.memory import ReadTarget, crc64nvme, crc_hex
from dcp_s3.s3.store import S3Store
from tests.end_to_end.states import every_kind, random_tensor
from tests.faulty import BUCKET, FaultyServer
from tests.flipping import flip_in_flight
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.offline.conftest import SETTINGS, Saved, save, small_state
from tests.retention.making import save_on_ranks
from tests.spread import spread_out


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
    totals, moved = list[int](), list[int]()
    server.reset_counters()
    settings = {**SETTINGS, "concurrency": 2}
    report = verify(root, full=True, settings=settings, on_total=totals.append, on_progress=moved.append)
    counters, log = server.counters, server.request_log
    assert report.ok
    assert counters.peak_in_flight <= 2
    data = {path: size for path, size in sizes.items() if path.endswith(".distcp")}
    assert totals == [sum(moved)] == [sum(data.values())]
    for path, size in data.items():
        ranges = [each.range.removeprefix("bytes=") for each in log if each.key == f"run/{path}"]
        assert len(ranges) > 1
        ends = sorted(tuple(map(int, each.split("-"))) for each in ranges)
        assert [0, *(last + 1 for _, last in ends)] == [*(first for first, _ in ends), size]
    assert counters.requests["ListObjectsV2"] == 1
    assert counters.bytes_out - report.bytes_read < 10_000  # the listing
    server.reset_counters()
    assert saved.verify(full=False).ok
    assert server.counters.requests == {"GetObject": 2, "ListObjectsV2": 1}
    assert not [request.key for request in server.request_log if request.key.endswith(".distcp")]


def test_memory_is_a_block_for_each_connection(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: dict[int, Any] = {}

    def record(view: memoryview, **arguments: Any) -> ReadTarget:
        buffers[id(view.obj)] = view.obj  # kept, so that no other gets its address
        return ReadTarget(view, **arguments)

    monkeypatch.setattr(dcp_s3.offline.verify, "ReadTarget", record)
    monkeypatch.setattr(dcp_s3.offline.verify, "BLOCK", 2**16)
    state = {f"w{n}": random_tensor((1000, 300), torch.float32, n) for n in range(6)}
    with separate_objects(*state):
        saved.save(state, writer={"overwrite": True})
    saved.flip(saved.info("w3").relative_path, 2**17)
    (problem,) = saved.verify(concurrency=3).problems
    assert problem.fqn == "w3"
    assert 0 < len(buffers) <= 3
    assert {memoryview(buffer).nbytes for buffer in buffers.values()} == {2**16}


# --- damaged data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fqn", ["weight", "half", "step"])
def test_a_flipped_bit_in_an_item_names_its_entry(saved: Saved, fqn: str) -> None:
    info = saved.info(fqn)
    start, length = info.offset + (get_facts(info)[0] or 0), info.length
    if get_facts(info)[0] is not None:
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
    data = saved.get(saved.manifest)
    saved.put(saved.manifest, data, {METADATA_CRC_KEY: crc_hex(crc64nvme(data))})  # as it is saved
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
    start = info.offset + (get_facts(info)[0] or 0) if fqn else info.offset + info.length - 20
    seen = flip_in_flight(monkeypatch, saved.get(info.relative_path)[start : start + 12], times=1)
    size = sum(saved.sizes.values())
    report = saved.verify()
    assert report.ok, report.problems
    assert len(seen) == 1
    assert report.bytes_read - size in [saved.sizes[path] for path in saved.data], "one object twice"


def test_what_has_no_checksum_is_counted_and_not_read(s3: Any, root: str, tmp_path: Path) -> None:
    dcp.save(small_state(), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    foreign = Saved(s3, f"{root}/foreign")
    for file in tmp_path.iterdir():
        foreign.put(file.name, file.read_bytes(), {})
    for saved in (foreign, Saved(s3, f"{root}/ours").save(small_state(), checksum="none")):
        report = saved.verify()
        assert report.ok, report.problems
        assert (report.objects_without_checksum, report.items_without_checksum) == (report.objects, 4)
        assert report.bytes_read == sum(size for path, size in saved.sizes.items() if not path.endswith(".distcp"))
        path = saved.info("weight").relative_path
        saved.put(path, saved.get(path)[:100])
        assert {problem.path for problem in saved.verify(full=False).problems} == {path}


# --- metadata ------------------------------------------------------------------------------------------


def change_info(fqn: str, **fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == fqn:
                vars(info).update(fields)

    return change


def move_to_the_end(metadata: Metadata) -> None:
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "weight")
    info.raw_offset = info.length - 1


WRONG_METADATA: list[tuple[Callable[[Any], Any], str | None, str]] = [
    (change_info("weight", offset=10**6), "weight", "its object ends at"),
    (change_info("weight", relative_path="__7_0-abc.distcp"), None, "is missing"),
    (change_info("weight", relative_path="../other/__0_0.distcp"), None, "outside"),
    (change_info("weight", raw_offset=-1), None, "'weight' lies at no possible range of bytes"),
    (move_to_the_end, "weight", "has no chunk at"),
    (lambda m: m.storage_data.pop(MetadataIndex("step")), "step", "lies in no object"),
    (lambda m: m.storage_data.pop(MetadataIndex("half", torch.Size([0]))), "half", "lies in no object"),
    (lambda m: setattr(m.state_dict_metadata["half"], "chunks", []), "half", "has no chunk at"),
    (lambda m: setattr(m, "storage_data", None), None, "does not say where its items lie"),
]


def test_metadata_that_is_wrong_is_found_without_reading_data(saved: Saved) -> None:
    original, twin, path = saved.get(".metadata"), saved.info("twin"), saved.info("weight").relative_path
    for damaged in (".metadata", path):
        saved.flip(damaged, 100)
    report = saved.verify()  # of objects, by the manifest
    assert [problem.path for problem in report.problems] == [".metadata", path]
    assert (report.objects, report.items) == (2, 0)
    for damaged in (".metadata", path):
        saved.flip(damaged, 100)
    saved.change_metadata(change_info("half", offset=twin.offset, length=twin.length))  # only by its data
    problem = saved.only_problem()
    assert problem.fqn == "half"
    assert "the metadata is wrong" in problem.what
    for change, fqn, what in WRONG_METADATA:
        saved.change_metadata(change)
        for full in (False, True):
            problems = saved.verify(full=full).problems
            assert [problem for problem in problems if problem.fqn == fqn and what in problem.what], (what, problems)
        saved.put(".metadata", original)
    for data in (original[:50], pickle.dumps(Path)):
        saved.put(".metadata", data, {})
        problem = saved.only_problem()
        assert (problem.path, problem.fqn) == (".metadata", None)


# --- the manifest --------------------------------------------------------------------------------------


def set_field(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(fields)


def set_objects(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["objects"][0].update(fields)


WRONG_MANIFESTS: list[tuple[Callable[[Any], Any], str]] = [
    (set_field(save_id="0123456789abcdef"), "is of the save '0123456789abcdef'"),
    (set_field(rank=1), "the rank 1"),
    (set_field(items=5), "counts 5 items, the metadata 4"),
    (set_field(format_version=2), "format version 2, this dcp_s3 reads 1"),
    (set_field(objects=[]), "in which items lie"),
    (set_objects(size=3), "recorded were 3"),
    (set_objects(crc64nvme="f00"), "has no possible checksum of "),
    (set_objects(crc64nvme=7), "has no possible checksum of "),
    (lambda manifest: manifest["objects"].append(manifest["objects"][0]), " twice"),
    (lambda manifest: manifest["objects"].append({"path": "gone", "size": 3}), "gone: is missing"),
]


def test_a_manifest_that_disagrees(saved: Saved) -> None:
    original = saved.get(saved.manifest)
    for change, what in WRONG_MANIFESTS:
        saved.change_manifest(change)
        problems = saved.verify(full=False).problems
        assert [problem for problem in problems if what in str(problem)], (what, problems)
        saved.put(saved.manifest, original)
    saved.change_manifest(set_objects(crc64nvme="0" * 16))
    assert saved.verify(full=False).ok
    problem = saved.only_problem()
    assert problem.fqn is None
    assert "recorded was 0000000000000000" in problem.what
    path = saved.manifest
    saved.put(path, b"{}", {})
    assert "not a dcp_s3 manifest" in saved.only_problem(full=False).what
    saved.delete(path)
    assert str(saved.only_problem(full=False)).startswith(f"{path}: is missing")


def test_ranks_that_commit_for_themselves(s3: Any, root: str) -> None:
    saved = Saved(s3, save_on_ranks(root, 2))
    report = saved.verify()
    assert report.ok, report.problems
    assert (report.objects, report.items) == (2, 6)
    assert report.bytes_read == sum(saved.sizes.values())
    manifest = next(path for path in saved.sizes if path.endswith(".0.json"))
    original = saved.get(manifest)
    saved.put(manifest, json.dumps(json.loads(original) | {"world_size": 3, "created_at": 1.0}).encode(), {})
    assert str(saved.only_problem()).startswith("__0.metadata: is of a save by another number of ranks")
    saved.put(manifest, original)
    path = next(path for path in saved.data if path.startswith("__1_"))
    for damaged in (path, "__1.metadata"):
        saved.flip(damaged, saved.sizes[damaged] // 2)
        assert {problem.path for problem in saved.verify().problems} == {damaged}
        saved.flip(damaged, saved.sizes[damaged] // 2)
    saved.put("__2.metadata", b"of a save with more ranks", {})
    assert saved.verify().ok, "nobody loads it"
    saved.delete("__1.metadata")
    assert str(saved.verify(full=False).problems[0]).startswith("__1.metadata: is missing")


def test_failures_of_s3_are_no_damage_but_an_object_that_goes_while_it_is_read_is(faulty: FaultyServer) -> None:
    url = f"s3://{BUCKET}/run/step-1"

    def fail(operation: str, where: str, fault: Fault) -> None:
        faulty.rule = lambda request: fault if request.operation == operation and where in request.key else None

    with pytest.raises(errors.CheckpointNotFoundError):
        verify(url)
    save(small_state(), url)
    failures = ((Fault.error(403, "AccessDenied"), errors.AccessDeniedError), (Fault.reset(), errors.TransferError))
    for where in (".metadata", "manifest", ".distcp", ""):
        for fault, error in failures:
            fail("GetObject" if where else "ListObjectsV2", where, fault)
            with pytest.raises(error):
                verify(url, full=True, settings={"retry_attempts": 1})
    for status, code in ((404, "NoSuchKey"), (412, "PreconditionFailed"), (416, "InvalidRange")):
        fail("GetObject", ".distcp", Fault.error(status, code))
        (problem,) = verify(url, full=True).problems
        assert problem.fqn is None
        assert "while it was read" in problem.what


def test_a_checkpoint_that_is_replaced_meanwhile_is_verified_anew(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the listing, and between it and the metadata."""

    def replace_in(owner: Any, name: str, times: int) -> None:
        plain, left = getattr(owner, name), [1] * times

        def later(*arguments: Any) -> Any:
            if left and arguments[1] in ("run/", saved.parsed):
                left.pop()
                saved.save({"other": torch.ones(3)}, writer={"overwrite": True})
            return plain(*arguments)

        monkeypatch.setattr(owner, name, later)

    replace_in(dcp_s3.offline.verify, "fetch_metadata", 4)
    replace_in(S3Store, "list", 1)
    report = saved.verify()
    assert report.ok, report.problems
    assert report.items == 1
