"""What Lightning sees of the checkpoints on S3 when it looks for them through fsspec."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import Any, NoReturn

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect_checkpoint
from dcp_s3.coroutines import run
from dcp_s3.integrations.lightning_saves import BackgroundSaves
from dcp_s3.retention.catalog import list_checkpoints
from dcp_s3.s3.async_store import open_async_store
from dcp_s3.settings import resolve_settings
from dcp_s3.url import is_s3_url, parse_url

_CHAINED = "s3::"


class CheckpointFiles(AbstractFileSystem):
    """A read-only view: committed checkpoints are directories, and there is nothing else.

    Args:
        saves: saves under way. What they write is there already, and what they are to remove is not.
        options: of fsspec; not used.
    """

    protocol = "s3"
    cachable = False

    def __init__(self, saves: BackgroundSaves | None = None, **options: Any) -> None:
        super().__init__()
        self._saves = saves

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a committed checkpoint is at or directly below ``path``."""
        url = str(parse_url(_text(path)))
        expected = None if self._saves is None else self._saves.holds(url)
        return bool(_inspect(url) or self.ls(url)) if expected is None else expected

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The committed checkpoints directly below ``path``."""
        found = [info for info in list_checkpoints(_text(path)) if info.committed]
        # Lightning normalizes the names as paths, and s3:/... would be a local one. A chained URL stays what it is.
        entries = [{"name": _CHAINED + info.url.removeprefix("s3://"), **_TYPE} for info in found]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """The entry of a committed checkpoint, or of a directory of them.

        Raises:
            FileNotFoundError: there is none.
        """
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": self._strip_protocol(path), **_TYPE}

    def modified(self, path: str) -> datetime:
        """When the checkpoint at ``path`` was committed.

        Raises:
            FileNotFoundError: there is none.
        """
        info = _inspect(_text(path))
        if info is None:
            raise FileNotFoundError(path)
        return datetime.fromtimestamp(info.created_at or 0.0, tz=timezone.utc)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"dcp_s3 shows only which checkpoints there are, not {path}. Remedy: pip install s3fs"
        )


_TYPE = {"size": 0, "type": "directory"}


def find_url(path: str | os.PathLike[str] | None) -> str | None:
    """The S3 URL that Lightning means by a path; None if it is another path.

    Raises:
        InvalidURLError: Lightning took an S3 URL for a local path.
    """
    if path is None:
        return None
    text = os.fspath(path)
    if text.startswith(_CHAINED):
        text = _text(text)
    if is_s3_url(text):
        return str(parse_url(text))
    if "/s3:/" in text:
        raise errors.InvalidURLError(
            f"{text!r} is an S3 URL that was taken for a local path. Remedy: pass it as text, not as a pathlib.Path"
        )
    return None


def newest(dirpath: str) -> str | None:
    """URL of the checkpoint directly below ``dirpath`` that was committed last, whatever its name; None without one.

    For ``Trainer.fit(ckpt_path=newest(dirpath))``. ``ckpt_path="last"`` knows only ``last.ckpt``.

    Raises:
        InvalidURLError, StorageError
    """
    found = [info for info in list_checkpoints(dirpath) if info.committed]
    return max(found, key=lambda info: info.created_at or 0.0).url if found else None


def _text(path: str) -> str:
    """A path of fsspec as a URL: with the protocol, chained or without."""
    return path if is_s3_url(path) else "s3://" + path.removeprefix(_CHAINED)


def _inspect(path: str) -> CheckpointInfo | None:
    """The committed checkpoint at a URL."""

    async def inspect() -> CheckpointInfo | None:
        url = parse_url(path)
        async with open_async_store(url.bucket, resolve_settings(None)) as store:
            return await inspect_checkpoint(store, url)

    info = run(inspect())
    return info if info is not None and info.committed else None
