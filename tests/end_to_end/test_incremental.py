"""Incremental saves, end to end: what is frozen is copied inside S3, and each checkpoint is whole on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import CheckpointManager, S3StorageWriter, events, latest, prune, verify
from dcp_s3.save import incremental, objects
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import assert_same, blank
from tests.end_to_end.test_interchange import download
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.spill.conftest import draining, spill  # noqa: F401 - fixtures
from tests.spill.making import Spill

MIB = 2**20


@pytest.fixture(autouse=True)
def _forget() -> None:
    incremental._memories.clear()


def make_state(step: int) -> dict[str, Any]:
    """A frozen base of 12 MiB, and an adapter and an embedding of which a row changes."""
    base = {f"base.{number}": torch.arange(MIB, dtype=torch.float32) + number for number in range(3)}
    base |= {"base.empty": torch.zeros(0), "base.t": torch.ones(300, 70).t()}
    embedding = torch.arange(1000, dtype=torch.bfloat16).reshape(100, 10)
    embedding[step] = -1
    return {**base, "adapter": torch.full((1000,), float(step)), "embedding": embedding, "step": step}


def save(url: str, state: dict[str, Any], **arguments: Any) -> events.Written:
    heard: list[Any] = []
    writer = S3StorageWriter(url, incremental=True, on_event=heard.append, **arguments)
    writer.attach("config.json", b"{}")
    dcp.save(state, storage_writer=writer)
    return next(event for event in heard if isinstance(event, events.Written))


def delete_all(s3: Any, bucket: str, prefix: str = "") -> None:
    for each in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        s3.delete_object(Bucket=bucket, Key=each["Key"])


@pytest.mark.servers("memory", "rgw")
def test_what_is_frozen_is_sent_once(root: str, bucket: str, s3: Any, tmp_path: Path) -> None:
    assert save(f"{root}/step-1", make_state(1)).copied_bytes == 0
    for step in (2, 3, 4):
        written = save(f"{root}/step-{step}", make_state(step))
        assert written.copied_bytes > 12 * MIB
        assert written.bytes - written.copied_bytes < 20_000
    for step in (3, 1, 2, 4):  # whatever the others are, and whether they are
        assert_loads(f"{root}/step-{step}", make_state(step))
        assert verify(f"{root}/step-{step}", full=True).ok
        found = blank({name: value for name, value in make_state(step).items() if name != "step"})
        place = download(s3, bucket, f"run/step-{step}", tmp_path / str(step))
        dcp.load(found, storage_reader=dcp.FileSystemReader(place))
        assert_same(found, {name: make_state(step)[name] for name in found})
        delete_all(s3, bucket, f"run/step-{step}/")


@pytest.mark.servers("memory", "moto", "rgw")  # rclone copies no parts
def test_overwriting_a_checkpoint_copies_from_the_one_that_it_replaces(root: str, bucket: str, s3: Any) -> None:
    for step in (1, 2, 3):
        written = save(f"{root}/last", make_state(step), overwrite=True)
        assert (written.copied_bytes > 0) == (step > 1)
        assert_loads(f"{root}/last", make_state(step))
    assert len(s3.list_objects_v2(Bucket=bucket)["Contents"]) == written.objects + 2, "nothing of the others is left"


@pytest.mark.servers("memory")
def test_what_was_pruned_meanwhile_or_saved_by_another_process_is_sent(root: str, bucket: str, s3: Any) -> None:
    save(f"{root}/step-1", make_state(1))
    delete_all(s3, bucket)
    assert save(f"{root}/step-2", make_state(2)).copied_bytes == 0
    assert_loads(f"{root}/step-2", make_state(2))
    assert save(f"{root}/step-3", make_state(3)).copied_bytes > 12 * MIB
    prune(root, "latest:1")
    assert_loads(f"{root}/step-3", make_state(3))
    incremental._memories.clear()
    assert save(f"{root}/step-4", make_state(4)).copied_bytes == 0
    assert save(f"{root}/step-5", make_state(5)).copied_bytes > 0


@pytest.mark.servers("memory")
def test_of_many_copies_that_fail_few_are_framed_at_a_time(
    root: str, bucket: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[int] = []
    most: list[int] = []
    iterate = objects.ObjectPieces.__iter__

    def counted(self: Any) -> Any:
        now.append(1)
        most.append(len(now))
        yield from iterate(self)
        now.pop()

    state = {f"w{number}": torch.full((1_500_000,), float(number)) for number in range(12)}
    options: dict[str, Any] = {"max_objects": 12, "settings": {"part_size": "5MiB"}}
    assert save(f"{root}/step-1", state, **options).objects == 12
    delete_all(s3, bucket)
    monkeypatch.setattr(objects.ObjectPieces, "__iter__", counted)
    written = save(f"{root}/step-2", state, **options)
    assert (written.objects, written.copied_bytes) == (12, 0)
    assert max(most) <= 4
    assert_loads(f"{root}/step-2", state)


@pytest.mark.servers("memory")
def test_a_manager_whose_retention_deletes_what_is_copied_from(root: str, memory_server: Any) -> None:
    heard: list[Any] = []
    with CheckpointManager(root, incremental=True, retention="latest:1", on_event=heard.append) as manager:
        for step in range(1, 5):
            manager.save(step, make_state(step))
    committed = [event for event in heard if isinstance(event, events.Committed)]
    assert [bool(event.copied_bytes) for event in committed] == [False, True, True, True]
    assert "12.0 MiB copied" in str(committed[-1])
    assert "copied" not in str(committed[0])
    found = latest(root)
    assert found is not None
    assert found.step == 4
    assert_loads(found.url, make_state(4))


# --- several ranks --------------------------------------------------------------------------------------------


def _sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(8 * MIB, dtype=torch.float32).reshape(8, MIB)
    own = {f"of_{dist.get_rank()}": torch.arange(2 * MIB, dtype=torch.float32), "step": step}
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    return {"w": sharded, "adapter": torch.full((1000,), float(step)), "replicated": full[:4] + 1, **own}


def _save_on_ranks(root: str, how: str) -> list[tuple[int, int]]:
    """(Bytes, copied bytes) of each save of this rank; none where another process has them."""
    heard: list[Any] = []
    for step in (1, 2, 3):
        options: dict[str, Any] = {"split_replicated": how == "split", "on_event": heard.append, "step": step}
        writer = S3StorageWriter(f"{root}/step-{step}", incremental=True, **options)
        if how in ("plain", "split", "joint"):
            dcp.save(_sharded(step), storage_writer=writer, use_collectives=how != "joint")
        else:
            kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
            options = {"async_checkpointer_type": kind, "process_group": dist.group.WORLD}
            dcp.async_save(_sharded(step), storage_writer=writer, **options).result(100)  # type: ignore[union-attr]
    return [(event.bytes, event.copied_bytes) for event in heard if isinstance(event, events.Written)]


@pytest.mark.servers("memory")
@pytest.mark.parametrize("how", ["plain", "split", "thread", "process", "joint"])
def test_each_rank_copies_what_it_has_saved(root: str, memory_server: Any, how: str) -> None:
    memory_server.handle.reset_counters()
    for rank in run_ranks(2, _save_on_ranks, root, how):
        for number, (size, copied) in enumerate(rank):
            assert copied == 0 if number == 0 else size - copied < 20_000, rank
    counters = memory_server.handle.counters
    assert sum(counters.requests.get(each, 0) for each in ("CopyObject", "UploadPartCopy")) >= 4
    assert counters.bytes_in < 80 * MIB, "once"
    own = torch.arange(2 * MIB, dtype=torch.float32)
    for step in (1, 2, 3):
        whole = torch.arange(8 * MIB, dtype=torch.float32).reshape(8, MIB)
        adapter = torch.full((1000,), float(step))
        assert_loads(f"{root}/step-{step}", {"w": whole, "adapter": adapter, "of_0": own, "of_1": own})
        assert verify(f"{root}/step-{step}", full=True).ok


def test_where_s3_is_down_nothing_is_copied_and_all_is_spilled(draining: Spill) -> None:  # noqa: F811
    for step in (1, 2):
        assert (save(draining.url(str(step)), make_state(step)).copied_bytes > 0) == (step == 2)
    down = {"CopyObject", "UploadPartCopy", "HeadObject", "PutObject", "CreateMultipartUpload", "UploadPart"}
    refused: list[str] = []

    def rule(request: Any) -> Fault | None:
        if request.operation in down and len(refused) < 20 and "/.dcp_s3" not in request.key:
            refused.append(request.operation)
            return Fault.error(503, "SlowDown")
        return None

    draining.server.rule = rule
    written = save(draining.url("3"), make_state(3), settings={"spill_after": 0.2, "retry_attempts": 2})
    assert written.copied_bytes == 0
    assert written.spilled_bytes > 0
    draining.server.rule = lambda _: None
    assert_loads(draining.url("3"), make_state(3))
    written = save(draining.url("4"), make_state(4))
    assert_loads(draining.url("4"), make_state(4))
    assert save(draining.url("5"), make_state(5)).copied_bytes > 0


def test_local_durability_copies_nothing(draining: Spill) -> None:  # noqa: F811
    for step in (1, 2):
        written = save(draining.url(str(step)), make_state(step), settings={"durability": "local"})
        assert (written.copied_bytes, written.spilled_bytes) == (0, written.bytes)


def test_a_bucket_of_s3_express_gets_all_bytes(draining: Spill) -> None:  # noqa: F811
    bucket = "checkpoints--use1-az4--x-s3"
    draining.server.s3.create_bucket(bucket)
    for step in (1, 2):
        assert save(f"s3://{bucket}/run/{step}", make_state(step)).copied_bytes == 0
    assert_loads(f"s3://{bucket}/run/2", make_state(2))


@pytest.mark.servers("memory", "moto", "rgw")  # rclone copies no parts
def test_bits_are_compared_not_values(root: str) -> None:
    """-0.0 equals 0.0, and NaN equals nothing."""
    state = {"zero": torch.zeros(2 * MIB), "nan": torch.full((2 * MIB,), float("nan"))}
    save(f"{root}/1", state)
    state["zero"].neg_()
    written = save(f"{root}/2", state)
    assert 8 * MIB < written.copied_bytes < 9 * MIB
    assert_loads(f"{root}/2", state)
