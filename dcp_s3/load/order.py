"""Hands items that are no tensors to the planner in plan order, as torch's readers do.

They arrive in any order, and those that come early are held back. To bound that memory, a load of many such items reads
them in batches.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from dcp_s3.load.item_transfer import ItemTransfer


class Turns:
    """The queue of items that are no tensors, in plan order.

    Args:
        transfers: transfers of all items, in plan order.
    """

    def __init__(self, transfers: Sequence[ItemTransfer]) -> None:
        self._waiting = collections.deque(transfer for transfer in transfers if transfer.target is None)

    def take(self) -> Iterator[ItemTransfer]:
        """Yield, once each, the items that have arrived with all before them."""
        while self._waiting and self._waiting[0].loaded is not None:
            yield self._waiting.popleft()


def in_batches(transfers: Sequence[ItemTransfer], max_held: int) -> list[list[ItemTransfer]]:
    """Split items into batches to be read one after the other, all tensors in the first.

    Args:
        transfers: transfers of the items, in plan order.
        max_held: stored bytes of non-tensors in one batch, unless a single item has more.
    """
    batches: list[list[ItemTransfer]] = [[]]
    held = 0
    for transfer in transfers:
        if transfer.target is not None:
            batches[0].append(transfer)
            continue
        size = transfer.length
        if held and held + size > max_held:
            batches.append([])
            held = 0
        batches[-1].append(transfer)
        held += size
    return batches
