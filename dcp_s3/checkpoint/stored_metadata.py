"""``.metadata`` as it lies on S3: fetched, compared with its checksum, loaded; and the last one that is whole."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.layout import METADATA_CRC_KEY, metadata_object, step_of
from dcp_s3.limit import Deadline, Limit
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import Store, StoredObject
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger(__name__)

# The look of `find_previous` is for a message, so it is short.
_MOST_PAGES = 10
_MOST_READ = 5
_LOOK_SECONDS = 5.0


def fetch_metadata(store: Store, url: CheckpointURL, rank: int | None = None) -> StoredObject:
    """Fetch the object whose presence is the commit: ``.metadata``, or the one of ``rank``. Not checked yet."""
    try:
        return store.get(url.key(metadata_object(rank)))
    except errors.ObjectNotFoundError:
        raise not_found_error(url, why=f": it has no {metadata_object(rank)}") from None


def not_found_error(
    url: CheckpointURL, what: str = "no committed checkpoint", why: str = ""
) -> errors.CheckpointNotFoundError:
    """The error for a URL where there is ``what``."""
    return errors.CheckpointNotFoundError(
        f"there is {what} at {url}{why}. Remedy: check the URL; `dcp-s3 ls` on its parent shows what is there. A save "
        "that was cut off leaves no checkpoint",
        url=str(url),
    )


def find_crc_mismatch(stored: StoredObject) -> str | None:
    """How a manifest differs from the CRC-64/NVME in its user metadata; None if it does not, or has none there."""
    found, recorded = crc_hex(crc64nvme(stored.data)), stored.metadata.get(METADATA_CRC_KEY)
    if recorded is None or recorded == found:
        return None
    return f"its CRC-64/NVME is {found}, recorded was {recorded}"


def check_metadata(stored: StoredObject, url: CheckpointURL, rank: int | None = None) -> Metadata:
    """The metadata in a fetched object: ``.metadata``, or the one of ``rank``. See `load_metadata`."""
    from dcp_s3.format.metadata import load_metadata  # here, for the import of torch takes seconds

    crc = stored.metadata.get(METADATA_CRC_KEY)
    return load_metadata(stored.data, url=str(url), crc=crc, of_rank=rank is not None)


def find_previous(store: Store, url: CheckpointURL) -> CheckpointURL | None:
    """The checkpoint with the highest step beside ``url``, other than it, whose metadata can be read; None if there is
    none.

    Ten pages of a listing and ``.metadata`` of five checkpoints at most: whether the data is whole is not checked.
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
        except errors.CheckpointError as error:  # not committed, or not readable either
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
        except (errors.DcpS3Error, OSError, ValueError, RuntimeError) as error:
            logger.debug("the last good checkpoint is unknown: %s", error)

    # A daemon: looking for credentials or resolving a name may take longer than any limit on requests.
    thread = threading.Thread(target=look, name="dcp_s3-previous", daemon=True)
    thread.start()
    thread.join(_LOOK_SECONDS)
    return str(found[0]) if found and found[0] is not None else ""
