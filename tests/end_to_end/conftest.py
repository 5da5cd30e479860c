"""A checkpoint to be damaged behind dcp_s3's back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.blocks import get_raw_offset
from tests.end_to_end.states import blank, random_tensor

# Few attempts: what is cut short at rest stays so, and each attempt waits longer than the one before.
SETTINGS = {"part_size": "5MiB", "retry_attempts": 2}


def make_state() -> dict[str, Any]:
    """A tensor that takes several requests, one for itself, several that share one, and objects."""
    return {
        "large": random_tensor((1500, 1000), torch.float32, 1),
        "medium": random_tensor((300, 1000), torch.bfloat16, 2),
        "small": {f"w{i}": random_tensor((9, 5), torch.float32, 10 + i) for i in range(20)},
        "objects": {"text": "something", "numbers": [1, 2, 3]},
    }


class Saved:
    """A checkpoint whose stored bytes can be changed behind dcp_s3's back."""

    def __init__(self, s3: Any, bucket: str, root: str, *, state: Any = None, **settings: Any) -> None:
        self._s3, self._bucket, self.url = s3, bucket, root
        self._prefix = root.removeprefix(f"s3://{bucket}/")
        self.state = make_state() if state is None else state
        writer = S3StorageWriter(root, max_objects=1, settings={**SETTINGS, **settings})
        self.metadata: Metadata = dcp.save(self.state, storage_writer=writer)

    def info(self, fqn: str) -> Any:
        (found,) = (info for index, info in self.metadata.storage_data.items() if index.fqn == fqn)
        return found

    def raw(self, fqn: str) -> tuple[int, int]:
        """First byte and length, in the object, of what the tensor's checksum covers."""
        info = self.info(fqn)
        chunk = self.metadata.state_dict_metadata[fqn].chunks[0]
        element_size = self.metadata.state_dict_metadata[fqn].properties.dtype.itemsize
        return info.offset + get_raw_offset(info), chunk.sizes.numel() * element_size

    def get(self, path: str) -> bytes:
        return bytes(self._s3.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}")["Body"].read())

    def put(self, path: str, data: bytes) -> None:
        self._s3.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}", Body=data)

    def delete(self, path: str) -> None:
        self._s3.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}")

    def flip(self, path: str, *positions: int) -> bytes:
        """Change one bit at each position; returns the object's new content."""
        data = bytearray(self.get(path))
        for position in positions:
            data[position] ^= 0x10
        self.put(path, bytes(data))
        return bytes(data)

    def change_metadata(self, change: Callable[[Metadata], None]) -> None:
        metadata = pickle.loads(self.get(".metadata"))
        change(metadata)
        self.put(".metadata", pickle.dumps(metadata))

    def change_info(self, fqn: str, **changes: Any) -> None:
        """Give the item of a name other fields in ``.metadata``."""

        def change(metadata: Metadata) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == fqn:
                    vars(info).update(changes)

        self.change_metadata(change)

    def load(self, state: Any = None, **settings: Any) -> Any:
        state = blank(self.state) if state is None else state
        dcp.load(state, storage_reader=S3StorageReader(self.url, settings={**SETTINGS, **settings}))
        return state

    def failure_of_load(self, state: Any = None) -> errors.DcpS3Error:
        with pytest.raises(CheckpointException) as failure:
            self.load(state)
        ((error, _),) = failure.value.failures.values()
        assert isinstance(error, errors.CheckpointError), repr(error)
        assert error.url == self.url
        assert self.url in str(error)
        return error


@pytest.fixture
def saved(s3: Any, bucket: str, root: str) -> Saved:
    """A checkpoint in one object."""
    return Saved(s3, bucket, root)
