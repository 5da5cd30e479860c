"""The commit: nothing before it, one winner, never half an overwrite, and nothing that could not be read back."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.checkpoint import readback
from dcp_s3.checkpoint.stored_metadata import check_metadata
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format import allow_list
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY, manifest_object
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.end_to_end import loads
from tests.end_to_end.loads import assert_loads, failure
from tests.end_to_end.states import random_tensor
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.retention import making
from tests.retention.runs import Run, nothing
from tests.single_ranks import committing_alone

SMALL = {"part_size": "5MiB", "concurrency": 3, "retry_attempts": 3}


def state_of(seed: int) -> dict[str, Any]:
    return {"large": random_tensor((1400, 1000), torch.float32, seed), "small": random_tensor((7,), torch.int64, seed)}


def save(state: Any, url: str, **writer: Any) -> Any:
    return loads.save(state, url, **{"settings": SMALL, **writer})


@pytest.fixture
def run() -> Run:
    return Run()


def keys(s3: Any, bucket: str) -> list[str]:
    return [found["Key"] for found in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_the_manifest_names_exactly_what_is_there(root: str, s3: Any, bucket: str) -> None:
    metadata = save(state_of(1), f"{root}/step-00000012", metrics={"loss": 1.5})
    key = f"run/step-00000012/{manifest_object(metadata.storage_meta.save_id)}"
    manifest = Manifest.from_json(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    assert (manifest.step, manifest.world_size, manifest.items) == (12, 1, 2)
    assert manifest.metrics == {"loss": 1.5}
    stored = {
        k: s3.head_object(Bucket=bucket, Key=k)["ContentLength"] for k in keys(s3, bucket) if k.endswith(".distcp")
    }
    assert {f"run/step-00000012/{entry.path}": entry.size for entry in manifest.objects} == stored
    assert {info.relative_path for info in metadata.storage_data.values()} == {e.path for e in manifest.objects}
    for name in (key, "run/step-00000012/.metadata"):
        found = s3.get_object(Bucket=bucket, Key=name)
        fields = {field.lower(): value for field, value in found["Metadata"].items()}
        assert fields[METADATA_CRC_KEY] == crc_hex(crc64nvme(found["Body"].read())), name
    assert fields[SAVE_ID_KEY] == metadata.storage_meta.save_id


def test_an_existing_checkpoint_is_refused_before_any_byte_moves(
    memory_server: Any, root: str, s3: Any, bucket: str
) -> None:
    save(state_of(1), root)
    before = keys(s3, bucket)
    memory_server.handle.reset_counters()
    error = failure(lambda: save(state_of(2), root), errors.CheckpointExistsError)
    assert "Checkpoint already exists" in str(error), "the words of torch's own writers"
    assert "overwrite=True" in str(error)
    assert set(memory_server.handle.counters.requests) == {"GetObject"}
    assert keys(s3, bucket) == before
    assert_loads(root, state_of(1))


def test_overwriting_replaces_and_removes_the_old_objects(root: str, s3: Any, bucket: str) -> None:
    save(state_of(1), root)
    s3.put_object(Bucket=bucket, Key="run/notes.txt", Body=b"mine")
    old = set(keys(s3, bucket))
    save(state_of(2), root, overwrite=True)
    new = set(keys(s3, bucket))
    assert old & new == {"run/.metadata", "run/notes.txt"}
    assert_loads(root, state_of(2))


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_at_every_request_of_a_save_the_url_holds_the_old_or_the_new_one_whole(
    run: Run, overwrite: bool, applied: bool
) -> None:
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


@pytest.mark.servers("memory", "moto", "rgw")  # rclone ignores If-None-Match
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_three_writers_exactly_one_wins(server: Any, run: Run, s3: Any, bucket: str, overwrite: bool) -> None:
    """All have looked whether a checkpoint exists before any commits."""
    run.store = run.memory = S3Store(bucket, Settings())  # type: ignore[assignment]
    if overwrite:
        if server.name == "rgw":
            pytest.skip("RGW 16 refuses every If-Match with a quoted ETag, so an overwrite there is unconditional")
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
    info = run.only()
    assert info.save_id == saves[won.index(True)][1].identity.save_id
    assert run.damages() == [None]
    assert len(keys(s3, bucket)) == 3, "the losers removed theirs"


def test_a_lost_answer_to_the_commit_is_a_commit(faulty: FaultyServer) -> None:
    seen = faulty.once("PutObject", Fault.apply_then_reset(), key=".metadata")
    save(state_of(1), f"s3://{BUCKET}/run")
    assert seen
    assert_loads(f"s3://{BUCKET}/run", state_of(1))


@pytest.mark.parametrize("collectives", [True, False])
def test_an_overwrite_that_s3_never_heard_of_deletes_nothing(faulty: FaultyServer, collectives: bool) -> None:
    """A proxy answers to the commit as S3 would, ETag and all."""
    url, old, new = f"s3://{BUCKET}/run/step-1", state_of(1), state_of(2)
    dcp.save(old, storage_writer=S3StorageWriter(url), use_collectives=collectives)
    forged = Fault.forge(200, headers={"ETag": '"0123456789abcdef0123456789abcdef"'})
    writer = S3StorageWriter(url, overwrite=True)
    seen = faulty.once("PutObject", forged, key="/.metadata")
    error = failure(lambda: dcp.save(new, storage_writer=writer), errors.TransferError)
    assert seen
    assert "not committed" in str(error)
    assert_loads(url, old)
    dcp.save(new, storage_writer=S3StorageWriter(url, overwrite=True))
    assert_loads(url, new)


@pytest.mark.parametrize("body", [b"", b"<html>Sign in</html>"])
def test_a_page_in_the_place_of_an_answer_is_no_commit(faulty: FaultyServer, body: bytes) -> None:
    url, old, new = f"s3://{BUCKET}/run/step-1", state_of(1), state_of(2)
    save(old, url)
    faulty.rule = lambda request: Fault.forge(200, body) if request.operation == "PutObject" else None
    error = failure(lambda: save(new, url, overwrite=True, settings={"retry_attempts": 2}))
    assert "a proxy or captive portal" in str(error)
    faulty.rule = lambda _: None
    assert_loads(url, old)


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


def save_by_rank(url: str, seed: int, **arguments: Any) -> None:
    writer = S3StorageWriter(url, settings=SMALL, **arguments)
    with committing_alone():
        dcp.save(state_of(seed), storage_writer=writer, use_collectives=False, no_dist=True)


def test_a_checkpoint_without_collectives_is_never_replaced(memory_server: Any, root: str) -> None:
    save(state_of(1), f"{root}/step-1")
    save_by_rank(f"{root}/step-2", 1)
    for url in (f"{root}/step-1", f"{root}/step-2"):
        for overwrite in (False, True):
            with pytest.raises(errors.CheckpointExistsError, match="delete it first"):
                save_by_rank(url, 2, overwrite=overwrite)
        assert_loads(url, state_of(1))


def test_a_checkpoint_with_collectives_replaces_one_without(
    memory_server: Any, root: str, s3: Any, bucket: str
) -> None:
    save_by_rank(root, 1)
    old = set(keys(s3, bucket))
    failure(lambda: save(state_of(2), root), errors.CheckpointExistsError)
    assert set(keys(s3, bucket)) == old
    save(state_of(2), root, overwrite=True)
    assert not old & set(keys(s3, bucket))
    assert_loads(root, state_of(2))


def test_damage_of_the_metadata_itself_is_noticed(run: Run) -> None:
    """A flipped bit could otherwise move a chunk and still be a valid pickle."""
    run.save("step-1")
    found = run.memory.get("run/step-1/.metadata")
    for position in range(0, len(found.data), 29):
        damaged = bytearray(found.data)
        damaged[position] ^= 4
        with pytest.raises(errors.CorruptCheckpointError, match="recorded was"):
            check_metadata(replace(found, data=bytes(damaged)), run.url("step-1"))


# --- read back -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "_known", set())


def _save(url: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, overwrite=True), no_dist=True)


def _refuse_a_class(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(allow_list.METADATA, ("torch.distributed.checkpoint.metadata", "TensorProperties"))


def _load_another_tensor(patch: pytest.MonkeyPatch) -> None:
    load = torch.load

    def shifted(*arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        return found.roll(1) if isinstance(found, torch.Tensor) else found

    patch.setattr(torch, "load", shifted)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_refuse_a_class, "was not committed: what was written cannot be read back"),
        (_load_another_tensor, "makes another tensor"),
    ],
)
def test_what_could_not_be_read_back_is_not_committed(
    memory_server: Any, s3: Any, root: str, monkeypatch: pytest.MonkeyPatch, change: Any, why: str
) -> None:
    url = f"{root}/step-1"
    _save(url, {"a": torch.ones(3), "step": 1})
    before = making.keys(s3, url)
    with monkeypatch.context() as patch:
        patch.setattr(readback, "_known", set())
        change(patch)
        with pytest.raises(CheckpointException, match=why):
            _save(url, {"a": torch.zeros(3, dtype=torch.int16), "step": 2})
    assert before.items() <= making.keys(s3, url).items()
    assert_loads(url, {"a": torch.ones(3), "step": 1})


def test_what_was_read_back_once_is_not_read_again(
    memory_server: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    load = readback.load_metadata

    def counted(data: bytes, **options: Any) -> Any:
        calls.append(len(data))
        return load(data, **options)

    monkeypatch.setattr(readback, "load_metadata", counted)
    _save(f"{root}/step-1", {"a": torch.ones(3), "step": 1})
    _save(f"{root}/step-2", {"b": torch.ones(30), "c": torch.ones(2), "step": 1})
    assert len(calls) == 1
    _save(f"{root}/step-3", {"b": torch.ones(30, dtype=torch.bfloat16)})
    assert len(calls) == 2
