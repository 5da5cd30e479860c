"""States to save, and what it means that two are the same; and the other clients of a DCP checkpoint that save and load
one: torch on a directory, torch with fsspec and s3fs, s3torchconnector.

These run on `tests.ranks.run_ranks(..., forget="dcp_s3")`, where dcp_s3 is not imported and cannot be: what they read
needs nothing but torch, and what they wrote was written by somebody else. Hence this module must not import dcp_s3.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits (NaNs and infinities among them) in the shape and dtype asked for."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def every_kind() -> dict[str, Any]:
    large = random_tensor((1000, 60), torch.float32, 7)
    tied = random_tensor((11, 5), torch.float32, 8)
    return {
        "dtypes": {str(dtype): random_tensor((5, 7), dtype, i) for i, dtype in enumerate(DTYPES)},
        "scalars": {str(dtype): random_tensor((), dtype, i) for i, dtype in enumerate(DTYPES)},
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.bfloat16)],
        "transposed": large.t(),
        "strided": large[::3, ::2],
        "permuted": random_tensor((4, 5, 6), torch.float16, 9).permute(2, 0, 1),
        "view": large[10:20],
        "inner_view": large[:, 5:9],
        "expanded": torch.arange(5.0).expand(3, 5),
        "conj": random_tensor((6,), torch.complex64, 3).nan_to_num().conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "channels_last": random_tensor((2, 3, 4, 5), torch.float32, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "tied": {"a": tied, "b": tied},
        "objects": {"int": 5, "text": "läuft", "none": None, "list": [1, [2, {"x": 3}]], "bytes": b"\x00\x01"},
        "dotted.name": torch.ones(2),
        "naïve/key %+": torch.zeros(2),
    }


def blank(state: Any) -> Any:
    """The same structure with other values, to load into; every tensor contiguous."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None if state is not None else 0


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return bytes(flat.view(torch.uint8).numpy())


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal to the last bit (NaNs too), in dtype, shape and structure."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert_same(f, e, f"{path}/{i}")
    else:
        assert found == expected, path


SMALL_PARTS = {"part_size": "5MiB"}


def random_values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


# --- for other clients ------------------------------------------------------------------------------------

OBJECTS = 2
"""Number of objects, each of more than 5 MiB, that `interchange_state` is enough for."""


def interchange_state() -> dict[str, Any]:
    """The same in every process: one of every kind of entry, and enough for several objects with several parts."""
    torch.manual_seed(0)
    large = {f"w{i}": random_tensor((1024, 1290 + i), torch.float32, 20 + i) for i in range(OBJECTS)}
    return {**every_kind(), "large": large}


@contextlib.contextmanager
def without_dcp_s3() -> Iterator[None]:
    imported = [name for name in sys.modules if name.partition(".")[0] == "dcp_s3"]
    assert not imported, imported
    sys.modules["dcp_s3"] = None  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _storage(client: str) -> tuple[Callable[..., StorageReader], Callable[..., StorageWriter]]:
    """How it makes a reader, and a writer, of a place."""
    if client == "filesystem":
        return dcp.FileSystemReader, partial(dcp.FileSystemWriter, sync_files=False)
    if client == "fsspec":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        options: dict[str, Any] = {
            "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            # As for the tests' own boto3 client: rclone answers a range with the whole object's checksum.
            "config_kwargs": {"response_checksum_validation": "when_required"},
            "skip_instance_cache": True,
        }
        return partial(FsspecReader, **options), partial(FsspecWriter, sync_files=False, **options)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    region, config = os.environ["AWS_DEFAULT_REGION"], S3ClientConfig(force_path_style=True)
    reader, writer = (partial(each, region, s3client_config=config) for each in (S3StorageReader, S3StorageWriter))
    return reader, writer


def read(client: str, place: str) -> None:
    with without_dcp_s3():
        found = blank(interchange_state())
        dcp.load(found, storage_reader=_storage(client)[0](place))
        assert_same(found, interchange_state())


def write(client: str, place: str, options: dict[str, Any]) -> None:
    with without_dcp_s3():
        dcp.save(interchange_state(), storage_writer=_storage(client)[1](place, **options))


def read_directories(directories: list[str]) -> bytes:
    """All that is in each of them, by torch's reader, as torch.save writes it."""
    with without_dcp_s3():
        buffer = io.BytesIO()
        torch.save([_read_directory(directory) for directory in directories], buffer)
        return buffer.getvalue()


def _read_directory(directory: str) -> dict[str, Any]:
    reader = dcp.FileSystemReader(directory)
    state: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    for name, entry in state.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[name] = torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader)
    return state


def distribute(full: torch.Tensor, *placements: Any) -> DTensor:
    """Over all ranks; of two placements the first is over two groups of them, if their number is even."""
    world = dist.get_world_size()
    shape = (world,) if len(placements) == 1 or world % 2 else (2, world // 2)
    mesh = init_device_mesh("cpu", shape)
    return distribute_tensor(full, mesh, placements[-len(shape) :], src_data_rank=None)


def sharded_tensors(value: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
    """A ShardedTensor of given shards (3 + 5 rows), and one of a sharding spec (7 rows: 4 + 3)."""
    rank = dist.get_rank()
    start, rows = ((0, 3), (3, 5))[rank]
    shard = sharded_tensor.Shard(
        tensor=value(0, 8, 6)[start : start + rows].clone(),
        metadata=ShardMetadata([start, 0], [rows, 6], f"rank:{rank}/cpu"),
    )
    given = sharded_tensor.init_from_local_shards([shard], 8, 6)
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    by_spec = sharded_tensor.zeros(spec, 7, 3)
    for local in by_spec.local_shards():
        first = local.metadata.shard_offsets[0]
        local.tensor.copy_(value(1, 7, 3)[first : first + local.metadata.shard_sizes[0]])
    return given, by_spec
