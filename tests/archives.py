"""What torch.save writes, and what other versions of it wrote."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

NEWER_RECORDS = (".format_version", ".storage_alignment")
"""Not written by torch 2.1 to 2.5."""


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes here."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def records_of(data: bytes) -> dict[str, bytes]:
    """Names (without the archive's own) and bytes of the records, in their order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}


def rewritten(
    data: bytes, *, without: tuple[str, ...] = (), changed: Mapping[str, bytes] | None = None, alignment: int = 64
) -> bytes:
    """The same archive by torch's own writer: without some records, or with others in their place or behind the
    pickle."""
    records = records_of(data)
    pickled = records.pop("data.pkl")
    records = {"data.pkl": pickled} | {name: b"" for name in changed or {} if name not in records} | records
    records |= changed or {}
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer, True, alignment)
    for name, content in records.items():
        if name not in (*without, "version", ".data/serialization_id"):  # the last two are its own
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return buffer.getvalue()


def old(data: bytes) -> bytes:
    """As torch 2.1 to 2.5 wrote it."""
    return rewritten(data, without=NEWER_RECORDS)


def oldest(data: bytes) -> bytes:
    """As torch 2.0 and before wrote it: without a byte order."""
    return rewritten(data, without=(*NEWER_RECORDS, "byteorder"))


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The same records by Python's zipfile: sizes and CRC-32s stand in the local headers, nothing is aligned."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records_of(data).items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()
