"""`register`: code that names no storage backend, or torch's own, uses this one for S3 URLs.

It acts on torch's own classes: making a FileSystemWriter, FileSystemReader, FsspecWriter or FsspecReader for an S3 URL
gives an `S3StorageWriter` or `S3StorageReader`, whoever makes it, and whenever the name was imported. Subclasses, local
paths and other URLs are left alone. A `pathlib.Path` of an S3 URL, which has only one slash left, counts as that URL.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat

from dcp_s3.errors import SettingsError
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import AsyncCheckpointExecutor, FsspecReader, FsspecWriter
from dcp_s3.url import is_s3_url, parse_url

_WRITERS: tuple[type, ...] = (FileSystemWriter, FsspecWriter)
_OURS: tuple[type, ...] = (*_WRITERS, FileSystemReader, FsspecReader)

_registration: tuple[bool, SettingsLike] | None = None
"""Whether to overwrite, and the settings. None: what is replaced in torch does what it did before."""


def register(*, overwrite: bool = False, settings: SettingsLike = None) -> None:
    """Make torch's own writers and readers of files use this backend for S3 URLs: those that `dcp.save`,
    `dcp.async_save` and `dcp.load` choose for ``checkpoint_id="s3://..."``, and those that frameworks make.

    Other URLs and paths go where they went before. Another call replaces the arguments of the previous call. Of a
    writer's own arguments, ``overwrite`` counts; how many files and threads it is to use does not.

    >>> register()
    >>> dcp.save(state, checkpoint_id="s3://bucket/other/step-1")
    Metadata(...)
    >>> unregister()

    Args:
        overwrite: replace a checkpoint at the URL, as torch's writers do. Otherwise a save there fails with
            CheckpointExistsError, even in a run that went back to an earlier step.
        settings: a `Settings`, or a mapping of settings that override the environment. The environment is read at each
            save and load.

    Raises:
        SettingsError: a setting, in the environment or given here, is not allowed.
    """
    global _registration
    resolve_settings(settings)
    _registration = overwrite, settings
    _change_torch()


def unregister() -> None:
    """Undo `register`. Further calls change nothing.

    >>> register()
    >>> unregister()
    """
    global _registration
    _registration = None


def _s3_url(path: object) -> str | None:
    """The URL that ``path`` means; None if it is not on S3 or nothing is registered."""
    is_path = _registration is not None and isinstance(path, (str, os.PathLike))
    return str(parse_url(path)) if is_path and is_s3_url(path) else None  # type: ignore[arg-type]


def _make(cls: type, url: str, given: Mapping[str, Any]) -> S3StorageWriter | S3StorageReader:
    """Ours for torch's ``cls``, which was ``given`` these arguments."""
    overwrite, settings = _registration or (False, None)
    if cls not in _WRITERS:
        return S3StorageReader(url, settings=settings, _extension_registry=given.get("_extension_registry"))
    formats = given.get("serialization_format", SerializationFormat.TORCH_SAVE), given.get("_extensions") or None
    if formats != (SerializationFormat.TORCH_SAVE, None):
        raise SettingsError(
            f"{cls.__name__} cannot write {url} as safetensors or through stream extensions: dcp_s3 writes DCP's own "
            "format. Remedy: leave serialization_format and _extensions out; for safetensors then `dcp-s3 export`"
        )
    own = given.get("overwrite")
    overwrite = overwrite if own is None else bool(own)
    return S3StorageWriter(url, overwrite=overwrite, settings=settings)


def _new(base: type, cls: type, *args: Any, **kwargs: Any) -> Any:
    """``cls.__new__``: one of ours for an S3 URL, otherwise what it was."""
    url = _s3_url(args[0] if args else kwargs.get("path"))
    if url is not None and cls in _OURS:
        # __init__ is not called: what is made is of another class.
        return _make(cls, url, inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments)  # type: ignore[misc]
    plain: Any = super(base, cls).__new__  # type: ignore[arg-type]
    return plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)


# --- what changes in torch ----------------------------------------------------------------------------


@functools.cache
def _change_torch() -> None:
    for base in (FileSystemWriter, FileSystemReader):
        made = functools.partial(_new, base)
        made.__signature__ = inspect.signature(base.__init__)  # type: ignore[attr-defined]
        base.__new__ = staticmethod(made)  # type: ignore[method-assign]
    for cls in _OURS:
        _wrap(cls, "validate_checkpoint_id", _validate_checkpoint_id)
    # An asynchronous save chooses its writer later, perhaps in another process, where nothing is registered.
    for executor in AsyncCheckpointExecutor.__subclasses__():
        _wrap(executor, "execute_save", _execute_save)


def _wrap(cls: type, name: str, by: Any) -> None:
    """Replace a method by ``by``, whose first argument is the method."""
    method = getattr(cls, name)
    stock = getattr(method, "__func__", method)
    new = functools.wraps(stock)(lambda *args, **kwargs: by(stock, *args, **kwargs))
    setattr(cls, name, classmethod(new) if inspect.ismethod(method) else new)


def _validate_checkpoint_id(stock: Any, cls: type, checkpoint_id: str | os.PathLike[str]) -> bool:
    return (cls in _OURS and _s3_url(checkpoint_id) is not None) or bool(stock(cls, checkpoint_id))


def _execute_save(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    url = _s3_url(kwargs.get("checkpoint_id"))
    if url is not None and kwargs.get("storage_writer") is None:
        kwargs["storage_writer"] = _make(FileSystemWriter, url, {})
    return stock(self, *args, **kwargs)
