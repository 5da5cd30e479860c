"""The files that Megatron-Core reads and writes beside the tensors, on S3.

With `MultiStorageClientFeature` enabled, Megatron reaches all of them through the package multistorageclient. `Files`
takes that package's place. It carries s3:// paths, and passes others on: to the package if it is there and enabled,
else to the local file system.

``common.pt`` and ``metadata.json`` belong to a checkpoint: they are its attachments. The former is written before the
save begins, so it is held until then.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pathlib
import threading
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


class SmallFiles:
    """Files on S3, each read and written whole. Thread-safe."""

    def __init__(self, settings: SettingsLike) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._held: dict[CheckpointURL, dict[str, bytes]] = {}
        self._sent: dict[CheckpointURL, bytes | None] = {}  # the last metadata.json of each checkpoint

    def hold(self, url: CheckpointURL, name: str, data: bytes) -> None:
        """Keep a file for the next save to ``url``."""
        with self._lock:
            self._held.setdefault(url, {})[name] = data

    def take(self, url: CheckpointURL) -> dict[str, bytes]:
        """The files, by name, of the save to ``url`` that begins now. They are not held any more."""
        with self._lock:
            found = self._held.pop(url, {})
            if CONFIG_FNAME in found:
                self._sent[url] = found[CONFIG_FNAME]
        return found

    def write(self, path: URLLike, data: bytes) -> None:
        """Write a file; one that belongs to a checkpoint waits for its save."""
        directory, name = _split(path)
        if name == COMMON_STATE_FNAME:
            self.hold(directory, name, data)
            return
        with self._lock:
            # Megatron writes it after the save, with which it was committed already.
            was_sent = name == CONFIG_FNAME and self._sent.pop(directory, None) == data
        if not was_sent:
            self._store(directory).put(directory.key(name), data)

    def read(self, path: URLLike) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StorageError, CheckpointError
        """
        directory, name = _split(path)
        try:
            if name in _ATTACHED:
                return S3StorageReader(str(directory), settings=self.settings).attachment(name)
            return self._store(directory).get(directory.key(name)).data
        except (ObjectNotFoundError, CheckpointNotFoundError, EntryNotFoundError) as error:
            raise FileNotFoundError(f"{parse_url(path)} is not there: {error}") from error

    def is_file(self, path: URLLike) -> bool:
        """Whether there is a file; whether a checkpoint has it, for those that belong to one."""
        directory, name = _split(path)
        if name not in _ATTACHED:
            return bool(name) and self._store(directory).exists(directory.key(name))
        try:
            self.read(path)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, path: URLLike) -> bool:
        """Whether anything lies below ``path``."""
        return bool(self.names(path))

    def exists(self, path: URLLike) -> bool:
        """Whether there is a file, or anything below ``path``."""
        return self.is_file(path) or self.is_dir(path)

    def names(self, path: URLLike) -> list[str]:
        """Names of the files and directories right below ``path``."""
        url = parse_url(path)
        prefix = url.key("")
        found = self._store(url).list(prefix, "/")
        return [key[len(prefix) :].rstrip("/") for key in (*(each.key for each in found.objects), *found.prefixes)]

    def open(self, path: URLLike, mode: str = "rb", **_: Any) -> IO[Any]:
        """A file as `open` gives it. What is written is stored when it is closed.

        Raises:
            FileNotFoundError: there is none to read.
            ValueError: the mode is one for both reading and writing.
        """
        kind, make = mode.replace("b", "").replace("t", ""), io.BytesIO if "b" in mode else _text
        if kind not in ("r", "w", "a"):
            raise ValueError(f"{parse_url(path)} cannot be opened with mode {mode!r}: files on S3 are written whole")
        data = self.read(path) if kind == "r" or (kind == "a" and self.is_file(path)) else b""
        if kind == "r":
            return make(data)
        return _Outgoing(functools.partial(self.write, path), make(data))  # type: ignore[return-value]

    def _store(self, url: CheckpointURL) -> S3Store:
        return store_of(url, resolve_settings(self.settings))


class Files:
    """What Megatron takes for the package multistorageclient.

    Args:
        is_enabled, import_package: whether the real package is there and enabled, and what imports it.
    """

    def __init__(self, small: SmallFiles, is_enabled: Callable[[], bool], import_package: Callable[[], Any]) -> None:
        self._import_package = import_package

        def save(obj: object, path: URLLike, **options: Any) -> None:
            with small.open(path, "wb") as stream:
                torch.save(obj, stream, **options)

        def load(path: URLLike, **options: Any) -> Any:
            return torch.load(io.BytesIO(small.read(path)), **options)

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

        self.open = route("open", small.open, builtins.open)
        self.Path = route("Path", type("S3Path", (_S3Path,), {"small": small}), pathlib.Path)
        self.os = SimpleNamespace(
            makedirs=route("os.makedirs", lambda _, **__: None, os.makedirs),  # S3 has no directories
            path=SimpleNamespace(
                exists=route("os.path.exists", small.exists, os.path.exists),
                isdir=route(
                    "os.path.isdir", lambda path, **_: small.is_dir(path), lambda path, **_: os.path.isdir(path)
                ),
                isfile=route("os.path.isfile", small.is_file, os.path.isfile),
            ),
        )
        self.torch = SimpleNamespace(
            save=route("torch.save", save, torch.save, at=1),
            load=route("torch.load", load, torch.load),
            MultiStorageFileSystemReader=route(
                "torch.MultiStorageFileSystemReader",
                lambda path, **_: _Reader(path, settings=small.settings),
                lambda path, **_: CachedMetadataFileSystemReader(path),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._import_package(), name)  # an error of Megatron's if it is not there


class _Outgoing:
    """A file that is stored when it is closed, unless the block that writes it fails."""

    def __init__(self, send: Callable[[bytes], None], buffer: io.BytesIO | io.StringIO) -> None:
        self._buffer = buffer
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

    small: SmallFiles

    def iterdir(self) -> Iterator[_S3Path]:
        return (self / name for name in self.small.names(self))

    def exists(self) -> bool:
        return self.small.exists(self)

    def is_dir(self) -> bool:
        return self.small.is_dir(self)

    def is_file(self) -> bool:
        return self.small.is_file(self)


class _Reader(S3StorageReader):
    """Has the metadata once for each load: Megatron asks for it again afterwards."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata or super().read_metadata(*args, **kwargs)


def _text(data: bytes) -> io.StringIO:
    return io.StringIO(data.decode())


def _split(path: URLLike) -> tuple[CheckpointURL, str]:
    """Directory and name of a file."""
    url = parse_url(path)
    return CheckpointURL(url.bucket, url.prefix.rpartition("/")[0]), url.name
