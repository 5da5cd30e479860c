"""What decodes an item tells damage from what is only unusual."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
import torch

from dcp_s3.offline.verify_bytes import UnknownExtensionError, find_damage
from dcp_s3.offline.verify_plan import StoredItem
from tests.offline.damaging import NeedsCode

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def make_item(data: bytes, *, shape: tuple[int, ...] | None = None, transforms: tuple[str, ...] = ()) -> StoredItem:
    size = None if shape is None else torch.Size(shape)
    return StoredItem("a", "o", 0, len(data), size, False, transforms, None, 0, len(data))


def damage(data: bytes, **arguments: Any) -> str | None:
    return find_damage(io.BytesIO(data), make_item(data, **arguments))


def test_containers_are_told_from_damage() -> None:
    assert damage(torch_saved(torch.ones(2, 3)), shape=(2, 3)) is None
    assert damage(torch_saved({"a": torch.ones(2)})) is None
    assert damage(pickle.dumps(NeedsCode())) is None
    assert "neither a zip archive nor a pickle" in (damage(b"anything else") or "")
    assert damage(pickle.dumps(NeedsCode())[:-5]) is not None
    assert damage(b"") is not None
    assert damage(torch_saved("text"), shape=(2,)) is not None
    assert "recorded was (3, 2)" in (damage(torch_saved(torch.ones(2, 2)), shape=(3, 2)) or "")
    assert damage(torch_saved(torch.ones(2)), shape=(2, 1)) is not None
    assert not NeedsCode.ran


def test_archives_without_crc32_are_good() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = torch_saved(torch.ones(20))
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is not None
    assert damage(data, shape=(20,)) is None


def test_what_pretends_to_be_larger_than_it_is_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    assert len(buffer.getvalue()) < 10**4
    for shape in (None, (3,)):
        assert "pretends to have 1000000 bytes" in (damage(buffer.getvalue(), shape=shape) or "")


def test_an_unknown_extension_is_no_damage() -> None:
    with pytest.raises(UnknownExtensionError):
        damage(b"abc", transforms=("somebody.else/1",))


def test_a_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    data = torch_saved(torch.ones(2))
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError):
        damage(data, shape=(2,))
