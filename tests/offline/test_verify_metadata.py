"""verify: metadata and manifests that are wrong, lost or of other saves are named."""

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

from dcp_s3 import errors
from dcp_s3.format.blocks import get_raw_offset
from tests.end_to_end.test_extensions import Xor
from tests.offline.conftest import Saved, small_state
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


# --- without checksums ----------------------------------------------------------------------------------


def test_what_has_no_checksum_is_counted_and_not_read(memory_server: Any, s3: Any, root: str, tmp_path: Path) -> None:
    """Written by torch and uploaded as it is, or saved without checksums."""
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


def test_what_went_through_stream_extensions(s3: Any, root: str) -> None:
    saved = Saved(s3, root).save(small_state(), writer={"_extensions": [Xor()]})
    report = saved.verify()
    assert report.ok, report.problems
    info = saved.info("weight")
    saved.flip(info.relative_path, info.offset)
    assert saved.only_problem().fqn == "weight"
