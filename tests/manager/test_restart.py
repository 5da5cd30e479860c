"""CheckpointManager with local durability, killed and started again, goes on where it was."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_s3 import CheckpointManager, errors, list_checkpoints
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import RankFailed, run_ranks
from tests.spill.making import allow_all as back
from tests.spill.making import refuse_all as away

ROOT = f"s3://{BUCKET}/run"


def _state(step: int) -> dict[str, Any]:
    """Of one rank: something of its own, and something that one of the ranks saves for all."""
    rank = dist.get_rank()
    return {f"of-{rank}": torch.full((1000,), 10.0 * step + rank), "same": torch.full((10,), float(step)), "step": step}


def _is_of(loaded: dict[str, Any], step: int) -> bool:
    expected = _state(step)
    return loaded["step"] == step and all(
        torch.equal(loaded[name], value) for name, value in expected.items() if isinstance(value, torch.Tensor)
    )


def _settings(spill: str, shared: bool) -> dict[str, Any]:
    """A spill directory for each rank stands for hosts of their own."""
    directory = spill if shared else f"{spill}/host-{dist.get_rank()}"
    return {"durability": "local", "spill_dir": directory, "spill_after": "5s"}


def _save_to_s3(last: int) -> None:
    with CheckpointManager(ROOT) as manager:
        for step in range(1, last + 1):
            manager.save(step, _state(step))


def _save_and_die(spill: str, shared: bool, first: int, last: int, restored: int | None = None) -> None:
    """SIGKILL as soon as the last step is durable on every rank."""
    manager = CheckpointManager(ROOT, settings=_settings(spill, shared))
    try:
        if restored is not None:
            loaded = _state(0)
            assert manager.restore(loaded) == restored
            assert _is_of(loaded, restored)
        for step in range(first, last + 1):
            manager.save(step, _state(step), blocking=step % 2 == 0)
        manager.wait()
        dist.barrier()
    except BaseException:
        logging.getLogger().exception("before the kill")
        raise
    os.kill(os.getpid(), signal.SIGKILL)


def _live(ranks: int, *arguments: Any) -> None:
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(ranks, _save_and_die, *arguments)


def _resume(
    spill: str, shared: bool, asked: int | None = None, then: int | None = None, **options: Any
) -> int | str | None:
    """What is restored; the step after that (``then``: another one) is saved, which may not fail."""
    with CheckpointManager(ROOT, settings=_settings(spill, shared)) as manager:
        loaded = _state(0)
        try:
            found = manager.restore(loaded, asked, **options)
        except errors.DcpS3Error as error:
            return f"{type(error).__name__}: {error}"
        if found is None:
            return None
        assert _is_of(loaded, found)
        assert manager.latest_step() is not None or dist.get_rank() > 0
        step = found + 1 if then is None else then
        manager.save(step, {**_state(step), "attempt": torch.tensor(2)})
        manager.wait()
        return found


def _drained(spill: Path, *, expected: set[int]) -> None:
    """All that waits goes to S3, and is committed there."""
    stores = [SpillStore(directory) for directory in (spill, *spill.glob("host-*"))]
    deadline = time.monotonic() + 60
    while any(store.scan() for store in stores):
        assert time.monotonic() < deadline, [save.name for store in stores for save in store.scan()]
        for store in stores:
            Drainer(store).run()
    assert {info.step for info in list_checkpoints(ROOT) if info.committed} == expected


@pytest.mark.quick("2-refuse_all")
@pytest.mark.parametrize("then", [away, back])
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_what_is_on_the_disk_is_gone_on_from_whether_or_not_s3_is_back(
    faulty: FaultyServer, tmp_path: Path, ranks: int, then: Any
) -> None:
    run_ranks(ranks, _save_to_s3, 2)
    faulty.rule = away
    _live(ranks, str(tmp_path), True, 3, 5)
    faulty.rule = then
    _live(ranks, str(tmp_path), True, 6, 6, 5)
    _live(ranks, str(tmp_path), True, 7, 8, 6)
    assert run_ranks(ranks, _resume, str(tmp_path), True) == [8] * ranks
    faulty.rule = back
    assert run_ranks(ranks, _resume, str(tmp_path), True) == [9] * ranks
    _drained(tmp_path, expected=set(range(1, 11)))


def _resume_and_tell(spill: str, waits: str) -> int | str | None:
    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "restore waits" in record.getMessage():
                Path(waits).touch()

    logging.getLogger("dcp_s3").addHandler(Tell())
    return _resume(spill, False)


def test_hosts_that_need_each_others_parts_wait_until_s3_is_back(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(2, _save_to_s3, 2)
    faulty.rule = away
    _live(2, str(tmp_path), False, 3, 5)
    waits = tmp_path / "waits"

    def come_back() -> None:
        deadline = time.monotonic() + 60
        while not waits.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        faulty.rule = back

    thread = threading.Thread(target=come_back)
    thread.start()
    assert run_ranks(2, _resume_and_tell, str(tmp_path), str(waits)) == [5, 5]
    thread.join()
    assert waits.exists()


def _resume_impatiently(spill: str) -> int | str | None:
    return _resume(spill, False, drain_timeout=0.5)


def test_the_wait_for_s3_is_bounded_and_ends_in_an_error_on_all_ranks(faulty: FaultyServer, tmp_path: Path) -> None:
    faulty.rule = away
    _live(2, str(tmp_path), False, 3, 5)
    first, second = run_ranks(2, _resume_impatiently, str(tmp_path))
    assert first == second
    assert "step-00000005" in first
    assert "SlowDown" in first


def _lose(directory: Path, name: str, *, commit: bool) -> None:
    found = [
        save
        for save in SpillStore(directory).scan()
        if save.journal.url.endswith(name) and (save.journal.commit is not None) == commit
    ]
    assert found
    for save in found:
        shutil.rmtree(save.path)


@pytest.mark.quick("0-True")
@pytest.mark.parametrize(("host", "commit"), [(1, False), (0, False), (0, True)])
def test_a_step_whose_parts_are_lost_is_passed_over_and_does_not_stand_in_the_way(
    faulty: FaultyServer, tmp_path: Path, host: int, commit: bool
) -> None:
    run_ranks(2, _save_to_s3, 2)
    faulty.rule = away
    _live(2, str(tmp_path), False, 3, 5)
    _lose(tmp_path / f"host-{host}", "step-00000005", commit=commit)
    faulty.rule = back
    assert run_ranks(2, _resume, str(tmp_path), False) == [4, 4]  # and 5 is saved
    _drained(tmp_path, expected={1, 2, 3, 4, 5})
    assert run_ranks(2, _second_attempt, 5) == [True, True]


def _second_attempt(step: int) -> bool:
    loaded = {**_state(0), "attempt": torch.tensor(1)}
    with CheckpointManager(ROOT) as manager:
        assert manager.restore(loaded, step) == step
    return bool(loaded["attempt"] == 2)


@pytest.mark.quick("allow_all")
@pytest.mark.parametrize("rule", [away, back])
def test_a_run_that_goes_back_replaces_the_steps_that_waited(faulty: FaultyServer, tmp_path: Path, rule: Any) -> None:
    run_ranks(2, _save_to_s3, 1)
    faulty.rule = away
    _live(2, str(tmp_path), True, 2, 4)
    faulty.rule = rule
    asked, then = (2, 3) if rule is away else (1, 2)
    assert run_ranks(2, _resume, str(tmp_path), True, asked, then) == [asked, asked]
    faulty.rule = back
    _drained(tmp_path, expected={1, 2, 3, 4})
    assert run_ranks(2, _second_attempt, then) == [True, True]
