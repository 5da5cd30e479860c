"""The Hugging Face Trainer's checkpoints on S3, with the real package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer

from dcp_s3 import KeepLatest, list_checkpoints, read_tensor
from dcp_s3.errors import CheckpointError, CheckpointNotFoundError
from dcp_s3.integrations.transformers import PRIVATE
from tests.faulty import BUCKET, FaultyServer, serve
from tests.frameworks.accelerate_ranks import files_in, kill_in_save
from tests.frameworks.transformers_runs import Run, run_example, train, train_for_ever, trainer
from tests.preload import MODULES
from tests.ranks import run_ranks

# Imported once, by the process that ranks are forked from, rather than by each of them for ten seconds.
MODULES.append("tests.frameworks.transformers_runs")

ROOT = f"s3://{BUCKET}/run"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Accelerate makes it several on each rank, and OpenMP does not survive a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    [(_, *expected)] = run_ranks(1, train, Run(f"{ROOT}-expected", sharded), tmp_path, None)
    kill_in_save(faulty, "step-00000006", 2, tmp_path, train_for_ever, Run(ROOT, sharded))
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [(began, *_)] = run_ranks(1, train, Run(ROOT, sharded, steps=9), cwd)
    assert began == 4
    for began, *found in run_ranks(2, train, Run(ROOT, sharded), cwd):
        assert began == 8
        assert found == expected
    assert files_in(cwd) == ["output"]  # the Trainer makes it; nothing is in it
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


def test_ranks_with_their_own_data_and_random_numbers_go_on_to_the_same_bits(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    run = Run(ROOT, alike=False, steps=7, arguments=(("save_steps", 4),))
    expected = run_ranks(2, train, Run(f"{ROOT}-expected", alike=False, steps=7), tmp_path)
    assert expected[0][1] != expected[1][1], "the ranks are alike: nothing of their own is tested"
    run_ranks(2, train, Run(ROOT, alike=False, steps=6, arguments=run.arguments), tmp_path)
    found = run_ranks(2, train, run, tmp_path)
    assert [began for began, *_ in found] == [4, 4]
    assert [rest for _, *rest in found] == [rest for _, *rest in expected]


def test_the_example_trains_and_goes_on(faulty: FaultyServer, tmp_path: Path) -> None:
    options = ["--url", ROOT, "--save-every", "2"]
    run_ranks(2, run_example, [*options, "--steps", "4"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4]
    run_ranks(1, run_example, [*options, "--steps", "8"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [4, 6, 8]
    assert files_in(tmp_path) == ["output"]


# --- one process, without torch.distributed ------------------------------------------------------------


@pytest.fixture
def alone(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def test_the_best_model_is_kept_and_loaded_at_the_end(alone: Path) -> None:
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
        "learning_rate": 5.0,  # gets worse and worse
        "warmup_steps": 0,
    }
    made = trainer(Run(ROOT, steps=6, arguments=tuple(best.items())))
    made.train()
    infos = {info.step: info for info in list_checkpoints(ROOT)}
    losses = {entry["step"]: entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry}
    first = min(losses, key=lambda step: losses[step])
    assert set(infos) == {first, 6}
    assert first != 6
    assert infos[first].metrics["eval_loss"] == losses[first]
    assert made.state.best_model_checkpoint == infos[first].url
    name = "model.layers.0.mlp.up_proj.weight"
    saved = read_tensor(infos[first].url, f"model.{name}")
    assert (made.model.get_parameter(name) == saved).all()
    assert files_in(alone) == ["output"]


def test_a_step_may_be_chosen_and_nothing_there_is_a_new_training(alone: Path) -> None:
    everything = KeepLatest(10)
    first = trainer(Run(ROOT, steps=6), retention=everything)
    first.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    again = trainer(Run(ROOT, steps=6), retention=everything)
    again.train(resume_from_checkpoint=2)  # saves steps 4 and 6 again
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses
    with pytest.raises(CheckpointNotFoundError):
        trainer(Run(ROOT)).train(resume_from_checkpoint=3)


def test_a_checkpoint_of_the_trainer_itself_is_taken_over(alone: Path) -> None:
    stock = trainer(Run(ROOT, steps=4))
    stock.__class__ = Trainer  # as if it had been made by it
    stock.train()
    made = trainer(Run(ROOT, steps=6))
    made.train(resume_from_checkpoint="output/checkpoint-4")
    assert made.state.log_history[0]["step"] == 1
    assert [info.step for info in list_checkpoints(ROOT)] == [6]


def test_a_hyperparameter_search_is_refused(alone: Path) -> None:
    with pytest.raises(CheckpointError, match="hyperparameter search"):
        trainer(Run(ROOT)).train(trial=object())


def test_deepspeed_is_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(Run(ROOT))
    monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        made.train()


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_methods_of_the_trainer_exist(name: str) -> None:
    assert callable(getattr(Trainer, name))
