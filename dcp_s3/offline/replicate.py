"""Copies of a checkpoint between S3 and a directory with the layout of torch's FileSystemReader and FileSystemWriter.

The commit comes last, so that an interrupted copy is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.control_files import attachments_of
from dcp_s3.format.layout import CONTROL_PREFIX
from dcp_s3.offline.copy_source import (
    DOWNLOAD_MARKER,
    CopyResult,
    CopySource,
    check_unchanged,
    commit_copy,
    etags_in_place,
    known_crcs,
    list_objects,
    make_source,
    replacing,
)
from dcp_s3.s3.files import FileTransfer, OnProgress, download_files, upload_files
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import StoredObject
from dcp_s3.url import CheckpointURL, parse_url

# s3transfer's suffix of an incomplete file.
_PARTIAL = re.compile(r"\.[0-9a-fA-F]{8}")
_READ_SIZE = 4 * 2**20

OnTotal = Callable[[int], None]


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
    """Copy a checkpoint into a directory, which torch's FileSystemReader then reads; see `copy`.

    An interrupted download continues when it is called again: complete files stay. Sizes are compared with what was
    saved; for checkpoints of dcp_s3 also the CRC-64 of every data object.
    """
    parsed = parse_url(url)
    store = S3Store(parsed.bucket, resolve_settings(settings))
    target = Path(directory)
    listed = list_objects(store, parsed)
    there = Directory.of_sizes({path: each.size for path, each in listed.items()})
    source = make_source(str(parsed), there, lambda path: store.get(parsed.key(path)))
    etags = etags_in_place(source, listed)
    _prepare_directory(target, parsed, source, etags, overwrite=overwrite)
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
    check_unchanged(store, parsed, source, etags)
    for attachment, entry in attachments_of(source.attachments).items():
        plain, data = target / attachment, (target / entry.path).read_bytes()
        if not plain.is_file() or plain.read_bytes() != data:  # S3 may lack the plain copy, or have an older one
            plain.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(plain, data)
    for name, data in source.commits.items():
        _write_whole(target / name, data)
    (target / DOWNLOAD_MARKER).unlink()
    if not any((target / CONTROL_PREFIX).iterdir()):
        (target / CONTROL_PREFIX).rmdir()
    return CopyResult(source.count, source.size, sum(wanted.values()))


def _prepare_directory(
    target: Path, url: CheckpointURL, source: CopySource, etags: Mapping[str, str], *, overwrite: bool
) -> None:
    marker = target / DOWNLOAD_MARKER
    digest = hashlib.sha256(b"".join(source.commits[name] for name in sorted(source.commits))).hexdigest()
    same: dict[str, object] = {"url": str(url), "metadata_sha256": digest}
    if etags:  # the metadata of another save with the same names may be the same
        same["etags_sha256"] = hashlib.sha256(json.dumps(sorted(etags.items())).encode()).hexdigest()
    mark = json.dumps(same).encode()
    if target.exists() and any(target.iterdir()):
        if marker.is_file() and marker.read_bytes() == mark:
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


def _remove_partial(target: Path, source: CopySource) -> None:
    whole = {target / path for path in source.files}
    for folder in {path.parent for path in whole}:
        for file in folder.iterdir() if folder.is_dir() else ():
            if _PARTIAL.fullmatch(file.suffix) and file.with_suffix("") in whole and file not in whole:
                file.unlink()


def _verify(target: Path, url: CheckpointURL, source: CopySource) -> None:
    expected = known_crcs(source, lambda path: (target / path).read_bytes())
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
    """Copy a checkpoint in a directory (of torch's FileSystemWriter, or a download) to S3; see `copy`."""
    parsed = parse_url(url)
    store = S3Store(parsed.bucket, resolve_settings(settings))
    origin = Path(directory)
    sizes = {path.relative_to(origin).as_posix(): path.stat().st_size for path in origin.rglob("*") if path.is_file()}

    def read(path: str) -> StoredObject:
        return StoredObject((origin / path).read_bytes(), {}, "")

    source = make_source(str(origin), Directory.of_sizes(sizes), read)

    def send(paths: Collection[str]) -> None:
        files = [FileTransfer(parsed.key(path), origin / path) for path in paths]
        upload_files(store, files, on_progress=on_progress)

    with replacing(store, parsed, source, source.files, overwrite=overwrite) as late:
        if on_total is not None:
            on_total(sum(source.files.values()))
        send(source.files.keys() - late)
        commit_copy(store, parsed, source, overwrite=overwrite)
        send(late)
    return CopyResult(source.count, source.size, source.size)
