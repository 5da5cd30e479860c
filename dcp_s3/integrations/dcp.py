"""`register`: code that names no storage backend, or torch's own, uses this one for S3 URLs.

It acts on torch's classes FileSystemWriter, FileSystemReader, FsspecWriter and FsspecReader themselves: making one for
an S3 URL gives an `S3StorageWriter` or `S3StorageReader`. So it does not matter who makes it (`dcp.save` with a bare
``checkpoint_id``, a framework), nor when the name was imported. Subclasses, local paths and other URLs are left alone.
A `pathlib.Path` of an S3 URL, which has only one slash left, counts as that URL.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from dcp_s3.errors import SaveProtocolError, SettingsError
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import AsyncCheckpointExecutor, FsspecReader, FsspecWriter
from dcp_s3.url import is_s3_url, parse_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Registration:
    """The arguments of `register`."""

    overwrite: bool
    settings: SettingsLike


_lock = threading.Lock()
_registration: _Registration | None = None
_replaced: list[tuple[type, str, Any]] = []
"""What was changed: class, name, and what the class itself had there; None if it had nothing."""


def register(*, overwrite: bool = False, settings: SettingsLike = None) -> None:
    """Make torch's own writers and readers of files use this backend for S3 URLs: those that `dcp.save`,
    `dcp.async_save` and `dcp.load` choose for ``checkpoint_id="s3://..."``, and those that frameworks make.

    Other URLs and paths go where they went before. Another call replaces the arguments of the previous call, and
    nothing else. Of a writer's own arguments, ``overwrite`` and ``_extensions`` count; how many files and threads it is
    to use does not.

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
    with _lock:
        _registration = _Registration(overwrite, settings)
        if not _replaced:
            _change_torch()


def unregister() -> None:
    """Undo `register`. Further calls change nothing.

    >>> register()
    >>> unregister()
    """
    global _registration
    with _lock:
        _registration = None
        while _replaced:
            cls, name, own = _replaced.pop()
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)


def _find(path: object) -> tuple[_Registration, str] | None:
    """The registration and the URL, if ``path`` is ours."""
    registration = _registration
    if registration is None or not isinstance(path, (str, os.PathLike)) or not is_s3_url(path):
        return None
    return registration, str(parse_url(path))


# --- what is made instead -----------------------------------------------------------------------------


def _make_writer(registration: _Registration, url: str, given: Mapping[str, Any]) -> S3StorageWriter:
    if given.get("serialization_format", SerializationFormat.TORCH_SAVE) != SerializationFormat.TORCH_SAVE:
        raise SaveProtocolError(
            f"{url} cannot be saved as safetensors: dcp_s3 writes DCP's own format. Remedy: leave out "
            "serialization_format"
        )
    _warn_of_options(url, given)
    overwrite = given.get("overwrite")
    return S3StorageWriter(
        url,
        overwrite=registration.overwrite if overwrite is None else bool(overwrite),
        settings=registration.settings,
        _extensions=given.get("_extensions"),
    )


def _make_reader(registration: _Registration, url: str, given: Mapping[str, Any]) -> S3StorageReader:
    _warn_of_options(url, given)
    return S3StorageReader(url, settings=registration.settings, _extension_registry=given.get("_extension_registry"))


def _warn_of_options(url: str, given: Mapping[str, Any]) -> None:
    """fsspec's classes pass any further arguments (credentials, an endpoint) to its file system."""
    if options := given.get("kwargs"):
        logger.warning(
            "%s: the options %s are fsspec's and not used; dcp_s3 takes endpoint and credentials from its settings",
            url, ", ".join(sorted(options)),
        )  # fmt: skip


_MAKERS: dict[type, Any] = {
    FileSystemWriter: _make_writer,
    FsspecWriter: _make_writer,
    FileSystemReader: _make_reader,
    FsspecReader: _make_reader,
}
_LOCAL_ONLY = (HuggingFaceStorageWriter, HuggingFaceStorageReader)
_warned: set[type] = set()
"""Subclasses that were warned of."""


def _new(base: type, cls: type, *args: Any, **kwargs: Any) -> Any:
    """``cls.__new__``: one of ours for an S3 URL, otherwise what it was."""
    found = _find(args[0] if args else kwargs.get("path"))
    if found is not None and cls in _MAKERS:
        # __init__ is not called: what is made is of another class.
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
        return _MAKERS[cls](*found, bound)
    if found is not None and issubclass(cls, _LOCAL_ONLY):
        raise SettingsError(
            f"{cls.__name__} has no S3: it takes {found[1]} for a local directory. Remedy: save with dcp_s3 and make "
            "safetensors of it with `dcp-s3 export URL DEST`; load safetensors after `dcp-s3 import SRC URL`"
        )
    if found is not None and issubclass(cls, FileSystemWriter) and cls not in _warned:
        _warned.add(cls)
        logger.warning(
            "%s of %s saves to %s by itself: register leaves subclasses of torch's writers alone, and nothing that "
            "dcp_s3 promises holds for it. Remedy: S3StorageWriter; for Megatron "
            "dcp_s3.integrations.megatron.install()",
            cls.__name__, cls.__module__, found[1],
        )  # fmt: skip
    plain: Any = super(base, cls).__new__  # type: ignore[arg-type]
    return plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)


# --- what changes in torch ----------------------------------------------------------------------------


def _change_torch() -> None:
    """``__new__`` stays after `unregister`, and does what it did before: Python cannot take it away again from a class
    whose ``__init__`` has arguments."""
    for base in (FileSystemWriter, FileSystemReader):
        if "__new__" not in base.__dict__:
            base.__new__ = staticmethod(_make_new(base))  # type: ignore[method-assign]
    for cls in _MAKERS:
        _replace(cls, "validate_checkpoint_id", classmethod(_with_ours(cls.validate_checkpoint_id.__func__)))  # type: ignore[attr-defined]
        _replace(cls, "reset", _without_ours(cls.reset))  # type: ignore[attr-defined]
    # An asynchronous save chooses its writer later, perhaps in another process, where nothing is registered.
    for executor in AsyncCheckpointExecutor.__subclasses__():
        _replace(executor, "execute_save", _with_writer(executor.execute_save))


def _replace(cls: type, name: str, by: Any) -> None:
    _replaced.append((cls, name, cls.__dict__.get(name)))
    setattr(cls, name, by)


def _make_new(base: type) -> Any:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _new(base, cls, *args, **kwargs)

    __new__.__signature__ = inspect.signature(base.__init__)  # type: ignore[misc, attr-defined]
    return __new__


def _with_ours(validate: Any) -> Any:
    @functools.wraps(validate)
    def validate_checkpoint_id(cls: type, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (cls in _MAKERS and _find(checkpoint_id) is not None) or bool(validate(cls, checkpoint_id))

    return validate_checkpoint_id


def _without_ours(reset: Any) -> Any:
    @functools.wraps(reset)
    def refuse_ours(self: Any, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        found = _find(checkpoint_id) if type(self) in _MAKERS else None
        if found is not None:
            raise SettingsError(
                f"this {type(self).__name__} was made for {self.path}, so that it cannot go to {found[1]}, which "
                f"checkpoint_id={str(checkpoint_id)!r} means. Remedy: make it for that URL, or give dcp none"
            )
        reset(self, checkpoint_id)

    return refuse_ours


def _with_writer(execute_save: Any) -> Any:
    @functools.wraps(execute_save)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _find(kwargs.get("checkpoint_id"))
        if found is not None and kwargs.get("storage_writer") is None:
            kwargs["storage_writer"] = _make_writer(*found, {})
        return execute_save(self, *args, **kwargs)

    return save
