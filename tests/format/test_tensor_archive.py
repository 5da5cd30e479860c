"""Archives of torch.save that are made without the tensors."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from dcp_s3.format.framing import FramingError, make_archive
from dcp_s3.format.safetensors import TensorEntry
from tests.end_to_end.states import DTYPES, assert_same, bits, random_tensor


def entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(name, tensor.dtype, tuple(tensor.shape))


def load(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    archive = make_archive(values)
    data = b"".join(part if isinstance(part, bytes) else bits(tensors[part.name]) for part in archive.parts)
    assert len(data) == archive.nbytes
    loaded: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return loaded


def test_torch_loads_every_dtype_and_shape() -> None:
    tensors = {str(dtype): random_tensor((5, 7), dtype, n) for n, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 4), "one": torch.ones(1)}
    found = load({name: entry(name, tensor) for name, tensor in tensors.items()}, tensors)
    assert_same(found, tensors)
    assert list(found) == list(tensors)


def test_other_values_keep_what_is_in_them() -> None:
    shared = torch.arange(6.0)
    tensors = {"w": torch.randn(3)}
    others = {
        "step": 5, "nested": {"t": shared, "again": [shared[2:], torch.ones(2)]}, "order": OrderedDict(a=shared),
        "none": torch.empty(0),
    }  # fmt: skip
    found = load({"step": 5, "w": entry("w", tensors["w"]), **others}, tensors)
    assert_same(found, {**tensors, **others})
    assert found["nested"]["t"].data_ptr() == found["order"]["a"].data_ptr()


def test_a_model_of_any_size_takes_no_memory() -> None:
    archive = make_archive({"huge": TensorEntry("huge", torch.float32, (2**20, 2**20))})
    assert archive.nbytes > 2**42
    assert sum(len(part) for part in archive.parts if isinstance(part, bytes)) < 10_000


def test_tensors_that_cannot_be_written_are_an_error() -> None:
    with pytest.raises(FramingError, match="inside of an entry"):
        make_archive({"x": [torch.eye(3).to_sparse()]})
    with pytest.raises(FramingError, match="belongs to no tensor"):
        make_archive({"x": {torch.ones(2)}})
