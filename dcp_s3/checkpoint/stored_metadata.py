"""``.metadata`` as it lies on S3: fetched, compared with its checksum, loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.format.layout import METADATA_CRC_KEY, metadata_object
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.process import torch_imported_alone
from dcp_s3.store import Store, StoredObject
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
    with torch_imported_alone():
        from dcp_s3.format.metadata import load_metadata  # here, for the import of torch takes seconds

    crc = stored.metadata.get(METADATA_CRC_KEY)
    return load_metadata(stored.data, url=str(url), crc=crc, of_rank=rank is not None)
