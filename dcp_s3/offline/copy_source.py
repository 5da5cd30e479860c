"""What belongs to a checkpoint that is copied, and the commit of the copy."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import SaveIdentity, check_absent, exists_error, find_previous
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry, list_directory
from dcp_s3.checkpoint.stored_metadata import find_crc_mismatch
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.control_files import AttachmentEntry, Manifest, attachments_of
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    METADATA,
    METADATA_CRC_KEY,
    SAVE_ID_KEY,
    What,
    classify,
    is_inside,
    manifest_object,
    metadata_object,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.store import ABSENT, ListedObject, Store, StoredObject, same_etag
from dcp_s3.units import format_size, one_line, plural
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

DOWNLOAD_MARKER = CONTROL_PREFIX + "download.json"
"""Marks a directory into which a download has begun, and says of which checkpoint."""


@dataclass(frozen=True, repr=False)
class CopyResult:
    """The result of a copy.

    >>> copy("s3://bucket/run/step-00001000", "s3://bucket/kept/step-00001000").moved > 0
    True
    """

    files: int
    """Number of files that make up the checkpoint, its metadata included."""
    size: int
    """Bytes of these files."""
    moved: int
    """Bytes that this call moved; less than ``size`` if it continued an earlier one."""

    def __repr__(self) -> str:
        found = f"{plural(self.files, 'file')}, {format_size(self.size)}, {format_size(self.moved)} moved"
        return one_line("CopyResult", found)


@dataclass(frozen=True)
class CopySource:
    """A checkpoint to be copied, on S3 or in a directory."""

    commits: Mapping[str, bytes]
    """Bytes of ``.metadata``, or of every ``__{rank}.metadata``, by relative path."""
    save_ids: Mapping[str, str]
    """Ids of the saves that made these commits, by relative path."""
    files: Mapping[str, int]
    """Bytes of everything else that belongs to it, by relative path."""
    crcs: Mapping[str, str]
    """CRC-64/NVME of data objects, by relative path, as far as manifests record them."""
    attachments: Sequence[AttachmentEntry]
    """Attachments of all ranks. Of several with one name, the first counts."""

    @property
    def size(self) -> int:
        return sum(self.files.values()) + sum(len(data) for data in self.commits.values())

    @property
    def count(self) -> int:
        return len(self.files) + len(self.commits)

    def manifest_of(self, commit: str) -> str | None:
        """Relative path of a commit's manifest, None if it is missing."""
        path = _manifest_path(commit, self.save_ids[commit])
        return path if path in self.files else None


def _manifest_path(commit: str, save_id: str) -> str:
    return manifest_object(save_id, classify(commit).rank)


def make_source(where: str, directory: Directory, read: Callable[[str], StoredObject]) -> CopySource:
    """Find the files that belong to the checkpoint in a directory.

    Left out are data objects that the metadata does not name (of another save), manifests of other saves, pins, leases,
    lists of deletions, and checkpoints in directories below.
    """
    # The metadata of rank 0 comes last.
    names = [metadata_object(rank) for rank in reversed(directory.committing)]
    if not names:
        raise errors.CheckpointNotFoundError(
            f"there is no committed checkpoint at {where}: it has no {METADATA}. Remedy: check the URL or directory",
            url=where,
        )
    commits: dict[str, bytes] = {}
    save_ids: dict[str, str] = {}
    manifests: dict[str, Manifest | None] = {}
    needed: dict[str, int] = {}

    def manifest_of(name: str, save_id: str) -> Manifest | None:
        path = _manifest_path(name, save_id)
        if path not in manifests and path in directory.objects:
            try:
                manifests[path] = Manifest.from_json(read(path).data)
            except ValueError as error:
                logger.warning("attachments of %s are not copied: its manifest cannot be read: %s", where, error)
                manifests[path] = None
        return manifests.get(path)

    for name in names:
        stored = read(name)
        commits[name], save_id = stored.data, stored.metadata.get(SAVE_ID_KEY)
        # Bytes with a checksum, and the manifest of their save, tell without torch what there is.
        known = save_id and METADATA_CRC_KEY in stored.metadata and find_crc_mismatch(stored) is None
        manifest = manifest_of(name, save_id) if save_id and known else None
        if save_id and manifest is not None and all(is_inside(entry.path) for entry in manifest.objects):
            sizes, save_ids[name] = {entry.path: entry.size for entry in manifest.objects}, save_id
        else:
            from dcp_s3.format.metadata import load_metadata

            crc = stored.metadata.get(METADATA_CRC_KEY)
            metadata = load_metadata(stored.data, url=where, crc=crc, of_rank=name != METADATA)
            sizes, save_ids[name] = needed_objects(metadata), str(getattr(metadata.storage_meta, "save_id", None))
            manifest_of(name, save_ids[name])
        for path, size in sizes.items():
            needed[path] = max(size, needed.get(path, 0))
    attachments: list[AttachmentEntry] = []
    for _, manifest in sorted(manifests.items(), key=lambda each: classify(each[0]).rank or 0):
        if manifest is not None:
            attachments += _attachments(where, manifest, present=len(names))
    needed |= {entry.path: entry.size for entry in attachments}
    damage = directory.describe_damage(needed)
    if damage is not None:
        raise errors.CorruptCheckpointError(
            f"{where} cannot be copied: {damage}. Remedy: it is damaged, or being deleted; copy another checkpoint",
            url=where,
        )
    belong = needed.keys() | manifests.keys()
    files = {found.path: found.size for found in directory if found.path in belong or _is_besides(found)}
    crcs = {
        entry.path: entry.crc64nvme for each in manifests.values() if each for entry in each.objects if entry.crc64nvme
    }
    return CopySource(commits, save_ids, files, crcs, attachments)


def _attachments(where: str, parsed: Manifest, *, present: int) -> list[AttachmentEntry]:
    if parsed.rank is not None and parsed.world_size > present:
        raise errors.CheckpointNotFoundError(
            f"the checkpoint at {where} is incomplete: {present} of {parsed.world_size} ranks have committed. Remedy: "
            "wait until the save is done, or copy another checkpoint",
            url=where,
        )
    return [entry for entry in parsed.objects if isinstance(entry, AttachmentEntry)]


def _is_besides(found: DirectoryEntry) -> bool:
    """Whether an object is copied although no metadata names it: metrics, and files that users put there."""
    if found.kind.what not in (What.METRICS, What.CONTROL, What.OTHER) or found.path == DOWNLOAD_MARKER:
        return False
    # Keys may be anything: "./.metadata" must not become the file .metadata, "a/" has no file.
    return not any(segment in ("", ".", "..") for segment in found.path.split("/"))


def list_objects(store: Store, url: CheckpointURL) -> dict[str, ListedObject]:
    """Everything at a URL, by relative path, with ETags."""
    skip = len(url.key(""))
    return {each.key[skip:]: each for each in store.list(url.key("")).objects}


def directory_of(listed: Mapping[str, ListedObject]) -> Directory:
    return Directory.of_sizes({path: each.size for path, each in listed.items()})


def fetch_source(store: Store, url: CheckpointURL) -> tuple[dict[str, ListedObject], CopySource]:
    """What lies at a URL, and the checkpoint in it."""
    listed = list_objects(store, url)
    return listed, make_source(str(url), directory_of(listed), lambda path: store.get(url.key(path)))


def etags_in_place(source: CopySource, listed: Mapping[str, ListedObject]) -> dict[str, str]:
    """ETags, by relative path, of what another save may write over while this is copied: names without a nonce.

    Empty for what dcp_s3 saved: whoever has copied all that its metadata names has one checkpoint.
    """
    plain = plain_copies(source)
    ours = (What.METRICS, What.CONTROL, What.MANIFEST)
    fixed = [
        path for path in source.files if not ((kind := classify(path)).nonce or kind.what in ours or path in plain)
    ]
    if not fixed:
        return {}
    return {path: listed[path].etag if path in listed else "" for path in (*fixed, *source.commits)}


def check_unchanged(store: Store, url: CheckpointURL, source: CopySource, before: Mapping[str, str]) -> None:
    """Fail if the source changed since ``before`` (its `etags_in_place`): the parts are not of one checkpoint."""
    if not before:
        return
    now = etags_in_place(source, list_objects(store, url))
    changed = [path for path, etag in before.items() if not same_etag(etag, now[path])]
    if changed:
        raise errors.CheckpointError(
            f"{url} was not copied: {len(changed)} of its objects have changed meanwhile, the first {changed[0]}. "
            "Remedy: copy again, when nobody saves to this URL",
            url=str(url),
        )


def plain_copies(source: CopySource) -> set[str]:
    """Relative paths of the plain copies of attachments. Until the commit, those of a replaced checkpoint stay."""
    return attachments_of(source.attachments).keys() & source.files.keys()


@contextlib.contextmanager
def replacing(
    store: Store, url: CheckpointURL, source: CopySource, paths: Collection[str], *, overwrite: bool
) -> Iterator[set[str]]:
    """Refuse to replace a checkpoint, or delete what only the replaced one needed when the copy is complete.

    Yields the plain copies of attachments among ``paths`` (what is to be written) that the old checkpoint has, too:
    they wait for the commit. If it needs another of these objects, its commit is removed at once.
    """
    if not overwrite:
        for name in source.commits:
            check_absent(store, SaveIdentity(url, "", classify(name).rank))
        yield set()
        return
    # This takes few requests, and only for an overwrite.
    old = [found.path for found in list_directory(store, url, METADATA, "__").commits.values()]
    replaced = find_previous(store, SaveIdentity(url, "")).keys
    plain = plain_copies(source)
    planned = {url.key(path) for path in set(paths) - plain}
    if old and (replaced & planned or old != [METADATA] or METADATA not in source.commits):
        store.delete([url.key(path) for path in old])
    yield {path for path in plain & set(paths) if url.key(path) in replaced}
    store.delete(sorted(replaced - {url.key(path) for path in (*source.files, *source.commits)}))


def commit_copy(store: Store, url: CheckpointURL, source: CopySource, *, overwrite: bool) -> None:
    """Write the metadata of a copy whose objects are all there: it is a checkpoint then."""
    for name, data in source.commits.items():
        fields = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))}
        if source.manifest_of(name):
            fields[SAVE_ID_KEY] = source.save_ids[name]
        try:
            store.put(url.key(name), data, expect=None if overwrite else ABSENT, metadata=fields)
        except errors.PreconditionFailedError:
            raise exists_error(url) from None
