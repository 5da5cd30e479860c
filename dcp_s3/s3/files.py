"""Transfers of whole files by s3transfer: several files, and several parts of each, at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions as boto
from botocore.config import Config
from s3transfer.exceptions import RetriesExceededError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber

from dcp_s3.s3.answers import check_answers
from dcp_s3.s3.botocore_private import look_once
from dcp_s3.s3.client import client_options, config_options, new_session
from dcp_s3.s3.diagnosis import error_code, is_passing, to_storage_error, watch
from dcp_s3.s3.operations import creation_arguments
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings

OnProgress = Callable[[int], None]
"""Called from several threads with the number of bytes moved since the last call; negative after a retry."""


@dataclass(frozen=True)
class FileTransfer:
    """One file and its object."""

    key: str
    """Object key."""
    path: Path
    """Path of the file."""


def download_files(store: S3Store, files: Iterable[FileTransfer], *, on_progress: OnProgress | None = None) -> None:
    """Fetch objects into files; missing directories are made.

    Each file appears under its name when it is complete: until then it has another extension. No checksum is compared.
    """
    extra = _owner(store.settings)

    def submit(manager: Any, file: FileTransfer) -> Any:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        return manager.download(
            store.name, file.key, os.fspath(file.path), extra_args=extra, subscribers=_subscribers(on_progress)
        )

    _transfer(store, files, "GetObject", submit)


def upload_files(store: S3Store, files: Iterable[FileTransfer], *, on_progress: OnProgress | None = None) -> None:
    """Store files as data objects, with encryption and storage class from the settings."""
    extra = _owner(store.settings) | creation_arguments(store.settings, data=True)

    def submit(manager: Any, file: FileTransfer) -> Any:
        return manager.upload(
            os.fspath(file.path), store.name, file.key, extra_args=extra, subscribers=_subscribers(on_progress)
        )

    _transfer(store, files, "PutObject", submit)


def _transfer(
    store: S3Store, files: Iterable[FileTransfer], operation: str, submit: Callable[[Any, FileTransfer], Any]
) -> None:
    # On an exception the manager cancels what is under way and waits for it.
    with _client(store.settings) as client, TransferManager(client, _config(store.settings)) as manager:
        submitted = [(file, submit(manager, file)) for file in files]
        for file, future in submitted:
            try:
                _result(future, lambda file=file: submit(manager, file), store.settings.retry_attempts)  # type: ignore[misc]
            except RetriesExceededError as error:
                cause = error.last_exception if isinstance(error.last_exception, Exception) else error
                raise to_storage_error(cause, operation, store.name, file.key, store.settings.retry_attempts) from cause
            except (boto.BotoCoreError, boto.ClientError) as error:
                raise to_storage_error(error, operation, store.name, file.key, 1) from error


def _result(future: Any, submit_again: Callable[[], Any], attempts: int) -> None:
    """Wait for a file; if its multipart upload is gone, transfer it again from the beginning.

    The upload may have been completed and the answer lost, but nobody knows.
    """
    for attempt in range(1, attempts + 1):
        try:
            future.result()
        except boto.ClientError as error:
            if error_code(error) != "NoSuchUpload" or attempt == attempts:
                raise
            future = submit_again()
        else:
            return


@contextlib.contextmanager
def _client(settings: Settings) -> Iterator[Any]:
    # Not the process's client: that one leaves retries to its callers, and s3transfer has few of its own.
    options = config_options(settings)
    options["retries"] = {"total_max_attempts": settings.retry_attempts, "mode": "standard"}
    core = new_session(settings)
    session = boto3.session.Session(botocore_session=core)
    client = session.client("s3", config=Config(**options), **client_options(settings, core))
    check_answers(client)
    client.meta.events.register("before-parse.s3.*", _let_pass)
    look_once(client)
    watch(client, settings.retry_attempts)
    if owner := _owner(settings):
        # s3transfer leaves it out when it gives up an upload.
        client.meta.events.register(
            "provide-client-params.s3.AbortMultipartUpload", lambda params, **_: {**params, **owner}
        )
    try:
        yield client
    finally:
        client.close()


def _let_pass(response_dict: dict[str, Any], **_: Any) -> None:
    """Make botocore retry all passing statuses: of a failing server's it retries only 500, 502, 503 and 504."""
    if is_passing(response_dict["status_code"]) and response_dict["status_code"] not in (500, 502, 503, 504):
        response_dict["status_code"] = 500


def _config(settings: Settings) -> TransferConfig:
    return TransferConfig(
        multipart_threshold=settings.max_part_size,
        multipart_chunksize=settings.max_part_size,
        max_request_concurrency=min(settings.max_connections, 32),
        num_download_attempts=settings.retry_attempts,
        io_chunksize=2**20,
    )


def _owner(settings: Settings) -> dict[str, str]:
    owner = settings.expected_bucket_owner
    return {"ExpectedBucketOwner": owner} if owner else {}


class _Progress(BaseSubscriber):
    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        self._on_progress(bytes_transferred)


def _subscribers(on_progress: OnProgress | None) -> list[_Progress]:
    return [] if on_progress is None else [_Progress(on_progress)]
