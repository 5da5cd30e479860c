"""`register` and `redirect`: code that names no storage backend, or torch's own, uses this one.

Both act on torch's classes FileSystemWriter, FileSystemReader, FsspecWriter and FsspecReader themselves: making one for
a path that is ours gives an `S3StorageWriter` or `S3StorageReader`. So it does not matter who makes it (`dcp.save` with
a bare ``checkpoint_id``, a framework), nor when the name was imported. Subclasses, other paths and other URLs are left
alone. A `pathlib.Path` of an S3 URL, which has only one slash left, counts as that URL.

An asynchronous save would choose its writer in another thread, when a redirection may be over, or in another process,
where nothing is registered. So it is made when the save is asked for.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from dcp_s3.errors import InvalidURLError, SaveProtocolError, SettingsError
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.torch_private import (
    FsspecReader,
    FsspecWriter,
    ProcessBasedAsyncCheckpointExecutor,
    ThreadBasedAsyncCheckpointExecutor,
)
from dcp_s3.url import is_s3_url, parse_url

logger = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class _Registration:
    """The arguments of `register`: S3 URLs are ours."""

    overwrite: bool
    settings: SettingsLike

    def target(self, path: _Path) -> str | None:
        """URL of what ``path`` names; None if it is not ours."""
        return str(parse_url(path)) if is_s3_url(path) else None


@dataclass(frozen=True, eq=False)  # two calls with the same arguments are two
class _Redirection:
    """The arguments of `redirect`: paths below some directories are ours."""

    urls: Mapping[str, str]
    """URLs without a slash at the end, by absolute directory, also by its real path if there are links in it."""
    settings: SettingsLike
    overwrite: bool = True  # as torch's FileSystemWriter

    def target(self, path: _Path) -> str | None:
        """URL of what ``path`` names; None if it is not ours."""
        text = os.fspath(path)
        if is_s3_url(text) or "://" in text:
            return None
        for path in (os.path.abspath(text), os.path.realpath(text)):
            for directory in sorted(self.urls, key=len, reverse=True):
                if path == directory or path.startswith(directory.rstrip(os.sep) + os.sep):
                    return str(parse_url(self.urls[directory] + path[len(directory.rstrip(os.sep)) :]))
        return None


_lock = threading.Lock()
_registration: _Registration | None = None
_redirections: list[_Redirection] = []
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
        _update()


def unregister() -> None:
    """Undo `register`. Further calls change nothing.

    >>> register()
    >>> unregister()
    """
    global _registration
    with _lock:
        _registration = None
        _update()


class Redirect:
    """What `redirect` returns: a context manager that undoes it at its end."""

    def __init__(self, redirection: _Redirection) -> None:
        self._redirection = redirection

    def __enter__(self) -> Redirect:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Let these paths be files again. Further calls change nothing."""
        with _lock:
            if self._redirection in _redirections:
                _redirections.remove(self._redirection)
            _update()

    def __repr__(self) -> str:
        return f"Redirect({dict(self._redirection.urls)!r})"


def redirect(urls: Mapping[_Path, _Path], *, settings: SettingsLike = None) -> Redirect:
    """Let checkpoints of DCP below local directories be on S3, whoever makes torch's FileSystemWriter or
    FileSystemReader for them.

    Only what goes through these classes: a framework's other files, and its own search for the latest step, stay on the
    local disk. A checkpoint that is there is replaced, as FileSystemWriter does, unless it was given
    ``overwrite=False``; here it stays whole until the new one is committed.

    >>> with redirect({"/ckpt": "s3://bucket/other"}):
    ...     saved = dcp.save(state, checkpoint_id="/ckpt/step-100")
    >>> latest("s3://bucket/other").url
    's3://bucket/other/step-100'

    It holds from the call on; leaving the ``with``, or `Redirect.undo`, ends it. Of several that fit, the latest call
    counts; within a call, the longest directory.

    Args:
        urls: S3 URLs by local directory. The directories need not exist.
        settings: a `Settings`, or a mapping of settings that override the environment.

    Raises:
        InvalidURLError: a URL is not an S3 URL, or a directory is one.
        SettingsError: a setting, in the environment or given here, is not allowed.
    """
    resolve_settings(settings)
    checked: dict[str, str] = {}
    for directory, url in urls.items():
        text = os.fspath(directory)
        if is_s3_url(text) or "://" in text:
            raise InvalidURLError(f"{text!r} cannot be redirected: it is a URL. Remedy: give a local directory")
        checked[os.path.abspath(text)] = str(parse_url(url))
    checked = {os.path.realpath(directory): url for directory, url in checked.items()} | checked
    redirection = _Redirection(checked, settings)
    with _lock:
        _redirections.append(redirection)
        _update()
    return Redirect(redirection)


def _find(path: object) -> tuple[_Registration | _Redirection, str] | None:
    """Whose ``path`` is, and its URL; None if it is not ours."""
    if not isinstance(path, (str, os.PathLike)):
        return None
    for each in (*reversed(_redirections), *([_registration] if _registration else ())):
        url = each.target(path)
        if url is not None:
            return each, url
    return None


# --- what is made instead -----------------------------------------------------------------------------


class _MovedWriter(S3StorageWriter):
    """Understands paths that are redirected, as DCP passes them on."""

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        super().reset(_moved(checkpoint_id))


class _MovedReader(S3StorageReader):
    """Understands paths that are redirected, as DCP passes them on."""

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        super().reset(_moved(checkpoint_id))


def _moved(checkpoint_id: _Path | None) -> _Path | None:
    found = None if checkpoint_id is None or is_s3_url(checkpoint_id) else _find(checkpoint_id)
    return checkpoint_id if found is None else found[1]


def _make_writer(whose: _Registration | _Redirection, url: str, given: Mapping[str, Any]) -> S3StorageWriter:
    """A writer like torch's with the ``given`` arguments."""
    if given.get("serialization_format", SerializationFormat.TORCH_SAVE) != SerializationFormat.TORCH_SAVE:
        raise SaveProtocolError(
            f"{url} cannot be saved as safetensors: dcp_s3 writes DCP's own format. Remedy: leave out "
            "serialization_format"
        )
    _warn_of_options(url, given)
    overwrite = given.get("overwrite")
    return _MovedWriter(
        url,
        overwrite=whose.overwrite if overwrite is None else bool(overwrite),
        settings=whose.settings,
        _extensions=given.get("_extensions"),
    )


def _make_reader(whose: _Registration | _Redirection, url: str, given: Mapping[str, Any]) -> S3StorageReader:
    """A reader like torch's with the ``given`` arguments."""
    _warn_of_options(url, given)
    return _MovedReader(url, settings=whose.settings, _extension_registry=given.get("_extension_registry"))


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
_warned: set[type] = set()
"""Subclasses that were warned of."""
_LOCAL_ONLY = (HuggingFaceStorageWriter, HuggingFaceStorageReader)


def _new(base: type, cls: type, *args: Any, **kwargs: Any) -> Any:
    """``cls.__new__``: one of ours for a path that is ours, otherwise what it was."""
    path = args[0] if args else kwargs.get("path")
    found = _find(path)
    if found is not None and cls in _MAKERS:
        # __init__ is not called: what is made is of another class.
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
        return _MAKERS[cls](*found, bound)
    if _replaced and issubclass(cls, _LOCAL_ONLY) and is_s3_url(path):
        raise SettingsError(
            f"{cls.__name__} has no S3: it takes {path} for a local directory. Remedy: save with dcp_s3 and make "
            "safetensors of it with `dcp-s3 export URL DEST`; load safetensors after `dcp-s3 import SRC URL`"
        )
    if found is not None and issubclass(cls, FileSystemWriter) and cls not in _warned:
        _warned.add(cls)
        logger.warning(
            "%s of %s saves to %s by itself: register and redirect leave subclasses of torch's writers alone, and "
            "nothing that dcp_s3 promises holds for it. Remedy: S3StorageWriter; for Megatron "
            "dcp_s3.integrations.megatron.install()",
            cls.__name__, cls.__module__, found[1],
        )  # fmt: skip
    plain: Any = super(base, cls).__new__  # type: ignore[arg-type]
    return plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)


# --- on and off ---------------------------------------------------------------------------------------

_EXECUTORS = (ThreadBasedAsyncCheckpointExecutor, ProcessBasedAsyncCheckpointExecutor)


def _update() -> None:
    """Change torch's classes if anything is registered or redirected; otherwise change them back.

    ``__new__`` stays, and does what it did before: Python cannot take it away again from a class whose ``__init__`` has
    arguments.
    """
    wanted = _registration is not None or bool(_redirections)
    if wanted == bool(_replaced):
        return
    if not wanted:
        while _replaced:
            cls, name, own = _replaced.pop()
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)
        return
    for base in (FileSystemWriter, FileSystemReader):
        if "__new__" not in base.__dict__:
            base.__new__ = staticmethod(_make_new(base))  # type: ignore[method-assign]
    for cls in _MAKERS:
        _replace(cls, "validate_checkpoint_id", classmethod(_with_ours(cls.validate_checkpoint_id.__func__)))  # type: ignore[attr-defined]
        _replace(cls, "reset", _without_ours(cls.reset))  # type: ignore[attr-defined]
    for executor in _EXECUTORS:
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
    def validate_checkpoint_id(cls: type, checkpoint_id: _Path) -> bool:
        return (cls in _MAKERS and _find(checkpoint_id) is not None) or bool(validate(cls, checkpoint_id))

    return validate_checkpoint_id


def _without_ours(reset: Any) -> Any:
    @functools.wraps(reset)
    def refuse_ours(self: Any, checkpoint_id: _Path | None = None) -> None:
        found = _find(checkpoint_id) if type(self) in _MAKERS else None
        if found is not None:
            raise SettingsError(
                f"this {type(self).__name__} was made for {self.path}, so that it cannot go to {found[1]}, which "
                f"checkpoint_id={str(checkpoint_id)!r} means. Remedy: make it for that path, or give dcp none"
            )
        reset(self, checkpoint_id)

    return refuse_ours


def _with_writer(execute_save: Any) -> Any:
    @functools.wraps(execute_save)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, writer = _find(kwargs.get("checkpoint_id")), kwargs.get("storage_writer")
        if found is not None and (writer is None or isinstance(writer, S3StorageWriter)):
            kwargs["storage_writer"] = _make_writer(*found, {}) if writer is None else writer
            kwargs["checkpoint_id"] = found[1]
        return execute_save(self, *args, **kwargs)

    return save
