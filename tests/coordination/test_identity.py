"""All ranks of an attempt compute the same ids, and no other attempt computes one of them."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_s3.coordination import identity
from dcp_s3.coordination.identity import Attempt, ask, current_attempt, make_attempt, tell
from dcp_s3.coordination.processes import count_save, end_era
from dcp_s3.coordination.values import COMMITTING, Intent, is_newer, open_claim, parse_claim, parse_intent
from dcp_s3.errors import SaveProtocolError, SettingsError, StorageError
from dcp_s3.process import Launch, launch
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.ranks import run_ranks

_URL = parse_url("s3://bucket/run/step-1")
_SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
}
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "5", "WORLD_SIZE": "64"}
_JOBSET = {"JOBSET_UID": "uid", "JOBSET_RESTART_ATTEMPT": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("", (), 0, 1)),
        (_SRUN, Launch("slurm-71.2", (0,), 3, 8)),
        ({**_SRUN, "SLURM_RESTART_COUNT": "3"}, Launch("slurm-71.2", (3,), 3, 8)),
        (_TORCHRUN, Launch("torchrun-abc", (2,), 5, 64)),
        ({**_SRUN, **_TORCHRUN}, Launch("slurm-71.2+torchrun-abc", (0, 2), 5, 64)),
        ({**_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launch("", (2,), 5, 64)),
        ({**_JOBSET, "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4"}, Launch("jobset-uid", (4,), 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launch("", (), 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("", (), 1, 2)),
        # A batch script is one process, and so is a pod that knows only its index.
        ({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, Launch("slurm-71.batch", (0,), 0, 1)),
        ({"JOB_COMPLETION_INDEX": "3"}, Launch("", (), 0, 1)),
        ({"JOBSET_UID": "uid"}, Launch("", (), 0, 1)),  # the same at every attempt
    ],
)
def test_what_launchers_say(environment: Mapping[str, str], expected: Launch) -> None:
    assert launch(environment) == expected


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("one", "4"), ("0", "0"), ("0", "many")])
def test_a_rank_that_is_none_is_refused(rank: str, size: str) -> None:
    with pytest.raises(SettingsError, match=r"RANK = .* WORLD_SIZE = .* whole numbers"):
        launch({"RANK": rank, "WORLD_SIZE": size})


def _attempt(environment: Mapping[str, str], **options: Any) -> Attempt:
    found = launch(environment)
    return make_attempt(Settings(**options), found, rank=found.rank, world_size=found.world_size)


def test_what_tells_attempts_apart_and_nothing_for_several_ranks_is_an_error_that_names_the_remedy() -> None:
    several = {"RANK": "0", "WORLD_SIZE": "2"}
    static = {**several, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
    for each in (several, static):
        with pytest.raises(SaveProtocolError, match="DCP_S3_RUN_ID"):
            _attempt(each)
    assert _attempt(_TORCHRUN, run_id="mine").run == "mine"
    ids = [_attempt(each, run_id="mine").id for each in (several, {**several, "RANK": "1"}, static)]
    assert ids[0] == ids[1] != ids[2]
    assert len({_attempt(each).id for each in (_SRUN, {**_SRUN, "SLURM_STEP_ID": "3"}, {**_SRUN, **_TORCHRUN})}) == 3
    assert _attempt(static, run_id="mine").restart == (1,), "restarts count with it"
    for options in ({}, {"run_id": "mine"}):  # a single process needs no launcher, even if the id is used again
        assert _attempt({}, **options).id != _attempt({}, **options).id


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """This process is one of two, whose number of saves no other test has counted."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return Settings(run_id=secrets.token_hex(8))


def test_saves_are_counted_by_url_and_step_whatever_the_thread(two: Settings) -> None:
    assert current_attempt(_URL, two) is current_attempt(_URL, two)
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda _: count_save(_URL, two, step=7).number, range(400)))
    assert sorted(numbers) == [(0, 7, count) for count in range(1, 401)]
    assert [count_save(_URL, two, step=step).number for step in (8, None, 8)] == [(0, 8, 1), (0, 0, 1), (0, 8, 2)]
    assert count_save(parse_url(f"{_URL}0"), two, step=7).number == (0, 7, 1)


def test_an_era_ends_with_each_call_of_restore(two: Settings) -> None:
    root = parse_url(f"s3://bucket/{two.run_id}")
    for era in range(3):
        counted = count_save(root.child("step-1"), two, step=1)
        assert counted.number == (era, 1, 1), "counts begin again"
        counted.decided("aborted")
        assert counted.is_decided
        end_era(root, two)
    assert count_save(_URL, two, step=1).number[0] == 0, "of another root"


def test_a_store_that_does_not_answer_is_an_error_of_ours() -> None:
    class Gone:
        def set(self, *_: object) -> None: ...

        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(StorageError, match="store of the process group"):
        make_attempt(Settings(), launch({}), rank=1, world_size=2, store=Gone())


# --- attempts in claims ---------------------------------------------------------------------------------

ATTEMPT = Attempt("run", (0,), "token", 10.0, 2, 0)


@pytest.mark.parametrize(
    ("claimed", "mine", "expected"),
    [
        ({"began": 10.0}, {"began": 9.0}, True),
        ({"began": 9.0}, {"began": 10.0}, False),
        ({"began": 9.0, "restart": (1,)}, {"began": 10.0, "restart": (0,)}, False),  # restarts count anew in each start
        ({"began": None, "restart": (1,)}, {"restart": (0,)}, True),
        ({"began": None, "restart": (0,)}, {"restart": (1,)}, False),
        ({"began": None, "run": "other", "restart": (9,)}, {"restart": (1,)}, False),  # who comes later is newer
    ],
)
def test_d7_attempts_are_ordered_by_the_store_s_clock_or_by_restarts(
    claimed: Mapping[str, Any], mine: Mapping[str, Any], expected: bool
) -> None:
    theirs = dataclasses.replace(ATTEMPT, token="other", **claimed)
    claim = open_claim(theirs, "0" * 16, (0, 1, 1), 1, "", "")
    assert is_newer(claim, dataclasses.replace(ATTEMPT, **mine)) is expected
    assert not is_newer(claim, theirs)


def test_claims_and_intents_survive_their_way_and_damage_is_seen() -> None:
    claim = open_claim(ATTEMPT, "0123456789abcdef", (1, 2, 3), None, '"etag"', "", why="because")
    assert parse_claim(claim.to_json()) == claim
    lockstep = dataclasses.replace(claim, number=None, state=COMMITTING, save_id=claim.nonce + "ab")
    assert parse_claim(lockstep.to_json()) == lockstep
    for wrong in (
        {"nonce": "../evil"}, {"state": "other"}, {"save_id": "ab"}, {"roll": "f" * 20}, {"world_size": 0},
        {"step": "x"}, {"number": (1, 2)}, {"began": "today"},
    ):  # fmt: skip
        assert parse_claim(dataclasses.replace(claim, **wrong).to_json()) is None, wrong
    data = bytearray(claim.to_json())
    data[30] ^= 1
    assert parse_claim(bytes(data)) is None
    assert parse_claim(b"[]") is parse_claim(b'{"save": 1}') is None
    intent = Intent("process", 7, "digest", (1, 2**64 - 1), (3,), "other")
    assert parse_intent(intent.to_json()) == intent
    assert parse_intent(b"{}") is parse_intent(intent.to_json().replace(b"7", b"Infinity", 1)) is None


# --- what the first rank says, whatever earlier ones have left in the store ----------------------


def _store(of: dist.TCPStore | None = None) -> dist.TCPStore:
    port, timeout = 0 if of is None else of.port, timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", port, is_master=of is None, wait_for_workers=False, timeout=timeout)


def test_each_attempt_hears_its_own_first_rank_and_who_died_before_it_heard_is_not_counted() -> None:
    """torchrun's agent keeps one store over all restarts."""
    store = _store()
    clients = [_store(store) for _ in range(3)]
    with pytest.raises(SaveProtocolError, match="rank 0 of the process group has not come to a save"):
        ask(clients[0], 0.05)
    store.add(identity._ASKS, 1)  # and one that died before it had said its word
    for attempt in ("first", "second", "third"):
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask, client, 60.0) for client in clients[:2]]  # before it is there
            tell(store, attempt, 3)
            asked.append(threads.submit(ask, clients[2], 60.0))
            assert [each.result(60) for each in asked] == [attempt] * 3


# --- real ranks ----------------------------------------------------------------------------------


def _identify(directory: str) -> list[tuple[str, str, int, int, int]]:
    """Attempts of this rank: of its group, of the next one, and without one."""
    found = []

    def note() -> None:
        attempt = current_attempt(_URL, Settings())
        assert current_attempt(_URL, Settings()) is attempt
        number = count_save(_URL, Settings(), step=1).number[2]
        found.append((attempt.id, attempt.run, attempt.rank, attempt.world_size, number))

    os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"] = "71", os.environ["RANK"]  # one step a host
    note()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the first rank has to be there for the others
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{directory}/again", rank=rank, world_size=size)
    note()
    dist.barrier()
    dist.destroy_process_group()
    os.environ["DCP_S3_RUN_ID"] = "mine"
    note()
    return found


def test_ranks_agree_and_each_group_is_another_attempt(tmp_path: Path) -> None:
    found = run_ranks(3, _identify, str(tmp_path))
    for attempts in zip(*found, strict=True):
        assert len({save for save, *_ in attempts}) == 1, "whatever differs in their environments"
        assert len({run for _, run, *_ in attempts}) == 1
        assert [rank for _, _, rank, _, _ in attempts] == [0, 1, 2]
        assert {(size, number) for *_, size, number in attempts} == {(3, 1)}
    assert len({save for save, *_ in found[0]}) == 3
    assert found[0][2][1] == "mine"
