"""What a read item holds on to."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format.blocks import Range, make_storage_info
from dcp_s3.load.boxes import Section
from dcp_s3.load.item_transfer import StreamTransfer, TensorTransfer
from dcp_s3.load.plan import plan_requests

INDEX, NOTHING = MetadataIndex("x"), torch.Size((0,))
ITEM = ReadItem(LoadItemType.BYTE_IO, INDEX, NOTHING, INDEX, NOTHING, NOTHING)


def test_the_buffer_of_an_item_is_let_go_when_it_is_decoded() -> None:
    """It is as large as the item; here it comes by sections, as from another rank."""
    buffers: list[weakref.ref[torch.Tensor]] = []

    def decode(_: Any, buffer: torch.Tensor) -> None:
        assert bytes(buffer) == b"\1" * 8
        buffers.append(weakref.ref(buffer))

    item = StreamTransfer(ITEM, make_storage_info("__0_0.distcp", 0, 8), None, None, decode)
    item.expect_sections(True)
    for section in (Section(0, 5), Section(5, 8)):
        item.scatter(section, memoryview(b"\1" * (section.stop - section.start)))
        arrived = item.section_arrived(section)
    assert arrived
    assert item.finish() is None
    (buffer,) = buffers
    assert buffer() is None


def test_planned_requests_keep_no_target_alive() -> None:
    """A load pauses the garbage collector: what it held in a cycle would stay."""
    target = torch.zeros(4)
    size = torch.Size((4,))
    item = ReadItem(LoadItemType.TENSOR, INDEX, size, INDEX, NOTHING, size)
    transfer = TensorTransfer(item, "a", 0, [Range(0, 16, None)], target, size, torch.float32)
    gc.disable()
    try:
        requests = plan_requests(transfer.segments(), max_request=8, max_gap=0)
        assert len(requests) == 1
        known = weakref.ref(target)
        del target, transfer, requests
        assert known() is None
    finally:
        gc.enable()
