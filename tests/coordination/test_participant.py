"""The ranks of a save without collectives, each in a thread, over a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import errors
from dcp_s3.coordination.claim import Claim, withdraw
from dcp_s3.coordination.joint import JointSave, find_commit, lost_error, make_facts
from dcp_s3.coordination.participant import Participant
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import CONTROL_PREFIX, data_object, manifest_object, new_nonce
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.part import Part, WrittenItem, digest_of, item_hash
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

_URL = parse_url("s3://bucket/run/step-1")
_SHAPE = torch.Size((2,))


def _item(fqn: str) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size((0,)), _SHAPE), TensorProperties(dtype=torch.float32), _SHAPE
    )
    return WriteItem(MetadataIndex(fqn, torch.Size((0,))), WriteItemType.TENSOR, tensor_data=data)


class Rank:
    """One rank, with what it holds and what it writes."""

    def __init__(self, store: MemoryStore, number: int, holds: Sequence[str], *, ranks: int, **options: Any) -> None:
        attempt = options.pop("attempt", "attempt")
        self.number, self.store, self.ranks = number, store, ranks
        self.items = {item_hash(item): item for item in map(_item, holds)}
        self.held = frozenset(self.items)
        save = digest_of([hash(attempt) & 0xFFFF])
        claim = Claim(save, 1, attempt, "run", options.pop("restart", (0,)), None, ranks, 1)
        options = {"overwrite": False, "rank_timeout": 0.5, "step": 1, **options}
        self.joint = JointSave(_URL, claim, number, **options)
        self.taking_part = Participant(store, self.joint)

    def part(self, hashes: Sequence[int], number: int = 0) -> Part:
        path = data_object(self.number, 0, new_nonce())
        self.store.put(_URL.key(path), b"x" * 8 * len(hashes))
        written = tuple(
            WrittenItem(self.items[each].index, self.items[each].tensor_data, make_storage_info(path, 8 * at, 8))
            for at, each in enumerate(hashes)
        )
        entry = ObjectEntry(path, 8 * len(hashes), None)
        facts = make_facts(started_at=1.0, throttled=0, metrics={"loss": self.number}, extra={})
        paths = {each.index.fqn: (each.index.fqn,) for each in written}
        return Part(
            self.joint.save, self.number, self.ranks, written, (entry,), self.held, paths, number,
            facts if number or not self.number else {},
        )  # fmt: skip

    def hashes(self, names: Sequence[str]) -> list[int]:
        return [item_hash(_item(name)) for name in names]

    def begin_and_write(self, *names: str) -> None:
        self.taking_part.begin()
        self.write(*names)

    def write(self, *names: str) -> None:
        self.taking_part.publish(self.part(self.hashes(names)))

    def wait(self) -> str:
        return self.taking_part.wait(self.part)


def _together(ranks: Sequence[Rank], do: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [future.result(60) for future in [threads.submit(do, rank) for rank in ranks]]


def _names(store: MemoryStore) -> set[str]:
    metadata = load_metadata(store.get(_URL.key(".metadata")).data, url=str(_URL))
    return set(metadata.state_dict_metadata)


def _manifest(store: MemoryStore, save_id: str) -> Manifest:
    return Manifest.from_json(store.get(_URL.key(manifest_object(save_id))).data)


def test_the_ranks_commit_one_checkpoint_and_clean_up() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", "b", "c"], ranks=3) for number in range(3)]
    _together(ranks, lambda rank: rank.taking_part.begin())
    _together(ranks, lambda rank: rank.write("abc"[rank.number]))
    [save_id] = set(_together(ranks, Rank.wait))
    assert save_id.startswith(ranks[0].joint.save)
    assert _names(store) == {"a", "b", "c"}
    manifest = _manifest(store, save_id)
    assert manifest.metrics == {"loss": 0}
    assert manifest.coordination["made_up"] == {}
    control = {each.key for each in store.list(_URL.key(CONTROL_PREFIX)).objects}
    assert control == {_URL.key(manifest_object(save_id)), _URL.key(f"{CONTROL_PREFIX}claim.json")}


def test_what_only_one_rank_holds_is_written_by_it_in_the_end() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", f"own-{number}"], ranks=2) for number in range(2)]
    _together(ranks, lambda rank: rank.taking_part.begin())
    ranks[0].write("a")
    ranks[1].write()  # the rule said that the other one writes it
    _together(ranks, Rank.wait)
    assert _names(store) == {"a", "own-0", "own-1"}


def test_a_dead_rank_that_said_what_it_holds_is_made_up_for() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", "b", "c"], ranks=3) for number in range(3)]
    _together(ranks, lambda rank: rank.taking_part.begin())
    with ranks[0].taking_part.alive(ranks[0].held, is_known=False):
        pass  # and dies
    ranks[1].write("b")
    ranks[2].write("c")
    [save_id] = set(_together(ranks[1:], Rank.wait))
    assert _names(store) == {"a", "b", "c"}
    manifest = _manifest(store, save_id)
    [stand_in] = manifest.coordination["made_up"].values()
    assert manifest.coordination["made_up"].keys() == {"0"}
    assert manifest.metrics == {"loss": stand_in}  # what the first rank would have said
    # It was only slow: it finds the checkpoint, and does no harm.
    ranks[0].write("a")
    assert ranks[0].wait() == save_id
    assert _names(store) == {"a", "b", "c"}


def test_the_save_before_says_what_a_silent_rank_holds() -> None:
    store = MemoryStore()
    held = digest_of(Rank(store, 0, ["a", "b"], ranks=2).held)
    ranks = [Rank(store, number, ["a", "b"], ranks=2, before=lambda: [held, held]) for number in range(2)]
    ranks[1].taking_part.begin()
    ranks[1].write("b")
    ranks[1].wait()
    assert _names(store) == {"a", "b"}


@pytest.mark.parametrize(
    ("held", "attached"),
    [(("a", "own-0"), ()), (("a", "b"), ("common.pt",)), (None, ())],
    ids=["other things", "an attachment", "unknown"],
)
def test_a_dead_rank_whose_state_nobody_holds_ends_the_save(
    held: tuple[str, ...] | None, attached: tuple[str, ...]
) -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", "b"], ranks=3) for number in range(3)]
    _together(ranks, lambda rank: rank.taking_part.begin())
    if held is not None:
        dead = Rank(store, 0, held, ranks=3)
        with dead.taking_part.alive(dead.held, attached, is_known=False):
            pass
    ranks[1].write("a")
    ranks[2].write("b")

    def fails(rank: Rank) -> str:
        with pytest.raises(errors.SaveProtocolError, match="rank 0 wrote nothing for at least") as e:
            rank.wait()
        return str(e.value)

    assert len(set(_together(ranks[1:], fails))) == 1
    assert find_commit(store, ranks[1].joint) is None


@pytest.mark.parametrize("causes", [{}, {1: "the disk is full"}])
def test_ranks_that_are_a_part_of_the_job_have_their_numbers_in_the_job(causes: dict[int, str]) -> None:
    said = str(lost_error(Rank(MemoryStore(), 0, ["a"], ranks=3, members=(4, 5, 6)).joint, [1, 2], causes))
    assert "ranks 5 to 6" in said
    assert "rank 1" not in said
    assert ("rank 5: the disk is full" in said) == bool(causes)


def test_a_rank_that_is_asked_may_take_long_while_it_shows_that_it_lives() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["shared", f"own-{number}"], ranks=2) for number in range(2)]
    _together(ranks, lambda rank: rank.taking_part.begin())
    ranks[0].write("shared", "own-0")
    ranks[1].write()
    asked: list[int] = []

    def slowly(hashes: Sequence[int], number: int) -> Part:
        asked.extend(hashes)
        with ranks[1].taking_part.alive(ranks[1].held, is_known=True):
            time.sleep(4 * ranks[1].joint.rank_timeout)
        return ranks[1].part(hashes, number)

    with ThreadPoolExecutor(2) as threads:
        merging = threads.submit(ranks[0].taking_part.wait, ranks[0].part, turn=0)
        answering = threads.submit(ranks[1].taking_part.wait, slowly, turn=100)
        first, second = merging.result(60), answering.result(60)
    assert first == second
    assert _names(store) == {"shared", "own-0", "own-1"}
    assert asked == ranks[1].hashes(["own-1"]), "once"


def test_what_a_rank_has_taken_back_is_not_committed_though_all_parts_are_there() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", "b"], ranks=2) for number in range(2)]
    ranks[0].begin_and_write("a")
    ranks[1].begin_and_write("b")
    withdraw(store, ranks[0].joint.url, ranks[0].joint.claim)
    with pytest.raises(errors.SaveProtocolError, match="another attempt of the run, or a later save"):
        ranks[1].taking_part.wait(ranks[1].part, turn=0)
    assert find_commit(store, ranks[1].joint) is None


def test_a_slow_rank_that_shows_that_it_lives_is_waited_for() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a", "b"], ranks=2) for number in range(2)]
    ranks[1].begin_and_write("b")
    ended = threading.Event()

    def slow(rank: Rank) -> None:
        with rank.taking_part.alive(rank.held, is_known=False):
            ended.wait(4 * rank.joint.rank_timeout)  # far longer than a dead rank is waited for
        rank.write("a")

    with ThreadPoolExecutor(2) as threads:
        writing, waiting = threads.submit(slow, ranks[0]), threads.submit(ranks[1].wait)
        writing.result(60)
        save_id = ranks[0].wait()
        assert waiting.result(60) == save_id
    assert _manifest(store, save_id).coordination["made_up"] == {}


def test_the_turn_to_merge_passes_on_from_a_dead_rank() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a"], ranks=4) for number in range(4)]
    for rank in ranks:
        rank.begin_and_write("a")  # twice and more: one of each is kept
    last = max(ranks, key=lambda rank: rank.joint.turn_of(rank.number))
    last.wait()  # all others are dead
    assert _names(store) == {"a"}


def test_a_dead_stand_in_of_a_dead_rank_is_not_waited_for() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a"], ranks=4, rank_timeout=0.1) for number in range(4)]
    with ranks[0].taking_part.alive(ranks[0].held, is_known=False):
        pass  # and dies, as those below do
    for rank in ranks[1:]:
        rank.begin_and_write("a")
    save_id = ranks[3].taking_part.wait(ranks[3].part, turn=0)
    manifest = _manifest(store, save_id)
    assert manifest.coordination["made_up"] == {"0": 1}
    assert manifest.metrics == {"loss": 3}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_id_that_an_earlier_start_has_used_is_no_save_that_is_done(overwrite: bool) -> None:
    store = MemoryStore()
    for _ in range(2):
        ranks = [Rank(store, number, ["a"], ranks=2, overwrite=overwrite) for number in range(2)]
        if find_commit(store, ranks[0].joint) is None:
            _together(ranks, Rank.begin_and_write)
            _together(ranks, Rank.wait)
        else:
            with pytest.raises(errors.SaveProtocolError, match="DCP_S3_RUN_ID"):
                ranks[0].taking_part.begin()


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_mergers_do_no_harm(overwrite: bool) -> None:
    for _ in range(10):
        store = MemoryStore()
        if overwrite:
            old = Rank(store, 0, ["old"], ranks=1, attempt="old")
            old.taking_part.begin()
            old.write("old")
            old.wait()
        ranks = [
            Rank(store, number, ["a", "b"], ranks=2, rank_timeout=0.0, restart=(1,), overwrite=overwrite)
            for number in range(2)
        ]
        _together(ranks, lambda rank: rank.taking_part.begin())
        _together(ranks, lambda rank: rank.write("ab"[rank.number]))
        found = set(_together(ranks, Rank.wait))
        assert find_commit(store, ranks[0].joint) in found
        assert _names(store) == {"a", "b"}
        metadata = load_metadata(store.get(_URL.key(".metadata")).data, url=str(_URL))
        assert all(store.exists(_URL.key(info.relative_path)) for info in (metadata.storage_data or {}).values())


def test_an_older_attempt_neither_begins_nor_commits() -> None:
    store = MemoryStore()
    old = [Rank(store, number, ["a"], ranks=2, overwrite=True) for number in range(2)]
    for rank in old:
        rank.taking_part.begin()
        rank.write("a")
    new = Rank(store, 0, ["b"], ranks=1, attempt="new", restart=(1,), overwrite=True)
    new.taking_part.begin()
    with pytest.raises(errors.SaveProtocolError, match="another attempt of the run"):
        old[0].wait() if old[0].joint.turn_of(0) == 0 else old[1].wait()
    with pytest.raises(errors.SaveProtocolError, match="newer attempt"):
        Rank(store, 0, ["a"], ranks=2, overwrite=True).taking_part.begin()
    new.write("b")
    new.wait()
    assert _names(store) == {"b"}


class _MayNotList(MemoryStore):
    def page(self, *_: Any, **__: Any) -> Any:
        raise errors.AccessDeniedError("ListBucket is denied")


def test_what_the_merging_rank_may_not_do_ends_the_save_on_all_ranks() -> None:
    store, denied = MemoryStore(), _MayNotList()
    denied._storage = store._storage  # the same objects
    ranks = [Rank(store, number, ["a"], ranks=2, rank_timeout=60.0) for number in range(2)]
    for rank in ranks:
        rank.begin_and_write("a")
    merging, other = sorted(ranks, key=lambda rank: rank.joint.turn_of(rank.number))
    merging.taking_part._store = denied
    with pytest.raises(errors.AccessDeniedError, match="ListBucket"):
        merging.wait()
    with pytest.raises(errors.SaveProtocolError, match=r"which merges what the ranks wrote: .*ListBucket is denied"):
        other.wait()


def test_a_damaged_part_ends_the_save() -> None:
    store = MemoryStore()
    ranks = [Rank(store, number, ["a"], ranks=2) for number in range(2)]
    for rank in ranks:
        rank.begin_and_write("a")
    [key] = [each.key for each in store.list(_URL.key(CONTROL_PREFIX)).objects if ".1.0." in each.key]
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    for rank in ranks:
        with pytest.raises(errors.SaveProtocolError, match="cannot be merged"):
            rank.wait()
    assert find_commit(store, ranks[0].joint) is None
