"""torch-checkpointing on S3: give its CheckpointManager an `S3StorageConfig`, and `commit` as ``finalize_callback``.
See docs/torch-checkpointing.md."""

from __future__ import annotations

import errno
import io
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import Buffer

from dcp_s3 import errors, process
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import FILES_PREFIX, METADATA, is_attachment_name
from dcp_s3.integrations import files, require
from dcp_s3.memory import crc_hex
from dcp_s3.retention.prune import remove
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import StreamedObject
from dcp_s3.url import is_s3_url, parse_url

require("torch-checkpointing", "0.1.1", "0.2")

from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX, CallbackArgs  # noqa: E402
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig  # noqa: E402


@dataclass
class S3StorageConfig(StorageConfig):
    """Checkpoints right below an S3 URL. Picklable: savers with a process of their own send it there. Rank and world
    size are those of this process, of torch.distributed if it is initialised, else of the launcher's environment.

    Args:
        root: URL above the checkpoints, ``s3://bucket/run``. They are named relative to it, or by their URLs.
        settings: see `dcp_s3.Settings`; None: from the environment.

    Raises:
        InvalidURLError, SettingsError
    """

    root: str
    settings: SettingsLike = None
    rank: int = field(init=False)
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        parse_url(self.root)
        self.settings = resolve_settings(self.settings)
        distributed, launched = process.is_initialized(), process.launch()
        self.rank = process.rank() if distributed else launched.rank
        self.world_size = process.world_size() if distributed else launched.world_size

    def create_storage(self) -> S3Storage:
        return S3Storage(self)


def commit(args: CallbackArgs) -> None:
    """The ``finalize_callback`` of every rank: what all ranks have written to ``args.path`` becomes a checkpoint.

    Raises:
        CheckpointExistsError, TransferError, StorageError: it is not committed with what this rank has written.
    """
    storage = args.storage
    if not isinstance(storage, S3Storage):
        raise errors.SaveProtocolError(
            f"commit needs S3Storage, and the storage is {type(storage).__name__}. Remedy: give the CheckpointManager "
            "storage_config=S3StorageConfig(...)"
        )
    name = storage._checkpoint(Path(args.path))
    (nonce, written), url = storage._begin(name), storage._root.child(name)
    wait = storage._settings.stall_timeout or float("inf")
    try:
        files.publish_files(storage._store, url, storage._rank, storage._world_size, nonce, written.values(), wait)
    finally:
        storage._writing.pop(name)


class S3Storage(Storage):
    """torch-checkpointing's storage on S3, for any number of threads.

    A directory right below the root is a checkpoint, which exists for others once it is committed. Files that were not
    written through this class, for example safetensors, are read as they are.
    """

    def __init__(self, config: S3StorageConfig) -> None:
        self._root, self._settings = parse_url(config.root), resolve_settings(config.settings)
        self._store = store_of(self._root, self._settings)
        self._rank, self._world_size = config.rank, config.world_size
        # Random id of each save that this process takes part in, and the files that it has written, by relative path.
        self._writing: dict[str, tuple[str, dict[str, ObjectEntry]]] = {}
        self._open: dict[Path, files.OpenFile] = {}
        self._lock = threading.Lock()

    # --- writing ----------------------------------------------------------------------------------------

    def get_write_stream(self, path: Path, data: object) -> files.WriteStream:
        """The stream for ``data``; the memory of its tensors is sent without copies."""
        name, rest = self._split(path)
        if not is_attachment_name(rest):
            raise OSError(errno.EINVAL, "no file of a checkpoint can have this name", str(path))
        _, written = self._begin(name)

        def done(stored: StreamedObject) -> None:
            crc = None if stored.crc64nvme is None else crc_hex(stored.crc64nvme)
            written[rest] = ObjectEntry(rest, stored.size, crc)

        return files.WriteStream(self._store, self._root.child(name).key(rest), data, done)

    def stream_write(self, path: Path) -> files.WriteStream:
        return self.get_write_stream(path, None)

    def write(self, path: Path, data: Buffer) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Begin to write a checkpoint. Nobody else sees it before it is committed."""
        if name := self._split(path)[0]:
            self._begin(name)

    def _begin(self, name: str) -> tuple[str, dict[str, ObjectEntry]]:
        if name.startswith(DEFAULT_TEMP_DIR_PREFIX):
            raise errors.SaveProtocolError(
                f"{name} would have to be renamed, and S3 has no rename. Remedy: write_to_temp_dir=False in the "
                "CheckpointWriterConfig, and finalize_callback=commit"
            )
        with self._lock:
            if name not in self._writing:
                url, nonce = self._root.child(name), secrets.token_hex(8)
                if self._store.exists(url.key(METADATA)):
                    raise FileExistsError(errno.EEXIST, "it is committed: delete it first", str(url))
                files.put_record(self._store, url, self._rank, nonce)
                self._writing[name] = nonce, {}
            return self._writing[name]

    # --- changing ---------------------------------------------------------------------------------------

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        raise OSError(errno.ENOTSUP, "S3 has no rename: write in place, with finalize_callback=commit", str(src_path))

    def delete(self, path: Path) -> None:
        raise PermissionError(errno.EPERM, "files of a checkpoint are deleted with it, by rmdir", str(path))

    def rmdir(self, path: Path) -> None:
        """Delete a checkpoint, its commit first. What was not committed is left for `prune`.

        Raises:
            CheckpointProtectedError, CheckpointNotFoundError
        """
        name = self._checkpoint(path)
        self._writing.pop(name, None)
        remove(str(self._root.child(name)), settings=self._settings)

    # --- reading ----------------------------------------------------------------------------------------

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """The file, in the version that was there when it was last looked for (`exists`, `getsize`)."""
        file = self._open.get(path) or self._look(path)
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(file.read_whole())  # type: ignore[return-value]
        return io.BufferedReader(files.ReadStream(file), files.BLOCK)  # type: ignore[return-value]

    def _look(self, path: Path) -> files.OpenFile:
        """Open a file. What was committed is compared with what is there."""
        name, rest = self._split(path)
        entry, key = (self._entries(name) or {}).get(rest), self._root.child(name).key(rest)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        head = self._store.head(key, checksum=entry.crc64nvme is not None)
        if head.size != entry.size or (head.crc64nvme and entry.crc64nvme not in (None, head.crc64nvme)):
            raise files.damaged_error(self._root.bucket, key)
        self._open[path] = files.OpenFile(self._store, key, head.size, head.etag, entry.crc64nvme)
        return self._open[path]

    def getsize(self, path: Path) -> int:
        return self._look(path).size

    @property
    def mmap_fill_workers(self) -> int:
        return max(8, self._store.read_width())

    # --- what there is ----------------------------------------------------------------------------------

    def exists(self, path: Path) -> bool:
        self._open.pop(path, None)
        name, rest = self._split(path)
        entries = self._entries(name) if name else {}
        return entries is not None and (not rest or any(f"{each}/".startswith(f"{rest}/") for each in entries))

    def isdir(self, path: Path) -> bool:
        name, rest = self._split(path)
        return self.exists(path) and not (rest and rest in (self._entries(name) or {}))

    def ls(self, path: Path) -> list[str]:
        if not self.isdir(path):
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        name, rest = self._split(path)
        if name:
            below = f"{rest}/" if rest else ""
            inside = (each for each in self._entries(name) or {} if each.startswith(below))
            return sorted({each[len(below) :].partition("/")[0] for each in inside})
        prefix = self._root.key("")
        names = [each[len(prefix) : -1] for each in self._store.list(prefix, "/").prefixes]
        exists = self._store.map(lambda _, each: self._entries(each) is not None, names)
        return [each for each, found in zip(names, exists, strict=True) if found]

    def remap_path(self, path: Path) -> str:
        name, rest = self._split(path)
        url = self._root.child(name) if name else self._root
        return str(url.child(rest) if rest else url)

    def _entries(self, name: str) -> Mapping[str, ObjectEntry] | None:
        """The files of a directory by relative path; None if it does not exist, or is not committed."""
        if name in self._writing:
            return self._writing[name][1]
        url = self._root.child(name)
        if (committed := files.find_files(self._store, url)) is not None:
            return committed
        skip = len(url.key(""))
        found = {each.key[skip:]: each.size for each in self._store.list(url.key("")).objects}
        if not found or any(path.startswith(FILES_PREFIX) for path in found):
            return None
        return {path: ObjectEntry(path, size) for path, size in found.items()}

    def _checkpoint(self, path: Path) -> str:
        name, rest = self._split(path)
        if not name or rest:
            raise errors.SaveProtocolError(f"{path} is not right below {self._root}, where checkpoints are")
        return name

    def _split(self, path: Path) -> tuple[str, str]:
        """The name of a checkpoint, empty for the root, and the path below it."""
        text, root = os.fspath(path), f"{self._root}/"
        url = self._root if path == Path() else parse_url(text) if is_s3_url(text) else self._root.child(text)
        if text.startswith("/") or ".." in text.split("/") or not f"{url}/".startswith(root):
            raise errors.InvalidURLError(
                f"{text!r} is not below {self._root}. Remedy: a name relative to the root, or a URL below it"
            )
        name, _, rest = f"{url}/"[len(root) :].rstrip("/").partition("/")
        return name, rest
