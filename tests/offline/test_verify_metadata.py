"""verify: metadata and manifests that are wrong, lost or of other saves are named, and items that cannot be decoded."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_s3 import errors
from dcp_s3.format.blocks import get_raw_offset
from dcp_s3.offline.verify_bytes import UnknownExtensionError, find_damage
from dcp_s3.offline.verify_plan import StoredItem
from tests.end_to_end import foreign
from tests.end_to_end.test_extensions import Xor
from tests.flipping import flip_in_flight
from tests.offline.conftest import NeedsCode, Saved, small_state
from tests.ranks import run_ranks
from tests.retention.making import save_on_ranks

pytestmark = pytest.mark.servers("memory")


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


def set_field(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(fields)


def set_objects(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["objects"][0].update(fields)


WRONG_MANIFESTS: list[tuple[Callable[[Any], Any], str]] = [
    (set_field(save_id="0123456789abcdef"), "is of the save '0123456789abcdef'"),
    (set_field(rank=1), "is of rank 1"),
    (set_field(items=5), "counts 5 items, the metadata 4"),
    (set_field(format_version=2), "format version 2, this dcp_s3 reads 1"),
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


def test_ranks_that_commit_for_themselves(s3: Any, root: str) -> None:
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


# --- checkpoints of other writers -----------------------------------------------------------------------


@pytest.fixture
def foreign_saved(s3: Any, root: str, tmp_path: Path) -> Saved:
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


def test_framing_of_what_was_saved_without_checksums(s3: Any, root: str) -> None:
    saved = Saved(s3, root).save(small_state(), checksum="none")
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"
    saved.flip(info.relative_path, info.offset)
    step = saved.info("step")
    saved.flip(step.relative_path, step.offset + step.length // 2)
    assert saved.only_problem().fqn == "step"


@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_what_went_through_stream_extensions(s3: Any, root: str, checksum: str) -> None:
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


# --- what decodes an item tells damage from what is only unusual -----------------------------------------


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
