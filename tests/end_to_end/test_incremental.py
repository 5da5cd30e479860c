"""Incremental saves, end to end: what is frozen is copied inside S3, and each checkpoint is whole on its own.

And against a model: random schedules of changes, prunes, overwrites, kills and lost answers. Each committed checkpoint
must load bit for bit alone, after all others are deleted. DCP_S3_TEST_LOOPS says how many schedules there are (20),
DCP_S3_TEST_SEED which is the first (0); a failing test has printed the number. A kill is a server that takes nothing
more from some request on, not even the cleanup, and mostly a process that has forgotten all.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tests.memory_s3.store as server_store
from dcp_s3 import CheckpointManager, S3StorageWriter, events, latest, prune, verify
from dcp_s3.s3 import multipart, retry
from dcp_s3.save import incremental, objects
from dcp_s3.url import parse_url
from tests.end_to_end import loads
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import assert_same, blank
from tests.end_to_end.test_interchange import download
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.memory_s3.memory import Body
from tests.memory_s3.store import CHECKSUM, crc_of
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
    loads.save(state, url, {"config.json": b"{}"}, incremental=True, on_event=heard.append, **arguments)
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
    assert save(f"{root}/step-1", state, **options).objects == 13, "that of the attachment among them"
    delete_all(s3, bucket)
    monkeypatch.setattr(objects.ObjectPieces, "__iter__", counted)
    written = save(f"{root}/step-2", state, **options)
    assert (written.objects, written.copied_bytes) == (13, 0)
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
    assert "12.1 MiB copied" in str(committed[-1])
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


# --- random schedules against a model ------------------------------------------------------------------------

LOOPS = int(os.environ.get("DCP_S3_TEST_LOOPS", "20"))
SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
SMALLEST = 4096  # bytes of a part that is copied, so that states may be small
_COPIES = ("HeadObject", "CopyObject", "UploadPartCopy", "CompleteMultipartUpload")
_NOTHING = Fault.reset()
_CHANGES = (*_COPIES, "CreateMultipartUpload", "UploadPart", "PutObject")


class Schedule:
    """What one training does, and the checkpoints that must be there."""

    def __init__(self, seed: int, server: FaultyServer, done: Counter[str]) -> None:
        self.rng, self.server, self.done = random.Random(seed), server, done
        self.root, self.steps, self.number = f"s3://{BUCKET}/run-{seed}", 0, 0
        self.state: dict[str, Any] = {}
        self.frozen: set[str] = set()
        self.committed: dict[str, dict[str, Any]] = {}
        for number in range(self.rng.randint(2, 12)):
            self._add(self.rng.choice("abc") + str(number))

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 6)):
            self._change()
            self._save()
            if self.rng.random() < 0.3:
                # Also what uncommitted saves have left, which the next save may copy from.
                prune(self.root, f"latest:{self.rng.randint(1, 3)}", grace=0, force=True)
                self._forget_deleted()
                self.done["pruned"] += 1
            if self.rng.random() < 0.1:
                incremental._memories.clear()

    # --- the training --------------------------------------------------------------------------------------

    def _add(self, name: str) -> None:
        size = self.rng.choice([0, 1, 50, 1000, 3000, 10_000])
        self.state[name] = self._random(size, self.rng.choice([torch.float32, torch.bfloat16, torch.uint8]))
        if self.rng.random() < 0.7:
            self.frozen.add(name)

    def _random(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 250, (size,), generator=torch.manual_seed(self.rng.getrandbits(30))).to(dtype)

    def _change(self) -> None:
        for name, value in list(self.state.items()):
            if name not in self.frozen and self.rng.random() < 0.8:
                if self.rng.random() < 0.5 and value.numel():
                    value[self.rng.randrange(value.numel())] += 1
                else:
                    self.state[name] = self._random(value.numel(), value.dtype)
        what, name = self.rng.random(), self.rng.choice(sorted(self.state))
        if what < 0.1:
            self._add(self.rng.choice("abc") + f"+{self.steps}")
        elif what < 0.2 and len(self.state) > 1:
            del self.state[name]
        elif what < 0.3:
            self.frozen ^= {name}
        elif what < 0.35:
            self.state[name] = self.state[name].repeat(2)

    # --- its checkpoints -------------------------------------------------------------------------------------

    def _save(self) -> None:
        overwrite = bool(self.committed) and self.rng.random() < 0.2
        self.steps += not overwrite
        url = self.rng.choice(sorted(self.committed)) if overwrite else f"{self.root}/step-{self.steps}"
        snapshot = {name: value.clone() for name, value in self.state.items()}
        heard: list[Any] = []
        writer = S3StorageWriter(url, overwrite=overwrite, on_event=heard.append)
        kind = self.rng.choice(["well", "well", "lost answers", "killed", "vanishing", "damaged"])
        before = self._metadata(url)
        self.server.rule = self._fault(kind, _prefix(url))
        try:
            dcp.save(self.state, storage_writer=writer, no_dist=True)
        except CheckpointException:
            if kind != "killed":
                raise
            if self.rng.random() < 0.7:
                incremental._memories.clear()
        self.server.rule = lambda _: None
        while self.server.s3.in_flight:
            time.sleep(0.001)
        if self._metadata(url) != before:
            self.committed[url] = snapshot
        else:
            assert kind == "killed"
        self._forget_deleted()
        self.done[kind] += 1
        for event in heard:
            if isinstance(event, events.Written):
                self.done["bytes"] += event.bytes
                self.done["copied"] += event.copied_bytes
                self.done["saves that copied"] += event.copied_bytes > 0

    def _metadata(self, url: str) -> bytes | None:
        key = f"{_prefix(url)}.metadata"
        return self.server.s3.read(BUCKET, key) if key in self.server.s3.objects(BUCKET) else None

    def _forget_deleted(self) -> None:
        self.committed = {url: state for url, state in self.committed.items() if self._metadata(url) is not None}

    # --- what goes wrong -------------------------------------------------------------------------------------

    def _fault(self, kind: str, mine: str) -> Any:
        """``mine``: what the keys of the save begin with."""
        rng, lock, seen = random.Random(self.rng.getrandbits(30)), threading.Lock(), Counter[str]()
        at, store = rng.randint(1, 12), self.server.s3._store

        def lose(request: Any) -> Fault | None:
            same = f"{request.operation} {request.key} {request.query.get('partNumber')}"
            with lock:
                if request.operation not in _CHANGES or seen[same] >= 3 or rng.random() < 0.6:
                    return None
                seen[same] += 1
                return Fault.apply_then_reset() if rng.random() < 0.7 else Fault.error(503, "SlowDown")

        def kill(request: Any) -> Fault | None:
            with lock:
                seen["all"] += 1
                if seen["all"] < at:
                    return None
                return Fault.apply_then_reset() if seen["all"] == at and rng.random() < 0.5 else _NOTHING

        def vanish(request: Any) -> None:
            """Another checkpoint is deleted before or among the copies."""
            with lock:
                others = {"/".join(key.split("/")[:2]) + "/" for key in store.objects(BUCKET)} - {mine}
                if request.operation in _COPIES and others and rng.random() < 0.5:
                    other = rng.choice(sorted(others))
                    store.delete(BUCKET, [key for key in store.objects(BUCKET) if key.startswith(other)])

        def damage(request: Any) -> None:
            """Other bytes are where S3 copies from, with the same ETag; that checkpoint is lost."""
            with lock:
                source = request.headers.get("x-amz-copy-source", "").partition("/")[2]
                objects = store._buckets[BUCKET].objects
                if source in objects and not source.startswith(mine) and rng.random() < 0.5:
                    body = Body.of(bytes(objects[source].size))
                    objects[source] = replace(objects[source], body=body, checksums={CHECKSUM: crc_of(body)})
                    store.delete(BUCKET, [f"{source.rpartition('/')[0]}/.metadata"])

        rules = {"lost answers": lose, "killed": kill, "vanishing": vanish, "damaged": damage}
        return rules.get(kind, lambda _: None)

    # --- the promise -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each loads alone."""
        bucket = self.server.s3._store._buckets[BUCKET]
        everything = dict(bucket.objects)
        for url, expected in self.committed.items():
            bucket.objects = {key: value for key, value in everything.items() if key.startswith(_prefix(url))}
            bucket._sorted = None
            assert_loads(url, expected)
            self.done["loaded alone"] += 1
        if self.committed:
            report = verify(url, full=True)
            assert report.ok, report.problems
        bucket.objects, bucket._sorted = {}, None


def _prefix(url: str) -> str:
    return parse_url(url).key("")


@pytest.mark.counted
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("part", range(4))
def test_each_checkpoint_is_whole_on_its_own(
    faulty: FaultyServer, part: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)
    for module in (server_store, incremental):
        monkeypatch.setattr(module, "MIN_PART_SIZE", SMALLEST)
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", 3 * SMALLEST)
    monkeypatch.setattr(incremental, "MOST_COPIES", 4)
    monkeypatch.setenv("DCP_S3_INCREMENTAL", "1")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "4")
    done: Counter[str] = Counter()
    for seed in range(SEED + part, SEED + LOOPS, 4):
        print(f"schedule {seed}")
        incremental._memories.clear()
        schedule = Schedule(seed, faulty, done)
        schedule.run()
        schedule.check()
        caplog.clear()
    print(dict(done))
    assert min(done["saves that copied"], done["loaded alone"], done["killed"], done["pruned"]) > 0
    assert done["copied"] > done["bytes"] / 10


@pytest.mark.servers("memory")
def test_bits_are_compared_not_values(root: str) -> None:
    """-0.0 equals 0.0, and NaN equals nothing."""
    state = {"zero": torch.zeros(2 * MIB), "nan": torch.full((2 * MIB,), float("nan"))}
    save(f"{root}/1", state)
    state["zero"].neg_()
    assert 8 * MIB < save(f"{root}/2", state).copied_bytes < 9 * MIB
    assert_loads(f"{root}/2", state)
