"""S3CheckpointManager with the trainer in examples/torchtitan.py, which calls it as torchtitan's own does: torchtitan's
options on S3, what others wrote, and runs that are killed in a save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
import tyro
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.checkpointer import CheckpointManager

from dcp_s3 import copy, errors, latest, list_checkpoints, read_tensors, verify
from dcp_s3.integrations.torchtitan import S3CheckpointManager
from examples.torchtitan import Trainer
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_ranks
from tests.memory_s3 import Fault
from tests.preload import MODULES
from tests.ranks import RankFailed

MODULES.append("torchtitan.components.checkpointer")  # imported once, by the process that ranks are forked from

ROOT = f"s3://{BUCKET}/run"
Config = S3CheckpointManager.Config
MODES = ("disabled", "async", "async_with_pinned_mem")


def config(**options: Any) -> S3CheckpointManager.Config:
    """Saves every second step, and in full, unless told otherwise."""
    return Config(**{"enable": True, "folder": ROOT, "interval": 2, "last_save_model_only": False, **options})


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    loaded_step: int
    digest: str
    local_files: tuple[str, ...]  # what lies in the directory in which it ran


def train(directory: Path, steps: int, kind: type[Trainer] = Trainer, **options: Any) -> Run:
    """Train to ``steps`` in an empty directory, without s3fs."""
    sys.modules["s3fs"] = None  # type: ignore[assignment]  # importing it fails
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    trainer = kind(config(**options), steps=steps)
    try:
        trainer.train()
    finally:
        trainer.checkpointer.close()
    return Run(trainer.loaded_step, trainer.digest(), tuple(map(str, directory.rglob("*"))))


class Adapter:
    """torchtitan's adapter to Hugging Face's format, for a model whose names are the same there."""

    fqn_to_index_mapping = None

    def __init__(self, path: str | None = None) -> None:
        self.hf_assets_path = path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    from_hf = to_hf

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> HuggingFaceStorageReader:
        assert not from_quantized
        return HuggingFaceStorageReader(path)


def steps_on_s3() -> list[int | None]:
    """Of the committed checkpoints."""
    return [info.step for info in list_checkpoints(ROOT) if info.committed]


# --- the class ------------------------------------------------------------------------------------------


def test_the_config_takes_torchtitans_options_from_the_command_line() -> None:
    given = ["--folder", ROOT, "--retention", "latest:3 every:10000", "--async-mode", "async", "--enable"]
    found = tyro.cli(Config, args=given)
    assert found == Config(folder=ROOT, retention="latest:3 every:10000", async_mode="async", enable=True)
    assert found._owner is S3CheckpointManager


def test_what_cannot_be_done_is_refused(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, refused, tmp_path)


def refused(directory: Path) -> None:
    with pytest.raises(errors.SettingsError, match="'newest:3' is not a policy"):
        config(retention="newest:3")
    with pytest.raises(errors.SettingsError, match=r"needs a folder on S3.*CheckpointManager.Config"):
        Trainer(config(folder="local"), steps=1)
    os.environ["DCP_S3_RETENTION"] = "newest:3"
    with pytest.raises(errors.SettingsError, match="DCP_S3_RETENTION = 'newest:3' is not allowed"):
        Trainer(config(), steps=1)
    del os.environ["DCP_S3_RETENTION"]
    in_hf = config(folder="local", last_save_in_hf=True, last_save_model_only=True)
    with pytest.raises(ValueError, match="last_save_in_hf is not supported on S3"):
        Trainer(in_hf, steps=1, dump_folder=ROOT, sd_adapter=Adapter())
    with pytest.raises(ValueError, match="needs a state_dict_adapter"):
        Trainer(config(initial_load_in_hf=True), steps=0).train()


# --- save and retention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_saves_and_prunes(faulty: FaultyServer, tmp_path: Path, mode: str) -> None:
    first, second = run_ranks(2, save_and_restart, tmp_path, mode)
    assert first == second
    assert steps_on_s3() == [4, 8, 9]


def save_and_restart(directory: Path, mode: str) -> list[Run]:
    first = train(directory, 9, async_mode=mode, retention="latest:2 every:4")
    again = train(directory, 9, async_mode=mode, retention="latest:2 every:4")
    assert again == replace(first, loaded_step=9)
    assert first.local_files == ()
    # Nothing goes on after `close`.
    assert not [thread.name for thread in threading.enumerate() if thread.name == "dcp_s3-retention"]
    return [first, again]


def keep_what_is_kept(directory: Path) -> None:
    kept = [({"keep_latest_k": 2}, [2, 3]), ({"keep_latest_k": 0}, [2, 3, 4, 5, 6]), ({"retention": "latest:1"}, [9])]
    for number, (options, steps) in enumerate(kept, 1):
        train(directory, 3 * number, interval=1, **options)
        assert steps_on_s3() == steps


def test_without_a_policy_the_latest_k_stay(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, keep_what_is_kept, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_deleted_for_a_save_that_fails(faulty: FaultyServer, tmp_path: Path, mode: str) -> None:
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied") if request.operation == "PutObject" and "/step-6/" in request.key else None
    )
    for message in run_ranks(2, fail, tmp_path, mode):
        head, cause, *more = message.splitlines()
        assert head == f"the save of step 6 to {ROOT}/step-6 failed on ranks 0 to 1"
        assert cause.startswith("  Cause: AccessDeniedError")
        assert "  Last good: step 4" in more
    assert steps_on_s3() == [2, 4]


def fail(directory: Path, mode: str) -> str:
    with pytest.raises(errors.SaveFailedError) as raised:
        train(directory, 20, async_mode=mode, keep_latest_k=2)
    return str(raised.value)


# --- loads ----------------------------------------------------------------------------------------------


def go_back(directory: Path) -> None:
    first = train(directory, 6, async_mode="async")
    assert train(directory, 6, async_mode="async", load_step=2) == replace(first, loaded_step=2)
    with pytest.raises(errors.CheckpointNotFoundError, match="steps 2 to 6"):
        train(directory, 6, load_step=3)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"load_step = 3.*no checkpoint under"):
        train(directory, 6, load_step=3, folder=f"{ROOT}-other")
    assert train(directory, 6) == replace(first, loaded_step=6)


def test_a_run_that_goes_back_saves_its_steps_again(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, go_back, tmp_path)
    assert steps_on_s3() == [2, 4, 6]


def begin(adapter: Adapter | None = None, **options: Any) -> Trainer:
    """One that has loaded, and trains nothing."""
    made = Trainer(config(**options), steps=0, sd_adapter=adapter)
    made.train()
    return made


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in trainer.model.state_dict().items()}


def start_from_another_run(directory: Path) -> None:
    base = train(directory, 4, last_save_model_only=True, export_dtype="bfloat16", async_mode="async_with_pinned_mem")
    assert base.local_files == ()
    exported = read_tensors(f"{ROOT}/step-4", ["*"])
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    weights = {name: tensor.float() for name, tensor in exported.items()}
    assert_same(weights_of(begin(folder=f"{ROOT}-2", initial_load_path=f"{ROOT}/step-4")), weights)

    doubled, local = {name: 2 * tensor for name, tensor in weights.items()}, directory / "weights"
    local.mkdir()
    save_file(doubled, local / "model.safetensors")
    client = boto3.client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
    client.upload_file(str(local / "model.safetensors"), BUCKET, "run-weights/model.safetensors")
    for number, place in enumerate((str(local), f"{ROOT}-weights")):
        options = {"initial_load_in_hf": True, "initial_load_path": place}
        assert_same(weights_of(begin(Adapter(), folder=f"{ROOT}-4-{number}", **options)), doubled)

    everything = begin(
        folder=f"{ROOT}-3", initial_load_path=f"{ROOT}/step-2", initial_load_model_only=False,
        exclude_from_loading=["lr_scheduler", "dataloader"],
    )  # fmt: skip
    assert (everything.step, everything.ntokens_seen) == (2, 2 * 4 * 16)
    assert everything.lr_schedulers.state_dict() == {"last_epoch": 0}
    assert everything.dataloader.dataset.number == 0
    assert len(everything.optimizers.optimizers[0].state) == len(exported)
    with pytest.raises(errors.RestoreFailedError, match=r"step-5 failed on rank 0\s+Cause: CheckpointNotFound"):
        train(directory, 0, folder=f"{ROOT}-2", initial_load_path=f"{ROOT}/step-5")
    with pytest.raises(errors.RestoreFailedError, match=r"(?s)step-4 failed .*Missing key.*optimizer"):
        train(directory, 6)


def test_a_run_starts_from_another_one(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, start_from_another_run, tmp_path)


def exchange(directory: Path) -> None:
    ours, stock = train(directory, 4, async_mode="async"), directory / "stock"
    copy(f"{ROOT}/step-2", stock / "step-2")
    options = {"enable": True, "folder": str(stock), "interval": 2, "last_save_model_only": False}
    theirs = Trainer(CheckpointManager.Config(**options), steps=4)
    theirs.train()
    theirs.checkpointer.close()
    assert theirs.loaded_step == 2
    copy(stock / "step-4", f"{ROOT}-2/step-4")
    back = train(directory, 4, folder=f"{ROOT}-2")
    assert back.loaded_step == 4
    assert ours.digest == theirs.digest() == back.digest


def test_torchtitan_itself_reads_what_is_downloaded_and_writes_what_is_loaded_after_a_copy(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    run_ranks(1, exchange, tmp_path)


class Dying(Trainer):
    """SIGKILL after the save of step 4, as soon as it is durable on every rank."""

    def train_step(self, data: Any) -> None:
        if self.step == 5:
            self.checkpointer.maybe_wait_for_saving()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        super().train_step(data)


def train_and_die(directory: Path) -> None:
    train(directory, 8, Dying, async_mode="async")


def test_a_save_that_is_only_on_the_local_disk_is_loaded_from_there(
    faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_S3_DURABILITY", "local")
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path / "spill"))
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "1s")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    faulty.rule = lambda request: (
        Fault.error(503, "SlowDown") if request.method == "PUT" and "/step-4/" in request.key else None
    )
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(2, train_and_die, tmp_path / "first")
    assert 4 not in steps_on_s3()
    faulty.rule = lambda _: None
    first, second = run_ranks(2, train, tmp_path / "second", 6)
    assert first == second
    assert first.loaded_step == 4


# --- killed in a save -----------------------------------------------------------------------------------

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run on one rank that saves nothing ends with."""
    (run,) = run_ranks(1, train_without_saving, tmp_path_factory.mktemp("uninterrupted"))
    assert run.loaded_step == 0
    return str(run.digest)


def train_without_saving(directory: Path) -> Run:
    return train(directory, STEPS, enable=False)


def train_to_the_end(directory: Path, mode: str) -> Run:
    return train(directory, STEPS, async_mode=mode, retention="latest:2")


@pytest.mark.parametrize(
    ("mode", "name", "ranks", "kept"),
    [
        ("disabled", ".*distcp$", 3, [6, 8]),
        # The data of the killed save could be that of a save in progress: for the grace period it keeps step 4.
        ("async", "[.]metadata$", 1, [4, 6, 8]),
        ("async_with_pinned_mem", ".*distcp$", 3, [6, 8]),
    ],
)
def test_a_run_killed_in_a_save_goes_on_bit_for_bit(
    faulty: FaultyServer, tmp_path: Path, uninterrupted: str, mode: str, name: str, ranks: int, kept: list[int]
) -> None:
    kill_in_save(faulty, AtWrite(f"step-4/{name}"), 2, tmp_path, train_to_the_end, tmp_path / "cwd", mode)
    assert steps_on_s3() == [2]
    assert files_in(tmp_path / "cwd") == []

    runs = run_ranks(ranks, train_to_the_end, tmp_path / "second", mode)
    assert runs == [Run(2, uninterrupted, ())] * ranks
    assert steps_on_s3() == kept
    assert latest(ROOT).step == STEPS
    assert verify(f"{ROOT}/step-{STEPS}", full=True).ok
