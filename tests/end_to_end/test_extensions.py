"""torch's stream transforms (`_extensions` and `_extension_registry`, experimental there)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from tests.end_to_end.loads import failure
from tests.end_to_end.states import assert_same, blank, every_kind, random_tensor
from tests.end_to_end.test_interchange import download, upload

pytestmark = pytest.mark.servers("memory")

SETTINGS = {"part_size": "5MiB"}
KEY = 0x5A


class Xor(StreamTransformExtension):
    """Every byte XOR a number that is kept in the descriptor; its streams can be neither sought nor reopened."""

    def __init__(self, key: int = KEY) -> None:
        self.key = key
        self.table = bytes(byte ^ key for byte in range(256))

    @staticmethod
    def registry_name() -> str:
        return "dcp_s3.tests.xor"

    @staticmethod
    def from_descriptor(version: str) -> Xor:
        return Xor(int(version))

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/{self.key}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _XorWriter(output, self.table))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _XorReader(input, self.table))


class _XorWriter(io.RawIOBase):
    """Holds the last bytes back until it is closed, as a compressor does."""

    def __init__(self, output: IO[bytes], table: bytes) -> None:
        self._output, self._table, self._held = output, table, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        block = self._held + bytes(data).translate(self._table)
        self._held = block[-10:]
        self._output.write(block[:-10])
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._held)
            self._output.close()
        super().close()


class _XorReader(io.RawIOBase):
    def __init__(self, source: IO[bytes], table: bytes) -> None:
        self._source, self._table = source, table

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(min(len(buffer), 1000)).translate(self._table)
        buffer[: len(data)] = data
        return len(data)


EXTENSIONS: dict[str, Callable[[], list[StreamTransformExtension]]] = {
    "xor": lambda: [Xor()],
    "xor-twice": lambda: [Xor(1), Xor(2)],
}


@pytest.fixture(params=EXTENSIONS)
def extensions(request: pytest.FixtureRequest) -> Sequence[StreamTransformExtension]:
    """What a save goes through."""
    return EXTENSIONS[request.param]()


def registry() -> ExtensionRegistry:
    """torch's own extensions and ours."""
    found = ExtensionRegistry()
    found.register(Xor)
    return found


def make_state() -> dict[str, Any]:
    return {**every_kind(), "large": random_tensor((1500, 1000), torch.float32), "zeros": torch.zeros(1000, 500)}


def save(state: Any, url: str, extensions: Sequence[StreamTransformExtension], **settings: Any) -> Any:
    writer = S3StorageWriter(url, settings={**SETTINGS, **settings}, _extensions=extensions)
    return dcp.save(state, storage_writer=writer)


def load(state: Any, url: str, extension_registry: ExtensionRegistry | None) -> Any:
    dcp.load(state, storage_reader=S3StorageReader(url, settings=SETTINGS, _extension_registry=extension_registry))
    return state


def failure_of_load(state: Any, url: str, extension_registry: ExtensionRegistry | None) -> BaseException:
    error: BaseException = failure(lambda: load(state, url, extension_registry))
    return error


def flip(s3: Any, bucket: str, relative_path: str, position: int) -> None:
    key = f"run/{relative_path}"
    data = bytearray(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[position] ^= 1
    s3.put_object(Bucket=bucket, Key=key, Body=bytes(data))


@pytest.mark.servers("memory", "moto")
def test_what_goes_through_extensions_comes_back_also_to_and_from_torch(
    s3: Any, bucket: str, root: str, tmp_path: Path, extensions: Sequence[StreamTransformExtension]
) -> None:
    state = make_state()
    save(state, root, extensions)
    assert_same(load(blank(state), root, registry()), state)

    download(s3, bucket, "run", tmp_path / "ours")
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "ours", _extension_registry=registry()))
    assert_same(found, state)

    writer = dcp.FileSystemWriter(tmp_path / "torch", sync_files=False, _extensions=extensions)
    dcp.save(state, storage_writer=writer)
    upload(s3, bucket, "run/torch", tmp_path / "torch")
    assert_same(load(blank(state), f"{root}/torch", registry()), state)


def test_a_part_of_a_transformed_tensor(root: str) -> None:
    """A box has to be cut from the whole decoded tensor: raw offsets mean nothing here."""
    from tests.ranks import run_ranks

    save({"x": random_tensor((6, 8), torch.float32)}, root, [Xor()])
    run_ranks(2, _load_columns, root)


def _load_columns(url: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(torch.zeros(6, 8), mesh, [Shard(1)])}
    load(state, url, registry())
    expected = random_tensor((6, 8), torch.float32).chunk(2, dim=1)[mesh.get_rank()]
    assert_same(state["x"].to_local(), expected)


def test_an_unknown_extension_is_named_and_nothing_loaded(root: str) -> None:
    save({"x": torch.ones(30)}, root, [Xor()])
    target = {"x": torch.zeros(30)}
    error = failure_of_load(target, root, None)
    assert isinstance(error, errors.DcpS3Error)
    for part in ("'x'", root, "dcp_s3.tests.xor", "_extension_registry"):
        assert part in str(error)
    assert not target["x"].any()


@pytest.mark.parametrize("fqn", ["x", "n"])
def test_damage_is_found_by_the_checksum_of_the_stored_bytes(s3: Any, bucket: str, root: str, fqn: str) -> None:
    state = {"x": random_tensor((50, 30), torch.float32), "n": "text"}
    metadata = save(state, root, [Xor()])
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    flip(s3, bucket, info.relative_path, info.offset + info.length // 2)
    error = failure_of_load(blank(state), root, registry())
    assert isinstance(error, errors.CorruptCheckpointError)
    for part in (repr(fqn), root, f"bytes {info.offset} to {info.offset + info.length - 1} of {info.relative_path}"):
        assert part in str(error)
