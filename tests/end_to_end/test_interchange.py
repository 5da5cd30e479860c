"""What torch writes and reads, what other clients do, and what goes through stream extensions comes back the same."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from dcp_s3 import S3StorageReader, errors
from tests.end_to_end import loads, states
from tests.end_to_end.states import assert_same, random_tensor
from tests.load.test_foreign_items import Boxes
from tests.ranks import run_ranks
from tests.servers import S3Server

SETTINGS = {"part_size": 5 * 2**20}


def run_foreign(server: S3Server, fn: Any, *args: Any) -> Any:
    """`fn` on a rank that cannot import dcp_s3; the other clients know the endpoint by AWS's own variable."""
    return run_ranks(1, fn, *args, env={"AWS_ENDPOINT_URL": server.endpoint_url}, forget="dcp_s3")[0]


def read_by_torch(server: S3Server, *directories: Path) -> list[dict[str, Any]]:
    """All that is in each of them."""
    data = run_foreign(server, states.read_directories, list(map(str, directories)))
    return torch.load(io.BytesIO(data), weights_only=False)  # type: ignore[no-any-return]


def download(s3: Any, bucket: str, prefix: str, directory: Path) -> Path:
    for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix + "/")["Contents"]:
        path = directory / found["Key"].removeprefix(prefix + "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, found["Key"], str(path))
    return directory


def upload(s3: Any, bucket: str, prefix: str, directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            s3.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(directory)}")


@pytest.mark.parametrize(("max_objects", "checksum"), [(3, "auto"), (1, "none")])
@pytest.mark.parametrize("client", ["fsspec", "s3torchconnector"])
def test_other_s3_clients_read_a_checkpoint_in_place(
    server: S3Server, root: str, client: str, max_objects: int, checksum: str
) -> None:
    loads.save(states.interchange_state(), root, max_objects=max_objects, settings={**SETTINGS, "checksum": checksum})
    run_foreign(server, states.read, client, root)


def test_reads_what_torch_wrote_and_boto3_uploaded(
    server: S3Server, s3: Any, bucket: str, root: str, tmp_path: Path
) -> None:
    run_foreign(server, states.write, "filesystem", str(tmp_path), {"single_file_per_rank": False, "thread_count": 2})
    assert len(list(tmp_path.glob("*.distcp"))) >= 4
    upload(s3, bucket, "run", tmp_path)
    loads.assert_loads(root, states.interchange_state(), settings=SETTINGS)


# s3torchconnector cannot write to the others: rclone answers CreateMultipartUpload with <InitiateMultipartUpload> where
# the Common Runtime insists on S3's <InitiateMultipartUploadResult>; RGW 16.2's answer to Complete has no ETag.
@pytest.mark.servers("memory", "moto", "external")
@pytest.mark.parametrize("client", ["fsspec", "s3torchconnector"])
def test_reads_what_other_clients_wrote(server: S3Server, root: str, client: str) -> None:
    run_foreign(server, states.write, client, root, {"thread_count": 2})
    loads.assert_loads(root, states.interchange_state(), settings=SETTINGS)


# --- stream extensions ---------------------------------------------------------------------------------


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


@pytest.mark.servers("memory")
@pytest.mark.parametrize("extensions", [[Xor()], [Xor(1), Xor(2)]], ids=["one", "two"])
def test_what_torch_wrote_through_extensions_is_read_and_an_unknown_one_is_named(
    s3: Any, bucket: str, root: str, tmp_path: Path, extensions: Sequence[StreamTransformExtension]
) -> None:
    state = {"x": random_tensor((60, 80), torch.float32), "zeros": torch.zeros(10, 5), "n": "text"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False, _extensions=extensions))
    upload(s3, bucket, "run", tmp_path)
    registry = ExtensionRegistry()
    registry.register(Xor)
    loads.assert_loads(root, state, _extension_registry=registry)
    # A box has to be cut from the whole decoded tensor: raw offsets mean nothing here.
    part, reader = {"x": torch.zeros(6, 3)}, S3StorageReader(root, _extension_registry=registry)
    dcp.load(part, storage_reader=reader, planner=Boxes({"x": (3, 5)}))
    assert_same(part["x"], state["x"][3:9, 5:8])
    target = {"x": torch.zeros(60, 80)}
    error = loads.failure(lambda: loads.load(target, root), errors.DcpS3Error)
    for named in ("'x'", root, "dcp_s3.tests.xor", "_extension_registry"):
        assert named in str(error)
    assert not target["x"].any()
