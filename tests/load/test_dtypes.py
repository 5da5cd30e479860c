"""Loading into other dtypes: what torch's readers make of it, with one warning where values do not fit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.load.fetch import Buffer
from dcp_s3.load.read import keeps_values
from tests.end_to_end.states import DTYPES, random_tensor
from tests.end_to_end.test_bad_input import failure_of_load
from tests.servers import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning"),
    pytest.mark.timeout(180),
]

_LOGGER = "dcp_s3.load.read"


def test_what_is_converted_comes_through_bounded_memory(
    memory_server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(3_000_000)}
    dcp.save(state, storage_writer=S3StorageWriter(root, settings={"part_size": "5MiB"}))
    sizes, reserve = [0], Buffer.reserve

    def record(buffer: Buffer, size: int) -> memoryview:
        sizes.append(size)
        return reserve(buffer, size)

    monkeypatch.setattr(Buffer, "reserve", record)
    target = {"w": torch.zeros(3_000_000, dtype=torch.bfloat16)}
    monkeypatch.setattr("dcp_s3.load.fetch.LOAD_BUFFERS", 4 * 2**20)
    dcp.load(target, storage_reader=S3StorageReader(root, settings={"concurrency": 4}))
    assert torch.equal(target["w"], state["w"].bfloat16())
    assert 2**19 < max(sizes) < 2**20 + 2**12, "a quarter of 4 MiB for each of 4 connections"


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == _LOGGER]


def test_one_warning_counts_and_names_what_was_narrowed(
    memory_server: S3Server, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"model": {f"w{n}": torch.randn(4) for n in range(9)}, "n": torch.tensor([2**40 + 1])}
    kept = {"same": torch.ones(3), "wider": torch.ones(3).half(), "exact": torch.ones(3, dtype=torch.int32)}
    dcp.save({**state, **kept}, storage_writer=S3StorageWriter(root))
    target = {
        "model": {f"w{n}": torch.zeros(4, dtype=torch.bfloat16) for n in range(9)},
        "n": torch.zeros(1, dtype=torch.float32),
        "same": torch.zeros(3),
        "wider": torch.zeros(3),
        "exact": torch.zeros(3, dtype=torch.float64),
    }
    dcp.load(target, storage_reader=S3StorageReader(root))
    (message,) = _messages(caplog)
    assert caplog.records[[record.name for record in caplog.records].index(_LOGGER)].levelno == logging.WARNING
    for part in (root, "10 tensors", "9 from torch.float32 to torch.bfloat16 (model.w0, ",
                 "1 from torch.int64 to torch.float32 (n)", "S3StorageReader(allow_dtype_cast=False)"):  # fmt: skip
        assert part in message, message
    assert not [name for name in kept if f"({name}" in message or f", {name}" in message]
    assert torch.equal(target["model"]["w3"], state["model"]["w3"].bfloat16())  # type: ignore[index]


@pytest.mark.parametrize("other", [torch.float16, torch.float64])
def test_a_strict_load_changes_nothing(memory_server: S3Server, root: str, other: torch.dtype) -> None:
    dcp.save({"a": torch.ones(3), "w": torch.ones(3)}, storage_writer=S3StorageWriter(root))
    target = {"a": torch.full((3,), 7.0), "w": torch.full((3,), 7.0, dtype=other)}
    error = failure_of_load(root, target, allow_dtype_cast=False)
    assert isinstance(error, errors.TensorMismatchError)
    assert error.fqn == "w"
    assert "allow_dtype_cast" in str(error)
    assert (target["a"] == 7).all()


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_what_keeps_its_values_comes_back(saved: torch.dtype, target: torch.dtype, seed: int) -> None:
    """Bit for bit, but for the payloads of NaNs."""
    values = random_tensor((64,), saved, seed)
    if not keeps_values(saved, target):
        return
    back = values.to(target).to(saved)
    nan = values != values
    assert torch.equal(back != back, nan)
    assert torch.equal(_bytes(back)[~nan], _bytes(values)[~nan])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)
