"""The spill directory: what is durable stays, what is not goes, and processes keep out of each other's way."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.errors import SpillError
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.journal import Journal, State
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, serve

MIB = 2**20
_CONTEXT = multiprocessing.get_context("forkserver")


def make_journal(**changes: Any) -> Journal:
    return replace(Journal(f"s3://{BUCKET}/run/step-1", "abc", 1700000000.0, Settings().model_dump()), **changes)


def list_files(path: Path) -> list[str]:
    """All files, without those of locks."""
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file() and each.suffix != ".lock")


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def store(tmp_path: Path) -> SpillStore:
    return SpillStore(tmp_path / "spill")


@contextlib.contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that does ``target`` and is killed at the end; yields it when it has created the file ``ready``."""
    ready = Path(arguments[0]) / f"ready-{time.monotonic_ns()}"
    process = _CONTEXT.Process(target=target, args=(*arguments, str(ready)))
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.is_alive(), process.exitcode
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.join()


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# --- durable writes --------------------------------------------------------------------------------------


class Crash(Exception):
    """The machine stops here."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_a_journal_is_replaced_leaves_the_old_one_or_the_new(
    store: SpillStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.begin(make_journal(), "0") as writer:
        writer.seal(writer.save.journal)
    (save,) = store.scan()
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


def test_a_save_that_is_not_sealed_leaves_nothing(store: SpillStore) -> None:
    with store.begin(make_journal(), "0") as writer:
        os.close(writer.open_file("object-0", MIB))
        assert store.size() > MIB
    assert list_files(store.path) == []
    assert store.scan() == []
    assert store.size() == 0


def test_a_sealed_save_is_there_with_its_files(store: SpillStore) -> None:
    journal = make_journal(keys=("x",))
    with store.begin(journal, "0") as writer:
        writer.write_file("data", b"abc")
        writer.seal(journal)
    (save,) = store.scan()
    assert save.journal == replace(journal, state=State.SEALED)
    assert (save.path / "data").read_bytes() == b"abc"
    assert not save.is_being_written()
    save.remove()
    assert list_files(store.path) == []


def test_saves_come_oldest_first(store: SpillStore) -> None:
    for created_at in (3.5, 1700000000.0, 20.25, 3.25):
        with store.begin(make_journal(created_at=created_at), "0") as writer:
            writer.seal(writer.save.journal)
    assert [save.journal.created_at for save in store.scan()] == [3.25, 3.5, 20.25, 1700000000.0]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_can_not_begin_leaves_nothing_behind(
    store: SpillStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.begin(make_journal(), "0"):
        pass  # the directories are there now

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = count_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for _ in range(3):
            with pytest.raises(SpillError, match="No space left"):
                store.begin(make_journal(), "0").__enter__()
    assert count_descriptors() == before
    assert list_files(store.path) == []
    assert list((store.path / "new").iterdir()) == []


def test_a_journal_that_can_not_be_replaced_leaves_no_file_behind(
    store: SpillStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.begin(make_journal(), "0") as writer:
        writer.seal(writer.save.journal)
    (save,) = store.scan()
    before = list_files(store.path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            save.update(save.journal)
    assert list_files(store.path) == before


# --- what a process leaves that dies ---------------------------------------------------------------------


def _write_and_wait(path: str, journal: Journal, ready: str) -> None:
    with SpillStore(path).begin(journal, "0") as writer:
        writer.write_file("object-0", b"abc")
        Path(ready).touch()
        signal.pause()


def test_the_save_of_a_live_process_stays_and_that_of_a_dead_one_goes(
    store: SpillStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.path.mkdir()
    with serve(monkeypatch) as server:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.s3.endpoint_url)
        with running(_write_and_wait, str(store.path), make_journal(keys=("run/step-1/x",))) as process:
            (save,) = store.scan()
            assert save.is_being_written()
            report = Drainer(store).run()
            assert report.waiting == {save.name: "it is being written"}
            assert (save.path / "object-0").read_bytes() == b"abc"
            kill(process)
            assert not save.is_being_written()
            report = Drainer(store).run()
        assert report == DrainReport(discarded=[save.name])
        assert not save.path.exists()


def test_what_is_left_of_a_save_that_was_being_removed_goes(store: SpillStore) -> None:
    with store.begin(make_journal(), "0") as writer:
        writer.write_file("object-0", b"abc")
        writer.seal(writer.save.journal)
    (writer.save.path / "journal").unlink()
    assert store.scan() == []
    assert writer.save.path.exists(), "looking changes nothing"
    assert store.tidy() == []
    assert not writer.save.path.exists()


def test_what_is_left_of_a_save_that_never_began_goes_after_a_while(store: SpillStore) -> None:
    old, young = store.path / "new" / "old", store.path / "new" / "young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (0, 0))
    assert store.tidy() == []
    assert not old.exists()
    assert young.exists(), "its process may be about to begin"


def test_a_damaged_journal_is_set_aside_and_the_others_are_found(store: SpillStore) -> None:
    for number in range(3):
        with store.begin(make_journal(created_at=float(number)), "0") as writer:
            writer.write_file("object-0", b"abc")
            writer.seal(writer.save.journal)
    damaged = store.scan()[1]
    journal = bytearray((damaged.path / "journal").read_bytes())
    journal[100] ^= 1
    (damaged.path / "journal").write_bytes(journal)
    assert [save.journal.created_at for save in store.scan()] == [0, 2]
    assert store.list_refused() == []
    (found,) = store.tidy()
    assert found.path == damaged.path
    assert store.list_damaged() == []
    (refused,) = store.list_refused()
    assert refused.reason == found.reason
    assert refused.path.name == damaged.name
    assert "journal is damaged" in refused.reason
    assert (refused.path / "object-0").read_bytes() == b"abc"
    assert len(store.scan()) == 2


def test_a_stray_file_in_the_directory_does_no_harm(store: SpillStore) -> None:
    with store.begin(make_journal(), "0") as writer:
        writer.seal(writer.save.journal)
    (store.saves / "README").write_text("?")
    (store.path / "other").mkdir()
    assert len(store.scan()) == 1
    assert store.list_refused() == []


# --- the limit -------------------------------------------------------------------------------------------


def _reserve(path: str, limit: int, rank: int, results: Any) -> None:
    store = SpillStore(path, limit=limit)
    made = 0
    with store.begin(make_journal(), str(rank)) as writer:
        results.put(None)
        for number in range(8):
            try:
                os.close(writer.open_file(f"object-{number}", MIB))
            except SpillError as error:
                assert "DCP_S3_SPILL_LIMIT" in str(error)  # noqa: PT017 - in another process
            else:
                made += 1
            assert store.size() <= limit
        writer.seal(writer.save.journal)
    results.put(made)


def test_processes_that_reserve_at_once_never_exceed_the_limit(store: SpillStore) -> None:
    store.path.mkdir()
    limit = 10 * MIB + MIB // 2
    results = _CONTEXT.Queue()
    processes = [_CONTEXT.Process(target=_reserve, args=(str(store.path), limit, n, results)) for n in range(4)]
    for process in processes:
        process.start()
    made = [results.get(timeout=60) for _ in range(8)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sum(each for each in made if each) == 10
    assert 10 * MIB <= store.size() <= limit


def test_a_file_that_goes_while_others_are_counted_hides_none_of_them(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=2 * MIB)
    with limited.begin(make_journal(), "0") as writer:
        os.close(writer.open_file("object-0", MIB))
        (writer.save.path / "journal.1234.tmp").symlink_to("gone")  # listed, and then not there
        assert limited.size() > MIB
        with pytest.raises(SpillError, match="DCP_S3_SPILL_LIMIT"):
            writer.open_file("object-1", MIB)


def test_the_limit_is_free_again_when_a_save_has_gone(store: SpillStore) -> None:
    limited = SpillStore(store.path, limit=2 * MIB)
    with limited.begin(make_journal(), "0") as writer:
        os.close(writer.open_file("object-0", MIB))
        with pytest.raises(SpillError, match=r"DCP_S3_SPILL_LIMIT.*Remedy"):
            writer.open_file("object-1", MIB)
        assert not (writer.save.path / "object-1").exists()
    with limited.begin(make_journal(), "0") as writer:
        os.close(writer.open_file("object-0", MIB))


# --- locks -----------------------------------------------------------------------------------------------


def _hold_drainer_lock(path: str, ready: str) -> None:
    with SpillStore(path).drainer() as alone:
        assert alone
        Path(ready).touch()
        signal.pause()


def test_of_two_drains_one_is_told_that_the_other_is_at_it(store: SpillStore) -> None:
    store.path.mkdir()
    with store.begin(make_journal(), "0") as writer:
        writer.seal(writer.save.journal)
    with running(_hold_drainer_lock, str(store.path)) as process:
        report = Drainer(store).run()
        assert report.busy
        assert not report.waiting
        kill(process)
        with store.drainer() as alone:
            assert alone, "the lock of a process that was killed is free"


def test_two_drains_of_one_process_do_not_run_at_once(store: SpillStore) -> None:
    with store.drainer() as alone, store.drainer() as too:
        assert alone
        assert not too
    with store.drainer() as alone:
        assert alone


def _fork_inside(path: str, ready: str) -> None:
    """Fork, as a DataLoader does for its workers, while this process holds locks of the store."""
    store = SpillStore(path, limit=100 * MIB)
    parent = os.getpid()
    with store.drainer(), store.begin(make_journal(), "0") as writer, store.reservation(1):
        if not os.fork():
            while os.getppid() == parent:
                time.sleep(0.05)
            os._exit(0)
        writer.seal(writer.save.journal)
    Path(ready).touch()
    signal.pause()


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_locks(store: SpillStore) -> None:
    store.path.mkdir()
    with running(_fork_inside, str(store.path)):
        with store.drainer() as alone:
            assert alone
        fd = os.open(store.path / "limit.lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
        (save,) = store.scan()
        assert not save.is_being_written()
