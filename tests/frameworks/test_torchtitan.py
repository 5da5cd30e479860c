"""S3CheckpointManager: torchtitan's options on S3."""

from __future__ import annotations

import inspect
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError

from dcp_s3 import errors
from dcp_s3.integrations.torchtitan import S3CheckpointManager
from examples.torchtitan import Trainer
from tests.faulty import FaultyServer
from tests.frameworks.ranks import run_ranks
from tests.frameworks.titan import MODES, ROOT, Adapter, Run, config, steps_on_s3, train
from tests.memory_s3 import Fault

Config = S3CheckpointManager.Config


# --- the class ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__init__", "config dataloader model_parts optimizers lr_schedulers states sd_adapter base_folder"),
        ("dcp_save", "state_dict checkpoint_id async_mode enable_garbage_collection to_hf"),
        ("dcp_load", "state_dict checkpoint_id from_hf from_quantized"),
        ("_load", "step"),
        ("_wait_for_saving", ""),
        ("_purge_stale_checkpoints", ""),
        ("_close", ""),
        ("_save_last_step", "curr_step"),
        ("_states_to_load", "model_only"),
    ],
)
def test_torchtitan_has_the_hooks_that_are_overridden_or_called(name: str, arguments: str) -> None:
    assert " ".join([*inspect.signature(getattr(CheckpointManager, name)).parameters][1:]) == arguments


def test_the_config_takes_torchtitans_options_from_the_command_line() -> None:
    given = ["--folder", ROOT, "--retention", "latest:3 every:10000", "--async-mode", "async", "--enable"]
    found = tyro.cli(Config, args=given)
    assert found == Config(folder=ROOT, retention="latest:3 every:10000", async_mode="async", enable=True)
    assert found._owner is S3CheckpointManager


@pytest.mark.parametrize("page", ["frameworks.md", "torchtitan.md"])
def test_what_the_pages_say_to_paste_saves(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    [pasted] = re.findall(r"config\.checkpoint = (S3CheckpointManager\.Config\([^)]*\))", text)
    assert eval(pasted, {"S3CheckpointManager": S3CheckpointManager, "URL": ROOT}).enable


def test_a_policy_that_is_none_is_refused_before_anything_runs() -> None:
    with pytest.raises(errors.SettingsError, match="'newest:3' is not a policy"):
        config(retention="newest:3")


def test_what_cannot_be_done_is_refused(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(1, refused, tmp_path)


def refused(directory: Path) -> None:
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


def keep_what_is_kept(directory: Path) -> list[list[int | None]]:
    found = []
    for number, options in enumerate([{"keep_latest_k": 2}, {"keep_latest_k": 0}, {"retention": "latest:1"}]):
        train(directory, 3 * (number + 1), interval=1, **options)
        found.append(steps_on_s3())
    return found


def test_without_a_policy_the_latest_k_stay(faulty: FaultyServer, tmp_path: Path) -> None:
    assert run_ranks(1, keep_what_is_kept, tmp_path) == [[[2, 3], [2, 3, 4, 5, 6], [9]]]


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


class Exhausted(Trainer):
    """Runs out of data in step 3, when the save of step 2 has just begun."""

    def train_step(self, data: Any) -> None:
        if self.step == 3:
            raise DataloaderExhaustedError
        super().train_step(data)


def run_out_of_data(mode: str) -> list[int | None]:
    trainer = Exhausted(config(async_mode=mode), steps=8)
    with pytest.raises(DataloaderExhaustedError):
        trainer.train()
    trainer.checkpointer.close()
    return steps_on_s3()


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_end_waits_for_the_save_under_way(faulty: FaultyServer, mode: str) -> None:
    faulty.rule = lambda request: Fault.delay(1.0) if request.key.endswith("/.metadata") else None
    assert run_ranks(1, run_out_of_data, mode) == [[2]]
