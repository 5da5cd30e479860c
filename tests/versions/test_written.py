"""What one version of torch wrote, another one reads, to the last bit: ours, and what torch's FileSystemWriter wrote.

Every value follows from its name. Archives in this folder hold what other versions wrote. With DCP_S3_TEST_WRITTEN, a
folder, what this version writes is left there, and what others have left there is read: `.ci/torch` does that with each
version.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.process import release
from tests.end_to_end.states import DTYPES, assert_same, blank, random_tensor
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


WHOLE = (6, 5)
"""Shape of the tensors that ranks save in shards."""


def one_rank() -> dict[str, Any]:
    """Dtypes, strides and other entries that all supported versions have."""
    return {
        "dtypes": {str(dtype): random_tensor((2, 3), dtype, i) for i, dtype in enumerate(DTYPES)},
        "scalar": random_tensor((), torch.bfloat16, 1),
        "empty": torch.empty(3, 0, 2),
        "transposed": random_tensor((4, 3), torch.float32, 2).t(),
        "channels_last": random_tensor((2, 3, 4, 5), torch.float16, 3).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "objects": {"step": 12, "text": "läuft", "none": None, "list": [1, {"x": 2.5}]},
    }


def whole(name: str) -> torch.Tensor:
    """The whole of a tensor that ranks save in shards."""
    return torch.arange(len(name), len(name) + 30, dtype=torch.float32).reshape(WHOLE)


def ranks(blank: bool = False) -> dict[str, Any]:
    """Of each of several ranks: shards along both dimensions, and what all have."""

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state: dict[str, Any] = {
        name: DTensor.from_local(_part(torch.zeros(WHOLE) if blank else whole(name), each), mesh, [each], shape=WHOLE,
                                 stride=(WHOLE[1], 1), run_check=False)
        for name, each in placements.items()
    }  # fmt: skip
    return {**state, "step": 0 if blank else 7}


def _part(full: torch.Tensor, placement: Any) -> torch.Tensor:

    if isinstance(placement, Replicate):
        return full.clone()
    chunks = full.chunk(dist.get_world_size(), placement.dim)
    return chunks[dist.get_rank()].contiguous()


_HERE = Path(__file__).parent
_SHARED = os.environ.get("DCP_S3_TEST_WRITTEN")
_ARCHIVES = sorted([*_HERE.glob("*.zip"), *(Path(_SHARED).glob("*.zip") if _SHARED else ())])
_STRIDES = hasattr(TensorProperties(), "strides")  # torch 2.15
_METADATA = "user-metadata.json"


def _save_ranks(url: str, folder: str, run: str) -> None:
    dcp.save(ranks(), storage_writer=S3StorageWriter(f"{url}/ranks"))
    os.environ["DCP_S3_RUN_ID"] = run
    dcp.save(ranks(), storage_writer=S3StorageWriter(f"{url}/merged"), use_collectives=False)
    dcp.save(ranks(), storage_writer=dcp.FileSystemWriter(f"{folder}/ranks"))


def test_what_this_torch_writes_it_reads(s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    dcp.save(one_rank(), storage_writer=S3StorageWriter(f"{root}/one"))
    dcp.save(one_rank(), storage_writer=dcp.FileSystemWriter(tmp_path / "torch/one"))
    run_ranks(2, _save_ranks, root, str(tmp_path / "torch"), "written")
    archive = (Path(_SHARED) if _SHARED else tmp_path) / f"{torch.__version__.partition('+')[0]}.zip"
    metadata = {}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for found in s3.list_objects_v2(Bucket=bucket)["Contents"]:
            stored = s3.get_object(Bucket=bucket, Key=found["Key"])
            name = "ours/" + found["Key"].removeprefix("run/")
            if "/board-" not in name:
                metadata[name] = stored["Metadata"]
                file.writestr(name, stored["Body"].read())
        for path in sorted(tmp_path.joinpath("torch").rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(tmp_path)))
        file.writestr(_METADATA, json.dumps(metadata))
    _check(archive, s3, bucket, root, tmp_path)


@pytest.mark.parametrize("archive", _ARCHIVES, ids=lambda path: path.stem)
def test_what_another_torch_wrote_is_read(s3: Any, bucket: str, root: str, tmp_path: Path, archive: Path) -> None:
    _check(archive, s3, bucket, root, tmp_path)


def _check(archive: Path, s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    folder = tmp_path / f"read-{archive.stem}"
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    metadata = json.loads((folder / _METADATA).read_text())
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != _METADATA:
            fields, key = metadata.get(name, {}), f"run/{archive.stem}/{name}"
            s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes(), Metadata=fields)
    stock = _STRIDES or release(archive.stem) < release("2.15")  # its own reader takes no more values than it knows
    pairs = []
    for writer, names in (("ours", ("ranks", "merged")), ("torch", ("ranks",))):
        url = f"{root}/{archive.stem}/{writer}"
        _check_one(dcp.FileSystemReader(folder / writer / "one") if stock else None, f"{url}/one")
        pairs += [(f"{url}/{name}", str(folder / writer / name) if stock else None) for name in names]
    for world_size in (1, 2, 3):
        run_ranks(world_size, _load_ranks, pairs)


def _check_one(stock: Any, url: str) -> None:
    expected = one_rank()
    for reader in (S3StorageReader(url), *([] if stock is None else [stock])):
        found = blank(expected)
        dcp.load(found, storage_reader=reader)
        assert_same(found, expected)
    assert_same(_strided(url), expected)


def _strided(url: str) -> dict[str, Any]:
    """What is loaded into memory of the strides that were saved."""
    found = one_rank()
    for name in ("transposed", "channels_last"):
        found[name].zero_()
    dcp.load(found, storage_reader=S3StorageReader(url))
    return found


def _load_ranks(pairs: list[tuple[str, str | None]]) -> None:
    """Each from its URL by us, and from a folder by torch."""
    for reader in [each for url, folder in pairs for each in (S3StorageReader(url), folder) if each is not None]:
        found = ranks(blank=True)
        dcp.load(found, storage_reader=dcp.FileSystemReader(reader) if isinstance(reader, str) else reader)
        assert found["step"] == 7
        for name in ("rows", "columns", "replicated"):
            local, placement = found[name].to_local(), found[name].placements[0]
            assert torch.equal(local, _part(whole(name), placement)), (name, type(reader))
