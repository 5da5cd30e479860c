"""The checkpoints of a run in memory, whose clock and faults a test sets. No process, no socket."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from dcp_s3 import CheckpointCatalog, CheckpointInfo, Plan, PruneReport, annotate, apply_plan, pin, prune, remove
from dcp_s3.checkpoint.commit import Beginning, Commit, Committer, make_commit
from dcp_s3.checkpoint.commit_state import SaveIdentity
from dcp_s3.checkpoint.info import Deletion
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import CLAIM, data_object, joint_object, spread, step_of
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.url import CheckpointURL, parse_url
from tests.memory_store import FaultyStore, MemoryStore, Rule
from tests.retention.making import is_manifest, save_locally

ROOT = "s3://bucket/run"
HOUR = 3600.0
DAY = 24 * HOUR


def nothing(method: str, key: str) -> None:
    """The rule of a store that works."""


class Clock:
    """A store's: far from that of this host."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Checkpoints under `ROOT`."""

    def __init__(self, *, page_size: int = 1000) -> None:
        self.clock = Clock()
        self.memory = MemoryStore("bucket", page_size=page_size, clock=self.clock)
        self.rule: Rule = nothing
        """Asked before and after each call of the store (`FaultyStore`)."""
        self.calls: Counter[str] = Counter()
        self.store = FaultyStore(self.memory, self._ask)

    def _ask(self, method: str, key: str) -> Exception | None:
        if not method.startswith("after "):
            self.calls[method] += 1
        return self.rule(method, key)

    def once(self, method: str, part: str, change: Any) -> None:
        """Let something happen before the next call of a method with a key that holds ``part``."""

        def rule(found: str, key: str) -> None:
            if found == method and part in key:
                self.rule = nothing
                change()

        self.rule = rule

    # --- what is there ------------------------------------------------------------------------------------

    def url(self, name: str) -> CheckpointURL:
        return parse_url(f"{ROOT}/{name}" if name else ROOT)

    def objects(self, name: str = "") -> dict[str, int]:
        """Path and bytes of all objects of a checkpoint, or of all."""
        start = self.url(name).key("") if name else ""
        return {each.key[len(start) :]: each.size for each in self.memory.list(start).objects}

    def manifests(self, name: str) -> list[str]:
        return [path for path in self.objects(name) if is_manifest(path)]

    def get(self, name: str, path: str) -> bytes:
        return self.memory.get(self.url(name).key(path)).data

    def put(self, name: str, path: str, data: bytes = b"x", metadata: Mapping[str, str] | None = None) -> None:
        self.memory.put(self.url(name).key(path), data, metadata=metadata)

    def forget_metadata(self, name: str) -> None:
        """As a copy does that loses user metadata."""
        self.put(name, ".metadata", self.get(name, ".metadata"))

    def delete(self, name: str, path: str) -> None:
        assert self.memory.exists(self.url(name).key(path))
        self.memory.delete([self.url(name).key(path)])

    def delete_data(self, name: str) -> None:
        self.delete(name, next(path for path in self.objects(name) if path.endswith(".distcp")))

    # --- saves --------------------------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        objects: int = 1,
        digits: int = 0,
        rank: int | None = None,
        ranks: int = 1,
        late: bool = False,
    ) -> tuple[Committer, Commit]:
        """A save as the writer does it, up to its commit: with ``digits`` spread over directories, of a ``rank`` that
        commits for itself, so ``late`` that a prune may have taken its objects."""
        identity = SaveIdentity(self.url(name), secrets.token_hex(8), rank)
        committer = Committer(identity, Beginning(at=0.0) if late else Beginning(), overwrite=overwrite)
        committer.check_url(self.memory)
        entries, storage_data = [], {}
        for number in range(objects):
            path = data_object(rank or 0, number, secrets.token_hex(8))
            path, data = spread(path, digits) if digits else path, f"state {number} of {name}".encode()
            self.store.put(identity.url.key(path), data)
            entries.append(ObjectEntry(path, len(data), crc_hex(crc64nvme(data))))
            storage_data[MetadataIndex(f"state{number}")] = _StorageInfo(path, 0, len(data))
        metadata = Metadata(
            {index.fqn: BytesStorageMetadata() for index in storage_data},
            storage_data=storage_data,
            storage_meta=StorageMeta(checkpoint_id=str(identity.url), save_id=identity.save_id),
        )
        commit = make_commit(
            identity, metadata, entries, step=step_of(name), world_size=ranks, metrics=dict(metrics or {})
        )
        return committer, commit

    def save(self, name: str, **options: Any) -> str:
        """Save and commit as the writer does (`begin`)."""
        committer, commit = self.begin(name, **options)
        assert committer.commit(self.store, commit, spilled=False)
        return name

    def save_on_ranks(self, name: str, ranks: int, **options: Any) -> str:
        """Every rank commits for itself."""
        for rank in range(ranks):
            self.save(name, rank=rank, ranks=ranks, **options)
        return name

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.save(f"step-{number}")

    def save_foreign(self, name: str, directory: Path) -> str:
        """What torch's own writer makes, uploaded."""
        for file in save_locally(directory).iterdir():
            self.put(name, file.name, file.read_bytes())
        return name

    # --- what is done -------------------------------------------------------------------------------------

    def catalog(self, root: str = ROOT, **arguments: Any) -> CheckpointCatalog:
        return CheckpointCatalog(root, store=self.store, **arguments)

    def names(self, root: str = ROOT) -> list[str]:
        return [info.name for info in self.catalog(root).checkpoints()]

    def states(self, **settings: Any) -> dict[str, str]:
        return {info.name: info.state for info in self.catalog(settings=settings).checkpoints()}

    def only(self) -> CheckpointInfo:
        """The one checkpoint."""
        [info] = self.catalog().checkpoints()
        return info

    def damages(self) -> list[str | None]:
        return [info.damage for info in self.catalog().scan().checkpoints]

    def latest(self) -> str | None:
        """Its name."""
        found = self.catalog().latest()
        return None if found is None else found.name

    def prune(self, policy: Any = None, **arguments: Any) -> PruneReport:
        return prune(ROOT, policy, store=self.store, **arguments)

    def apply(self, plan: Plan) -> PruneReport:
        return apply_plan(ROOT, plan, store=self.store)

    def remove(self, name: str, **arguments: Any) -> Deletion:
        return remove(f"{ROOT}/{name}", store=self.store, **arguments)

    def annotate(self, name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return annotate(f"{ROOT}/{name}", metrics, store=self.store)

    def pin(self, name: str, reason: str | None = None) -> None:
        pin(f"{ROOT}/{name}", reason, store=self.store)


def keep_steps(*steps: int) -> PolicyFunction:
    """The policy that keeps these steps, and no others."""
    return lambda infos, now: {info.name: ["asked for"] for info in infos if info.step in steps}


def deleted(report: PruneReport) -> list[str]:
    """Names of the checkpoints that a prune deleted."""
    return [each.name for each in report.deleted]


COORDINATION = (CLAIM, *(joint_object("ab", kind, name) for kind, name in (("part", 1), ("intent", 2), ("roll", "ef"))))
"""What a save without collectives writes beside its data."""
BOARD = ".dcp_s3/board-ab-queue"


class Mixed:
    """Something of everything that a prune deletes, put back as often as a test wants.

    Committed: step-1 of ours with metrics, step-2 of another writer, step-9 to stay. Left over: step-5, objects in
    step-9, an upload, a board.
    """

    def __init__(self, directory: Path) -> None:
        self.run = run = Run()
        run.save("step-1")
        run.annotate("step-1", {"loss": 1})
        run.save_foreign("step-2", directory)
        run.save("step-9")
        self.commits: dict[str, set[str]] = {}
        """Of each committed checkpoint, by the key of its ``.metadata``, the keys of what it needs."""
        for key in run.objects():
            if not key.endswith((".metadata", "metrics.json")):
                self.commits.setdefault(f"run/{key.split('/')[1]}/.metadata", set()).add(key)
        self.keep = {key for key in run.objects() if key.startswith("run/step-9/")}
        run.save("step-5")
        run.delete("step-5", ".metadata")
        run.put("step-9", "__0_0-abcdef.distcp")
        run.clock.now += 60  # a claim that is no newer than the commit is of the save that committed
        for name in ("step-5", "step-9"):
            for path in COORDINATION:
                run.put(name, path)
        run.put("", BOARD)
        run.memory.begin("run/step-9/__0_1-abcdef.distcp")
        run.clock.now += 2 * DAY
        self.start = run.memory.snapshot()

    def put_back(self) -> None:
        self.run.rule = nothing
        self.run.memory.put_back(self.start)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.run.objects())

    def check_committed(self, there: Iterable[str] | None = None) -> None:
        """No checkpoint that reads as committed has lost an object."""
        found = set(self.keys if there is None else there)
        for metadata, needed in self.commits.items():
            assert metadata not in found or needed <= found, f"{metadata} lost {needed - found}"

    def prune_to_the_end(self) -> None:
        """The next prune does all that is left; the list of one that was cut off may go with the one after."""
        for _ in range(2):
            assert self.run.prune("latest:1").ok
            left = {key for key in self.keys - self.keep if "/deletion-" not in key}
            assert not left
        assert self.keys == self.keep
        assert self.run.memory.uploads("") == []
