"""Copies of a checkpoint between S3 and a local directory.

The directory has the layout of torch's FileSystemReader and FileSystemWriter. In both directions the commit comes last,
so that an interrupted copy is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import SaveIdentity, check_absent, exists_error, find_previous
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry
from dcp_s3.checkpoint.listing import list_directory
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    METADATA,
    METADATA_CRC_KEY,
    SAVE_ID_KEY,
    What,
    classify,
    manifest_object,
    metadata_object,
)
from dcp_s3.format.manifest import AttachmentEntry, Manifest, attachments_of
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.s3.files import FileTransfer, OnProgress, download_files, upload_files
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import ABSENT
from dcp_s3.url import CheckpointURL, parse_url

logger = logging.getLogger(__name__)

_MARKER = CONTROL_PREFIX + "download.json"
"""Marks a directory into which a download has begun, and says of which checkpoint."""
# s3transfer's suffix of an incomplete file.
_PARTIAL = re.compile(r"\.[0-9a-fA-F]{8}")
_READ_SIZE = 4 * 2**20

OnTotal = Callable[[int], None]


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy."""

    files: int
    """Number of files that make up the checkpoint, its metadata included."""
    size: int
    """Bytes of these files."""
    moved: int
    """Bytes that this call moved; less than ``size`` if it continued an earlier one."""


@dataclass(frozen=True)
class _CopySource:
    """A checkpoint to be copied, on S3 or in a directory."""

    commits: Mapping[str, bytes]
    """Bytes of ``.metadata``, or of every ``__{rank}.metadata``, by relative path."""
    metadata: Mapping[str, Metadata]
    """Loaded metadata, by relative path."""
    files: Mapping[str, int]
    """Bytes of everything else that belongs to it, by relative path."""
    attachments: Sequence[AttachmentEntry] = ()
    """Attachments of all ranks. Of several with one name, the first counts."""

    @property
    def size(self) -> int:
        return sum(self.files.values()) + sum(len(data) for data in self.commits.values())

    @property
    def count(self) -> int:
        return len(self.files) + len(self.commits)

    def manifest_of(self, commit: str) -> str | None:
        """Relative path of the manifest of the save that made a commit, None if it is missing."""
        path = _manifest_path(commit, self.metadata[commit])
        return path if path in self.files else None


def _manifest_path(commit: str, metadata: Metadata) -> str:
    return manifest_object(str(getattr(metadata.storage_meta, "save_id", None)), classify(commit).rank)


def _make_source(where: str, directory: Directory, read: Callable[[str], bytes]) -> _CopySource:
    """Find the files that belong to the checkpoint in a directory.

    Left out are data objects that the metadata does not name (of another save), manifests of other saves, pins, leases,
    lists of deletions, and checkpoints in directories below.

    Raises:
        CheckpointNotFoundError: nothing is committed.
        CorruptCheckpointError: something that the metadata names is missing or too short.
    """
    # The metadata of rank 0 comes last.
    names = [metadata_object(rank) for rank in reversed(directory.committing)]
    if not names:
        raise errors.CheckpointNotFoundError(
            f"there is no committed checkpoint at {where}: it has no {METADATA}. Remedy: check the URL or directory",
            url=where,
        )
    commits = {name: read(name) for name in names}
    metadata = {name: load_metadata(data, url=where) for name, data in commits.items()}
    needed: dict[str, int] = {}
    for loaded in metadata.values():
        for path, size in needed_objects(loaded).items():
            needed[path] = max(size, needed.get(path, 0))
    manifests = {_manifest_path(name, loaded) for name, loaded in metadata.items()} & directory.objects.keys()
    attachments: list[AttachmentEntry] = []
    for path in sorted(manifests, key=lambda path: classify(path).rank or 0):
        attachments += _read_attachments(where, read(path), present=len(names))
    needed |= {entry.path: entry.size for entry in attachments}
    damage = directory.describe_damage(needed)
    if damage is not None:
        raise errors.CorruptCheckpointError(
            f"{where} cannot be copied: {damage}. Remedy: it is damaged, or being deleted; copy another checkpoint",
            url=where,
        )
    belong = needed.keys() | manifests
    files = {found.path: found.size for found in directory if found.path in belong or _is_besides(found)}
    return _CopySource(commits, metadata, files, attachments)


def _read_attachments(where: str, manifest: bytes, *, present: int) -> list[AttachmentEntry]:
    """The attachments that a manifest names.

    Raises:
        CheckpointNotFoundError: only ``present`` of the ranks have committed.
    """
    try:
        parsed = Manifest.from_json(manifest)
    except ValueError as error:
        logger.warning("attachments of %s are not copied: its manifest cannot be read: %s", where, error)
        return []
    if parsed.rank is not None and parsed.world_size > present:
        raise errors.CheckpointNotFoundError(
            f"the checkpoint at {where} is incomplete: {present} of {parsed.world_size} ranks have committed. Remedy: "
            "wait until the save is done, or copy another checkpoint",
            url=where,
        )
    return [entry for entry in parsed.objects if isinstance(entry, AttachmentEntry)]


def _is_besides(found: DirectoryEntry) -> bool:
    """Whether an object is copied although no metadata names it: metrics, and files that users put there."""
    if found.kind.what not in (What.METRICS, What.CONTROL, What.OTHER) or found.path == _MARKER:
        return False
    # Keys may be anything: "./.metadata" must not become the file .metadata, "a/" has no file.
    return not any(segment in ("", ".", "..") for segment in found.path.split("/"))


# --- download ------------------------------------------------------------------------------------


def download(
    url: str,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: OnTotal | None = None,
    on_progress: OnProgress | None = None,
) -> CopyResult:
    """Copy a checkpoint into a directory, which torch's FileSystemReader then reads.

    An interrupted download continues when it is called again: complete files stay. Sizes are compared with what was
    saved; for checkpoints of dcp_s3 also the CRC-64 of every data object.

    Args:
        url: URL of the checkpoint.
        directory: target, made if missing. Must be empty, or hold an interrupted download of the same checkpoint.
        overwrite: write into a directory that holds something else. A checkpoint in it is lost at once.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_total: called once with the number of bytes to move.
        on_progress: called with the number of bytes as they move, from several threads.

    Raises:
        CheckpointExistsError: the directory is not empty.
        CheckpointNotFoundError: there is no committed checkpoint at ``url``.
        CorruptCheckpointError: the checkpoint is damaged, or what arrived is not what was saved.
        StorageError, OSError
    """
    parsed = parse_url(url)
    store = S3Store(parsed.bucket, resolve_settings(settings))
    target = Path(directory)
    source = _make_source(str(parsed), list_directory(store, parsed), lambda path: store.get(parsed.key(path)).data)
    _prepare_directory(target, parsed, source, overwrite=overwrite)
    present = {path for path, size in source.files.items() if _size_of(target / path) == size}
    wanted = {path: size for path, size in source.files.items() if path not in present}
    if on_total is not None:
        on_total(sum(wanted.values()))
    download_files(
        store,
        [FileTransfer(parsed.key(path), target / path) for path in wanted],
        on_progress=on_progress,
    )
    _verify(target, parsed, source)
    for attachment, entry in attachments_of(source.attachments).items():
        plain, data = target / attachment, (target / entry.path).read_bytes()
        if not plain.is_file() or plain.read_bytes() != data:  # S3 may lack the plain copy, or have an older one
            plain.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(plain, data)
    for name, data in source.commits.items():
        _write_whole(target / name, data)
    (target / _MARKER).unlink()
    if not any((target / CONTROL_PREFIX).iterdir()):
        (target / CONTROL_PREFIX).rmdir()
    return CopyResult(source.count, source.size, sum(wanted.values()))


def _prepare_directory(target: Path, url: CheckpointURL, source: _CopySource, *, overwrite: bool) -> None:
    marker = target / _MARKER
    digest = hashlib.sha256(b"".join(source.commits[name] for name in sorted(source.commits))).hexdigest()
    mark = json.dumps({"url": str(url), "metadata_sha256": digest}).encode()
    if target.exists() and any(target.iterdir()):
        if _read_marker(marker) == mark:
            _remove_partial(target, source)
            return
        if not overwrite:
            raise errors.CheckpointExistsError(
                f"{target} is not empty, and holds no unfinished download of {url}. Remedy: give another directory, "
                "empty this one, or pass overwrite=True",
                url=str(url),
            )
        # Existing files may have the right size by chance.
        commits = Directory.of_sizes(dict.fromkeys(os.listdir(target), 0)).commits.values()
        for name in [*(found.path for found in commits), *source.files]:
            (target / name).unlink(missing_ok=True)
    marker.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(marker, mark)


def _read_marker(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove_partial(target: Path, source: _CopySource) -> None:
    whole = {target / path for path in source.files}
    for folder in {path.parent for path in whole}:
        for file in folder.iterdir() if folder.is_dir() else ():
            if _PARTIAL.fullmatch(file.suffix) and file.with_suffix("") in whole and file not in whole:
                file.unlink()


def _verify(target: Path, url: CheckpointURL, source: _CopySource) -> None:
    expected: dict[str, str] = {}
    for commit in source.commits:
        path = source.manifest_of(commit)
        if path is None:
            continue
        try:
            manifest = Manifest.from_json((target / path).read_bytes())
        except ValueError:
            continue  # written by a later version
        expected |= {entry.path: entry.crc64nvme for entry in manifest.objects if entry.crc64nvme}
    for path, size in source.files.items():
        found = _size_of(target / path)
        if found != size:
            problem = f"has {found} bytes instead of {size}"
        elif path in expected and (crc := _crc_of(target / path)) != expected[path]:
            problem = f"has CRC-64/NVME {crc} instead of {expected[path]}"
        else:
            continue
        (target / path).unlink(missing_ok=True)  # so that the next call fetches it again
        raise errors.CorruptCheckpointError(
            f"{path} of {url} arrived damaged: it {problem}. Remedy: call download again; if it stays so, the object "
            "itself is damaged: use another checkpoint",
            url=str(url),
        )


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _crc_of(path: Path) -> str:
    crc = 0
    buffer = memoryview(bytearray(_READ_SIZE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc64nvme(buffer[:count], crc)
    return crc_hex(crc)


def _write_whole(path: Path, data: bytes) -> None:
    """Write under another name, then rename: the file is complete or does not exist."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# --- upload --------------------------------------------------------------------------------------


def upload(
    directory: str | os.PathLike[str],
    url: str,
    *,
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: OnTotal | None = None,
    on_progress: OnProgress | None = None,
) -> CopyResult:
    """Copy a checkpoint in a directory (of torch's FileSystemWriter, or a download) to S3.

    Args:
        directory: source, with ``.metadata`` and what it refers to.
        url: URL of the new checkpoint.
        overwrite: replace a checkpoint at ``url``. It stays whole until the new one is committed, unless objects
            of the two have the same names: then it is lost at once.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_total: called once with the number of bytes to move.
        on_progress: called with the number of bytes as they move, from several threads.

    Raises:
        CheckpointExistsError: a checkpoint is at ``url``.
        CheckpointNotFoundError: no checkpoint is in the directory.
        CorruptCheckpointError: a file of the checkpoint is missing or too short. No byte has moved.
        StorageError, OSError
    """
    parsed = parse_url(url)
    store = S3Store(parsed.bucket, resolve_settings(settings))
    origin = Path(directory)
    sizes = {path.relative_to(origin).as_posix(): path.stat().st_size for path in origin.rglob("*") if path.is_file()}
    source = _make_source(str(origin), Directory.of_sizes(sizes), lambda path: (origin / path).read_bytes())
    replaced = _clear_the_way(store, parsed, source, overwrite=overwrite)
    total = sum(source.files.values())
    if on_total is not None:
        on_total(total)
    late = {path for path in _plain_copies(source) if parsed.key(path) in replaced}
    files = {path: FileTransfer(parsed.key(path), origin / path) for path in source.files}
    upload_files(store, [file for path, file in files.items() if path not in late], on_progress=on_progress)
    for name, data in source.commits.items():
        save_id = str(getattr(source.metadata[name].storage_meta, "save_id", ""))
        fields = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
        if source.manifest_of(name):
            fields[SAVE_ID_KEY] = save_id
        try:
            store.put(parsed.key(name), data, expect=None if overwrite else ABSENT, metadata=fields)
        except errors.PreconditionFailedError:
            raise exists_error(parsed) from None
    upload_files(store, [files[path] for path in sorted(late)], on_progress=on_progress)
    kept = {parsed.key(path) for path in (*source.files, *source.commits)}
    store.delete(sorted(replaced - kept))
    return CopyResult(source.count, source.size, source.size)


def _plain_copies(source: _CopySource) -> set[str]:
    """Relative paths of the plain copies of attachments. Until the commit, those of a replaced checkpoint stay."""
    return attachments_of(source.attachments).keys() & source.files.keys()


def _clear_the_way(store: S3Store, url: CheckpointURL, source: _CopySource, *, overwrite: bool) -> frozenset[str]:
    """Refuse to replace a checkpoint, or find the leftovers of replacing it: keys to delete afterwards."""
    if not overwrite:
        for name in source.commits:
            check_absent(store, SaveIdentity(url, "", classify(name).rank))
        return frozenset()
    # This takes few requests, and only for an overwrite.
    old = [found.path for found in list_directory(store, url, METADATA, "__").commits.values()]
    replaced = find_previous(store, SaveIdentity(url, "")).keys
    planned = {url.key(path) for path in source.files.keys() - _plain_copies(source)}
    if old and (replaced & planned or old != [METADATA] or METADATA not in source.commits):
        store.delete([url.key(path) for path in old])
    return replaced
