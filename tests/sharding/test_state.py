"""`shard_state`: what a plan makes of a state, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcp_s3 import Fused, errors, shard, shard_state


def boxes_of(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(offsets, tuple(box.shape)) for offsets, box in zip(value.offsets, value.boxes, strict=True)]


def shards_of(shape: tuple[int, ...], split: Any, rank: int, world_size: int) -> Any:
    return shard_state({"w": torch.zeros(shape)}, {"w": split}, rank=rank, world_size=world_size)["w"]


def test_names_come_before_patterns_and_the_first_pattern_counts() -> None:
    model = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2, 3), "norm": torch.zeros(3)}
    plan = {"*.weight": 0, "model.b*": None, "model.b.weight": 1, "*": None}
    found = shard_state({"model": model, "step": 3}, plan, rank=1, world_size=2)
    assert found["step"] == 3
    assert found["model"]["norm"] is model["norm"]
    assert boxes_of(found["model"]["a.weight"]) == [((2, 0), (2, 3))]
    assert boxes_of(found["model"]["b.weight"]) == [((0, 3), (2, 3))]
    assert found["model"]["b.weight"].shape == (2, 6)
    assert set(found["model"]) == set(model)


def test_optimizers_and_what_is_exempt() -> None:
    layer = nn.Linear(3, 2)
    known = shard(torch.zeros(1), global_shape=(4,), offsets=(2,))
    state = {
        "optim": {
            "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 1}],
        },
        "list": [torch.ones(2, 3), "text", {"w": layer.weight}],
        "known": known,
    }
    found = shard_state(state, {"*": -1}, rank=0, world_size=4)
    assert found["optim"]["state"]["w"]["step"] is state["optim"]["state"]["w"]["step"]  # type: ignore[index]
    assert found["optim"]["param_groups"] == [{"lr": 1}]
    assert found["known"] is known
    inner = found["optim"]["state"]["w"]["exp_avg"], found["list"][0], found["list"][2]["w"]
    assert [tuple(each.shape) for each in inner] == [(2, 12)] * 3
    # Loads go into the model.
    assert inner[2].boxes[0].data_ptr() == layer.weight.data_ptr()


def test_the_parts_of_a_fused_parameter_lie_in_its_parts() -> None:
    """Grouped-query attention: 8 rows of q, 4 of k and of v."""
    found = [shards_of((8, 5), Fused(0, (4, 2, 2)), rank, 2) for rank in (0, 1)]
    assert [each.shape for each in found] == [(16, 5)] * 2
    assert boxes_of(found[0]) == [((0, 0), (4, 5)), ((8, 0), (2, 5)), ((12, 0), (2, 5))]
    assert boxes_of(found[1]) == [((4, 0), (4, 5)), ((10, 0), (2, 5)), ((14, 0), (2, 5))]
    columns = shards_of((5, 4), Fused(-1, (3, 1)), 1, 2)
    assert boxes_of(columns) == [((0, 3), (5, 3)), ((0, 7), (5, 1))]


def test_fewer_heads_than_ranks() -> None:
    """4 ranks, 2 heads of k and v: ranks 0 and 1 hold the first, 2 and 3 the second."""
    found = [boxes_of(shards_of((4,), Fused(0, (2, 1, 1), copies=(1, 2, 2)), rank, 4)) for rank in range(4)]
    assert [places[0] for places in found] == [((2 * rank,), (2,)) for rank in range(4)]
    assert [places[1] for places in found] == [((8,), (1,)), ((8,), (1,)), ((9,), (1,)), ((9,), (1,))]
    assert [places[2] for places in found] == [((10,), (1,)), ((10,), (1,)), ((11,), (1,)), ((11,), (1,))]


@given(st.data())
def test_the_shards_of_all_ranks_hold_each_element_once(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6))
    dims = data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    dim = data.draw(st.integers(0, dims - 1))
    copies = data.draw(st.lists(st.sampled_from([c for c in range(1, 7) if world % c == 0]), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(0, 3)) for _ in copies]
    shape[dim] = sum(lengths)
    seen: dict[tuple[int, ...], set[tuple[Any, Any]]] = {}
    for rank in range(world):
        found = shards_of(tuple(shape), Fused(dim, tuple(lengths), tuple(copies)), rank, world)
        for offsets, sizes in boxes_of(found):
            for element in torch.ones(sizes).nonzero().tolist():
                where = tuple(o + e for o, e in zip(offsets, element, strict=True))
                seen.setdefault(where, set()).add((offsets, sizes))
    # Held more than once only as the same box, which DCP saves once.
    assert all(len(boxes) == 1 for boxes in seen.values())
    assert len(seen) == found.numel()


# --- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, r"the plan does not say how 'm\.w' is split"),
        ({"w": 0}, r"the plan does not say how 'm\.w' is split"),
        ({"m.w": 2}, r"splits 'm\.w' along 2, which is no dimension of \(4, 3\)"),
        ({"m.w": -3}, "along -3, which is no dimension"),
        ({"m.w": "rows"}, "along 'rows', which is no dimension"),
        ({"m.w": True}, "along True, which is no dimension"),
        ({"m.w": Fused(2, (4,))}, "along 2, which is no dimension"),
        ({"m.w": Fused(0, (2, 1))}, r"'m\.w' has length 4 along 0, but the plan has parts of \(2, 1\)"),
        ({"m.w": Fused(0, (5, -1))}, r"parts of \(5, -1\)"),
        ({"m.w": Fused(0, ())}, r"parts of \(\)"),
        ({"m.w": Fused(0, (2, 2), copies=(1,))}, r"with \(1,\) copies"),
        ({"m.w": Fused(0, (2, 2), copies=(1, 0))}, r"with \(1, 0\) copies"),
        ({"m.w": Fused(0, (2, 2), copies=(1, 3))}, r"part 1 of 'm\.w' cannot have 3 copies on 2 ranks"),
    ],
)
def test_plans_that_do_not_fit(plan: Any, message: str) -> None:
    with pytest.raises(errors.ShardingError, match=message) as caught:
        shard_state({"m": {"w": torch.zeros(4, 3)}}, plan, rank=0, world_size=2)
    assert caught.value.fqn == "m.w"


@pytest.mark.parametrize("place", [{}, {"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}])
def test_places_that_are_none(place: Any) -> None:
    with pytest.raises(errors.ShardingError, match="expected group"):
        shard_state({"w": torch.zeros(4)}, {"*": 0}, **place)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"m": nn.Linear(2, 2)}, r"'m' is a Linear\. Remedy: pass its state_dict\(\)"),
        ({"m": (torch.zeros(2), 1)}, "'m' is a tuple of tensors"),
        ({"m": torch.eye(3).to_sparse()}, "'m' is torch.sparse_coo, expected a dense tensor"),
    ],
)
def test_entries_that_would_hide_shards(state: Any, message: str) -> None:
    with pytest.raises(errors.ShardingError, match=message):
        shard_state(state, {"*": 0}, rank=0, world_size=2)
