"""What belongs to a checkpoint that is copied, by its metadata, its manifests and a listing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry
from dcp_s3.format.control_files import AttachmentEntry, Manifest, attachments_of
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
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.offline.place import Place
from dcp_s3.store import same_etag

DOWNLOAD_MARKER = CONTROL_PREFIX + "download.json"
"""Marks a directory into which a download has begun, and says of which checkpoint."""


@dataclass(frozen=True)
class CopySource:
    """A checkpoint to be copied."""

    place: Place
    commits: Mapping[str, bytes]
    """Bytes of ``.metadata``, or of every ``__{rank}.metadata``, by relative path."""
    save_ids: Mapping[str, str]
    """Ids of the saves of these commits, as far as their manifests are there."""
    files: Mapping[str, int]
    """Bytes of everything else that belongs to it, by relative path, without the plain copies of attachments."""
    crcs: Mapping[str, str]
    """CRC-64/NVME of data objects, by relative path, as far as manifests record them."""
    attachments: Mapping[str, AttachmentEntry]
    """Attachments by name, which is the relative path of a plain copy. Of several with one name, the first."""
    etags: Mapping[str, str]
    """ETags of what another save may write over while this is copied, by relative path: names without a nonce. Empty
    for what dcp_s3 saved: whoever has copied all that its metadata names has one checkpoint."""

    @property
    def size(self) -> int:
        return sum(self.files.values()) + sum(map(len, self.commits.values()))

    @property
    def count(self) -> int:
        return len(self.files) + len(self.commits)

    def check_unchanged(self) -> None:
        """Fail if another save wrote to the source since it was listed: the parts are not of one checkpoint."""
        now = self.place.objects() if self.etags else {}
        changed = [path for path, etag in self.etags.items() if path not in now or not same_etag(etag, now[path].etag)]
        if changed:
            raise errors.CheckpointError(
                f"{self.place.name} was not copied: {len(changed)} of its objects have changed meanwhile, the first "
                f"{changed[0]}. Remedy: copy again, when nobody saves to this URL",
                url=self.place.name,
            )


def find_source(place: Place) -> CopySource:
    """Find what belongs to the checkpoint at a place.

    Left out are data objects that the metadata does not name (of another save), manifests of other saves, pins, leases,
    lists of deletions, and checkpoints in directories below.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: something of it is not there.
    """
    where, listed = place.name, place.objects()
    directory = Directory.of_sizes({path: each.size for path, each in listed.items()})
    names = [metadata_object(rank) for rank in reversed(directory.committing)]  # the metadata of rank 0 comes last
    if not names:
        raise errors.CheckpointNotFoundError(
            f"there is no committed checkpoint at {where}: it has no {METADATA}. Remedy: check the URL or directory",
            url=where,
        )
    manifests: dict[str, Manifest] = {}
    commits: dict[str, bytes] = {}
    save_ids: dict[str, str] = {}
    needed: dict[str, int] = {}
    for name in names:
        stored, rank = place.store.get(place.key(name)), classify(name).rank
        commits[name] = stored.data
        metadata = load_metadata(
            stored.data, url=where, crc=stored.metadata.get(METADATA_CRC_KEY), of_rank=rank is not None
        )
        for path, size in needed_objects(metadata).items():
            needed[path] = max(size, needed.get(path, 0))
        save_id = stored.metadata.get(SAVE_ID_KEY) or str(getattr(metadata.storage_meta, "save_id", None))
        path = manifest_object(save_id, rank)
        if path not in directory.objects:
            continue
        save_ids[name] = save_id
        try:
            manifests[path] = Manifest.from_json(place.store.get(place.key(path)).data)
        except ValueError as error:
            raise errors.CorruptCheckpointError(
                f"{where} cannot be copied: its manifest {path} cannot be read ({error}). Remedy: restore or delete "
                "it; without it, what is attached to the checkpoint is not copied",
                url=where,
            ) from error
    found = list(reversed(manifests.values()))  # that of rank 0 first
    for manifest in found:
        if manifest.rank is not None and manifest.world_size > len(names):
            raise errors.CheckpointNotFoundError(
                f"the checkpoint at {where} is incomplete: {len(names)} of {manifest.world_size} ranks have committed. "
                "Remedy: wait until the save is done, or copy another checkpoint",
                url=where,
            )
    entries = [entry for manifest in found for entry in manifest.objects]
    needed |= {entry.path: entry.size for entry in entries if isinstance(entry, AttachmentEntry)}
    needed |= {path: entry.size for manifest in found for path, entry in manifest.files.items()}
    damage = directory.describe_damage(needed)
    if damage is not None:
        raise errors.CorruptCheckpointError(
            f"{where} cannot be copied: {damage}. Remedy: it is damaged, or being deleted; copy another checkpoint",
            url=where,
        )
    belong = needed.keys() | manifests.keys()
    attachments = attachments_of(entries)
    files = {
        found.path: found.size
        for found in directory
        if found.path not in attachments and (found.path in belong or _is_besides(found))
    }
    crcs = {entry.path: entry.crc64nvme for entry in entries if entry.crc64nvme}
    ours = (What.METRICS, What.CONTROL, What.MANIFEST)
    fixed = [path for path in files if not (kind := classify(path)).nonce and kind.what not in ours]
    etags = {path: listed[path].etag for path in (*fixed, *commits)} if fixed else {}
    return CopySource(place, commits, save_ids, files, crcs, attachments, etags)


def _is_besides(found: DirectoryEntry) -> bool:
    """Whether an object is copied although no metadata names it: metrics, and files that users put there."""
    if found.kind.what not in (What.METRICS, What.CONTROL, What.OTHER) or found.path == DOWNLOAD_MARKER:
        return False
    # Keys may be anything: "./.metadata" must not become the file .metadata, "a/" has no file.
    return not any(segment in ("", ".", "..") for segment in found.path.split("/"))
