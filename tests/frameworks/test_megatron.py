"""Megatron-Core saves to S3 and loads from there, in every mode and across shardings, beside Megatron as it is; saves
that fail, on every rank alike, and saves that are killed."""

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

from dcp_s3 import S3StorageReader, copy, latest, list_checkpoints, verify
from dcp_s3.integrations import megatron
from dcp_s3.integrations.megatron import REPLACED
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks import megatron_jobs as jobs
from tests.frameworks.ranks import files_in, kill_in_save, run_example, run_ranks
from tests.killing import AtRequest
from tests.memory_s3 import Fault

ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/iter_0000001"
pytestmark = pytest.mark.servers("memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", jobs.MODES)
def test_a_save_loads_in_other_shardings_and_leaves_no_file_on_disk(root: str, mode: str) -> None:
    url = f"{root}/iter_0000003"
    assert run_ranks(2, jobs.save, url, 3, "rows", mode) == [[], []]
    assert latest(root).url == url
    assert verify(url).ok
    assert S3StorageReader(url).attachments() == ["common.pt", "metadata.json"]
    for world, layout in ((1, "rows"), (4, "grid"), (2, "columns")):
        run_ranks(world, jobs.load, url, 3, layout)


def test_two_saves_under_way_do_not_mix(root: str) -> None:
    run_ranks(2, jobs.save_twice_at_once, root)
    assert [info.name for info in list_checkpoints(root) if info.committed] == ["iter_1", "iter_2"]


@pytest.mark.parametrize("mode", ["sync", "persistent"])
def test_plans_are_reused_from_save_to_save(root: str, mode: str) -> None:
    assert run_ranks(2, jobs.save_with_cached_structure, root, mode) == [[False, True, True, True]] * 2


def test_fully_parallel_strategies_share_the_work(root: str) -> None:
    written = run_ranks(2, jobs.save_and_load_fully_parallel, f"{root}/iter", "forked")
    assert sum(written) == len(jobs.SHAPES)
    assert all(written)


def test_a_separation_hint_is_accepted_and_all_that_reads_a_checkpoint_reads_it(root: str) -> None:
    url = f"{root}/iter_5"
    run_ranks(2, jobs.save_with_options, url)
    run_ranks(1, jobs.look, url)
    assert verify(url).ok


def _example(arguments: list[str]) -> None:
    from examples import megatron as example

    jobs.pretend()
    example.main(arguments)


def _run(url: str, steps: int) -> list[str]:
    return run_example(_example, ["--url", url, "--steps", str(steps)], Path()).splitlines()


def test_the_example_goes_on_where_it_was_on_other_ranks(root: str, tmp_path: Path) -> None:
    whole = run_ranks(1, _run, f"{root}/whole", 15)[0]
    run_ranks(2, _run, f"{root}/cut", 10)
    rest = run_ranks(1, _run, f"{root}/cut", 15)[0]
    assert rest[0] == f"restored {root}/cut/iter_0000010 on 1 ranks"
    # Sums over ranks round otherwise than sums on one.
    assert [float(line.split()[-1]) for line in rest[1:]] == pytest.approx(
        [float(line.split()[-1]) for line in whole[10:]], abs=1e-4
    )
    assert [info.name for info in list_checkpoints(f"{root}/cut")] == ["iter_0000010", "iter_0000015"]
    assert list(tmp_path.iterdir()) == []


# --- failures and kills ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "key", "operation", "failed"),
    [
        ("sync", "/__1_", "PutObject", 1),
        ("forked", "/__1_", "PutObject", 1),
        ("persistent", "/__1_", "PutObject", 1),
        ("forked", "/.metadata", "PutObject", 0),  # the commit
        ("forked", "/.metadata", "GetObject", 0),  # the look at what is there, while planning
    ],
)
def test_every_rank_raises_the_cause(faulty: FaultyServer, mode: str, key: str, operation: str, failed: int) -> None:
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied") if request.operation == operation and key in request.key else None
    )
    for failures in run_ranks(2, jobs.fail_to_save, URL, mode):
        assert failures.keys() == {failed}
        assert "AccessDenied" in failures[failed]
    faulty.rule = lambda _: None
    assert latest(ROOT) is None


def test_a_process_that_is_killed_while_it_saves(faulty: FaultyServer) -> None:
    for failures in run_ranks(2, jobs.lose_the_process, URL):
        assert failures.keys() == {1}
        assert "ended without a result on rank 1" in failures[1]
    assert latest(ROOT) is None


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("forked", AtRequest("PutObject", 10, applied=True)),  # of the second checkpoint's data
        ("sync", AtRequest("PutObject", 16, applied=False)),  # around its commit
    ],
    ids=str,
)
def test_training_that_is_killed_goes_on_with_other_ranks(
    faulty: FaultyServer, tmp_path: Path, mode: str, moment: AtRequest
) -> None:
    kill_in_save(faulty, moment, 2, tmp_path, jobs.train, ROOT, 1000, mode)
    assert latest(ROOT).step in (2, 4)

    run_ranks(1, jobs.train, ROOT, 6, mode)
    run_ranks(4, jobs.train, ROOT, 8, mode)
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4, 6, 8]
    assert all(verify(info.url).ok for info in list_checkpoints(ROOT))
    assert [each for each in files_in(tmp_path) if not each.startswith(("output-", "rendezvous"))] == ["cwd"]


# --- beside Megatron as it is ---------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for owner, name in REPLACED:  # they are as they were afterwards
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(megatron, "_stock", {})
    megatron.install()
    megatron.install(settings={"concurrency": 2})
    return MultiStorageClientFeature.import_package()


def test_a_checkpoint_of_stock_megatron_loads_once_it_is_uploaded(
    root: str, bucket: str, s3: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    run_ranks(2, jobs.save_stock, str(directory), 4, "columns")
    for path in directory.iterdir():
        s3.upload_file(str(path), bucket, f"run/iter_0000004/{path.name}")
    run_ranks(2, jobs.load, f"{root}/iter_0000004", 4, "rows")


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


def test_a_file_that_is_not_finished_is_not_written_and_the_common_part_waits_for_its_save(
    root: str, installed: Any
) -> None:
    for mode, data in (("w", "half"), ("wb", b"half")):
        with contextlib.suppress(ZeroDivisionError), open_file(f"{root}/half", mode) as stream:
            stream.write(data)
            raise ZeroDivisionError
        stream = open_file(f"{root}/half", mode)
        stream.write(data)
        del stream  # which nobody has closed
        gc.collect()
    assert not installed.os.path.exists(f"{root}/half")
    installed.torch.save({"iteration": 1}, f"{root}/iter_1/common.pt")
    assert not installed.os.path.exists(f"{root}/iter_1")
    with pytest.raises(FileNotFoundError):
        installed.torch.load(f"{root}/iter_1/common.pt")


def test_what_goes_to_the_process_that_saves_is_its_own() -> None:
    shared, view, alone = torch.ones(4).share_memory_(), torch.ones(8)[:4], torch.ones(4)
    tensors = {MetadataIndex(str(number)): tensor for number, tensor in enumerate((shared, view, alone))}
    prepared = megatron.Prepared(None, None, {index: megatron.own_memory(tensor) for index, tensor in tensors.items()})
    for tensor in megatron.preload(prepared).data.values():
        assert torch.equal(tensor, torch.ones(4))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.is_shared()
        assert tensor.data_ptr() not in (shared.data_ptr(), view.data_ptr())
