"""The newest checkpoints cannot be read here: whoever looks for the newest one says so once, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from dcp_s3 import CheckpointManager, KeepLatest, S3StorageWriter, Settings, latest, prune
from dcp_s3.checkpoint import look
from dcp_s3.cli.main import app
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.metadata import seal
from dcp_s3.s3.store import S3Store
from tests.faulty import BUCKET, FaultyServer, serve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """Checkpoints 1 to 7."""
    monkeypatch.setattr(look, "_told", set())
    with serve(monkeypatch, FaultyServer()):
        for step in range(1, 8):
            dcp.save({"w": torch.full((3,), step)}, storage_writer=S3StorageWriter(f"{_ROOT}/step-{step}"))
        yield S3Store(BUCKET, Settings())


def _truncate(store: S3Store, key: str) -> None:
    found = store.get(f"{key}/.metadata")
    store.put(f"{key}/.metadata", found.data[:-20], metadata=found.metadata)


def _is_of_a_newer_torch(store: S3Store, key: str) -> None:
    """A class that no torch has today, in a checkpoint that is otherwise whole."""
    found = store.get(f"{key}/.metadata")
    data = found.data.replace(b"BytesStorageMetadata", b"NewerStorageMetadata")
    data = data.replace(b"TensorStorageMetadata", b"NewestStorageMetadata")
    assert data != found.data
    fields = {name: value for name, value in found.metadata.items() if "crc" not in name}
    store.put(f"{key}/.metadata", seal(data[: -17 - data[-17]]), metadata=fields)
    [manifest] = [each.key for each in store.list(f"{key}/.dcp_s3/manifest-").objects]
    read = Manifest.from_json(store.get(manifest).data)
    read.writer["torch"] = "99.0"
    store.put(manifest, read.to_json())


def _restore() -> None:
    with CheckpointManager(_ROOT) as manager:
        state = {"w": torch.zeros(3)}
        assert manager.restore(state) == 3
        assert state["w"].tolist() == [3, 3, 3]


def _latest() -> None:
    found = latest(_ROOT)
    assert found is not None
    assert found.step == 3


def _prune() -> None:
    prune(_ROOT, KeepLatest(2), dry_run=True)


def _ls() -> None:
    assert CliRunner().invoke(app, ["ls", _ROOT]).exit_code == 0


@pytest.mark.parametrize("who", [_restore, _latest, _prune, _ls], ids=lambda f: f.__name__)
def test_who_looks_for_the_newest_says_once_that_it_cannot_be_read(
    store: S3Store, caplog: pytest.LogCaptureFixture, who: Callable[[], None]
) -> None:
    for step in range(4, 8):
        _truncate(store, f"run/step-{step}")
    who()
    who()
    said = [each.getMessage() for each in caplog.records if "cannot be loaded" in each.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{_ROOT}/step-7 cannot be loaded, nor can 3 more (to {_ROOT}/step-4): ")
    assert "its CRC-64/NVME is" in said[0]
    assert "Remedy: load an earlier checkpoint" in said[0]
    assert said[0].endswith(f"The next one that can be is {_ROOT}/step-3")
    assert [each.levelname for each in caplog.records if each.getMessage() in said] == ["WARNING"]


@pytest.mark.parametrize("who", [_restore, _latest, _prune], ids=lambda f: f.__name__)
def test_what_a_newer_torch_wrote_is_said_with_its_remedy(
    store: S3Store, caplog: pytest.LogCaptureFixture, who: Callable[[], None]
) -> None:
    for step in range(4, 8):
        _is_of_a_newer_torch(store, f"run/step-{step}")
    who()
    [said] = [each.getMessage() for each in caplog.records if "cannot be loaded" in each.getMessage()]
    assert f"torch {torch.__version__}" in said
    assert "Remedy: load it with the versions that wrote it" in said


def test_nothing_is_said_of_checkpoints_that_can_be_read(store: S3Store, caplog: pytest.LogCaptureFixture) -> None:
    _ls()
    assert "cannot be loaded" not in caplog.text
