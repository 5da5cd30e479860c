"""A checkpoint's directory, listed and classified."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from dcp_s3.s3.async_store import AsyncS3Store


def list_directory(store: Store, url: CheckpointURL, *prefixes: str) -> Directory:
    """List a checkpoint's directory with sizes only: without times and ETags.

    Args:
        store: store with the checkpoint.
        url: URL of the checkpoint.
        prefixes: list only what begins with one of these, relative to the URL; without any, everything.

    Raises:
        StorageError
    """
    skip = len(url.key(""))
    listed = (each for prefix in prefixes or ("",) for each in store.list(url.key(prefix)).objects)
    return Directory.of_sizes({each.key[skip:]: each.size for each in listed})


async def list_directory_async(store: AsyncS3Store, url: CheckpointURL, *prefixes: str) -> Directory:
    """List a checkpoint's directory with times and ETags, and the time on S3's clock before the first listing.

    Args:
        store: store with the checkpoint.
        url: URL of the checkpoint.
        prefixes: see `list_directory`.

    Raises:
        StorageError
    """
    pages = [await store.list(url.key(prefix)) for prefix in prefixes or ("",)]
    now = pages[0].server_time
    return Directory.of(url, (each for page in pages for each in page.objects), time.time() if now is None else now)
