"""Memory of every kind: it lives as long as something reads it, is really there, and is given back."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3.errors import StagingError
from dcp_s3.memory import view_bytes
from dcp_s3.stage import buffers
from dcp_s3.stage.buffers import HostBuffer, Kind, map_shared

KINDS: tuple[Kind, ...] = ("private", "shared", "file")
PAGE = mmap.PAGESIZE


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mapped() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.fixture(params=KINDS)
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> HostBuffer:
    return HostBuffer(3 * PAGE + 5, request.param, directory=str(tmp_path))


def test_memory_can_be_written_and_read(buffer: HostBuffer) -> None:
    """It starts on a page; only what is shared has a descriptor."""
    lease = buffer.lease()
    assert (len(lease), buffer.size) == (3 * PAGE + 5, 3 * PAGE + 5)
    assert bytes(lease) == bytes(len(lease))
    tensor = torch.frombuffer(lease, dtype=torch.uint8)
    assert tensor.data_ptr() == buffer.address
    assert buffer.address % PAGE == 0
    tensor.fill_(7)
    assert bytes(buffer.lease()) == b"\x07" * buffer.size
    assert not buffer.pinned
    if buffer.kind == "private":
        with pytest.raises(ValueError, match="private"):
            buffer.fileno()
        return
    state = os.fstat(buffer.fileno())
    assert state.st_size == buffer.size
    assert state.st_blocks * 512 >= buffer.size, "space is reserved"
    assert not os.get_inheritable(buffer.fileno())
    mapped = map_shared(os.dup(buffer.fileno()), buffer.size)
    buffer.lease()[PAGE] = 42
    assert mapped[PAGE] == 42, "another mapping shows the same"


_READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda t: t[3:5],
    "dtype": lambda t: t.view(torch.int32),
    "parameter": lambda t: torch.nn.Parameter(t.view(torch.float32)),
    "storage": lambda t: t.untyped_storage(),
    "bytes of a slice": lambda t: view_bytes(t[5:])[1:],
    "numpy": lambda t: t[3:].numpy(),
    "a copy": lambda t: t.clone(),
}


@pytest.mark.parametrize("kind", _READERS)
def test_a_lease_lives_as_long_as_what_reads_it(buffer: HostBuffer, kind: str) -> None:
    lease, other = buffer.lease(), buffer.lease()
    alive, others = weakref.ref(lease), weakref.ref(other)
    tensor = torch.frombuffer(lease, dtype=torch.uint8, count=64, offset=64)
    kept = _READERS[kind](tensor)
    del lease, other, tensor
    gc.collect()
    assert (alive() is None) == (kind == "a copy")
    assert others() is None
    del kept
    gc.collect()
    assert alive() is None


def test_a_file_leaves_no_name(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "at need"
    before = _descriptors()
    buffer = HostBuffer(PAGE, "file", directory=str(directory))
    assert _descriptors() == before + 2  # the mapping has a duplicate
    assert os.listdir(directory) == []
    state = os.fstat(buffer.fileno())
    assert (state.st_nlink, state.st_mode & 0o077, state.st_size) == (0, 0, PAGE)
    assert state.st_dev == os.stat(directory).st_dev


# --- no room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number"), [("file", errno.ENOSPC), ("file", errno.EOPNOTSUPP), ("shared", errno.ENOSPC)]
)
def test_no_room_names_what_is_full_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, number: int
) -> None:
    def fail(descriptor: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = _descriptors()
    with pytest.raises(StagingError, match="DCP_S3_SPILL_DIR") as failure:
        HostBuffer(5 * 2**20, kind, directory=str(tmp_path))
    message = str(failure.value)
    where = repr(str(tmp_path)) if kind == "file" else "shared memory"
    for each in ("DCP_S3_STAGING_LIMIT", "5.0 MiB", os.strerror(number), where):
        assert each in message
    assert isinstance(failure.value.__cause__, OSError)
    del failure
    gc.collect()
    assert _descriptors() == before


def test_a_spill_directory_that_is_a_file_or_cannot_be_written(tmp_path: Path) -> None:
    """In /proc nobody makes files, root neither."""
    file = tmp_path / "file"
    file.write_text("x")
    for path in (str(file), str(file / "below"), "/proc/self", "/proc/no/such/directory"):
        with pytest.raises(StagingError, match=r"spill directory.*DCP_S3_SPILL_DIR") as failure:
            HostBuffer(PAGE, "file", directory=path)
        assert repr(path) in str(failure.value)
    assert file.read_text() == "x"


# --- memory is given back --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_and_memory_are_given_back(kind: Kind, tmp_path: Path) -> None:
    size = 64 * 2**20
    before, mapped = _descriptors(), _mapped()
    for _ in range(20):
        buffer = HostBuffer(size, kind, directory=str(tmp_path))
        tensor = torch.frombuffer(buffer.lease(), dtype=torch.uint8)
        del buffer
        tensor[-1] = 1
    assert _mapped() >= mapped + size  # the last one is in use
    del tensor
    gc.collect()
    assert _descriptors() == before
    assert _mapped() < mapped + size


def test_pinned_memory_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(buffers.torch_private, "pin_memory", lambda address, size: calls.append(("pin", address)))
    monkeypatch.setattr(buffers.torch_private, "unpin_memory", lambda address: calls.append(("unpin", address)))
    buffer = HostBuffer(PAGE, "private")
    buffer.pin()
    address = buffer.address
    assert buffer.pinned
    assert calls == [("pin", address)]
    del buffer
    assert calls == [("pin", address), ("unpin", address)]
