"""The files that Megatron-Core reads and writes beside the tensors, on S3.

With `MultiStorageClientFeature` enabled, Megatron reaches all of them through the package multistorageclient. `Files`
takes that package's place. It carries s3:// paths, and passes others on: to the package if it is there and enabled,
else to the local file system.

``common.pt`` and ``metadata.json`` belong to a checkpoint: they are its attachments. They are held until its save
begins; what Megatron writes of them afterwards is the same again.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3.errors import CheckpointNotFoundError, EntryNotFoundError, ObjectNotFoundError
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import CheckpointURL, URLLike, is_s3_url, parse_url

_ATTACHED = frozenset({COMMON_STATE_FNAME, CONFIG_FNAME})


class Files:
    """What Megatron takes for the package multistorageclient; ``is_enabled`` and ``import_package`` are the real one's.
    On S3, files are read and written whole."""

    def __init__(
        self, settings: SettingsLike, is_enabled: Callable[[], bool], import_package: Callable[[], Any]
    ) -> None:
        self._settings, self._import_package = settings, import_package
        self.held: dict[CheckpointURL, dict[str, bytes]] = {}
        """Files for the next save to a URL, by name."""

        def route(name: str, on_s3: Callable[..., Any], local: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
            """What is called ``name`` in the package: ``on_s3`` if argument ``at`` is there, else the package's own, or
            ``local`` without it."""

            def call(*args: Any, **options: Any) -> Any:
                if is_s3_url(args[at]):
                    return on_s3(*args, **options)
                if not is_enabled():
                    return local(*args, **options)
                return functools.reduce(getattr, name.split("."), import_package())(*args, **options)

            return call

        def save(obj: object, path: URLLike, **options: Any) -> None:
            with self._open(path, "wb") as stream:
                torch.save(obj, stream, **options)

        def load(path: URLLike, **options: Any) -> Any:
            return torch.load(io.BytesIO(self._read(path)), **options)

        def is_dir(path: URLLike, **_: Any) -> bool:
            return bool(self.names(path))

        self.open = route("open", self._open, builtins.open)
        self.Path = route("Path", type("S3Path", (_S3Path,), {"files": self}), pathlib.Path)
        self.os = SimpleNamespace(
            makedirs=route("os.makedirs", lambda _, **__: None, os.makedirs),  # S3 has no directories
            path=SimpleNamespace(
                exists=route("os.path.exists", lambda path: self.is_file(path) or is_dir(path), os.path.exists),
                isdir=route("os.path.isdir", is_dir, lambda path, **_: os.path.isdir(path)),
                isfile=route("os.path.isfile", self.is_file, os.path.isfile),
            ),
        )
        self.torch = SimpleNamespace(
            save=route("torch.save", save, torch.save, at=1),
            load=route("torch.load", load, torch.load),
            MultiStorageFileSystemReader=route(
                "torch.MultiStorageFileSystemReader",
                lambda path, **_: _Reader(path, settings=settings),
                lambda path, **_: CachedMetadataFileSystemReader(path),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._import_package(), name)  # an error of Megatron's if it is not there

    def is_file(self, path: URLLike) -> bool:
        """Whether there is a file; whether a checkpoint has it, for those that belong to one."""
        directory, name = _split(path)
        if name not in _ATTACHED:
            return bool(name) and self._store(directory).exists(directory.key(name))
        try:
            self._read(path)
        except FileNotFoundError:
            return False
        return True

    def names(self, path: URLLike) -> list[str]:
        """Names of the files and directories right below ``path``."""
        url = parse_url(path)
        prefix = url.key("")
        found = self._store(url).list(prefix, "/")
        return [key[len(prefix) :].rstrip("/") for key in (*(each.key for each in found.objects), *found.prefixes)]

    def _open(self, path: URLLike, mode: str = "rb", **_: Any) -> IO[Any]:
        """A file as `open` gives it. What is written is stored when it is closed."""
        kind, is_text = mode.replace("b", "").replace("t", ""), "b" not in mode
        if kind not in ("r", "w", "a"):
            raise ValueError(f"{parse_url(path)} cannot be opened with mode {mode!r}: files on S3 are written whole")
        data = self._read(path) if kind == "r" or (kind == "a" and self.is_file(path)) else b""
        stream: IO[Any] = io.StringIO(data.decode()) if is_text else io.BytesIO(data)
        if kind == "r":
            return stream

        def send(data: bytes) -> None:
            directory, name = _split(path)
            if name in _ATTACHED:
                self.held.setdefault(directory, {})[name] = data
            else:
                self._store(directory).put(directory.key(name), data)

        return _Outgoing(send, stream)  # type: ignore[return-value]

    def _read(self, path: URLLike) -> bytes:
        directory, name = _split(path)
        try:
            if name in _ATTACHED:
                return S3StorageReader(str(directory), settings=self._settings).attachment(name)
            return self._store(directory).get(directory.key(name)).data
        except (ObjectNotFoundError, CheckpointNotFoundError, EntryNotFoundError) as error:
            raise FileNotFoundError(f"{parse_url(path)} is not there: {error}") from error

    def _store(self, url: CheckpointURL) -> S3Store:
        return store_of(url, resolve_settings(self._settings))


class _Outgoing:
    """A file that is stored when it is closed, unless the block that writes it fails."""

    def __init__(self, send: Callable[[bytes], None], buffer: IO[Any]) -> None:
        self._buffer: Any = buffer
        self._send: Callable[[bytes], None] | None = send
        buffer.seek(0, io.SEEK_END)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def close(self) -> None:
        send, self._send = self._send, None
        if send is not None:
            data = self._buffer.getvalue()
            send(data.encode() if isinstance(data, str) else data)
        self._buffer.close()

    def __enter__(self) -> _Outgoing:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._send = None
        self.close()


class _S3Path(pathlib.PurePosixPath):
    """An s3:// path as far as Megatron walks it. As text it has one slash after the scheme, as pathlib makes it."""

    files: Files

    def iterdir(self) -> Iterator[_S3Path]:
        return (self / name for name in self.files.names(self))

    def is_dir(self) -> bool:
        return bool(self.files.names(self))

    def is_file(self) -> bool:
        return self.files.is_file(self)


class _Reader(S3StorageReader):
    """Has the metadata once for each load: Megatron asks for it again afterwards."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata or super().read_metadata(*args, **kwargs)


def _split(path: URLLike) -> tuple[CheckpointURL, str]:
    """Directory and name of a file."""
    url = parse_url(path)
    return url.parent, url.name
