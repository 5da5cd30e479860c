"""`register`: a bare ``dcp.save(checkpoint_id="s3://...")`` uses this backend.

torch has no registry of storage backends. Without a writer or reader it tries FileSystemWriter/Reader, which
refuse URLs, then looks up FsspecWriter/FsspecReader in their module, at each call. `register` puts subclasses
there that make ours for S3 URLs and are torch's own for everything else. With AsyncCheckpointerType.PROCESS the
choice would be made in another process, which knows nothing of the registration: there the writer is made before
the request is sent over.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any

from dcp_s3.checkpoint._torch import AsyncCheckpointProcess, fsspec_filesystem
from dcp_s3.checkpoint.reader import S3StorageReader
from dcp_s3.checkpoint.writer import S3StorageWriter
from dcp_s3.url import is_s3_url

logger = logging.getLogger(__name__)

# Arguments of FsspecWriter and FsspecReader that mean the same to ours.
_UNDERSTOOD = frozenset({"overwrite", "_extensions", "_extension_registry"})

_lock = threading.Lock()
_originals: dict[str, Any] = {}


def register() -> None:
    """Make `dcp.save`, `dcp.async_save` and `dcp.load` use this backend for ``checkpoint_id="s3://..."`` when
    they are given no writer or reader. Other URLs go where they went before. Calling it again changes nothing.
    """
    with _lock:
        if _originals:
            return
        writer, reader = fsspec_filesystem.FsspecWriter, fsspec_filesystem.FsspecReader
        process_save = AsyncCheckpointProcess.save
        _originals.update(FsspecWriter=writer, FsspecReader=reader, process_save=process_save)
        fsspec_filesystem.FsspecWriter = _dispatching(writer, S3StorageWriter)  # type: ignore[misc]
        fsspec_filesystem.FsspecReader = _dispatching(reader, S3StorageReader)  # type: ignore[misc]
        AsyncCheckpointProcess.save = _with_writer(process_save)  # type: ignore[method-assign]


def unregister() -> None:
    """Undo `register`. Calling it again changes nothing."""
    with _lock:
        if not _originals:
            return
        fsspec_filesystem.FsspecWriter = _originals["FsspecWriter"]  # type: ignore[misc]
        fsspec_filesystem.FsspecReader = _originals["FsspecReader"]  # type: ignore[misc]
        AsyncCheckpointProcess.save = _originals["process_save"]  # type: ignore[method-assign]
        _originals.clear()


def _dispatching(original: Any, ours: Any) -> Any:
    def make(cls: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # A subclass of torch's class that somebody made meanwhile stays what it is.
        if cls is dispatcher and is_s3_url(path):
            if ignored := sorted(kwargs.keys() - _UNDERSTOOD):
                logger.warning("%s(%r): %s have no meaning for dcp_s3", cls.__name__, path, ", ".join(ignored))
            return ours(path, **{name: value for name, value in kwargs.items() if name in _UNDERSTOOD})
        return object.__new__(cls)

    def validate(cls: Any, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_s3_url(checkpoint_id) or bool(original.validate_checkpoint_id(checkpoint_id))

    dispatcher = type(
        original.__name__,
        (original,),
        {
            "__new__": make,
            "validate_checkpoint_id": classmethod(validate),
            "__doc__": original.__doc__,
            # So that instances for other URLs pickle: by name, as torch's own class where nothing is registered.
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
        },
    )
    return dispatcher


def _with_writer(process_save: Any) -> Any:
    @functools.wraps(process_save)
    def save(self: Any, staged_state_dict: Any, **kwargs: Any) -> Any:
        checkpoint_id = kwargs.get("checkpoint_id")
        if kwargs.get("storage_writer") is None and is_s3_url(checkpoint_id):
            kwargs["storage_writer"] = S3StorageWriter(checkpoint_id)
        return process_save(self, staged_state_dict, **kwargs)

    return save
