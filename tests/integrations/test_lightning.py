"""What of the Lightning adapter needs no Lightning: its saves, what Lightning sees of them, and the refusal."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from dcp_s3 import S3StorageReader, S3StorageWriter, list_checkpoints, pin
from dcp_s3.errors import InvalidURLError, SaveFailedError
from dcp_s3.integrations.lightning_saves import BackgroundSaves, CheckpointFiles, find_url, newest
from dcp_s3.manager.agree import Ranks
from dcp_s3.settings import resolve_settings
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.s3.waiting import until

ROOT = f"s3://{BUCKET}/run"
A, B, LAST = f"{ROOT}/epoch=0-step=4.ckpt", f"{ROOT}/epoch=1-step=8.ckpt", f"{ROOT}/last.ckpt"


@pytest.fixture
def saves(faulty: FaultyServer) -> BackgroundSaves:
    return BackgroundSaves(Ranks(None), Ranks(None), resolve_settings(None))


def save(saves: BackgroundSaves, url: str, step: int, *, blocking: bool = False) -> None:
    def attach(writer: S3StorageWriter) -> None:
        writer.attach("meta.pt", str(step).encode())

    saves.save(url, step, {"weight": torch.full((100,), step)}, attach, {"global_step": step}, blocking=blocking)


def put_leftover(server: FaultyServer) -> None:
    """What a save to A leaves that is killed."""
    client = boto3.Session().client("s3", endpoint_url=server.s3.endpoint_url)
    client.put_object(Bucket=BUCKET, Key="run/epoch=0-step=4.ckpt/__0_0-0123456789abcdef.distcp", Body=b"left")


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


REFUSED = Fault.error(403, "AccessDenied")


def test_saves_of_one_step_do_not_wait_for_each_other(faulty: FaultyServer, saves: BackgroundSaves) -> None:
    with Held(faulty, "step=4") as held:
        save(saves, A, 4)
        save(saves, LAST, 4)  # returns although the one before it is held
        assert held.reached.wait(60)
        assert A not in committed()
    saves.close()
    assert committed() == {A, LAST}
    assert S3StorageReader(LAST).attachment("meta.pt") == b"4"


def test_a_checkpoint_stays_until_the_one_that_replaces_it_is_committed(
    faulty: FaultyServer, saves: BackgroundSaves
) -> None:
    save(saves, A, 4)
    saves.wait()
    with Held(faulty, "step=8") as held:
        save(saves, B, 8)
        saves.remove(A)
        assert held.reached.wait(60)
        assert committed() == {A}
        assert CheckpointFiles().exists(A)
        assert not CheckpointFiles(saves).exists(A), "Lightning would take another name for the next one"
        assert CheckpointFiles(saves).exists(B)
    saves.close()
    assert committed() == {B}


def test_a_checkpoint_stays_if_the_save_that_replaces_it_fails(
    faulty: FaultyServer, saves: BackgroundSaves, caplog: pytest.LogCaptureFixture
) -> None:
    save(saves, A, 4)
    saves.wait()
    faulty.once("PutObject", REFUSED, key="step=8")
    save(saves, B, 8)
    saves.remove(A)
    save(saves, LAST, 8)
    with pytest.raises(SaveFailedError, match=r"(?s)step 8 .*AccessDenied"):
        saves.close()
    assert committed() == {A, LAST}
    assert f"{A} stays" in caplog.text


def test_a_failed_save_is_raised_at_the_save_of_the_next_step_which_is_not_made(
    faulty: FaultyServer, saves: BackgroundSaves
) -> None:
    faulty.once("PutObject", REFUSED, key="step=4")
    save(saves, A, 4)
    with pytest.raises(SaveFailedError, match=r"(?s)step 4 .*AccessDenied"):
        save(saves, B, 8)
    save(saves, B, 8)
    saves.close()
    assert committed() == {B}


def test_a_blocking_save_that_fails_raises(faulty: FaultyServer, saves: BackgroundSaves) -> None:
    faulty.once("PutObject", REFUSED, key="step=4")
    with pytest.raises(SaveFailedError, match="AccessDenied"):
        save(saves, A, 4, blocking=True)
    save(saves, A, 4, blocking=True)
    assert committed() == {A}
    saves.close()


def test_a_checkpoint_that_is_still_being_saved_goes_after_the_next_one(
    faulty: FaultyServer, saves: BackgroundSaves
) -> None:
    with Held(faulty, "step=4") as held:
        save(saves, A, 4)
        saves.remove(A)
        assert held.reached.wait(60)
    saves.wait()
    assert committed() == {A}, "it is the newest"
    save(saves, B, 8)
    saves.close()
    assert committed() == {B}


def test_a_url_that_is_saved_to_again_is_not_removed(faulty: FaultyServer, saves: BackgroundSaves) -> None:
    save(saves, A, 4)
    saves.wait()
    with Held(faulty, "last"):
        save(saves, LAST, 8)
        saves.remove(A)
        save(saves, A, 8)
    saves.close()
    assert committed() == {A, LAST}
    assert S3StorageReader(A).attachment("meta.pt") == b"8"


def test_what_a_killed_save_left_there_does_not_keep_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    server, later = FaultyServer(), [0.0]
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=lambda: time.time() + later[0])
    with serve(monkeypatch, server):
        put_leftover(server)
        later[0] = 60.0
        saves = BackgroundSaves(Ranks(None), Ranks(None), resolve_settings(None))
        save(saves, A, 4)
        save(saves, B, 8)
        saves.remove(A)
        saves.close()
        assert [info.url for info in list_checkpoints(ROOT)] == [B]


def test_a_pinned_checkpoint_stays(
    faulty: FaultyServer, saves: BackgroundSaves, caplog: pytest.LogCaptureFixture
) -> None:
    save(saves, A, 4, blocking=True)
    pin(A, reason="the paper's")
    save(saves, B, 8)
    saves.remove(A)
    saves.close()
    assert committed() == {A, B}
    assert "the paper's" in caplog.text


def test_with_local_durability_a_checkpoint_stays_until_the_next_one_is_on_s3(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    settings = resolve_settings({"durability": "local", "spill_dir": str(tmp_path / "spill")})
    saves = BackgroundSaves(Ranks(None), Ranks(None), settings)
    save(saves, A, 4)
    saves.wait()
    with Held(faulty, "step=8") as held:
        save(saves, B, 8)
        saves.remove(A)
        saves.wait()  # on disk
        assert held.reached.wait(60)
        assert B not in committed()
    saves.close()
    assert committed() == {B}


def test_with_local_durability_the_save_that_began_last_counts_whatever_ends_last(
    faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = resolve_settings({"durability": "local", "spill_dir": str(tmp_path / "spill")})
    saves = BackgroundSaves(Ranks(None), Ranks(None), settings)
    save(saves, A, 4)
    saves.wait()
    until(lambda: A in committed())
    saved, last_ended = saves._saved, threading.Event()

    def in_reverse(number: int, url: str, *rest: Any) -> None:
        if url == B:
            assert last_ended.wait(60)
        saved(number, url, *rest)
        if url == LAST:
            last_ended.set()

    original, on_s3 = S3StorageWriter.wait_committed, threading.Event()

    def wait_committed(writer: S3StorageWriter, timeout: float) -> None:
        if writer.checkpoint_id == LAST and not on_s3.wait(0.1):
            raise TimeoutError
        original(writer, timeout)

    monkeypatch.setattr(saves, "_saved", in_reverse)
    monkeypatch.setattr(S3StorageWriter, "wait_committed", wait_committed)
    save(saves, B, 8)
    save(saves, LAST, 8)
    saves.remove(A)
    saves.wait()  # on disk
    with pytest.raises(TimeoutError):
        saves._wait_committed(60)
    assert A in committed()
    on_s3.set()
    saves.close()
    assert committed() == {B, LAST}


def test_what_lightning_sees(faulty: FaultyServer, saves: BackgroundSaves) -> None:
    files = CheckpointFiles()
    assert not files.exists(ROOT)
    assert files.ls(ROOT, detail=False) == []
    assert newest(ROOT) is None
    started = datetime.now(tz=timezone.utc)
    save(saves, LAST, 4, blocking=True)
    put_leftover(faulty)
    assert files.exists(ROOT)
    assert files.isdir(ROOT)
    assert files.exists(LAST)
    assert not files.exists(A), "what is not committed"
    assert newest(ROOT) == LAST
    [found] = files.ls(ROOT, detail=False)
    assert find_url(os.path.normpath(found)) == LAST
    assert files.exists(found)
    assert files.modified(found) >= started
    assert files.info(LAST)["type"] == "directory"
    for missing in (A, f"{ROOT}/other"):
        with pytest.raises(FileNotFoundError):
            files.info(missing)
        with pytest.raises(FileNotFoundError):
            files.modified(missing)
    with pytest.raises(NotImplementedError, match="install s3fs"):
        files.open(LAST, "wb")
    saves.close()


def test_the_newest_is_the_one_committed_last(faulty: FaultyServer, saves: BackgroundSaves) -> None:
    for url, step in ((B, 8), (LAST, 8), (A, 4)):
        save(saves, url, step, blocking=True)
    saves.close()
    assert newest(ROOT) == A


def test_paths_that_mean_s3() -> None:
    assert find_url("s3://bucket/run/last.ckpt") == "s3://bucket/run/last.ckpt"
    assert find_url(Path("s3://bucket/run")) == "s3://bucket/run"
    assert find_url("s3::bucket/run/last.ckpt") == "s3://bucket/run/last.ckpt"
    assert find_url("/data/run") is None
    assert find_url(None) is None
    with pytest.raises(InvalidURLError, match="pass it as text"):
        find_url("/home/me/s3:/bucket/run")  # what ModelCheckpoint makes of a pathlib.Path
