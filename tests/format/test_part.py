"""A part survives its way through the bucket, and what is no part is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3.format.control_files import AttachmentEntry
from dcp_s3.format.part import MAGIC, Part, encode, path_code, path_from, unpack
from dcp_s3.memory import crc64nvme
from tests.coordination.making_parts import other, part_of, parts, tensor


@settings(max_examples=40)
@given(parts(), st.data())
def test_a_damaged_part_is_refused(part: Part, data: st.DataObject) -> None:
    packed = bytearray(encode(part))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="part"):
        unpack(bytes(packed))


@settings(max_examples=40)
@given(parts(), st.data())
def test_a_truncated_part_is_refused(part: Part, data: st.DataObject) -> None:
    packed = encode(part)
    with pytest.raises(ValueError, match="part"):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(st.binary(max_size=200))
def test_what_is_no_part_is_refused_even_with_its_magic_and_crc(body: bytes) -> None:
    for data in (body, MAGIC + body):
        with pytest.raises(ValueError, match="part"):
            unpack(data + crc64nvme(data).to_bytes(8, "big"))


def test_a_later_version_is_named() -> None:
    data = bytearray(encode(part_of(0, 1, [])))
    data[len(MAGIC) - 1] = 9
    with pytest.raises(ValueError, match=r"not a part of a save that this dcp_s3 reads"):
        unpack(bytes(data))


PART = part_of(1, 2, [tensor("w", [4], [2], [2]), other("step")], paths={"w": ("w",), "step": ("step",)})
WRONG: dict[str, Any] = {
    "rank": 2,
    "world_size": -1,
    "names": ["w"],
    "paths": ["1"],
    "properties": [],
    "shapes": [[4], [-2]],
    "items": 1,
}


def _with(field: str, value: Any) -> bytes:
    """`PART` with another value in its head, and a CRC that fits."""
    data = encode(PART)
    length = int.from_bytes(data[8:12], "little")
    head = json.loads(data[12 : 12 + length])
    head[field] = value
    text = json.dumps(head).encode()
    text += b" " * (-(12 + len(text)) % 8)
    changed = data[:8] + len(text).to_bytes(4, "little") + text + data[12 + length : -8]
    return changed + crc64nvme(changed).to_bytes(8, "big")


def test_the_head_can_be_changed_at_all() -> None:
    assert unpack(_with("facts", {"throttled": 3})).facts == {"throttled": 3}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_head_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="not a part that dcp_s3 writes"):
        unpack(_with(field, WRONG[field]))


@pytest.mark.parametrize(
    ("path", "size"),
    [("s3://other/__0_0-ab.distcp", 2000), ("../__1_0-ab.distcp", 2000), (".metadata", 2000)]
    + [("__1_0-0123456789ab.distcp", size) for size in (1899, -1)],
)
def test_objects_lie_in_the_checkpoint_and_hold_their_items(path: str, size: int) -> None:
    with pytest.raises(ValueError, match="not a part that dcp_s3 writes"):
        unpack(_with("objects", [{"path": path, "size": size, "crc64nvme": None}]))


def test_what_a_part_cannot_hold_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="no object of the part"):
        encode(dataclasses.replace(PART, objects=()))
    attached = AttachmentEntry(PART.objects[0].path, 2000, None, "/etc/passwd")
    with pytest.raises(ValueError, match="attachment"):
        encode(dataclasses.replace(PART, objects=(attached,)))
    transformed = dataclasses.replace(PART.written[0].storage, transform_descriptors=["zstd"])
    with pytest.raises(ValueError, match="cannot hold: transform_descriptors"):
        encode(dataclasses.replace(PART, written=(dataclasses.replace(PART.written[0], storage=transformed),)))
    with pytest.raises(ValueError, match="text and numbers"):
        encode(dataclasses.replace(PART, paths={"w": (1.5,)}))  # type: ignore[dict-item]


@given(st.lists(st.one_of(st.text("ab.1 i[", max_size=4), st.integers(-10, 100)), max_size=4))
def test_a_path_is_short_where_the_name_says_it(path: list[str | int]) -> None:
    name = ".".join(map(str, path))
    for each in (name, "another"):
        assert path_from(each, path_code(each, path)) == tuple(path)
