from __future__ import annotations

import pytest
import torch

from dcp_s3.demo.model import ModelConfig, Transformer, batch, standard_library_text
from dcp_s3.demo.train import BATCH


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


def test_there_is_text_in_the_standard_library() -> None:
    text = standard_library_text()
    assert text.dtype == torch.uint8
    assert len(text) > 1_000_000


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=32, layers=2, heads=2, hidden=48, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
