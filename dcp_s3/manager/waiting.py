"""Checkpoints that wait for S3 on the disks of a job's hosts, and where their objects are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.spill.local import find_commits, find_kept, find_waiting
from dcp_s3.spill.session import open_store


@dataclass(frozen=True)
class WaitingCheckpoint:
    """A checkpoint that was saved completely, but is not committed on S3 yet."""

    info: CheckpointInfo
    """The catalog's entry; its ``state`` is ``local``."""
    objects: tuple[ObjectEntry, ...]
    """Every data object of all ranks."""

    @property
    def key(self) -> tuple[str, str | None]:
        """URL and save id."""
        return self.info.url, self.info.save_id


@dataclass(frozen=True)
class Disk:
    """What one rank finds in its spill directory for the checkpoints under a root."""

    commits: tuple[WaitingCheckpoint, ...] = ()
    """Checkpoints whose commit waits there."""
    files: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Size in bytes of each data object there, by (URL, path in the checkpoint)."""
    size: int = 0
    """Bytes that wait for S3."""

    def holds_all_of(self, checkpoint: WaitingCheckpoint) -> bool:
        """Whether this rank can load the checkpoint without S3."""
        return any(each.key == checkpoint.key for each in self.commits) and not self.lacks(checkpoint)

    def lacks(self, checkpoint: WaitingCheckpoint) -> list[ObjectEntry]:
        """The checkpoint's data objects that are not on this disk."""
        url = checkpoint.info.url
        return [entry for entry in checkpoint.objects if self.files.get((url, entry.path)) != entry.size]


def look_at_disk(catalog: CheckpointCatalog) -> Disk:
    """What waits in this process's spill directory under the catalog's root. Nothing is changed."""
    store = open_store(catalog.settings)
    if store is None:
        return Disk()
    # Read before the files: a checkpoint that is drained meanwhile then lacks files, and is looked for on S3.
    manifests = {
        journal.url: Manifest.from_json(data)
        for journal, data, _ in find_commits(store)
        if journal.commit is not None and journal.commit.rank is None
    }
    infos = {info.url: info for info in catalog.local()}
    commits = tuple(
        WaitingCheckpoint(infos[url], tuple(manifest.objects))
        for url, manifest in manifests.items()
        if url in infos and infos[url].save_id == manifest.save_id
    )
    root = f"{catalog.root}/"
    waiting = {(facts.url, facts.path): facts.size for _, facts in find_waiting(store) if facts.url.startswith(root)}
    wanted = {checkpoint.info.url for checkpoint in commits}
    kept = {
        (facts.url, facts.path): facts.size for path, facts in find_kept(store) if facts.url in wanted and path.exists()
    }
    return Disk(commits, {**kept, **waiting}, sum(waiting.values()))


def waiting_checkpoints(disks: Iterable[Disk]) -> list[WaitingCheckpoint]:
    """The checkpoints that wait on any of the disks, each once."""
    found = {each.key: each for disk in disks for each in disk.commits}
    return list(found.values())


def find_missing(checkpoint: WaitingCheckpoint, disks: Sequence[Disk], on_s3: Directory) -> list[str]:
    """The data objects that are neither on S3 nor on a disk of this job. Without them the checkpoint cannot become
    complete.

    Args:
        checkpoint: the waiting checkpoint.
        disks: disks of all ranks.
        on_s3: what is on S3 at the checkpoint's URL.
    """
    missing = set(on_s3.lacking({entry.path: entry.size for entry in checkpoint.objects}, exact=True))
    for disk in disks:
        missing &= {entry.path for entry in disk.lacks(checkpoint)}
    return sorted(missing)
