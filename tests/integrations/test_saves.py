"""The saves of a framework, several to a step, and the checkpoints that go after them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import S3StorageReader, list_checkpoints, pin
from dcp_s3.errors import SaveFailedError, StagingError
from dcp_s3.integrations.saves import Saves
from dcp_s3.manager.agree import Ranks
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.s3.waiting import until

ROOT = f"s3://{BUCKET}/run"
A, B, LAST = f"{ROOT}/epoch=0-step=4.ckpt", f"{ROOT}/epoch=1-step=8.ckpt", f"{ROOT}/last.ckpt"


def make(settings: Settings | None = None) -> Saves:
    settings = settings or resolve_settings(None)
    return Saves(Ranks(None), settings, S3Stager(settings), background=Ranks(None), queue=1)


@pytest.fixture
def saves(faulty: FaultyServer) -> Saves:
    return make()


def save(saves: Saves, url: str, step: int, *, blocking: bool = False) -> None:
    state, files = {"weight": torch.full((100,), step)}, {"meta.pt": str(step).encode()}
    saves.save(url, step, state, lambda: ({"global_step": step}, files), blocking=blocking)


def committed() -> set[str]:
    return {info.url for info in list_checkpoints(ROOT) if info.committed}


class Held:
    """Objects whose key contains ``of`` are not written before `go` is set; at the end they are."""

    def __init__(self, server: FaultyServer, of: str) -> None:
        self._of = of
        self.reached, self.go = threading.Event(), threading.Event()
        server.rule = self._rule

    def _rule(self, request: Any) -> Fault | None:
        if request.operation == "PutObject" and self._of in request.key:
            self.reached.set()
            self.go.wait(60)
        return None

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


def test_a_checkpoint_stays_until_the_one_that_replaces_it_is_committed(faulty: FaultyServer, saves: Saves) -> None:
    save(saves, A, 4)
    saves.wait()
    with Held(faulty, "step=8") as held:
        save(saves, B, 8)
        saves.remove(A)
        assert held.reached.wait(60)
        assert committed() == {A}
        assert [saves.will_hold(url) for url in (A, B, LAST)] == [False, True, None]
    saves.close()
    assert saves.will_hold(B) is None
    assert committed() == {B}


def test_two_saves_of_a_step_are_held_and_neither_holds_up_the_training(faulty: FaultyServer, saves: Saves) -> None:
    with Held(faulty, "/") as held:
        save(saves, A, 4)
        save(saves, LAST, 4)
        assert held.reached.wait(60)
        assert committed() == set()
    saves.close()
    assert committed() == {A, LAST}


def test_a_checkpoint_stays_if_the_save_that_replaces_it_fails(
    faulty: FaultyServer, saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    save(saves, A, 4)
    saves.wait()
    faulty.once("PutObject", Fault.error(403, "AccessDenied"), key="step=8")
    save(saves, B, 8)
    saves.remove(A)
    save(saves, LAST, 8)
    with pytest.raises(SaveFailedError, match=r"(?s)step 8 .*AccessDenied"):
        saves.close()
    assert committed() == {A, LAST}
    assert f"{A} stays" in caplog.text


def test_a_checkpoint_that_is_still_being_saved_goes_after_the_next_one(faulty: FaultyServer, saves: Saves) -> None:
    with Held(faulty, "step=4") as held:
        save(saves, A, 4)
        saves.remove(A)
        assert held.reached.wait(60)
    saves.wait()
    retention = saves._retention
    assert retention is not None
    until(lambda: retention._thread is None)  # it has removed what it may
    assert committed() == {A}, "it is the newest"
    save(saves, B, 8)
    saves.close()
    assert committed() == {B}


def test_a_url_that_is_saved_to_again_is_not_removed(faulty: FaultyServer, saves: Saves) -> None:
    save(saves, A, 4)
    saves.remove(A)  # when the next save is committed
    save(saves, A, 8)
    saves.close()
    assert committed() == {A}
    assert S3StorageReader(A).attachment("meta.pt") == b"8"


def test_what_a_killed_save_left_there_does_not_keep_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    with serve(monkeypatch, FaultyServer(clock=lambda: time.time() + later[0])):
        S3Store(parse_url(A).bucket, Settings()).put("run/epoch=0-step=4.ckpt/__0_0-0123456789abcdef.distcp", b"left")
        later[0] = 60.0
        saves = make()
        save(saves, A, 4)
        save(saves, B, 8)
        saves.remove(A)
        saves.close()
        assert [info.url for info in list_checkpoints(ROOT)] == [B]


def test_a_pinned_checkpoint_stays(faulty: FaultyServer, saves: Saves, caplog: pytest.LogCaptureFixture) -> None:
    save(saves, A, 4, blocking=True)
    pin(A, reason="the paper's")
    save(saves, B, 8)
    saves.remove(A)
    saves.close()
    assert committed() == {A, B}
    assert "the paper's" in caplog.text


def test_with_local_durability_a_checkpoint_goes_when_the_last_save_is_on_s3_whatever_is_not(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    saves = make(resolve_settings({"durability": "local", "spill_dir": str(tmp_path / "spill")}))
    save(saves, A, 4)
    saves.wait()
    until(lambda: A in committed())
    save(saves, B, 8)
    saves.wait()
    until(lambda: B in committed())
    with Held(faulty, "last") as held:
        save(saves, LAST, 8)
        saves.remove(A)
        saves.wait()  # on disk
        assert held.reached.wait(60)
        with pytest.raises(TimeoutError):
            saves._wait_committed(0.1)
        assert A in committed()
    saves.close()
    assert committed() == {B, LAST}


def test_the_newest_checkpoint_stays_also_after_a_save_that_could_not_be_staged(saves: Saves) -> None:
    save(saves, A, 4, blocking=True)
    with pytest.raises(StagingError):
        saves.save(B, 8, {"lock": threading.Lock()}, lambda: ({}, {}), blocking=False)
    save(saves, B, 8, blocking=True)
    saves.remove(B)  # no later save replaces it
    saves.close()
    assert committed() == {A, B}
