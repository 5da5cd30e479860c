"""What goes with the plans of a load: what each rank may share, and the coordinator's orders about it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors, ranks


class Offer(NamedTuple):
    """What a rank says of itself in its local plan, so that the coordinator can tell which ranks may share."""

    rank: int
    """Rank in the default group."""
    shares: bool
    """Whether it shares what it reads."""
    checkpoint: int
    """Hash of the URL of the checkpoint, and of its endpoint."""
    version: int
    """Hash of the metadata that it read."""
    world_size: int
    """Number of ranks of the default group; 0 if that cannot carry CPU tensors."""
    given: int
    """`hash_ranks` of the reader's ``process_group``; 0 if there is none, or if it cannot carry CPU tensors."""


def hash_text(text: str) -> int:
    """63 bits of a hash, the same in every process and never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1


def hash_ranks(members: Sequence[int]) -> int:
    """63 bits that say which ranks, in this order."""
    return hash_text(",".join(map(str, members)))


def make_offer(checkpoint: str, version: int, given: dist.ProcessGroup | None, *, shares: bool) -> Offer:
    """The offer of this rank, for a checkpoint and a reader's ``process_group``."""
    return Offer(
        rank=ranks.rank(),
        shares=shares,
        checkpoint=hash_text(checkpoint),
        version=version,
        world_size=ranks.world_size() if _has_gloo(None) else 0,
        given=hash_ranks(dist.get_process_group_ranks(given)) if given is not None and _has_gloo(given) else 0,
    )


def _has_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether a group carries CPU tensors by gloo, the only backend that is supported here."""
    return "cpu:gloo" in dist.get_backend_config(group).split(",")


def choose_group(offers: Sequence[Offer], url: str) -> tuple[str, str]:
    """In which process group the ranks with these offers, in order, can exchange data.

    Returns:
        ``given`` (the readers' own) or ``default``, and nothing; or nothing, and the reason.

    Raises:
        CorruptCheckpointError: they have read different metadata of the checkpoint at ``url``.
    """
    first = offers[0]
    for offer in offers:
        if offer.checkpoint == first.checkpoint and offer.version != first.version:
            raise errors.CorruptCheckpointError(
                f"{url} changed while it was read: ranks {first.rank} and {offer.rank} read different metadata. "
                "Remedy: load it again",
                url=url,
            )
    if len(offers) == 1:
        return "", "it loads alone"
    if not all(offer.shares for offer in offers):
        return "", "not all ranks share (load_sharing=)"
    if any(offer.checkpoint != first.checkpoint for offer in offers):
        return "", "not all ranks load it"
    members = [offer.rank for offer in offers]
    expected = hash_ranks(members)
    if all(offer.given == expected for offer in offers):
        return "given", ""
    if members == list(range(first.world_size)) and all(offer.world_size == len(members) for offer in offers):
        return "default", ""
    if not all(offer.world_size for offer in offers):
        return "", (
            "the default process group has no gloo for CPU tensors. To read what several ranks need once: "
            'init_process_group("cpu:gloo,cuda:nccl"), which async_save needs as well, or give S3StorageReader a '
            "process_group with gloo"
        )
    return "", (
        f"{len(members)} ranks load it, which are not all ranks of the job. To read what several of them need once: "
        "S3StorageReader(process_group=...) with the group that dcp.load is given"
    )


class SharedPart(NamedTuple):
    """A run of bytes of a stored chunk, as one rank sees it."""

    items: tuple[int, ...]
    """Numbers of the rank's items that need bytes of the part."""
    start: int
    """First byte in the chunk."""
    stop: int
    """The byte after the last."""


Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and lengths of boxes of a chunk."""


class Peer(NamedTuple):
    """A rank that the owner of a piece sends to."""

    rank: int
    """Rank in the load's group."""
    needs: tuple[Boxes | None, ...] | None
    """For each part, the boxes of its items, or None where the part's only box contains all of it. None if so in all
    parts."""


class SharedPiece(NamedTuple):
    """The bytes that one request fetches and several ranks need, as seen by one of these ranks."""

    number: int
    """Place in the order in which all ranks process the pieces."""
    owner: int
    """Rank that fetches the piece."""
    parts: tuple[SharedPart, ...]
    """Parts in the order in which they lie in the object."""
    peers: tuple[Peer, ...]
    """Ranks that the piece is sent to; for the owner only."""


class Assignment(NamedTuple):
    """One rank's work on shared pieces."""

    items: tuple[ReadItem, ...]
    """The items of the plan that was shared out: a planner may change it afterwards."""
    pieces: tuple[SharedPiece, ...]
    """Pieces that the rank fetches or needs, in order of their numbers."""
    group: str = "default"
    """The process group to exchange them in, see `choose_group`."""
    tag: int = 0
    """The first tag of messages, another one for each load."""

    def shared_items(self) -> set[int]:
        """Numbers of the items that arrive in pieces, and only so."""
        return {number for piece in self.pieces for part in piece.parts for number in part.items}
