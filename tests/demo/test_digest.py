from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_s3.demo.model import state_digest


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


def test_names_and_plain_values_matter() -> None:
    digests = {state_digest(_state()), state_digest(_state() | {"step": 8})}
    renamed = _state()
    renamed["steps"] = renamed.pop("step")
    assert len(digests | {state_digest(renamed)}) == 3


def test_nans_equal_themselves_and_empty_tensors_count() -> None:
    state = {
        "nan": torch.tensor([float("nan")]),
        "none": torch.empty(0, 3),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
    }
    assert state_digest(state) == state_digest({name: value.clone() for name, value in state.items()})
    assert state_digest(state) != state_digest(state | {"none": torch.empty(3, 0)})
