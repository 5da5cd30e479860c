"""The checkpoint to go back to when a save or a load has failed: one short look, for a message."""

from __future__ import annotations

import logging
import threading

from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.errors import CheckpointError, DcpS3Error
from dcp_s3.format.layout import step_of
from dcp_s3.limit import Deadline, Limit
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_MOST_PAGES = 10
_MOST_READ = 5
_LOOK_SECONDS = 5.0


def find_previous(store: Store, url: CheckpointURL) -> CheckpointURL | None:
    """The checkpoint with the highest step beside ``url``, other than it, whose metadata can be read; None if there is
    none.

    Ten pages of a listing and ``.metadata`` of five checkpoints at most: whether the data is whole is not checked.

    Args:
        store: store with the checkpoints.
        url: URL of the checkpoint that failed.

    Raises:
        StorageError
    """
    root = CheckpointURL(url.bucket, url.prefix.rpartition("/")[0])
    start = root.key("")
    names: list[str] = []
    token: str | None = None
    for _ in range(_MOST_PAGES):
        page = store.page(start, "/", token=token)
        names += (each[len(start) :].rstrip("/") for each in page.prefixes)
        token = page.next_token
        if token is None:
            break
    else:
        return None  # the highest step may come last
    steps = {name: step for name in names if (step := step_of(name)) is not None and name != url.name}
    for name in sorted(steps, key=lambda name: steps[name], reverse=True)[:_MOST_READ]:
        candidate = root.child(name)
        try:
            check_metadata(fetch_metadata(store, candidate), candidate)
        except CheckpointError as error:  # not committed, or not readable either
            logger.debug("%s is not named as the last good checkpoint: %s", candidate, error)
        else:
            return candidate
    return None


def look_for_previous(settings: Settings, url: CheckpointURL) -> str:
    """The URL of `find_previous`, or an empty text: if there is none, or S3 does not say so within seconds."""
    found: list[CheckpointURL | None] = []

    def look() -> None:
        limit = Limit(Deadline.start("the look", _LOOK_SECONDS), attempts=1, hang=_LOOK_SECONDS / 2)
        try:
            found.append(find_previous(S3Store(url.bucket, settings, limit), url))
        except (DcpS3Error, OSError, ValueError, RuntimeError) as error:
            logger.debug("the last good checkpoint is unknown: %s", error)

    # A daemon: looking for credentials or resolving a name may take longer than any limit on requests.
    thread = threading.Thread(target=look, name="dcp_s3-previous", daemon=True)
    thread.start()
    thread.join(_LOOK_SECONDS)
    return str(found[0]) if found and found[0] is not None else ""
