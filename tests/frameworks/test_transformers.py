"""The Hugging Face Trainer's checkpoints on S3, with the real package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import Trainer

from dcp_s3 import KeepLatest, list_checkpoints, read_tensor, remove
from dcp_s3.errors import CheckpointError, CheckpointNotFoundError
from dcp_s3.integrations.transformers import PRIVATE, S3Trainer
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_ranks
from tests.frameworks.transformers_runs import Run, run_example, train, train_for_ever, trainer

ROOT = f"s3://{BUCKET}/run"


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    [(_, *expected)] = run_ranks(1, train, Run(f"{ROOT}-expected", sharded), tmp_path, None)
    kill_in_save(faulty, AtWrite("step-00000006"), 2, tmp_path, train_for_ever, Run(ROOT, sharded))
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [(began, *_)] = run_ranks(1, train, Run(ROOT, sharded, steps=9), cwd)
    assert began == 4
    for began, *found in run_ranks(2, train, Run(ROOT, sharded), cwd):
        assert began == 8
        assert found == expected
    assert files_in(cwd) == ["output"]  # the Trainer makes it; nothing is in it
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


def test_the_example_trains_and_goes_on(faulty: FaultyServer, tmp_path: Path) -> None:
    options = ["--url", ROOT, "--save-every", "2"]
    run_ranks(2, run_example, [*options, "--steps", "4"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4]
    run_ranks(1, run_example, [*options, "--steps", "8"], tmp_path)
    assert [info.step for info in list_checkpoints(ROOT)] == [4, 6, 8]
    assert files_in(tmp_path) == ["output"]


# --- one process, without torch.distributed ------------------------------------------------------------


@pytest.fixture
def alone(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps() -> list[int | None]:
    return [info.step for info in list_checkpoints(ROOT)]


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def evaluated(metric: str, values: dict[int, float], *, last: int = 6, **options: Any) -> S3Trainer:
    """A trainer that saves every second step, evaluates to ``values``, and is to load the best model."""
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": min(values),
        "load_best_model_at_end": True,
        "metric_for_best_model": metric,
        "greater_is_better": metric == "accuracy",
        "save_total_limit": 1,
    }
    made = trainer(Run(ROOT, steps=last, arguments=tuple(arguments.items())), **options)

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        found = {f"eval_{metric}": values[made.state.global_step]}
        made.log(dict(found))
        return found

    made.evaluate = evaluate
    return made


def assert_loaded(made: S3Trainer, step: int) -> None:
    [url] = [info.url for info in list_checkpoints(ROOT) if info.step == step]
    assert made.state.best_model_checkpoint == url
    name = "model.layers.0.mlp.up_proj.weight"
    assert (made.model.get_parameter(name) == read_tensor(url, f"model.{name}")).all()


@pytest.mark.parametrize("retention", [None, "latest:1"], ids=["of_the_trainer", "own"])
@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("loss", {1: 3.0, 2: 1.0, 3: 0.9, 4: 1.95, 5: 2.0, 6: 2.0}, 2),  # that of step 3 is not saved
        ("accuracy", {2: 0.8, 4: 0.9, 6: 0.7}, 4),
    ],
)
def test_the_best_model_is_kept_and_loaded_at_the_end(
    alone: Path, metric: str, values: dict[int, float], best: int, retention: str | None
) -> None:
    (alone / "output/checkpoint-500").mkdir(parents=True)  # of before: it stays
    made = evaluated(metric, values, retention=retention)
    made.train()
    assert steps() == [best, 6]
    assert_loaded(made, best)
    assert files_in(alone) == ["output", "output/checkpoint-500"]
    assert made.args.save_total_limit == 1


def test_the_best_model_of_before_a_restart_is_kept_and_loaded(alone: Path) -> None:
    values = {2: 0.9, 4: 0.8, 6: 0.8, 8: 0.7}
    evaluated("accuracy", values, last=4).train()
    made = evaluated("accuracy", values, last=8)
    made.train(resume_from_checkpoint=True)
    assert steps() == [2, 8]
    assert_loaded(made, 2)


def test_a_step_may_be_chosen_and_nothing_there_is_a_new_training(alone: Path) -> None:
    everything = KeepLatest(10)
    first = trainer(Run(ROOT, steps=6), retention=everything)
    first.train(resume_from_checkpoint=True)
    for info in list_checkpoints(ROOT):
        if info.step in (4, 6):
            remove(info.url)
    with pytest.raises(CheckpointNotFoundError):
        trainer(Run(ROOT)).train(resume_from_checkpoint=3)
    again = trainer(Run(ROOT, steps=6), retention=everything)
    again.train(resume_from_checkpoint=2)
    assert losses(again) == losses(first)
    assert steps() == [2, 4, 6]


def test_no_limit_keeps_everything(alone: Path) -> None:
    trainer(Run(ROOT, steps=6, arguments=(("save_total_limit", 0),))).train()  # as the Trainer understands it
    assert steps() == [2, 4, 6]


@pytest.mark.parametrize("start", [None, False, 4])
def test_a_training_that_begins_before_what_is_there_is_refused(alone: Path, start: Any) -> None:
    trainer(Run(ROOT, steps=6)).train()
    before = {info.step: info.save_id for info in list_checkpoints(ROOT)}
    with pytest.raises(CheckpointError, match=rf"{ROOT} has checkpoints up to step 6, .*Remedy"):
        trainer(Run(ROOT, steps=6)).train(resume_from_checkpoint=start)
    assert {info.step: info.save_id for info in list_checkpoints(ROOT)} == before == {4: before[4], 6: before[6]}


def test_what_cannot_be_is_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(callable(getattr(Trainer, name)) for name in PRIVATE)
    made = trainer(Run(ROOT))
    with pytest.raises(CheckpointError, match=rf"{ROOT}/step-4' is a path. Remedy: the step"):
        made.train(resume_from_checkpoint=f"{ROOT}/step-4")
    monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        made.train()
