"""`register` makes a bare ``dcp.save(checkpoint_id="s3://...")`` use this backend.

torch has no registry of storage backends. Without a writer or reader it asks FileSystemWriter/Reader, under the names
that ``_storage_utils`` imported, and then those of fsspec. `register` puts a chooser under the first names. The chooser
takes S3 URLs and leaves everything else to torch's classes, which are not changed.

With AsyncCheckpointerType.PROCESS the choice would be made in another process, where nothing is registered. So the
writer is made before the request is sent there.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_s3.load.reader import S3StorageReader
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import AsyncCheckpointProcess, storage_utils
from dcp_s3.url import is_s3_url

_ID = str | os.PathLike[str]


@dataclass(frozen=True)
class _Options:
    """The arguments of `register`."""

    overwrite: bool = False
    settings: SettingsLike = None

    def write(self, checkpoint_id: _ID) -> S3StorageWriter:
        return S3StorageWriter(checkpoint_id, overwrite=self.overwrite, settings=self.settings)

    def read(self, checkpoint_id: _ID) -> S3StorageReader:
        return S3StorageReader(checkpoint_id, settings=self.settings)


@dataclass(frozen=True)
class _Chooser:
    """Takes the place of one of torch's classes in `_storage_utils`."""

    make_s3: Callable[[_ID], Any]
    """Makes a writer or reader for an S3 URL."""
    original: Any
    """torch's class, for any other URL or path."""

    def validate_checkpoint_id(self, checkpoint_id: _ID) -> bool:
        return is_s3_url(checkpoint_id) or bool(self.original.validate_checkpoint_id(checkpoint_id))

    def __call__(self, checkpoint_id: _ID) -> Any:
        return (self.make_s3 if is_s3_url(checkpoint_id) else self.original)(checkpoint_id)


_lock = threading.Lock()
_originals: dict[str, Any] = {}
_options = _Options()


def register(*, overwrite: bool = False, settings: SettingsLike = None) -> None:
    """Make `dcp.save`, `dcp.async_save` and `dcp.load` use this backend for ``checkpoint_id="s3://..."`` when they are
    given no writer or reader.

    Other URLs and paths go where they went before. A `pathlib.Path` of an S3 URL, which has only one slash left, goes
    to S3 too. Another call replaces the arguments of the previous call, and nothing else.

    Args:
        overwrite: replace a checkpoint at the URL, as torch's FsspecWriter does. Otherwise a save there fails with
            CheckpointExistsError, even in a run that went back to an earlier step.
        settings: a `Settings`, or a mapping of settings that override the environment. The environment is read at each
            save and load.

    Raises:
        SettingsError: a setting, in the environment or given here, is not allowed.
    """
    global _options
    resolve_settings(settings)
    with _lock:
        _options = _Options(overwrite, settings)
        if _originals:
            return
        writer, reader = storage_utils.FileSystemWriter, storage_utils.FileSystemReader
        process_save = AsyncCheckpointProcess.save
        _originals.update(writer=writer, reader=reader, process_save=process_save)
        storage_utils.FileSystemWriter = _Chooser(lambda checkpoint_id: _options.write(checkpoint_id), writer)
        storage_utils.FileSystemReader = _Chooser(lambda checkpoint_id: _options.read(checkpoint_id), reader)
        AsyncCheckpointProcess.save = _with_writer(process_save)  # type: ignore[method-assign]


def unregister() -> None:
    """Undo `register`. Further calls change nothing."""
    with _lock:
        if not _originals:
            return
        storage_utils.FileSystemWriter = _originals["writer"]
        storage_utils.FileSystemReader = _originals["reader"]
        AsyncCheckpointProcess.save = _originals["process_save"]  # type: ignore[method-assign]
        _originals.clear()


def _with_writer(process_save: Any) -> Any:
    @functools.wraps(process_save)
    def save(self: Any, staged_state_dict: Any, **kwargs: Any) -> Any:
        checkpoint_id = kwargs.get("checkpoint_id")
        if kwargs.get("storage_writer") is None and checkpoint_id is not None and is_s3_url(checkpoint_id):
            kwargs["storage_writer"] = _options.write(checkpoint_id)
        return process_save(self, staged_state_dict, **kwargs)

    return save
