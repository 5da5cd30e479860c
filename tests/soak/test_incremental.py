"""Incremental saves against a model: random schedules of changes, prunes, overwrites, kills and lost answers.

Each committed checkpoint must load bit for bit alone, after all others are deleted. DCP_S3_TEST_LOOPS says how many
schedules there are (20), DCP_S3_TEST_SEED which is the first (0); a failing test has printed the number. A kill is a
server that takes nothing more from some request on, not even the cleanup, and mostly a process that has forgotten all.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tests.memory_s3.store as server_store
from dcp_s3 import S3StorageWriter, events, prune, verify
from dcp_s3.s3 import multipart, retry
from dcp_s3.save import incremental
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.memory_s3.memory import Body
from tests.memory_s3.store import CHECKSUM, crc_of

pytestmark = [
    pytest.mark.counted,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

LOOPS = int(os.environ.get("DCP_S3_TEST_LOOPS", "20"))
SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
ROOT = f"s3://{BUCKET}/run"
SMALLEST = 4096  # bytes of a part that is copied, so that states may be small
_COPIES = ("HeadObject", "CopyObject", "UploadPartCopy", "CompleteMultipartUpload")
_NOTHING = Fault.reset()
_CHANGES = (*_COPIES, "CreateMultipartUpload", "UploadPart", "PutObject")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)
    for module in (server_store, incremental):
        monkeypatch.setattr(module, "MIN_PART_SIZE", SMALLEST)
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", 3 * SMALLEST)
    monkeypatch.setattr(incremental, "MOST_COPIES", 4)
    monkeypatch.setenv("DCP_S3_INCREMENTAL", "1")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "4")


class Schedule:
    """What one training does, and the checkpoints that must be there."""

    def __init__(self, seed: int, server: FaultyServer, done: Counter[str]) -> None:
        self.rng, self.server, self.done = random.Random(seed), server, done
        self.root, self.steps, self.number = f"{ROOT}-{seed}", 0, 0
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


@pytest.mark.parametrize("part", range(4))
def test_each_checkpoint_is_whole_on_its_own(faulty: FaultyServer, part: int, caplog: pytest.LogCaptureFixture) -> None:
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
