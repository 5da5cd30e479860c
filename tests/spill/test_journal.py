"""The journal is read as it was written, or known to be damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.settings import Settings
from dcp_s3.spill.journal import (
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    Journal,
    JournalError,
    SpilledCommit,
    SpilledObject,
    State,
    file_name,
)

_TEXT = st.text(max_size=20)
_CRC = st.integers(0, 2**64 - 1).map(crc_hex)
_ENTRIES = st.builds(ObjectEntry, _TEXT, st.integers(0, 2**50), st.none() | _CRC)
_OBJECTS = st.builds(SpilledObject, _ENTRIES, st.integers(0, 99).map(file_name), st.integers(1, 2**33), _CRC)
_COMMITS = st.builds(
    SpilledCommit,
    st.just(MANIFEST),
    st.just(METADATA),
    st.lists(_ENTRIES, max_size=3).map(tuple),
    st.booleans(),
    st.none() | st.integers(0, 10**6),
)
_JOURNALS = st.builds(
    Journal,
    url=_TEXT,
    save_id=_TEXT,
    created_at=st.floats(0, 1e11),
    settings=st.dictionaries(_TEXT, st.none() | st.booleans() | st.integers() | st.floats(0, 1) | _TEXT, max_size=3),
    state=st.sampled_from(State),
    keys=st.lists(_TEXT, max_size=3).map(tuple),
    objects=st.lists(_OBJECTS, max_size=3).map(tuple),
    commit=st.none() | _COMMITS,
)

EXAMPLE = Journal(
    "s3://bucket/run/step-1",
    "0123456789abcdef",
    1700000000.25,
    Settings().model_dump(),
    State.SEALED,
    ("run/step-1/__0_0-abc.distcp",),
    (SpilledObject(ObjectEntry("__0_0-abc.distcp", 12, "00000000000000ff"), "object-0", 5, "00000000000000ff"),),
    SpilledCommit("manifest.json", "metadata", (ObjectEntry("__0_0-abc.distcp", 12),), overwrite=True, rank=3),
)


def sign(body: bytes) -> bytes:
    """A body behind a first line that is right."""
    return f"dcp_s3 journal {crc_hex(crc64nvme(body))}\n".encode() + body


@given(_JOURNALS)
def test_what_is_written_is_what_is_read(journal: Journal) -> None:
    assert Journal.from_bytes(journal.to_bytes()) == journal


@pytest.mark.parametrize("journal", [EXAMPLE, Journal("s3://b/x", "1", 0.0, {})], ids=["full", "small"])
def test_a_journal_that_is_cut_off_or_longer_or_has_any_byte_changed_is_refused(journal: Journal) -> None:
    data = journal.to_bytes()
    wrong = [data[:length] for length in range(len(data))] + [data + more for more in (b"x", b"\n", data)]
    for flip in (0x01, 0x80):
        flipped = (data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :] for at in range(len(data)))
        wrong.extend(flipped)
    for each in (*wrong, sign(b""), sign(b"anything else")):
        with pytest.raises(JournalError):
            Journal.from_bytes(each)


def test_a_journal_of_another_version_says_so() -> None:
    fields = json.loads(EXAMPLE.to_bytes().partition(b"\n")[2])
    fields["format_version"] = FORMAT_VERSION + 1
    with pytest.raises(JournalError, match=f"version {FORMAT_VERSION + 1}.*reads {FORMAT_VERSION}"):
        Journal.from_bytes(sign(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    "change",
    [
        {"state": "half"},
        {"created_at": None},
        {"settings": 7},
        {"keys": None},
        {"objects": [{"file": "object-0"}]},
        {"objects": [{"entry": {"wrong": 1}, "file": "object-0", "part_size": 1, "crc64nvme": ""}]},
        {"commit": {"manifest": "m"}},
        {"commit": [1]},
    ],
    ids=str,
)
def test_a_field_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    fields = {**json.loads(EXAMPLE.to_bytes().partition(b"\n")[2]), **change}
    with pytest.raises(JournalError, match="not a journal"):
        Journal.from_bytes(sign(json.dumps(fields).encode()))


@pytest.mark.parametrize("name", ["../../../secret.txt", "/etc/passwd", "journal", "object-0/../x", "object-0\n", ""])
def test_a_file_name_that_no_save_gives_is_refused(name: str) -> None:
    (spilled,), commit = EXAMPLE.objects, EXAMPLE.commit
    assert commit is not None
    for journal in (
        replace(EXAMPLE, objects=(replace(spilled, file=name),)),
        replace(EXAMPLE, commit=replace(commit, manifest=name)),
        replace(EXAMPLE, commit=replace(commit, metadata=name)),
    ):
        with pytest.raises(JournalError, match="no save writes"):
            Journal.from_bytes(journal.to_bytes())
