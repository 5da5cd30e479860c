"""A checkpoint whose commit still waits on this host's disk."""

from __future__ import annotations

import logging

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import CommitState, SaveIdentity, find_state
from dcp_s3.settings import Settings
from dcp_s3.spill.local import WaitingCommit, find_commits
from dcp_s3.spill.store import open_store
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


def find_uncommitted(
    store: Store, settings: Settings, url: CheckpointURL, rank: int | None = None
) -> WaitingCommit | None:
    """The newest commit at ``url`` that is spilled on this host; None if S3 has a newer one.

    Args:
        store: store with the checkpoint.
        settings: settings that name the directory.
        url: URL of the checkpoint.
        rank: rank of a save without collectives; None for a commit of all ranks.

    Raises:
        StorageError: missing bucket, credentials.
    """
    spill = open_store(settings)
    found = None
    for waiting in find_commits(spill) if spill else ():
        journal = waiting.journal
        if journal.url == str(url) and journal.commit is not None and journal.commit.rank == rank:
            found = waiting
    if found is None:
        return None
    journal = found.journal
    try:
        state = find_state(store, SaveIdentity(url, journal.save_id, rank), path=None, started_at=journal.created_at)
    except errors.TransferError as error:
        logger.warning("S3 does not say whether it has a newer checkpoint than this host: %s", error)
        return found
    return found if state is CommitState.WAITING else None
