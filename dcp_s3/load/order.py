"""Items that are no tensors reach the planner in the order of the plan, as with torch's readers.

They arrive in any order. Those that come before their turn are held back; so that this takes bounded memory, a load of
many reads them in batches.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from dcp_s3.load.item_transfer import ItemTransfer


class Turns:
    """Whose turn it is among the items that are no tensors.

    Args:
        transfers: of all items, in the order of the plan.
    """

    def __init__(self, transfers: Sequence[ItemTransfer]) -> None:
        self._waiting = collections.deque(transfer for transfer in transfers if transfer.target is None)

    def take(self) -> Iterator[ItemTransfer]:
        """Those that are there, with all before them; each once."""
        while self._waiting and self._waiting[0].loaded is not None:
            yield self._waiting.popleft()


def in_batches(transfers: Sequence[ItemTransfer], max_held: int) -> list[list[ItemTransfer]]:
    """Items to be read one batch after the other, all tensors in the first.

    Args:
        transfers: in the order of the plan.
        max_held: stored bytes of what is no tensor, in one batch, unless a single item has more.
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
