"""The adapter beside Megatron as it is: each reads what the other wrote, and other paths are left alone."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.msc_utils import MultiStorageClientFeature, open_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_s3 import latest
from dcp_s3.integrations import megatron
from dcp_s3.integrations.megatron import REPLACED
from dcp_s3.offline.copy import copy
from tests.frameworks.megatron import jobs
from tests.frameworks.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for owner, name in REPLACED:  # they are as they were afterwards
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(megatron, "_stock", {})
    megatron.install()
    megatron.install(settings={"concurrency": 2})
    return MultiStorageClientFeature.import_package()


def keys(s3: Any, bucket: str) -> list[str]:
    return [found["Key"] for found in s3.list_objects_v2(Bucket=bucket)["Contents"]]


def test_a_checkpoint_of_stock_megatron_loads_once_it_is_uploaded(
    root: str, bucket: str, s3: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    run_ranks(2, jobs.save_stock, str(directory), 4, "columns")
    for path in directory.iterdir():
        s3.upload_file(str(path), bucket, f"run/iter_0000004/{path.name}")
    url = f"{root}/iter_0000004"
    run_ranks(2, jobs.load, url, 4, "rows")


def test_a_checkpoint_of_ours_loads_with_stock_megatron_once_it_is_downloaded(root: str, tmp_path: Path) -> None:
    run_ranks(1, jobs.save, f"{root}/iter_4", 3, "rows")  # it is replaced
    run_ranks(2, jobs.save, f"{root}/iter_4", 4, "rows")
    copy(f"{root}/iter_4", tmp_path / "iter_4")
    run_ranks(2, jobs.load_stock, str(tmp_path / "iter_4"), 4, "columns")


@pytest.mark.parametrize("enabled", [True, False], ids=["multistorageclient", "without"])
def test_other_paths_go_where_they_went(root: str, tmp_path: Path, enabled: bool) -> None:
    local = tmp_path / "local"
    local.mkdir()
    paths = [str(local)]
    if enabled:
        (tmp_path / "msc").mkdir()
        paths.append(f"msc://__filesystem__{tmp_path}/msc")
    run_ranks(2, jobs.save_beside, f"{root}/iter_7", paths, enabled)
    for directory in (tmp_path / path.rpartition("/")[2] for path in paths):
        assert {"common.pt", "metadata.json", ".metadata"} <= {path.name for path in directory.iterdir()}
    assert latest(root).name == "iter_7"


def test_our_writer_has_what_the_stock_one_has() -> None:
    contract = {name for name in vars(filesystem_async.FileSystemWriterAsync) if not name.startswith("_")}
    # How the stock writer writes is its own business.
    internal = {"preload_tensors", "write_preloaded_data", "write_preloaded_data_multiproc"}
    assert {name for name in contract - internal if not hasattr(megatron.MegatronS3Writer, name)} == set()


def test_the_files_of_a_training_loop(root: str, bucket: str, s3: Any, installed: Any) -> None:
    tracker = f"{root}/latest_checkpointed_iteration.txt"
    assert not installed.os.path.isfile(tracker)
    assert not installed.os.path.isdir(root)
    installed.os.makedirs(f"{root}/iter_1", exist_ok=True)
    with open_file(tracker, "w") as stream:
        stream.write("100\n")
    with open_file(tracker, "a") as stream:
        stream.write("200")
    with open_file(Path(tracker), "r") as stream:
        assert stream.read() == "100\n200"
    assert s3.get_object(Bucket=bucket, Key="run/latest_checkpointed_iteration.txt")["Body"].read() == b"100\n200"
    assert installed.os.path.isfile(tracker)
    assert installed.os.path.isdir(root, strict=False)
    installed.torch.save({"a": torch.arange(3)}, f"{root}/sub/extra.pt")
    assert torch.equal(installed.torch.load(f"{root}/sub/extra.pt", map_location="cpu")["a"], torch.arange(3))
    names = {path.name: path for path in installed.Path(root).iterdir()}
    assert names.keys() == {"latest_checkpointed_iteration.txt", "sub"}
    assert (names["sub"].is_dir(), names["latest_checkpointed_iteration.txt"].is_file()) == (True, True)
    for mode in ("r", "rb"):
        with pytest.raises(FileNotFoundError, match="missing"):
            open_file(f"{root}/missing.txt", mode)
    with pytest.raises(ValueError, match="written whole"):
        open_file(tracker, "r+")


def test_a_file_that_is_not_finished_is_not_written(root: str, installed: Any) -> None:
    for mode, data in (("w", "half"), ("wb", b"half")):
        with contextlib.suppress(ZeroDivisionError), open_file(f"{root}/half", mode) as stream:
            stream.write(data)
            raise ZeroDivisionError
        stream = open_file(f"{root}/half", mode)
        stream.write(data)
        del stream  # which nobody has closed
        gc.collect()
    assert not installed.os.path.exists(f"{root}/half")


def test_the_common_part_waits_for_its_save(root: str, installed: Any) -> None:
    installed.torch.save({"iteration": 1}, f"{root}/iter_1/common.pt")
    assert not installed.os.path.exists(f"{root}/iter_1")
    with pytest.raises(FileNotFoundError):
        installed.torch.load(f"{root}/iter_1/common.pt")


def test_what_goes_to_the_process_that_saves_is_its_own() -> None:
    shared, view, alone = torch.ones(4).share_memory_(), torch.ones(8)[:4], torch.ones(4)
    tensors = {MetadataIndex(str(number)): tensor for number, tensor in enumerate((shared, view, alone))}
    prepared = megatron.Prepared(None, None, {index: megatron._own_memory(tensor) for index, tensor in tensors.items()})
    for tensor in megatron.preload(prepared).data.values():
        assert torch.equal(tensor, torch.ones(4))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.is_shared()
        assert tensor.data_ptr() not in (shared.data_ptr(), view.data_ptr())
