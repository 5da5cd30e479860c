"""What a shared item holds on to."""

from __future__ import annotations

import weakref

import torch

from dcp_s3.load.boxes import Box
from dcp_s3.load.peers.assignment import StoredChunk
from dcp_s3.load.peers.box_sections import Section
from dcp_s3.load.peers.shared_items import SharedItem


def test_its_memory_is_let_go_when_it_has_been_handed_on() -> None:
    """For an item that is decoded it is a buffer as large as the item."""
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> torch.Tensor:
        buffer = torch.zeros(8, dtype=torch.uint8)
        made.append(weakref.ref(buffer))
        return buffer

    item = SharedItem(
        "x", StoredChunk("__0_0.distcp", 0, 8, 1, (8,), 1, True), None, Box((0,), (8,)), make, torch.uint8,
        exclusive=True, finish=lambda: None,
    )  # fmt: skip
    for section in (Section(0, 5), Section(5, 8)):
        item.scatter(section, torch.ones(section.stop - section.start, dtype=torch.uint8))
        (buffer,) = made
        assert buffer() is not None
        item.arrived(section)
    assert buffer() is None
