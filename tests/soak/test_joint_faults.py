"""Joint saves each of whose PUTs goes wrong, and perhaps its retry: all ranks hear the same, and it is true.

The ranks are threads. DCP_S3_TEST_CYCLES says how many saves there are (10).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageReader, errors, verify
from dcp_s3.coordination.identity import Attempt
from dcp_s3.s3 import retry
from dcp_s3.save import joint
from dcp_s3.save.joint import JointSave
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

CYCLES = int(os.environ.get("DCP_S3_TEST_CYCLES", "10"))
SEED = int(os.environ.get("DCP_S3_TEST_SEED", "0"))
KEYS = ("claim.json", ".intent.", ".roll.", ".part.", ".merged.", "manifest-", "/.metadata", ".distcp")

pytestmark = [
    pytest.mark.counted,
    pytest.mark.timeout(300 + 30 * CYCLES),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def _forged(status: int) -> Fault:
    return Fault.forge(status, b"<html/>", {"Content-Type": "text/html"}, applied=True)


# S3 answers 409 to a conditional write beside another one, and to one that it tried again itself and had done.
FAULTS = {
    "409": Fault.error(409, "ConditionalRequestConflict"),
    "409 done": _forged(409),
    "412": Fault.error(412, "PreconditionFailed"),
    "412 done": _forged(412),
    "lost": Fault.reset(),
    "lost when done": Fault.apply_then_reset(),
    "late": Fault.delay(0.2),
    "refused late": Fault.error(503, "SlowDown", seconds=0.2),
    "twice": Fault.repeat(),
}


def _faults(condition: str) -> list[str]:
    """Nobody answers 412 to a write without a condition."""
    return [name for name in FAULTS if condition != "none" or "412" not in name]


class EveryPut:
    """A rule: the first try of each PUT meets a fault, every second try another one; then it succeeds. The kinds of
    faults come in turn for each kind of key, with and without a condition."""

    def __init__(self, seed: int) -> None:
        self.met: Counter[tuple[str, str]] = Counter()
        self._draw = random.Random(seed)
        self._tries: Counter[tuple[str, str]] = Counter()
        self._turns: dict[tuple[str, str], Iterator[str]] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> Fault | None:
        if request.operation != "PutObject":
            return None
        with self._lock:
            condition = next((name for name in ("if-none-match", "if-match") if name in request.headers), "none")
            this = request.key, request.headers.get("if-match", "")
            self._tries[this] += 1
            if self._tries[this] > 2 or (self._tries[this] == 2 and self._draw.random() < 0.5):
                return None
            kind = next(each for each in KEYS if each in request.key)
            name = next(self._turns.setdefault((kind, condition), itertools.cycle(_faults(condition))))
            self.met[f"{kind} {condition}", name] += 1
            return FAULTS[name]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.002)
    logging.disable(logging.CRITICAL)
    with serve(monkeypatch) as server:
        yield server
    logging.disable(logging.NOTSET)
    joint._learned.clear()


def _state(number: int, rank: int) -> dict[str, torch.Tensor]:
    return {"same": torch.full((1000,), float(number)), f"own-{rank}": torch.full((10,), float(number))}


def _save(url: str, number: int, ranks: int, *, overwrite: bool) -> list[str]:
    """What each rank hears."""
    settings = resolve_settings({"rank_timeout": 60.0})
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        attempt = Attempt("run", (0,), f"{number}", float(number), ranks, rank)
        made = JointSave(parse_url(url), "", settings, overwrite=overwrite, attempt=attempt, of_step=number)
        planner = DefaultSavePlanner()
        planner.set_up_planner(_state(number, rank), None, True)
        made.begin()
        try:
            plan = made.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            made.write_data(planner.finish_plan(plans[0]), planner)
            made.finish(metadata, [])
            told[rank] = "saved"
        except errors.DcpS3Error as error:
            told[rank] = f"failed: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [told[rank] for rank in range(ranks)]


def test_whatever_is_answered_to_each_put_of_a_joint_save_it_is_whole(faulty: FaultyServer) -> None:
    every = EveryPut(SEED)
    # The first save of a process looks whether the store keeps conditions: a 412 then would say that it does not.
    assert _save(f"s3://{BUCKET}/run/first", 0, 2, overwrite=False) == ["saved"] * 2
    for number in range(1, CYCLES + 1):
        overwrite = number % 2 == 0
        url = f"s3://{BUCKET}/run/step-{number - number % 4 if overwrite else number}"
        faulty.rule = every
        told = _save(url, number, 2 + number % 2, overwrite=overwrite)
        faulty.rule = lambda _: None
        assert told == ["saved"] * (2 + number % 2), (number, told)
        loaded = {f"own-{rank}": torch.zeros(10) for rank in range(2 + number % 2)} | {"same": torch.zeros(1000)}
        dcp.load(loaded, storage_reader=S3StorageReader(url), no_dist=True)
        assert all((value == float(number)).all() for value in loaded.values()), (number, loaded)
        assert verify(url, full=True).ok
    if CYCLES >= 50:
        met = {name: {fault for where, fault in every.met if where == name} for name, _ in every.met}
        assert {name for name in met if "if-" in name} >= {
            "claim.json if-none-match", "claim.json if-match", ".intent. if-none-match", ".part. if-none-match",
            "/.metadata if-none-match", "/.metadata if-match",
        }  # fmt: skip
        written = Counter[str]()
        for (name, _), times in every.met.items():
            written[name] += times
        often = {name: found for name, found in met.items() if written[name] > 2 * len(FAULTS)}
        missing = {name: set(_faults(name.split()[-1])) - found for name, found in often.items()}
        assert not any(missing.values()), missing
