"""The Hugging Face Trainer's checkpoints on S3, with the real package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from dcp_s3 import KeepLatest, export, list_checkpoints, read_tensor, remove
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.demo.train import state_digest
from dcp_s3.errors import CheckpointError, CheckpointNotFoundError
from dcp_s3.integrations.transformers import PRIVATE, S3Trainer, _KeepBestModel
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_ranks
from tests.frameworks.transformers_runs import (
    Run,
    evaluate_to,
    refused,
    run_example,
    tiny_tokenizer,
    train,
    train_for_ever,
    trainer,
)

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
    evaluate_to(made, metric, values)
    return made


def assert_loaded(made: S3Trainer, step: int) -> None:
    [url] = [info.url for info in list_checkpoints(ROOT) if info.step == step]
    assert made.state.best_model_checkpoint == url
    name = "model.layers.0.mlp.up_proj.weight"
    assert (made.model.get_parameter(name) == read_tensor(url, f"model.{name}")).all()


def test_an_older_checkpoint_in_the_output_directory_is_left_alone(alone: Path) -> None:
    (alone / "output/checkpoint-500").mkdir(parents=True)
    made = evaluated("accuracy", {2: 0.9, 4: 0.8, 6: 0.7})
    made.train()
    assert_loaded(made, 2)
    assert files_in(alone) == ["output", "output/checkpoint-500"]
    assert made.args.save_total_limit == 1


@pytest.mark.parametrize("retention", [None, "latest:1"], ids=["of_the_trainer", "own"])
@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("loss", {1: 3.0, 2: 1.0, 3: 0.9, 4: 0.95, 5: 2.0, 6: 2.0}),
        ("accuracy", {2: 0.9, 4: 0.9, 6: 0.8}),
    ],
    ids=["the_best_was_not_saved", "equal_values"],
)
def test_the_best_model_is_the_one_that_the_trainer_says(
    alone: Path, metric: str, values: dict[int, float], retention: str | None
) -> None:
    made = evaluated(metric, values, retention=retention)
    made.train()
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 6]
    assert_loaded(made, 2)


def test_the_best_model_of_before_a_restart_is_kept_and_loaded(alone: Path) -> None:
    values = {2: 0.9, 4: 0.9, 6: 0.8, 8: 0.7}
    evaluated("accuracy", values, last=4).train()
    made = evaluated("accuracy", values, last=8)
    made.train(resume_from_checkpoint=True)
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 8]
    assert_loaded(made, 2)


def test_a_best_model_that_is_gone_is_ignored(alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {2: 0.9, 4: 0.8, 6: 0.8}
    evaluated("accuracy", values, last=4).train()
    remove(f"{ROOT}/step-00000002")
    made = evaluated("accuracy", values)
    made.train(resume_from_checkpoint=True)
    assert made.state.best_model_checkpoint is None
    assert "step-00000002, is not considered any more" in caplog.text


def test_the_best_checkpoint_before_is_kept_until_the_new_one_is_committed() -> None:
    first, second = (
        CheckpointInfo(f"{ROOT}/step-{step}", f"step-{step}", "committed", step, None, None, objects=1, size=1)
        for step in (2, 4)
    )
    keep = _KeepBestModel()
    assert keep([first, second], 0.0) == {}
    keep.add(first.url)
    keep.add(second.url)
    assert list(keep([first], 0.0)) == ["step-2"]
    assert list(keep([first, second], 0.0)) == ["step-4"]


def test_a_step_may_be_chosen_and_nothing_there_is_a_new_training(alone: Path) -> None:
    everything = KeepLatest(10)
    first = trainer(Run(ROOT, steps=6), retention=everything)
    first.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    with pytest.raises(CheckpointNotFoundError):
        trainer(Run(ROOT)).train(resume_from_checkpoint=3)
    for info in list_checkpoints(ROOT):
        if info.step in (4, 6):
            remove(info.url)
    again = trainer(Run(ROOT, steps=6), retention=everything)
    again.train(resume_from_checkpoint=2)
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4, 6]


def test_no_limit_keeps_everything(alone: Path) -> None:
    trainer(Run(ROOT, steps=6, arguments=(("save_total_limit", 0),))).train()  # as the Trainer understands it
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4, 6]


def test_what_is_exported_is_a_model_with_its_tokenizer(alone: Path) -> None:
    tokenizer = tiny_tokenizer()
    made = trainer(Run(ROOT, steps=2), processing_class=tokenizer)
    made.train()
    made.save_model("stock")
    [url] = [info.url for info in list_checkpoints(ROOT)]
    export(url, "exported", include="model.*", rename={"^model[.]": ""})
    assert set(files_in(alone / "exported")) == set(files_in(alone / "stock")) - {"training_args.bin"}
    for name in set(files_in(alone / "exported")) - {"model.safetensors"}:
        assert (alone / "exported" / name).read_bytes() == (alone / "stock" / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained("exported")
    assert state_digest(dict(loaded.state_dict())) == state_digest(dict(made.model.state_dict()))
    assert AutoTokenizer.from_pretrained("exported").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("start", [None, False, 4], ids=["none", "false", "a_step"])
def test_a_training_that_begins_before_what_is_there_is_refused(alone: Path, start: Any) -> None:
    trainer(Run(ROOT, steps=6)).train()
    before = {info.step: info.save_id for info in list_checkpoints(ROOT)}
    with pytest.raises(CheckpointError, match=rf"{ROOT} has checkpoints up to step 6, .* step {start or 0}: .*Remedy"):
        trainer(Run(ROOT, steps=6)).train(resume_from_checkpoint=start)
    assert {info.step: info.save_id for info in list_checkpoints(ROOT)} == before == {4: before[4], 6: before[6]}


def test_a_checkpoint_on_disk_before_what_is_there_is_refused_on_all_ranks(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    run_ranks(1, train, Run(ROOT, steps=6), tmp_path)
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4/trainer_state.json").write_text('{"global_step": 4}')
    for error in run_ranks(2, refused, Run(ROOT, steps=6), tmp_path, "checkpoint-4"):
        assert "checkpoints up to step 6" in error
        assert "begin after step 4" in error


def test_a_checkpoint_of_the_trainer_itself_is_taken_over(alone: Path) -> None:
    stock = trainer(Run(ROOT, steps=4))
    stock.__class__ = Trainer  # as if it had been made by it
    stock.train()
    made = trainer(Run(ROOT, steps=6))
    made.train(resume_from_checkpoint="output/checkpoint-4")
    assert made.state.log_history[0]["step"] == 1
    assert [info.step for info in list_checkpoints(ROOT)] == [6]


def test_a_checkpoint_is_chosen_by_its_url(alone: Path) -> None:
    everything = KeepLatest(10)
    first = trainer(Run(ROOT, steps=6), retention=everything)
    first.train()
    branch = trainer(Run(f"{ROOT}-branch", steps=6), retention=everything)
    branch.train(resume_from_checkpoint=f"{ROOT}/step-00000004")
    assert [entry["loss"] for entry in branch.state.log_history if "loss" in entry] == [
        entry["loss"] for entry in first.state.log_history if "loss" in entry
    ]
    assert [info.step for info in list_checkpoints(f"{ROOT}-branch")] == [6]
    again = trainer(Run(ROOT, steps=8), retention=everything)
    again.train(resume_from_checkpoint=f"{ROOT}/step-00000006/")
    assert [info.step for info in list_checkpoints(ROOT)] == [2, 4, 6, 8]


def test_a_url_without_a_step_is_refused(alone: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"'{ROOT}' names no step. Remedy: .*{ROOT}/step-00001000; or True"):
        trainer(Run(ROOT)).train(resume_from_checkpoint=ROOT)


def test_a_hyperparameter_search_is_refused(alone: Path) -> None:
    with pytest.raises(CheckpointError, match="hyperparameter search"):
        trainer(Run(ROOT)).train(trial=object())


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_pushing_each_checkpoint_is_refused(alone: Path, strategy: str) -> None:
    made = trainer(Run(ROOT, arguments=(("hub_strategy", strategy),)))
    made.args.push_to_hub = True  # given to the Trainer, it asks the Hub
    with pytest.raises(CheckpointError, match=rf"'{strategy}' .* hub_strategy=\"end\""):
        made.train()
    assert list_checkpoints(ROOT) == []


def test_pushing_at_the_end_is_not_refused(alone: Path) -> None:
    made = trainer(Run(ROOT, steps=2, arguments=(("hub_strategy", "end"),)))
    made.args.push_to_hub = True
    made.train()
    assert [info.step for info in list_checkpoints(ROOT)] == [2]


def test_deepspeed_is_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(Run(ROOT))
    monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        made.train()


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_methods_of_the_trainer_exist(name: str) -> None:
    assert callable(getattr(Trainer, name))
