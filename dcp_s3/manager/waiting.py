"""Checkpoints that wait for S3 on the disks of a job's hosts: which there are, and where their parts lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.format.manifest import Manifest, ObjectEntry
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.spill.local import find_commits, find_kept, find_waiting
from dcp_s3.spill.session import open_store


@dataclass(frozen=True)
class WaitingCheckpoint:
    """A checkpoint that was complete when it was saved, and is not committed on S3 yet.

    Attributes:
        info: as the catalog tells of it; its ``state`` is ``local``.
        objects: every data object, of all ranks.
    """

    info: CheckpointInfo
    objects: tuple[ObjectEntry, ...]

    @property
    def key(self) -> tuple[str, str | None]:
        """URL and id of the save."""
        return self.info.url, self.info.save_id


@dataclass(frozen=True)
class Disk:
    """What one rank finds in its spill directory of the checkpoints under a root.

    Attributes:
        commits: that wait there.
        files: of data objects: (URL, path in the checkpoint), with bytes.
        size: bytes that wait.
    """

    commits: tuple[WaitingCheckpoint, ...] = ()
    files: Mapping[tuple[str, str], int] = field(default_factory=dict)
    size: int = 0

    def holds_all_of(self, checkpoint: WaitingCheckpoint) -> bool:
        """Whether this rank can load it without S3."""
        return any(each.key == checkpoint.key for each in self.commits) and not self.lacks(checkpoint)

    def lacks(self, checkpoint: WaitingCheckpoint) -> list[ObjectEntry]:
        """The data objects that are not here."""
        url = checkpoint.info.url
        return [entry for entry in checkpoint.objects if self.files.get((url, entry.path)) != entry.size]


def look_at_disk(catalog: CheckpointCatalog) -> Disk:
    """What waits in this process's spill directory under the root of a catalog; looks only."""
    store = open_store(catalog.settings)
    if store is None:
        return Disk()
    # Before the files: what is drained meanwhile then lacks some, and is looked for on S3.
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


def merge(disks: Iterable[Disk]) -> list[WaitingCheckpoint]:
    """What waits on any of the disks, once each."""
    found = {each.key: each for disk in disks for each in disk.commits}
    return list(found.values())


def find_missing(checkpoint: WaitingCheckpoint, disks: Sequence[Disk], on_s3: Directory) -> list[str]:
    """The data objects that are neither on S3 nor on a disk of this job, so that it cannot become whole.

    Args:
        checkpoint: that waits.
        disks: of all ranks.
        on_s3: what lies at its URL.
    """
    missing = set(on_s3.lacking({entry.path: entry.size for entry in checkpoint.objects}, exact=True))
    for disk in disks:
        missing &= {entry.path for entry in disk.lacks(checkpoint)}
    return sorted(missing)
