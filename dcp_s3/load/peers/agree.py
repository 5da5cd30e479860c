"""Agreement between the ranks of one load, and the metadata that one of them fetches for all.

Only code that all ranks of `dcp.load` reach at the same point may talk to the group: see `find_load_group`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dcp_s3 import errors
from dcp_s3.load.peers.interrupts import run_through
from dcp_s3.settings import Settings
from dcp_s3.store import StoredObject
from dcp_s3.tensor_memory import view_bytes
from dcp_s3.torch_private import Caller
from dcp_s3.tracebacks import portable

logger = logging.getLogger(__name__)


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether the group carries CPU tensors by gloo, the only backend that this supports."""
    return "cpu:gloo" in dist.get_backend_config(group).split(",")


def join_load(caller: Caller, url: str | None, settings: Settings, *, sharing: bool, willing: bool) -> LoadGroup | None:
    """The ranks of this load, if all of them share. Collective: ranks that do not share take part, too.

    Args:
        caller: caller of the load, from `find_load_group`.
        url: URL of the checkpoint, None if there is none.
        settings: settings of this rank's reader.
        sharing: whether this rank is to share at all.
        willing: whether this rank may take the metadata from another.
    """
    if not has_cpu_backend(caller.group):
        if sharing:
            logger.info(
                "every rank reads by itself: its process group has no gloo for CPU tensors. To read what several ranks "
                'need once: init_process_group("cpu:gloo,cuda:nccl"), which async_save needs as well'
            )
        return None
    group = LoadGroup(caller)
    share = willing and sharing and url is not None
    where = hash_text(f"{settings.endpoint_url or ''} {url}")
    told, group.raised = run_through(lambda: group.agree(share, share and caller.plain_finish, where))
    if not all(metadata and other == where for metadata, _, other in told):
        if share:
            logger.info("every rank reads %s by itself: not all of them share, or not this URL", url)
        if group.raised is not None:
            raise group.raised
        return None
    group.shares_data = all(data for _, data, _ in told)
    return group


class LoadGroup:
    """The ranks of one load.

    Args:
        caller: caller of the load, from `find_load_group`; its group has gloo for CPU tensors.

    Attributes:
        shares_data: whether they share more than the metadata.
        is_coordinator: whether this rank fetches the metadata for all.
        raised: exception that a signal raised while this rank agreed with the others. They now wait for this rank: pass
            it to `fetch_once`.
    """

    def __init__(self, caller: Caller) -> None:
        self.shares_data = False
        self.raised: BaseException | None = None
        self.group = caller.group
        self.rank = caller.rank
        self.world_size = caller.world_size
        self.is_coordinator = caller.rank == 0
        self._coordinator = dist.get_global_rank(caller.group, 0)

    def agree(self, *values: int) -> list[list[int]]:
        """All ranks' ``values`` (64 bits each, equally many on every rank), in order of ranks. Collective."""
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self.group)
        return [each.tolist() for each in found]

    def fetch_once(
        self, fetch: Callable[[], StoredObject], url: str, failure: BaseException | None = None
    ) -> StoredObject:
        """Call ``fetch`` on the coordinator; return or raise its outcome on all ranks. Collective.

        Args:
            fetch: called on the coordinator.
            url: URL of the checkpoint, for errors.
            failure: error with which this rank has failed already. The rank takes part, then raises it.

        Raises:
            PeerReadError: the coordinator raised something that is no error of dcp_s3.
        """
        stored: StoredObject | None = None
        if self.is_coordinator and failure is None:
            try:
                stored = fetch()
            except BaseException as error:  # noqa: BLE001 - the others wait, whatever it is
                failure = error
        told = None if failure is None else _for_others(failure, url, self.rank)
        found, raised = run_through(lambda: self._broadcast(stored, told))
        failure = failure or raised
        if failure is not None:
            raise failure
        if isinstance(found, errors.DcpS3Error):
            raise found
        return found

    def _broadcast(
        self, stored: StoredObject | None, failure: errors.DcpS3Error | None
    ) -> StoredObject | errors.DcpS3Error:
        """Give every rank the coordinator's object or error, whichever it has. Collective."""
        head: list[Any] = [failure]
        if stored is not None:
            head = [(len(stored.data), dict(stored.metadata), stored.etag)]
        dist.broadcast_object_list(head, src=self._coordinator, group=self.group, device=torch.device("cpu"))
        told = head[0]
        if isinstance(told, errors.DcpS3Error):
            return told
        size, metadata, etag = told
        data = (
            torch.frombuffer(bytearray(stored.data or b"\0"), dtype=torch.uint8)
            if stored is not None
            else torch.empty(max(1, size), dtype=torch.uint8, device="cpu")
        )
        dist.broadcast(data, src=self._coordinator, group=self.group)
        return stored if stored is not None else StoredObject(bytes(view_bytes(data)[:size]), metadata, etag)


def _for_others(failure: BaseException, url: str, rank: int) -> errors.DcpS3Error:
    if isinstance(failure, errors.DcpS3Error) and portable(failure):
        return failure
    return errors.PeerReadError(
        f"rank {rank}, which reads the metadata of {url} for all, failed: {type(failure).__name__}: {failure}",
        url=url,
        rank=rank,
    )


def hash_text(text: str) -> int:
    """63 bits of a hash, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
