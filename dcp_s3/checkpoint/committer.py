"""How a save becomes a checkpoint, in a store that takes everything at once."""

from __future__ import annotations

from collections.abc import Callable

from dcp_s3.checkpoint.commit import Commit, publish
from dcp_s3.checkpoint.commit_state import Beginning, Previous, SaveIdentity, check_absent, find_previous
from dcp_s3.errors import DeadlineExceededError, SpillError
from dcp_s3.store import Store


class Committer:
    """Makes what one save has written a checkpoint. The store of each call has the save's limit."""

    def __init__(self, identity: SaveIdentity, beginning: Beginning, *, overwrite: bool) -> None:
        self._identity, self._beginning, self._overwrite = identity, beginning, overwrite
        self._previous = Previous()

    def begin(self) -> None:
        """The save begins."""

    def check_url(self, store: Store) -> None:
        """Look at what is at the URL, before any data is written.

        Raises:
            CheckpointExistsError, StorageError
        """
        if self._overwrite:
            self._previous = find_previous(store, self._identity)
        else:
            check_absent(store, self._identity)

    def commit(self, store: Store, commit: Commit, *, spilled: bool) -> bool:
        """Commit, and return True; False if another process does, so that it is not known when.

        ``spilled``: whether objects of the save wait on the disks of hosts.

        Raises:
            DeadlineExceededError, CheckpointError, StorageError
        """
        if spilled:
            raise SpillError(
                f"{commit.identity.url} cannot be committed: objects of it wait in the spill directory of another "
                "rank, but this rank, which would commit them once they are on S3, has no spill directory. "
                "Remedy: set DCP_S3_SPILL_DIR on every rank"
            )
        self._publish(store, commit)
        return True

    def _publish(self, store: Store, commit: Commit, look_again: Callable[[], Previous] | None = None) -> None:
        try:
            publish(store, commit, self._previous, look_again=look_again, is_late=self._beginning.is_late)
        except DeadlineExceededError as error:
            deadline = store.limit.deadline
            if deadline is None or error.setting != deadline.setting:
                raise
            progress = "every rank had written its data, but it was not committed"
            if error.key == commit.identity.metadata_key and error.attempts:
                progress += "; S3 may still carry out the commit request that it did not answer"
            raise deadline.error(f"the save to {commit.identity.url}", progress) from error
