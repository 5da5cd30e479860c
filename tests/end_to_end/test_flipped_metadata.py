"""Bits of ``.metadata``, flipped: what loads is what was saved, and all else ends in our errors, in little memory.

Every bit is tried by the reader's own function; of metadata without a seal, every 13th unless DCP_S3_TEST_FLIPS is set.
Where it finds nothing, and in some other cases, everything that reads metadata is tried as well: DCP_S3_TEST_FLIPS such
bits, evenly spread; 0 stands for all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, errors, read_tensor, verify
from dcp_s3.format.metadata import load_metadata
from tests.end_to_end.states import assert_same, blank
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")

_ALL = "DCP_S3_TEST_FLIPS" in os.environ
_FLIPS = int(os.environ.get("DCP_S3_TEST_FLIPS", "6"))
_MEMORY = 300 * 2**20


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(6, 4), "b.bias": torch.randn(3).bfloat16()},
        "count": torch.tensor(7),
        "wide": torch.randn(3, 4),
        "step": 17,
    }


def _sharded() -> dict[str, Any]:
    state, mesh = _state(), init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("a.weight", "b.weight"):
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [Shard(0)])
    return state


def _save(root: str, directory: str) -> None:
    for step in (1, 2):
        dcp.save(_sharded(), storage_writer=S3StorageWriter(f"{root}/ours/step-{step:08d}"))
        dcp.save(_sharded(), storage_writer=dcp.FileSystemWriter(directory))


@pytest.fixture(params=["as saved", "copied", "copied, of an earlier version", "torch's"])
def checkpoint(request: Any, s3: Any, bucket: str, root: str, tmp_path: Path) -> Any:
    """The root with two checkpoints; the second is to be damaged. And its key, bytes and user metadata."""
    kind = request.param
    run_ranks(2, _save, root, str(tmp_path / "torch"))
    if kind == "torch's":
        root = f"{root}/torch"
        for step in (1, 2):
            for path in (tmp_path / "torch").iterdir():
                s3.put_object(Bucket=bucket, Key=f"run/torch/step-{step:08d}/{path.name}", Body=path.read_bytes())
    else:
        root = f"{root}/ours"
    key = f"{root.removeprefix(f's3://{bucket}/')}/step-00000002/.metadata"
    found = s3.get_object(Bucket=bucket, Key=key)
    data, fields = found["Body"].read(), found["Metadata"] if kind == "as saved" else {}
    if kind == "copied, of an earlier version":
        data = data[: -17 - data[-17]]  # without the seal

    def put(changed: bytes) -> None:
        s3.put_object(Bucket=bucket, Key=key, Body=changed, Metadata=fields)

    return kind, root, data, put


@pytest.mark.counted
def test_a_flipped_bit_loads_what_was_saved_or_is_found(checkpoint: Any) -> None:
    kind, root, data, put = checkpoint
    found, missed = [], []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sealed = kind in ("as saved", "copied")
    for bit in range(0, 8 * len(data), 1 if sealed or _ALL else 13):
        try:
            load_metadata(_flip(data, bit), url="s3://bucket/step-2")
        except (errors.CorruptCheckpointError, errors.UnsafeMetadataError):
            found.append(bit)
        else:
            missed.append(bit)
    assert (not missed) == sealed
    wrong = []
    for bit in (*_some(missed), *_some(found)[::10]):
        put(_flip(data, bit))
        try:
            _check(root, kind)
        except Exception as error:  # noqa: BLE001 - all of them are told at the end
            wrong.append((bit, repr(error)[:300]))
    assert not wrong, f"{len(wrong)}: {wrong[:10]}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < _MEMORY


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _some(bits: list[int]) -> list[int]:
    return bits[:: max(1, len(bits) // _FLIPS)] if _FLIPS else bits


def _check(root: str, kind: str) -> None:
    url = f"{root}/step-00000002"
    state = blank(_state())
    try:
        dcp.load(state, storage_reader=S3StorageReader(url), no_dist=True)
    except CheckpointException as failure:
        for error, _ in failure.failures.values():
            assert isinstance(error, errors.DcpS3Error), repr(error)
    else:
        assert_same(state, _state())
    flat, _ = flatten_state_dict(_state())
    for name in set(flat) - {"step"}:
        with contextlib.suppress(errors.DcpS3Error):
            assert_same(read_tensor(url, name), flat[name])
    state = blank(_state())
    with CheckpointManager(root) as manager:
        try:
            assert manager.restore(state) in (1, 2)
            assert_same(state, _state())
        except errors.DcpS3Error:
            if kind in ("as saved", "copied"):
                raise


def _cut_chunk(metadata: Metadata) -> None:
    (chunk,) = metadata.state_dict_metadata["wide"].chunks
    vars(chunk)["sizes"] = torch.Size([3, 0])


def _drop_chunk(metadata: Metadata) -> None:
    _, second = metadata.state_dict_metadata["model.a.weight"].chunks
    metadata.state_dict_metadata["model.a.weight"].chunks.remove(second)
    del metadata.storage_data[MetadataIndex("model.a.weight", second.offsets)]


def _change_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32


@pytest.mark.parametrize("edit", [_cut_chunk, _drop_chunk, _change_dtype])
def test_edited_metadata(checkpoint: Any, edit: Callable[[Metadata], None]) -> None:
    kind, root, data, put = checkpoint
    metadata = pickle.loads(data)
    edit(metadata)
    put(pickle.dumps(metadata))
    url, state = f"{root}/step-00000002", blank(_state())
    assert edit is _change_dtype or not verify(url).ok
    if kind == "torch's" and edit is _change_dtype:  # its items say what they are, and are loaded as that
        dcp.load(state, storage_reader=S3StorageReader(url), no_dist=True)
    else:
        with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
            dcp.load(state, storage_reader=S3StorageReader(url), no_dist=True)
        state = blank(_state())
        with CheckpointManager(root) as manager:
            assert manager.restore(state) == 1
    assert_same(state, _state())
