from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_s3.demo.train import BATCH, ModelConfig, Transformer, batch, state_digest


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_batch_of_a_step_is_the_same_text_on_any_number_of_ranks(ranks: int) -> None:
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    whole, _ = batch(text, step=5, sequences=BATCH, length=8)
    shares = [batch(text, step=5, sequences=BATCH, length=8, rank=rank, ranks=ranks)[0] for rank in range(ranks)]
    assert {len(share) for share in shares} == {BATCH // ranks}
    assert sorted(torch.cat(shares).tolist()) == sorted(whole.tolist())


def test_targets_are_the_inputs_one_byte_later_and_steps_differ() -> None:
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    inputs, targets = batch(text, step=5, sequences=BATCH, length=8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, batch(text, step=6, sequences=BATCH, length=8)[0])


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=32, layers=2, heads=2, hidden=48, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def _state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "scale": torch.tensor(1.0)},
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}],
        "step": 7,
    }


def test_the_order_of_names_and_the_layout_in_memory_do_not_matter() -> None:
    state = _state()
    other = {name: state[name] for name in reversed(state)}
    other["model"] = {"scale": state["model"]["scale"], "weight": state["model"]["weight"].t().contiguous().t()}
    other["groups"] = [{"lr": 1e-3, "betas": [0.9, 0.95]}]  # a tuple may come back as a list
    assert state_digest(other) == state_digest(state)


@pytest.mark.parametrize(
    "weight",
    [
        torch.arange(6.0).reshape(3, 2),
        torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
        torch.arange(6).reshape(2, 3),
        torch.tensor([[-0.0, 1, 2], [3, 4, 5]]),
        torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]]),
    ],
    ids=["shape", "precision", "dtype", "sign of zero", "last bit"],
)
def test_every_bit_of_a_tensor_matters(weight: torch.Tensor) -> None:
    state = _state()
    before = state_digest(state)
    state["model"]["weight"] = weight
    assert state_digest(state) != before


def test_nans_equal_themselves_and_empty_tensors_count() -> None:
    state = {
        "nan": torch.tensor([float("nan")]),
        "none": torch.empty(0, 3),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
    }
    assert state_digest(state) == state_digest({name: value.clone() for name, value in state.items()})
    assert state_digest(state) != state_digest(state | {"none": torch.empty(3, 0)})
