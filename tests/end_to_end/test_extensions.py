"""torch's stream transforms (`_extensions` and `_extension_registry`, experimental there)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from tests.end_to_end.loads import failure
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.end_to_end.test_interchange import download, upload
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


def save(state: Any, url: str, extensions: Sequence[StreamTransformExtension]) -> Any:
    return dcp.save(state, storage_writer=S3StorageWriter(url, _extensions=extensions))


def load(state: Any, url: str, extension_registry: ExtensionRegistry | None) -> Any:
    dcp.load(state, storage_reader=S3StorageReader(url, _extension_registry=extension_registry))
    return state


@pytest.mark.parametrize("extensions", [[Xor()], [Xor(1), Xor(2)]], ids=["one", "two"])
def test_what_goes_through_extensions_comes_back_also_to_and_from_torch(
    s3: Any, bucket: str, root: str, tmp_path: Path, extensions: Sequence[StreamTransformExtension]
) -> None:
    state = make_state()
    save(state, root, extensions)
    assert_same(load(blank(state), root, registry()), state)
    # A box has to be cut from the whole decoded tensor: raw offsets mean nothing here.
    part, reader = {"x": torch.zeros(6, 3)}, S3StorageReader(root, _extension_registry=registry())
    dcp.load(part, storage_reader=reader, planner=Boxes({"x": (3, 5)}))
    assert_same(part["x"], state["x"][3:9, 5:8])

    download(s3, bucket, "run", tmp_path / "ours")
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "ours", _extension_registry=registry()))
    assert_same(found, state)

    writer = dcp.FileSystemWriter(tmp_path / "torch", sync_files=False, _extensions=extensions)
    dcp.save(state, storage_writer=writer)
    upload(s3, bucket, "run/torch", tmp_path / "torch")
    assert_same(load(blank(state), f"{root}/torch", registry()), state)


def test_an_unknown_extension_is_named_and_nothing_loaded(root: str) -> None:
    save({"x": torch.ones(30)}, root, [Xor()])
    target = {"x": torch.zeros(30)}
    error = failure(lambda: load(target, root, None), errors.DcpS3Error)
    for part in ("'x'", root, "dcp_s3.tests.xor", "_extension_registry"):
        assert part in str(error)
    assert not target["x"].any()
