"""Every kind of entry, saved and loaded on one rank, on every server; and small files that belong to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, Settings, errors, verify
from dcp_s3.offline.copy import copy as upload
from dcp_s3.s3.store import S3Store
from tests.end_to_end import loads, states
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import every_kind, random_tensor
from tests.end_to_end.test_interchange import download, run_foreign
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.spread import spread_out

SMALL = {"part_size": "5MiB", "concurrency": 3}


def save(state: Any, url: str, **writer: Any) -> Any:
    return loads.save(state, url, settings=SMALL, **writer)


def test_every_kind(server: S3Server, root: str, bucket: str, s3: Any, tmp_path: Path) -> None:
    """Also for torch, which reads what was downloaded."""
    state = states.interchange_state()
    save(state, root, max_objects=3)
    assert_loads(root, state, settings=SMALL)
    directory = download(s3, bucket, "run", tmp_path)
    sizes = [path.stat().st_size for path in directory.glob("*.distcp")]
    assert len(sizes) == states.OBJECTS
    assert min(sizes) > 5 * 2**20, "an object has only one part"
    run_foreign(server, states.read, "filesystem", str(directory))
    save({}, f"{root}/empty")
    assert_loads(f"{root}/empty", {})


def test_multipart_objects(root: str, s3: Any, bucket: str) -> None:
    state = {
        "large": random_tensor((3000, 1000), torch.float32),
        "strided": random_tensor((2000, 1500), torch.float32).t(),
        "small": torch.ones(3),
    }
    save(state, f"{root}/ü b+%", max_objects=1)
    sizes = [o["Size"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"] if o["Key"].endswith(".distcp")]
    assert len(sizes) == 1
    assert sizes[0] > 4 * 5 * 2**20
    assert_loads(f"{root}/ü b+%", state, settings=SMALL)


def test_what_earlier_versions_spread_over_directories_is_read(memory_server: Any, root: str, s3: Any) -> None:
    state = {**every_kind(), "large": random_tensor((4000, 1000), torch.float32)}
    save(state, root)
    spread_out(s3, root)
    assert_loads(root, state, settings=SMALL)


def test_no_bytes_but_the_needed_ones_are_fetched_by_few_requests(memory_server: Any, root: str) -> None:
    server = memory_server.handle
    state = {"a": random_tensor((1000, 1000), torch.float32), "b": random_tensor((1000, 1000), torch.float32, 1)}
    save(state, f"{root}/two")
    server.reset_counters()
    loads.load({"a": torch.zeros(1000, 1000)}, f"{root}/two", settings=SMALL)
    assert server.counters.bytes_out < 4_000_000 + 30_000

    state = {f"layer.{i}": random_tensor((64,), torch.float32, i) for i in range(2000)}
    save(state, f"{root}/many")
    server.reset_counters()
    assert_loads(f"{root}/many", state, settings=SMALL)
    assert server.counters.requests["GetObject"] <= 4

    server.reset_counters()
    save({"x": torch.ones(3), "n": 5}, f"{root}/small")
    assert dict(server.counters.requests) == {"GetObject": 2, "PutObject": 3}


# --- attachments: small files that belong to a checkpoint ---------------------------------------------------

STATE = {"model": torch.arange(1000.0)}
URL = f"s3://{BUCKET}/run/step-1"


def _save(overwrite: bool = False, **attachments: bytes) -> None:
    """``common`` is attached as common.pt, and so on."""
    loads.save(STATE, URL, {f"{name}.pt": data for name, data in attachments.items()}, overwrite=overwrite)


def _read(name: str = "common.pt") -> bytes:
    return S3StorageReader(URL).attachment(name)


def _keys(server: FaultyServer) -> set[str]:
    return set(server.s3.objects(BUCKET))


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
    dcp.save(STATE, storage_writer=writer, checkpoint_id=f"{root}-2")
    assert S3StorageReader(f"{root}-2").attachments() == [], "each belongs to one save"


def test_an_overwrite_keeps_the_old_until_its_commit(faulty: FaultyServer) -> None:
    _save(common=b"old", only_old=b"x")
    seen = faulty.once("PutObject", Fault.error(403, "AccessDenied"), key="step-1/.metadata")
    with pytest.raises(CheckpointException):
        _save(True, common=b"new")
    assert seen
    assert _read() == b"old"
    _save(True, common=b"new")
    assert _read() == b"new"
    assert S3StorageReader(URL).attachments() == ["common.pt"]
    assert "run/step-1/only_old.pt" not in _keys(faulty)
    assert verify(URL, full=True).ok


def test_damage_and_a_manifest_that_leads_elsewhere_are_found(faulty: FaultyServer) -> None:
    _save(common=b"common")
    assert verify(URL, full=True).ok
    store, [manifest] = S3Store(BUCKET, Settings()), [key for key in _keys(faulty) if "manifest" in key]
    data = faulty.s3.read(BUCKET, manifest)
    fields = json.loads(data)
    [entry] = [each for each in fields["objects"] if "attachment" in each]
    assert (entry["attachment"], entry["size"], len(entry["crc64nvme"])) == ("common.pt", 6, 16)
    key = f"run/step-1/{entry['path']}"
    for entry["path"] in ("../x", "/etc/x", ".metadata", "x", "a/__0_0-ab.distcp"):
        store.put(manifest, json.dumps(fields).encode())
        with pytest.raises(errors.CorruptCheckpointError, match="cannot be read"):
            _read()
    store.put(manifest, data)
    for change, what in ((lambda: store.put(key, b"c0mmon"), "damaged"), (lambda: store.delete([key]), "gone")):
        change()
        with pytest.raises(errors.CorruptCheckpointError, match=rf"common\.pt.*is {what}"):
            _read()
        assert not verify(URL, full=what == "damaged").ok


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
