"""Accelerate's training state as one checkpoint, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_s3 import list_checkpoints
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.accelerate_runs import (
    Run,
    failing,
    interrupted,
    resumed,
    run_example,
    stock,
    train_for_ever,
    uninterrupted,
    with_average,
)
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_ranks

ROOT = f"s3://{BUCKET}/run"


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    run = Run(ROOT, sharded)
    [expected] = run_ranks(1, uninterrupted, run)
    cwd = tmp_path / "cwd"
    kill_in_save(faulty, AtWrite("step-00000006"), 2, tmp_path, train_for_ever, run)
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [alone] = run_ranks(1, resumed, Run(ROOT, sharded, steps=9), cwd)  # within an epoch: 5 batches each
    assert alone[0] == 4
    both = run_ranks(2, resumed, run, cwd)

    for began, digest, losses in both:
        assert began == 8
        assert (digest, losses) == expected
    assert files_in(cwd) == []
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


@pytest.mark.servers("memory")
@pytest.mark.parametrize("at", [3, 5], ids=["within_an_epoch", "at_its_end"])
def test_ranks_with_their_own_data_and_random_numbers_go_on_to_the_same_bits(root: str, at: int) -> None:
    run = Run(root, sharded=False, alike=False, steps=7)
    expected = run_ranks(2, uninterrupted, run)
    assert expected[0][0] != expected[1][0], "the ranks are alike: nothing of their own is tested"
    found = run_ranks(2, interrupted, run, at)
    assert [digest for digest, _ in found] == [digest for digest, _ in expected]
    assert found[0][1] == expected[0][1]
    # A registered object is the first rank's, as with Accelerate itself.
    first, second = expected[0][1], expected[1][1]
    assert found[1][1] == {step: (first if int(step[5:]) <= at else second)[step] for step in second}


@pytest.mark.servers("memory")
@pytest.mark.parametrize("when", ["save", "load"])
def test_an_error_in_a_state_of_one_rank_is_an_error_of_all(root: str, when: str) -> None:
    first, second = run_ranks(2, failing, f"{root}/step-1", when)
    assert second == ("ZeroDivisionError", f"in the {when} of rank 1")
    assert first[0] == "CheckpointError"
    assert f"rank 1 cannot go on: ZeroDivisionError: in the {when} of rank 1" in first[1]


@pytest.mark.servers("memory")
def test_other_registered_objects_on_one_rank_are_an_error_of_all(root: str) -> None:
    for error, message in run_ranks(2, failing, f"{root}/step-1", "count"):
        assert error == "CheckpointError"
        assert "{0: 1, 1: 0} (by rank)" in message


@pytest.mark.servers("memory")
def test_sharded_tensors_of_a_registered_object_load_on_another_number_of_ranks(root: str) -> None:
    run = Run(root, sharded=True)
    saved, other = run_ranks(2, with_average, run, 2, False)
    assert saved == other
    assert run_ranks(1, with_average, run, 2, True) == [saved]


@pytest.mark.servers("memory")
def test_stock_save_state_of_a_sharded_model_goes_to_s3_where_registered(root: str, tmp_path: Path) -> None:
    results = run_ranks(2, stock, Run(root, sharded=True), tmp_path)
    for before, after, _ in results:
        assert before == after
    assert {info.name for info in list_checkpoints(f"{root}/step-3")} == {"optimizer_0", "pytorch_model_fsdp_0"}
    # What docs/accelerate.md says is left on local disk: all but the model and the optimizer.
    folder = f"{root.replace('s3://', 's3:/')}/step-3/"
    assert {file.removeprefix(folder) for file in results[0][2] if file.startswith(folder)} == {
        "custom_checkpoint_0.pkl", "dl_state_dict.bin", "optimizer_0", "pytorch_model_fsdp_0",
        "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin",
    }  # fmt: skip
    assert not list(tmp_path.glob("s3:/*/run/step-3/*_0/*"))  # directories that Accelerate makes


@pytest.mark.servers("memory")
def test_the_example_trains_and_goes_on(root: str, tmp_path: Path) -> None:
    options = ["--url", root, "--save-every", "2"]
    run_ranks(2, run_example, [*options, "--steps", "4"], tmp_path)
    assert [info.step for info in list_checkpoints(root)] == [2, 4]
    [output] = run_ranks(1, run_example, [*options, "--steps", "7"], tmp_path)
    assert "step 4: restored on 1 processes" in output
    assert [info.step for info in list_checkpoints(root)] == [4, 6, 7]
    assert files_in(tmp_path) == []
