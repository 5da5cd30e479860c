"""The other clients of a DCP checkpoint: torch on a directory, torch with fsspec and s3fs, s3torchconnector.

Everything here runs on `tests.ranks.run_ranks(..., forget="dcp_s3")`, where dcp_s3 is not imported and cannot be:
what they read needs nothing but torch, and what they wrote was written by somebody else. Hence this module must not
import dcp_s3.
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
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tests.end_to_end.states import assert_same, blank, every_kind, random_tensor

OBJECTS = 2
"""Number of objects, each of more than 5 MiB, that `interchange_state` is enough for."""


def interchange_state() -> dict[str, Any]:
    """The same in every process: one of every kind of entry, and enough for several objects with several parts."""
    torch.manual_seed(0)
    large = {f"w{i}": random_tensor((1024, 1290 + i), torch.float32, 20 + i) for i in range(OBJECTS)}
    return {**every_kind(), "large": large}


def assert_same_interchange_state(found: dict[str, Any]) -> None:
    found, expected = dict(found), interchange_state()
    found_large, expected_large = found.pop("large"), expected.pop("large")
    assert_same(found, expected)
    assert found_large.keys() == expected_large.keys()
    for name, tensor in expected_large.items():  # as integers: among the random bits are NaNs
        assert found_large[name].dtype == tensor.dtype, name
        assert torch.equal(found_large[name].view(torch.int32), tensor.view(torch.int32)), name


# --- on ranks, without dcp_s3 ---------------------------------------------------------------------------


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
        assert_same_interchange_state(found)


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
