"""The commit: nothing before it, one winner, never half an overwrite, and nothing that could not be read back."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.checkpoint import commit as commit_module
from dcp_s3.format import allow_list
from dcp_s3.format import metadata as metadata_module
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY, manifest_object
from dcp_s3.format.metadata import dump_metadata
from dcp_s3.limit import Deadline, Limit
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.url import parse_url
from tests.end_to_end import loads
from tests.end_to_end.loads import assert_loads, failure
from tests.end_to_end.states import random_tensor
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.retention.making import keys
from tests.retention.runs import Run, nothing

SMALL = {"part_size": "5MiB", "concurrency": 3, "retry_attempts": 3}


def state_of(seed: int) -> dict[str, Any]:
    return {"large": random_tensor((1400, 1000), torch.float32, seed), "small": random_tensor((7,), torch.int64, seed)}


def save(state: Any, url: str, **writer: Any) -> Any:
    return loads.save(state, url, **{"settings": SMALL, **writer})


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_manifest_names_exactly_what_is_there(root: str, s3: Any, bucket: str) -> None:
    metadata = save(state_of(1), f"{root}/step-00000012", metrics={"loss": 1.5})
    path = manifest_object(metadata.storage_meta.save_id)
    key = f"run/step-00000012/{path}"
    manifest = Manifest.from_json(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    assert (manifest.step, manifest.world_size, manifest.items) == (12, 1, 2)
    assert manifest.metrics == {"loss": 1.5}
    there = {entry.path: entry.size for entry in manifest.objects}
    assert {k: size for k, size in keys(s3, f"{root}/step-00000012").items() if k not in (path, ".metadata")} == there
    assert {info.relative_path for info in metadata.storage_data.values()} == {e.path for e in manifest.objects}
    for name in (key, "run/step-00000012/.metadata"):
        found = s3.get_object(Bucket=bucket, Key=name)
        fields = {field.lower(): value for field, value in found["Metadata"].items()}
        assert fields[METADATA_CRC_KEY] == crc_hex(crc64nvme(found["Body"].read())), name
    assert fields[SAVE_ID_KEY] == metadata.storage_meta.save_id


@pytest.mark.parametrize("single_ranks", [False, True])
def test_what_is_there_is_refused_before_any_byte_moves_or_replaced_whole(run: Run, single_ranks: bool) -> None:
    if single_ranks:
        run.save_on_ranks("step-1", 2)
    else:
        run.save("step-1", objects=2)
    old = run.objects()
    run.put("step-1", "notes.txt")
    before = run.objects()
    run.calls.clear()
    with pytest.raises(errors.CheckpointExistsError, match=r"^Checkpoint already exists.*overwrite=True"):
        run.save("step-1")  # the words of torch's own writers
    assert (run.objects(), set(run.calls)) == (before, set())
    run.save("step-1", overwrite=True)
    assert old.keys() & run.objects().keys() == ({"run/step-1/.metadata"} if not single_ranks else set())
    assert "run/step-1/notes.txt" in run.objects()
    assert run.damages() == [None]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_at_every_request_the_old_or_the_new_one_is_there_whole(run: Run, overwrite: bool, applied: bool) -> None:
    """The process dies at its n-th request, for every n."""
    if overwrite:
        run.save("step-1", objects=2)
    start, dead, left, stop = run.memory.snapshot(), errors.TransferError("the process is dead"), 0, 0

    def rule(method: str, _: str) -> Exception | None:
        nonlocal left
        left -= not method.startswith("after ")
        return dead if left < 0 or (left == 0 and applied == method.startswith("after ")) else None

    seen = set[str]()
    while left <= 0:
        stop += 1
        run.memory.put_back(start)
        left, run.rule = stop, rule
        with contextlib.suppress(errors.TransferError):
            run.save("step-1", objects=2, overwrite=overwrite)
        run.rule = nothing
        infos = run.catalog().scan().checkpoints
        assert [info.damage for info in infos] in ([], [None])
        assert not any(info.committed and info.foreign for info in infos), "the manifest is there before .metadata"
        assert not overwrite or infos[0].committed
        seen |= {info.save_id or "" for info in infos}
    assert stop > 4
    assert len(seen) > 1, "at first nothing or the old one, then the new one"


@pytest.mark.parametrize(("part", "attempts"), [("manifest", 1), (".metadata", 0), (".metadata", 1)])
def test_a_deadline_at_the_commit_says_whether_s3_may_still_carry_it_out(run: Run, part: str, attempts: int) -> None:
    committer, commit = run.begin("step-1")
    store = run.store.within(Limit(deadline=Deadline("DCP_S3_SAVE_TIMEOUT", 60.0, time.monotonic() + 60.0)))

    def late(method: str, key: str) -> Exception | None:
        if method != "put" or part not in key:
            return None
        setting = "DCP_S3_SAVE_TIMEOUT"
        return errors.DeadlineExceededError("late", key=key, attempts=attempts, setting=setting, seconds=60.0)

    run.rule = late
    with pytest.raises(
        errors.DeadlineExceededError, match="the save to s3://bucket/run/step-1 was not done"
    ) as failure:
        committer.commit(store, commit, spilled=False)
    assert ("S3 may still carry out the commit" in str(failure.value)) == (part == ".metadata" and attempts > 0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_three_writers_exactly_one_wins(run: Run, overwrite: bool) -> None:
    """All have looked whether a checkpoint exists before any commits."""
    if overwrite:
        run.save("step-1")
    saves = [run.begin("step-1", overwrite=overwrite) for _ in range(3)]

    def commit(number: int) -> bool:
        committer, commit = saves[number]
        try:
            return committer.commit(run.store, commit, spilled=False)
        except errors.CheckpointExistsError:
            return False

    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(commit, range(3)))
    assert won.count(True) == 1
    assert run.only().save_id == saves[won.index(True)][1].identity.save_id
    assert run.damages() == [None]
    assert len(run.objects()) == 3, "the losers removed theirs"


@pytest.mark.parametrize("collectives", [True, False])
def test_an_overwrite_that_s3_never_heard_of_deletes_nothing(faulty: FaultyServer, collectives: bool) -> None:
    """A proxy answers to the commit as S3 would, ETag and all."""
    url, old, new = f"s3://{BUCKET}/run/step-1", state_of(1), state_of(2)
    dcp.save(old, storage_writer=S3StorageWriter(url), use_collectives=collectives)
    forged = Fault.forge(200, headers={"ETag": '"0123456789abcdef0123456789abcdef"'})
    faulty.once("PutObject", forged, key="/.metadata")
    failure(lambda: save(new, url, overwrite=True), errors.TransferError, "not committed")
    assert_loads(url, old)
    save(new, url, overwrite=True)
    assert_loads(url, new)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_was_carried_out_and_refused_keeps_its_objects(faulty: FaultyServer, overwrite: bool) -> None:
    """Something on the way lets requests through, and answers 412 to each from the commit on."""
    url, state = f"s3://{BUCKET}/run/step-1", state_of(2)
    if overwrite:
        save(state_of(1), url)
    committing = []

    def rule(request: Any) -> Fault | None:
        committing.extend(["now"] if request.key.endswith("/.metadata") and request.method == "PUT" else [])
        return Fault.forge(412, b"no", applied=True) if committing else None

    faulty.rule = rule
    failure(lambda: save(state, url, overwrite=overwrite), errors.TransferError)
    faulty.rule = lambda _: None
    assert_loads(url, state)


def test_an_overwrite_of_damaged_metadata_keeps_what_it_cannot_name(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save("step-1")
    data = [path for path in run.objects("step-1") if path.endswith(".distcp")]
    run.put("step-1", ".metadata", b"garbage")
    run.save("step-1", overwrite=True)
    assert "will stay" in caplog.text
    assert set(data) <= run.objects("step-1").keys()
    assert run.damages() == [None]


def test_metrics_that_json_cannot_hold(memory_server: Any, root: str) -> None:
    with pytest.raises(errors.SaveProtocolError, match="item"):
        S3StorageWriter(root, metrics={"loss": torch.tensor(1.0)})


def check(state: dict[str, Any]) -> None:
    """As in a commit of this state."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    commit_module.check_readable(dump_metadata(replace(metadata, storage_data={})), parse_url("s3://bucket/run/step-1"))


def another_tensor(*arguments: Any, load: Any = torch.load, **options: Any) -> Any:
    found = load(*arguments, **options)
    return found.roll(1) if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("why", ["what was written cannot be read back", "another tensor"])
def test_what_could_not_be_read_back_is_not_committed(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(commit_module, "_known", set())  # as in a new process
    with monkeypatch.context() as patch:
        if why == "another tensor":
            patch.setattr(torch, "load", another_tensor)
        else:
            patch.delitem(allow_list.METADATA, "torch.distributed.checkpoint.metadata.TensorProperties")
        for _ in range(2):
            with pytest.raises(errors.SaveProtocolError, match=why):
                check({"a": torch.zeros(3, dtype=torch.int16), "step": 2})
    with mock.patch("dcp_s3.format.metadata.load_metadata", side_effect=metadata_module.load_metadata) as load:
        check({"a": torch.ones(3), "step": 1})
        check({"b": torch.ones(30), "c": torch.ones(2), "step": 1})
        assert load.call_count == 1, "names that were read back once are not read again"
        check({"b": torch.ones(30, dtype=torch.bfloat16)})
        assert load.call_count == 2
