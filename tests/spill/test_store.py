"""The spill directory: what is durable stays, what is not goes, and processes keep out of each other's way."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.errors import SpillError
from dcp_s3.memory import Piece
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import SaveWriter, SpilledSave, SpillStore
from tests.faulty import BUCKET, FaultyServer

MIB = 2**20


def make_journal(**changes: Any) -> Journal:
    return replace(Journal(f"s3://{BUCKET}/run/step-1", "abc", 1700000000.0, Settings().model_dump()), **changes)


def seal(store: SpillStore, **changes: Any) -> SpilledSave:
    """A save with one file."""
    with store.begin(make_journal(**changes), "0") as writer:
        writer.write_file("object-0", b"abc")
        writer.seal(writer.save.journal)
    return writer.save


def fill(writer: SaveWriter, name: str) -> None:
    writer.write_object(name, MIB, [Piece.of(memoryview(bytes(MIB)))])


def list_files(path: Path) -> list[str]:
    """All files, without those of locks."""
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file() and each.suffix != ".lock")


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def store(tmp_path: Path) -> SpillStore:
    return SpillStore(tmp_path / "spill")


# --- durable writes --------------------------------------------------------------------------------------


class Crash(Exception):
    """The machine stops here."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_a_journal_is_replaced_leaves_the_old_one_or_the_new(
    store: SpillStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = seal(store)
    old, new = save.journal, replace(save.journal, keys=("a", "b"))
    calls: list[str] = []
    real = getattr(os, call)

    def crash(*arguments: Any) -> Any:
        calls.append(call)
        if len(calls) == number:
            raise Crash
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, crash)
        with contextlib.suppress(Crash):
            save.update(new)
    (found,) = store.scan()
    expected = new if len(calls) < number or (call, number) == ("fsync", 2) else old
    assert found.journal == expected
    assert save.journal in (old, new)


def test_what_is_written_of_a_journal_is_flushed_before_it_has_its_name(
    store: SpillStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("fsync", "replace", "rename"):
        real = getattr(os, name)

        def note(*arguments: Any, _real: Any = real, _name: str = name) -> Any:
            order.append(_name)
            return _real(*arguments)

        monkeypatch.setattr(os, name, note)
    with store.begin(make_journal(), "0") as writer:
        order.clear()
        writer.seal(writer.save.journal)
    assert order == ["fsync", "fsync", "replace", "fsync"], "files' directory, journal, its name, the directory"


def test_a_sealed_save_is_there_with_its_files_and_another_leaves_nothing(store: SpillStore) -> None:
    with store.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")
        assert store.size() > MIB
    assert (list_files(store.path), store.scan(), store.size()) == ([], [], 0)
    seal(store, keys=("x",))
    (save,) = store.scan()
    assert save.journal == make_journal(keys=("x",), state=State.SEALED)
    assert (save.path / "object-0").read_bytes() == b"abc"
    assert not save.is_being_written()
    save.remove()
    assert list_files(store.path) == []


# --- what a process leaves that dies ---------------------------------------------------------------------


def test_the_save_of_a_live_process_stays_and_that_of_a_dead_one_goes(store: SpillStore, faulty: FaultyServer) -> None:
    with store.begin(make_journal(keys=("run/step-1/x",)), "0") as writer:
        writer.write_file("object-0", b"abc")
        (save,) = store.scan()
        assert save.is_being_written()
        assert Drainer(store).run().waiting == {save.name: "it is being written"}
        assert (save.path / "object-0").read_bytes() == b"abc"
        writer.close()  # the kernel does that when a process dies
        assert not save.is_being_written()
        assert Drainer(store).run() == DrainReport(discarded=[save.name])
    assert not save.path.exists()


def test_what_is_left_of_a_save_that_was_being_removed_or_never_began_goes(store: SpillStore) -> None:
    save = seal(store)
    (save.path / "journal").unlink()
    old, young = store.path / "new" / "old", store.path / "new" / "young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    assert store.scan() == []
    assert save.path.exists(), "looking changes nothing"
    store.tidy()
    assert not save.path.exists()
    assert not old.exists()
    assert young.exists(), "its process may be about to begin"


# --- the limit -------------------------------------------------------------------------------------------


def test_who_reserve_at_once_never_exceed_the_limit(store: SpillStore) -> None:
    limit = 10 * MIB + MIB // 2
    limited = SpillStore(store.path, limit=limit)

    def reserve(rank: int) -> int:
        made = 0
        with limited.begin(make_journal(), str(rank)) as writer:
            for number in range(8):
                with contextlib.suppress(SpillError):
                    fill(writer, f"object-{number}")
                    made += 1
                assert store.size() <= limit
            writer.seal(writer.save.journal)
        return made

    with ThreadPoolExecutor(4) as pool:  # the locks are of open files, as between processes
        assert sum(pool.map(reserve, range(4))) == 10
    assert 10 * MIB <= store.size() <= limit


def test_the_limit_counts_what_is_there_and_is_free_again_when_it_has_gone(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=2 * MIB)
    with limited.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")
        (writer.save.path / "journal.1234.tmp").symlink_to("gone")  # listed, and then not there
        assert limited.size() > MIB
        with pytest.raises(SpillError, match=r"DCP_S3_SPILL_LIMIT.*Remedy"):
            fill(writer, "object-1")
        assert not (writer.save.path / "object-1").exists()
    with limited.begin(make_journal(), "0") as writer:
        fill(writer, "object-0")


# --- locks -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A child, as a DataLoader makes for its workers, that has what this process has open until the end."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        os.close(outside)
        os.read(inside, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(outside)
        os.close(inside)
        os.waitpid(child, 0)


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_locks(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=100 * MIB)
    with contextlib.ExitStack() as stack:
        with limited.drainer(), limited.begin(make_journal(), "0") as writer, limited.reservation(1):
            assert isinstance(writer, SaveWriter)
            stack.enter_context(forked())
            writer.seal(writer.save.journal)
        with store.drainer() as alone, store.drainer() as too:
            assert (alone, too) == (True, False)
            assert Drainer(store).run() == DrainReport(busy=True)
        with open(store.path / "limit.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (save,) = store.scan()
        assert not save.is_being_written()
