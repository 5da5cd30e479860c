"""Small files that belong to a checkpoint, through the public API."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from typer.testing import CliRunner

from dcp_s3 import S3StorageReader, S3StorageWriter, Settings, errors, pin, remove, unpin, verify
from dcp_s3.cli.main import app
from dcp_s3.offline.copy import copy as download
from dcp_s3.offline.copy import copy as upload
from dcp_s3.retention.parse import parse_policy
from dcp_s3.retention.prune import prune
from dcp_s3.s3.store import S3Store
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks

STATE = {"model": torch.arange(1000.0)}
URL = f"s3://{BUCKET}/run/step-1"


def _save(url: str, attachments: dict[str, bytes], *, overwrite: bool = False, **settings: Any) -> None:
    writer = S3StorageWriter(url, overwrite=overwrite, settings=settings)
    for name, data in attachments.items():
        writer.attach(name, data)
    dcp.save(STATE, storage_writer=writer)


def _keys(server: FaultyServer) -> set[str]:
    return set(server.s3.objects(BUCKET))


def test_an_attachment_is_read_back(root: str) -> None:
    _save(f"{root}/a", {"common.pt": b"common", "rng/rank-0.bin": b"", "große Datei": b"\0" * 3_000_000})
    reader = S3StorageReader(f"{root}/a")
    assert reader.attachments() == ["common.pt", "große Datei", "rng/rank-0.bin"]
    assert reader.attachment("common.pt") == b"common"
    assert reader.attachment("rng/rank-0.bin") == b""
    assert reader.attachment("große Datei") == b"\0" * 3_000_000
    loaded = {"model": torch.zeros(1000)}
    dcp.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["model"], STATE["model"])


def test_it_is_in_the_manifest_with_its_checksum(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"common"})
    [path] = [key for key in _keys(faulty) if "manifest" in key]
    [entry] = [e for e in json.loads(faulty.s3.read(BUCKET, path))["objects"] if "attachment" in e]
    assert (entry["attachment"], entry["size"], len(entry["crc64nvme"])) == ("common.pt", 6, 16)
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"common"


def test_show_names_it(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"common"})
    result = CliRunner().invoke(app, ["show", URL])
    assert result.exit_code == 0, result.output
    assert [line.split()[-1] for line in result.output.splitlines() if "\t6 B\t" in line] == ["common.pt"]


def test_nobody_sees_a_checkpoint_without_it(faulty: FaultyServer) -> None:
    seen = faulty.once("PutObject", Fault.error(403, "AccessDenied"), key=".distcp")
    with pytest.raises(CheckpointException):
        _save(URL, {"common.pt": b"common"})
    assert seen
    assert not any(key.endswith((".metadata", "common.pt")) for key in _keys(faulty))


def test_an_overwrite_keeps_the_old_until_its_commit(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"old", "only-old": b"x"})
    before = _keys(faulty)
    faulty.once("PutObject", Fault.error(403, "AccessDenied"), key=".metadata")
    with pytest.raises(CheckpointException):
        _save(URL, {"common.pt": b"new"}, overwrite=True)
    assert S3StorageReader(URL).attachment("common.pt") == b"old"
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"old"
    _save(URL, {"common.pt": b"new"}, overwrite=True)
    assert S3StorageReader(URL).attachment("common.pt") == b"new"
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"new"
    assert S3StorageReader(URL).attachments() == ["common.pt"]
    assert "run/step-1/only-old" in before - _keys(faulty)


def test_a_lost_plain_copy_is_made_by_a_download(faulty: FaultyServer, tmp_path: Path, caplog: Any) -> None:
    _save(URL, {"common.pt": b"old"})
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied")
        if request.operation == "PutObject" and request.key.endswith("/common.pt")
        else None
    )
    _save(URL, {"common.pt": b"new"}, overwrite=True)
    assert "no plain copy of its attachment common.pt" in caplog.text
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"old"
    assert S3StorageReader(URL).attachment("common.pt") == b"new"
    download(URL, tmp_path / "there")
    assert (tmp_path / "there" / "common.pt").read_bytes() == b"new"


def test_a_copy_has_it(faulty: FaultyServer, tmp_path: Path) -> None:
    _save(URL, {"a/b.json": b"{}"})
    download(URL, tmp_path / "there")
    assert (tmp_path / "there" / "a" / "b.json").read_bytes() == b"{}"
    upload(tmp_path / "there", f"s3://{BUCKET}/copy")
    assert S3StorageReader(f"s3://{BUCKET}/copy").attachment("a/b.json") == b"{}"
    [damaged] = [path for path in (tmp_path / "there").glob("*.distcp") if path.stat().st_size == 2]
    damaged.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"cannot be copied.*distcp is not there"):
        upload(tmp_path / "there", f"s3://{BUCKET}/other")


def test_an_upload_over_another_keeps_the_old_until_its_commit(faulty: FaultyServer, tmp_path: Path) -> None:
    _save(URL, {"common.pt": b"old"})
    _save(f"s3://{BUCKET}/new", {"common.pt": b"new"})
    download(f"s3://{BUCKET}/new", tmp_path / "new")
    seen = faulty.once("PutObject", Fault.error(403, "AccessDenied"), key="step-1/")
    with pytest.raises(errors.AccessDeniedError):
        upload(tmp_path / "new", URL, overwrite=True)
    assert seen
    assert S3StorageReader(URL).attachment("common.pt") == b"old"
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"old"
    upload(tmp_path / "new", URL, overwrite=True)
    assert S3StorageReader(URL).attachment("common.pt") == b"new"
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"new"
    assert verify(URL, full=True).ok


def test_who_loses_the_race_leaves_nothing_that_is_read(faulty: FaultyServer) -> None:
    """Another save commits just before this one would."""

    def rule(request: Any) -> None:
        if request.operation == "PutObject" and request.key.endswith("step-1/.metadata") and not raced:
            raced.append(True)
            _save(URL, {"common.pt": b"winner"})

    raced: list[bool] = []
    faulty.rule = rule
    with pytest.raises(CheckpointException, match="already exists"):
        _save(URL, {"common.pt": b"loser", "loser.pt": b"loser"})
    reader = S3StorageReader(URL)
    assert (reader.attachments(), reader.attachment("common.pt")) == (["common.pt"], b"winner")
    with pytest.raises(errors.EntryNotFoundError):
        reader.attachment("loser.pt")
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"winner"
    assert "run/step-1/loser.pt" not in _keys(faulty)
    assert len([key for key in _keys(faulty) if key.endswith(".distcp")]) == 2


def test_only_what_is_attached_is_read(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"1"})
    S3Store(BUCKET, Settings()).put("run/step-1/notes.txt", b"the user's own")
    with pytest.raises(errors.EntryNotFoundError, match=r"it has common\.pt"):
        S3StorageReader(URL).attachment("notes.txt")


@pytest.mark.parametrize("path", ["../x", "/etc/x", ".metadata", "x", "a/__0_0-ab.distcp"])
def test_a_manifest_that_leads_elsewhere_is_not_read(faulty: FaultyServer, tmp_path: Path, path: str) -> None:
    _save(URL, {"common.pt": b"1"})
    [key] = [key for key in _keys(faulty) if "manifest" in key]
    fields = json.loads(faulty.s3.read(BUCKET, key))
    [entry] = [each for each in fields["objects"] if "attachment" in each]
    entry["path"] = path
    S3Store(BUCKET, Settings()).put(key, json.dumps(fields).encode())
    with pytest.raises(errors.CorruptCheckpointError, match="cannot be read"):
        S3StorageReader(URL).attachment("common.pt")
    S3Store(BUCKET, Settings()).put(f"run/step-1/{path}x", b"1")
    download(URL, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    _save(URL, {}, overwrite=True)
    assert verify(URL, full=True).ok


def test_damage_is_found(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"common"})
    assert verify(URL, full=True).ok
    [key] = [key for key, size in faulty.s3.objects(BUCKET).items() if key.endswith(".distcp") and size == 6]
    S3Store(BUCKET, Settings()).put(key, b"c0mmon")
    with pytest.raises(errors.CorruptCheckpointError, match=r"common\.pt.*is damaged"):
        S3StorageReader(URL).attachment("common.pt")
    assert not verify(URL, full=True).ok
    S3Store(BUCKET, Settings()).delete([key])
    with pytest.raises(errors.CorruptCheckpointError, match=r"common\.pt.*is gone"):
        S3StorageReader(URL).attachment("common.pt")
    assert not verify(URL).ok


def test_deleting_leaves_nothing(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"old", "gone": b""})
    _save(URL, {"common.pt": b"new", "rng/0": b""}, overwrite=True)
    _save(f"s3://{BUCKET}/run/step-2", {"common.pt": b"2"})
    S3Store(BUCKET, Settings()).put("run/step-1/notes.txt", b"the user's own")
    result = CliRunner().invoke(app, ["rm", URL, "--yes"])
    assert result.exit_code == 0, result.output
    left = {key for key in _keys(faulty) if "step-1" in key}
    assert left == {"run/step-1/notes.txt"}
    assert S3StorageReader(f"s3://{BUCKET}/run/step-2").attachment("common.pt") == b"2"


def test_a_prune_does_so_soon_after_an_overwrite(faulty: FaultyServer) -> None:
    for step in (1, 2):
        _save(f"s3://{BUCKET}/run/step-{step}", {"common.pt": b"old"})
        _save(f"s3://{BUCKET}/run/step-{step}", {"common.pt": b"new"}, overwrite=True)
    report = prune(f"s3://{BUCKET}/run", parse_policy("latest:1"))
    assert report.ok
    assert not report.left_alone
    assert not [key for key in _keys(faulty) if "step-1" in key]


def test_what_a_save_that_was_cut_off_leaves_is_pruned(faulty: FaultyServer) -> None:
    _save(f"s3://{BUCKET}/run/step-2", {})
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied")
        if request.operation == "PutObject" and request.key.endswith("step-1/.metadata")
        else None
    )
    with pytest.raises(CheckpointException):
        _save(URL, {"common.pt": b"1"})
    faulty.rule = lambda _: None
    assert "run/step-1/common.pt" in _keys(faulty)
    remove(URL, force=True)
    assert not [key for key in _keys(faulty) if "step-1" in key]


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


def test_data_that_cannot_be() -> None:
    with pytest.raises(errors.SaveProtocolError, match=r"'common\.pt' is a dict.*pass its bytes"):
        S3StorageWriter(URL).attach("common.pt", {})  # type: ignore[arg-type]
    writer = S3StorageWriter(URL)
    writer.attach("common.pt", b"1")
    with pytest.raises(errors.SaveProtocolError, match="already attached to this save"):
        writer.attach("common.pt", b"2")


def test_a_file_and_a_directory_of_one_name(faulty: FaultyServer) -> None:
    with pytest.raises(CheckpointException, match="'a' and 'a/b' cannot both be attached"):
        _save(URL, {"a": b"", "a/b": b""})
    assert not any(key.endswith(".metadata") for key in _keys(faulty))


def test_one_that_is_not_there(faulty: FaultyServer) -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        S3StorageReader(URL).attachment("common.pt")
    _save(URL, {"common.pt": b"1"})
    with pytest.raises(errors.EntryNotFoundError, match=r"no attachment 'common\.pth': it has common\.pt"):
        S3StorageReader(URL).attachment("common.pth")


def test_of_another_library(faulty: FaultyServer, tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path / "stock"))
    (tmp_path / "stock" / "common.pt").write_bytes(b"stock")
    upload(tmp_path / "stock", URL)
    assert S3StorageReader(URL).attachments() == []
    assert S3StorageReader(URL).attachment("common.pt") == b"stock"
    with pytest.raises(errors.EntryNotFoundError, match="it has none"):
        S3StorageReader(URL).attachment("metadata.json")


def test_each_belongs_to_one_save(faulty: FaultyServer) -> None:
    writer = S3StorageWriter()
    writer.attach("a", b"2", checkpoint_id=f"s3://{BUCKET}/2")
    writer.attach("a", b"1")
    dcp.save(STATE, storage_writer=writer, checkpoint_id=f"s3://{BUCKET}/1")
    dcp.save(STATE, storage_writer=writer, checkpoint_id=f"s3://{BUCKET}/2")
    dcp.save(STATE, storage_writer=writer, checkpoint_id=f"s3://{BUCKET}/3")
    found = [S3StorageReader(f"s3://{BUCKET}/{n}") for n in (1, 2, 3)]
    assert [found[0].attachment("a"), found[1].attachment("a"), found[2].attachments()] == [b"1", b"2", []]


def test_a_copy_of_the_writer_has_them(faulty: FaultyServer) -> None:
    writer = S3StorageWriter()
    writer.attach("a", b"2", checkpoint_id=f"s3://{BUCKET}/2")
    writer.attach("a", b"1")
    other = pickle.loads(pickle.dumps(writer))
    dcp.save(STATE, storage_writer=other, checkpoint_id=f"s3://{BUCKET}/1")
    dcp.save(STATE, storage_writer=writer, checkpoint_id=f"s3://{BUCKET}/2")
    found = [S3StorageReader(f"s3://{BUCKET}/{n}") for n in (1, 2)]
    assert [found[0].attachment("a"), found[1].attachment("a")] == [b"1", b"2"]
    other.attach("a", b"3", checkpoint_id=f"s3://{BUCKET}/3")
    pickle.dumps(other)  # to the process that saves
    other.attach("a", b"4", checkpoint_id=f"s3://{BUCKET}/3")
    dcp.save(STATE, storage_writer=other, checkpoint_id=f"s3://{BUCKET}/3")
    assert S3StorageReader(f"s3://{BUCKET}/3").attachment("a") == b"4"


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
    assert S3StorageReader(URL).attachment("common.pt") == b"common"
    assert faulty.s3.read(BUCKET, "run/step-1/common.pt") == b"common"


def _ranks(root: str) -> None:
    rank = dist.get_rank()
    writer = S3StorageWriter(f"{root}/ranks")
    writer.attach(f"rng-{rank}", bytes([rank]))
    writer.attach("same", b"same")
    dcp.save({"model": torch.ones(3)}, storage_writer=writer)
    reader = S3StorageReader(f"{root}/ranks")
    assert reader.attachments() == ["rng-0", "rng-1", "same"]
    assert reader.attachment(f"rng-{1 - rank}") == bytes([1 - rank])
    dist.barrier()
    if rank == 0:
        with tempfile.TemporaryDirectory() as directory:
            download(f"{root}/ranks", directory)
            upload(directory, f"{root}/copy")
        assert verify(f"{root}/copy", full=True).ok
        assert S3StorageReader(f"{root}/copy").attachment("same") == b"same"
    writer = S3StorageWriter(f"{root}/differ")
    writer.attach("same", bytes([rank]))
    with pytest.raises(CheckpointException, match="ranks attached different files as 'same'"):
        dcp.save({"model": torch.ones(3)}, storage_writer=writer)
    writer = S3StorageWriter(f"{root}/alone")
    writer.attach(f"rng-{rank}", bytes([rank]))
    dcp.save({f"rank-{rank}": torch.ones(3)}, storage_writer=writer, use_collectives=False)
    dist.barrier()
    assert S3StorageReader(f"{root}/alone").attachments() == ["rng-0", "rng-1"]


@pytest.mark.servers("memory")
def test_several_ranks(root: str) -> None:
    run_ranks(2, _ranks, root)


def _process(root: str) -> None:
    writer = S3StorageWriter()
    for step in (1, 2):
        writer.attach("step", str(step).encode())
        dcp.async_save(
            STATE,
            checkpoint_id=f"{root}/{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
        assert S3StorageReader(f"{root}/{step}").attachment("step") == str(step).encode()


@pytest.mark.servers("memory")
def test_saves_by_a_process(root: str) -> None:
    run_ranks(1, _process, root)


def test_pins_do_not_matter(faulty: FaultyServer) -> None:
    _save(URL, {"common.pt": b"1"})
    pin(URL)
    unpin(URL)
    remove(URL)
    assert not _keys(faulty)
