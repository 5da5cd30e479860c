"""What torch wrote through stream transforms (`_extensions` and `_extension_registry`, experimental there)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from dcp_s3 import S3StorageReader, errors
from tests.end_to_end.loads import failure
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.end_to_end.test_interchange import upload
from tests.load.test_foreign_items import Boxes

pytestmark = pytest.mark.servers("memory")


class Xor(StreamTransformExtension):
    """Every byte XOR a number that is kept in the descriptor."""

    def __init__(self, key: int = 0x5A) -> None:
        self.key = key

    @staticmethod
    def registry_name() -> str:
        return "dcp_s3.tests.xor"

    @staticmethod
    def from_descriptor(version: str) -> Xor:
        return Xor(int(version))

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/{self.key}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _XorWriter(output, self.key))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(byte ^ self.key for byte in input.read()))


class _XorWriter(io.BytesIO):
    """Holds all back until it is closed, as a compressor does."""

    def __init__(self, output: IO[bytes], key: int) -> None:
        super().__init__()
        self._output, self._key = output, key

    def close(self) -> None:
        if not self.closed:
            self._output.write(bytes(byte ^ self._key for byte in self.getvalue()))
            self._output.close()
        super().close()


def registry() -> ExtensionRegistry:
    """torch's own extensions and ours."""
    found = ExtensionRegistry()
    found.register(Xor)
    return found


def make_state() -> dict[str, Any]:
    return {"x": random_tensor((60, 80), torch.float32), "zeros": torch.zeros(10, 5), "n": "text"}


def load(state: Any, url: str, extension_registry: ExtensionRegistry | None) -> Any:
    dcp.load(state, storage_reader=S3StorageReader(url, _extension_registry=extension_registry))
    return state


@pytest.fixture
def save(s3: Any, bucket: str, root: str, tmp_path: Path) -> Callable[..., str]:
    """Saves a state by torch, through extensions, and uploads that; returns its URL."""

    def save(state: Any, extensions: Sequence[StreamTransformExtension]) -> str:
        writer = dcp.FileSystemWriter(tmp_path / "torch", sync_files=False, _extensions=extensions)
        dcp.save(state, storage_writer=writer)
        upload(s3, bucket, "run/torch", tmp_path / "torch")
        return f"{root}/torch"

    return save


@pytest.mark.parametrize("extensions", [[Xor()], [Xor(1), Xor(2)]], ids=["one", "two"])
def test_what_torch_wrote_through_extensions_is_read(
    save: Callable[..., str], extensions: Sequence[StreamTransformExtension]
) -> None:
    state = make_state()
    url = save(state, extensions)
    assert_same(load(blank(state), url, registry()), state)
    # A box has to be cut from the whole decoded tensor: raw offsets mean nothing here.
    part, reader = {"x": torch.zeros(6, 3)}, S3StorageReader(url, _extension_registry=registry())
    dcp.load(part, storage_reader=reader, planner=Boxes({"x": (3, 5)}))
    assert_same(part["x"], state["x"][3:9, 5:8])


def test_an_unknown_extension_is_named_and_nothing_loaded(save: Callable[..., str]) -> None:
    url = save({"x": torch.ones(30)}, [Xor()])
    target = {"x": torch.zeros(30)}
    error = failure(lambda: load(target, url, None), errors.DcpS3Error)
    for part in ("'x'", url, "dcp_s3.tests.xor", "_extension_registry"):
        assert part in str(error)
    assert not target["x"].any()
