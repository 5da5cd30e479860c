"""Small files that belong to a checkpoint, through the public API."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

from dcp_s3 import S3StorageReader, S3StorageWriter, Settings, errors, pin, unpin, verify
from dcp_s3.cli.main import app
from dcp_s3.offline.copy import copy as download
from dcp_s3.offline.copy import copy as upload
from dcp_s3.s3.store import S3Store
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.retention import making

STATE = {"model": torch.arange(1000.0)}
URL = f"s3://{BUCKET}/run/step-1"


def _save(url: str = URL, /, overwrite: bool = False, **attachments: bytes) -> None:
    """``common`` is attached as common.pt, and so on."""
    writer = S3StorageWriter(url, overwrite=overwrite)
    for name, data in attachments.items():
        writer.attach(f"{name}.pt", data)
    dcp.save(STATE, storage_writer=writer)


def _read(name: str = "common.pt", url: str = URL) -> bytes:
    return S3StorageReader(url).attachment(name)


def _keys(server: FaultyServer) -> set[str]:
    return set(server.s3.objects(BUCKET))


def _put(key: str, data: bytes) -> None:
    S3Store(BUCKET, Settings()).put(key, data)


def _manifest(server: FaultyServer) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Its key, its fields, and those of the attachment in it."""
    [key] = [key for key in _keys(server) if "manifest" in key]
    fields = json.loads(server.s3.read(BUCKET, key))
    [entry] = [each for each in fields["objects"] if "attachment" in each]
    return key, fields, entry


def test_an_attachment_is_read_back(root: str) -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        S3StorageReader(root).attachment("common.pt")
    files = {"common.pt": b"common", "rng/rank-0.bin": b"", "große Datei": b"\0" * 3_000_000}
    writer = S3StorageWriter(root)
    for name, data in files.items():
        writer.attach(name, data)
    dcp.save(STATE, storage_writer=writer)
    reader = S3StorageReader(root)
    assert reader.attachments() == sorted(files)
    assert {name: reader.attachment(name) for name in files} == files
    with pytest.raises(errors.EntryNotFoundError, match=r"no attachment 'common\.pth': it has common\.pt"):
        reader.attachment("common.pth")


# --- one save, all or nothing -------------------------------------------------------------------------------


def test_an_overwrite_keeps_the_old_until_its_commit(faulty: FaultyServer) -> None:
    _save(common=b"old", only_old=b"x")
    seen = faulty.once("PutObject", Fault.error(403, "AccessDenied"), key="step-1/.metadata")
    with pytest.raises(CheckpointException):
        _save(URL, True, common=b"new")
    assert seen
    assert _read() == b"old"
    _save(URL, True, common=b"new")
    assert _read() == b"new"
    assert S3StorageReader(URL).attachments() == ["common.pt"]
    assert "run/step-1/only_old.pt" not in _keys(faulty)
    assert verify(URL, full=True).ok


def test_who_loses_the_race_leaves_nothing_that_is_read(faulty: FaultyServer) -> None:
    """Another save commits just before this one would."""

    def rule(request: Any) -> None:
        if request.operation == "PutObject" and request.key.endswith("step-1/.metadata") and not raced:
            raced.append(True)
            _save(common=b"winner")

    raced: list[bool] = []
    faulty.rule = rule
    with pytest.raises(CheckpointException, match="already exists"):
        _save(common=b"loser", loser=b"loser")
    assert S3StorageReader(URL).attachments() == ["common.pt"]
    assert _read() == b"winner"
    with pytest.raises(errors.EntryNotFoundError):
        _read("loser.pt")
    assert "run/step-1/loser.pt" not in _keys(faulty)
    assert len([key for key in _keys(faulty) if key.endswith(".distcp")]) == 2


def test_each_belongs_to_one_save_also_of_a_copy_of_the_writer(faulty: FaultyServer) -> None:
    def save(writer: S3StorageWriter, step: int) -> list[bytes]:
        dcp.save(STATE, storage_writer=writer, checkpoint_id=f"s3://{BUCKET}/{step}")
        reader = S3StorageReader(f"s3://{BUCKET}/{step}")
        return [reader.attachment(name) for name in reader.attachments()]

    writer = S3StorageWriter()
    writer.attach("a", b"1")
    assert [save(writer, step) for step in (1, 2)] == [[b"1"], []]
    writer.attach("a", b"1")
    other = pickle.loads(pickle.dumps(writer))
    assert [save(other, 11), save(writer, 12)] == [[b"1"], []]


# --- copies, damage -----------------------------------------------------------------------------------------


def test_a_copy_has_it(faulty: FaultyServer, tmp_path: Path) -> None:
    writer = S3StorageWriter(URL)
    writer.attach("a/b.json", b"{}")
    dcp.save(STATE, storage_writer=writer)
    download(URL, tmp_path / "there")
    assert (tmp_path / "there" / "a" / "b.json").read_bytes() == b"{}"
    upload(tmp_path / "there", f"s3://{BUCKET}/copy")
    assert _read("a/b.json", f"s3://{BUCKET}/copy") == b"{}"
    [damaged] = [path for path in (tmp_path / "there").glob("*.distcp") if path.stat().st_size == 2]
    damaged.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"cannot be copied.*distcp is not there"):
        upload(tmp_path / "there", f"s3://{BUCKET}/other")


@pytest.mark.parametrize("path", ["../x", "/etc/x", ".metadata", "x", "a/__0_0-ab.distcp"])
def test_a_manifest_that_leads_elsewhere_is_not_read(faulty: FaultyServer, tmp_path: Path, path: str) -> None:
    _save(common=b"1")
    key, fields, entry = _manifest(faulty)
    entry["path"] = path
    _put(key, json.dumps(fields).encode())
    with pytest.raises(errors.CorruptCheckpointError, match="cannot be read"):
        _read()
    _put(f"run/step-1/{path}x", b"1")
    with pytest.raises(errors.CorruptCheckpointError, match=r"its manifest .* cannot be read"):
        download(URL, tmp_path / "there")
    assert not list(tmp_path.iterdir())
    _save(URL, True)
    assert verify(URL, full=True).ok


def test_damage_is_found(faulty: FaultyServer) -> None:
    _save(common=b"common")
    _, _, entry = _manifest(faulty)
    assert (entry["attachment"], entry["size"], len(entry["crc64nvme"])) == ("common.pt", 6, 16)
    assert verify(URL, full=True).ok
    [key] = [key for key, size in faulty.s3.objects(BUCKET).items() if key.endswith(".distcp") and size == 6]
    _put(key, b"c0mmon")
    with pytest.raises(errors.CorruptCheckpointError, match=r"common\.pt.*is damaged"):
        _read()
    assert not verify(URL, full=True).ok
    S3Store(BUCKET, Settings()).delete([key])
    with pytest.raises(errors.CorruptCheckpointError, match=r"common\.pt.*is gone"):
        _read()
    assert not verify(URL).ok


# --- deletion -----------------------------------------------------------------------------------------------


def test_deleting_leaves_nothing_but_what_is_the_users_own(faulty: FaultyServer) -> None:
    _save(common=b"old", gone=b"")
    _save(URL, True, common=b"new", rng=b"")
    _save(f"s3://{BUCKET}/run/step-2", common=b"2")
    _put("run/step-1/notes.txt", b"the user's own")
    with pytest.raises(errors.EntryNotFoundError, match=r"it has common\.pt"):
        _read("notes.txt")
    pin(URL)
    unpin(URL)
    result = CliRunner().invoke(app, ["rm", URL, "--yes"])
    assert result.exit_code == 0, result.output
    assert {key for key in _keys(faulty) if "step-1" in key} == {"run/step-1/notes.txt"}
    assert _read(url=f"s3://{BUCKET}/run/step-2") == b"2"


# --- names and data that cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "", ".dcp_s3", "a/b/.metadata", "a/.dcp_s3/pin", ".metadata", "__0.metadata", "x/.metadata", "a.distcp",
        ".dcp_s3/pin", "../x", "/x", "x//y", "./x", "x/.", "s3://x", "a\nb", "x" * 91, b"x",
    ],
)  # fmt: skip
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(errors.SaveProtocolError, match="cannot be the name of an attachment"):
        S3StorageWriter(URL).attach(name, b"")


def test_data_that_cannot_be_and_names_that_cannot_both_be(faulty: FaultyServer) -> None:
    writer = S3StorageWriter(URL)
    with pytest.raises(errors.SaveProtocolError, match=r"'common\.pt' is a dict"):
        writer.attach("common.pt", {})  # type: ignore[arg-type]
    writer.attach("a", b"1")
    with pytest.raises(errors.SaveProtocolError, match="already attached to this save"):
        writer.attach("a", b"2")
    writer.attach("a/b", b"")
    with pytest.raises(CheckpointException, match="'a' and 'a/b' cannot both be attached"):
        dcp.save(STATE, storage_writer=writer)
    assert not any(key.endswith(".metadata") for key in _keys(faulty))


def test_of_another_library(faulty: FaultyServer, tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path / "stock"))
    (tmp_path / "stock" / "common.pt").write_bytes(b"stock")
    upload(tmp_path / "stock", URL)
    assert S3StorageReader(URL).attachments() == []
    assert _read() == b"stock"
    with pytest.raises(errors.EntryNotFoundError, match="it has none"):
        _read("metadata.json")


# --- spilling, ranks, processes -----------------------------------------------------------------------------


def test_it_spills(faulty: FaultyServer, tmp_path: Path) -> None:
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.operation == "PutObject" else None
    settings = {"spill_dir": str(tmp_path), "durability": "local", "spill_after": 0.5}
    writer = S3StorageWriter(URL, settings=settings)
    writer.attach("common.pt", b"common")
    dcp.save(STATE, storage_writer=writer)
    waiting = S3StorageReader(URL, include_uncommitted=True, settings=settings)
    assert waiting.attachments() == ["common.pt"]
    assert waiting.attachment("common.pt") == b"common"
    with pytest.raises(errors.EntryNotFoundError):
        waiting.attachment("other")
    faulty.rule = lambda _: None
    writer.wait_committed(timeout=60)
    assert _read() == b"common"


def _ranks(root: str) -> None:
    rank = dist.get_rank()

    def save(name: str, attachments: dict[str, bytes], **options: Any) -> S3StorageReader:
        writer = S3StorageWriter(f"{root}/{name}")
        for attached, data in attachments.items():
            writer.attach(attached, data)
        dcp.save({f"rank-{rank}": torch.ones(3)}, storage_writer=writer, **options)
        dist.barrier()
        return S3StorageReader(f"{root}/{name}")

    reader = save("ranks", {f"rng-{rank}": bytes([rank]), "same": b"same"})
    assert reader.attachments() == ["rng-0", "rng-1", "same"]
    assert reader.attachment(f"rng-{1 - rank}") == bytes([1 - rank])
    with pytest.raises(CheckpointException, match="ranks attached different files as 'same'"):
        save("differ", {"same": bytes([rank])})
    reader = save("alone", {f"rng-{rank}": bytes([rank])}, use_collectives=False)
    assert reader.attachments() == ["rng-0", "rng-1"]


@pytest.mark.servers("memory")
def test_several_ranks(root: str) -> None:
    run_ranks(2, _ranks, root)


def test_attachments_are_those_of_the_commit(root: str, s3: Any, tmp_path: Path) -> None:
    making.save_on_ranks(f"{root}/ranks", 1)
    manifest = next(path for path in making.keys(s3, f"{root}/ranks") if making.is_manifest(path))
    making.put(s3, f"{root}/ranks", manifest, b"{broken")
    with pytest.raises(errors.CorruptCheckpointError, match="what is attached"):
        S3StorageReader(f"{root}/ranks").attachments()
    writer = S3StorageWriter(f"{root}/replaced")
    writer.attach("vocab.json", b"{}")
    dcp.save(making.state(), storage_writer=writer, no_dist=True)
    making.save_foreign(s3, f"{root}/replaced", tmp_path)
    assert S3StorageReader(f"{root}/replaced").attachments() == []
