"""The ranks that save together, as a writer knows them: DCP does not tell it."""

from __future__ import annotations

import torch.distributed as dist

from dcp_s3 import process
from dcp_s3.errors import SaveProtocolError
from dcp_s3.url import CheckpointURL


class SaveGroup:
    """The process group that a writer was given; None: the default one. Can be sent to other processes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.members = None if group is None else tuple(dist.get_process_group_ranks(group))
        """The ranks of the group; None: all."""
        self._is_shared = process.world_size() > 1

    def check_there(self, url: CheckpointURL) -> None:
        """Refuse (SaveProtocolError) a save of one rank that was one of several when the writer was made."""
        if self._is_shared and not process.is_initialized():
            raise SaveProtocolError(
                f"the save to {url} does not begin: the process group has been destroyed since its writer was made, "
                "and what this rank alone holds must not be taken for the whole. Remedy: wait for the saves, or close "
                "the CheckpointManager, before destroy_process_group(); to save this process's state, make a new writer"
            )

    def check_rank(self, url: CheckpointURL, rank: int) -> None:
        """Refuse (SaveProtocolError) a save without collectives of some ranks of the job; ``rank`` is what DCP says."""
        is_part = self.members is not None and len(self.members) < process.world_size()
        if process.is_initialized() and (is_part or rank != process.rank()):
            raise SaveProtocolError(
                f"the save to {url} is one of some ranks, and without collectives all ranks of the job save together. "
                "Remedy: save in a process group with collectives; to save the state of this rank alone, no_dist=True "
                "without use_collectives=False"
            )
