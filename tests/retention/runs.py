"""The checkpoints of a run in memory, whose clock and faults a test sets. No process, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dcp_s3 import CheckpointCatalog, CheckpointInfo, Plan, PruneReport, apply_plan, prune, remove
from dcp_s3.checkpoint.commit import make_commit, publish
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, find_previous
from dcp_s3.checkpoint.deletion import Deletion
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import data_object, new_nonce, new_save_id, step_of
from dcp_s3.retention.marks import annotate_on, pin_on
from dcp_s3.store import Upload
from dcp_s3.url import CheckpointURL, parse_url
from tests.faulty_store import FaultyStore, Rule
from tests.memory_store import MemoryStore
from tests.retention.making import save_locally

ROOT = "s3://bucket/run"
HOUR = 3600.0
DAY = 24 * HOUR


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
        self.rule: Rule = lambda method, key: None
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
                self.rule = lambda method, key: None
                change()

        self.rule = rule

    # --- what is there ------------------------------------------------------------------------------------

    def url(self, name: str) -> CheckpointURL:
        return parse_url(f"{ROOT}/{name}")

    def objects(self, name: str = "") -> dict[str, int]:
        """Path and bytes of all objects of a checkpoint, or of all."""
        start = self.url(name).key("") if name else ""
        return {each.key[len(start) :]: each.size for each in self.memory.list(start).objects}

    def get(self, name: str, path: str) -> bytes:
        return self.memory.get(self.url(name).key(path)).data

    def put(self, name: str, path: str, data: bytes = b"x", metadata: Mapping[str, str] | None = None) -> None:
        self.memory.put(self.url(name).key(path), data, metadata=metadata)

    def delete(self, name: str, path: str) -> None:
        assert self.memory.exists(self.url(name).key(path))
        self.memory.delete([self.url(name).key(path)])

    def delete_data(self, name: str) -> None:
        self.delete(name, next(path for path in self.objects(name) if path.endswith(".distcp")))

    def open_upload(self, key: str) -> Upload:
        return self.memory.begin(key)

    # --- what is done -------------------------------------------------------------------------------------

    def save(self, name: str, *, overwrite: bool = False, metrics: Mapping[str, Any] | None = None) -> str:
        """Save and commit as the writer does."""
        identity, path = SaveIdentity(self.url(name), new_save_id()), data_object(0, 0, new_nonce())
        data = f"state of {name}".encode()
        previous = find_previous(self.memory, identity) if overwrite else Previous()
        self.store.put(identity.url.key(path), data)
        metadata = Metadata(
            state_dict_metadata={"state": BytesStorageMetadata()},
            storage_data={MetadataIndex("state"): _StorageInfo(path, 0, len(data))},
        )
        entry = ObjectEntry(path, len(data), crc_hex(crc64nvme(data)))
        commit = make_commit(identity, metadata, [entry], step=step_of(name), world_size=1, metrics=dict(metrics or {}))
        publish(self.store, commit, previous)
        return name

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.save(f"step-{number}")

    def save_foreign(self, name: str, directory: Path) -> str:
        """What torch's own writer makes, uploaded."""
        for file in save_locally(directory).iterdir():
            self.put(name, file.name, file.read_bytes())
        return name

    def catalog(self, **arguments: Any) -> CheckpointCatalog:
        return CheckpointCatalog(ROOT, store=self.store, **arguments)

    def states(self, **settings: Any) -> dict[str, str]:
        return {info.name: info.state for info in self.catalog(settings=settings).checkpoints()}

    def damages(self) -> list[str | None]:
        return [info.damage for info in self.catalog().scan(deep=True).checkpoints]

    def latest(self) -> CheckpointInfo | None:
        return self.catalog().latest()

    def prune(self, policy: Any = None, **arguments: Any) -> PruneReport:
        return prune(ROOT, policy, store=self.store, **arguments)

    def apply(self, plan: Plan) -> PruneReport:
        return apply_plan(ROOT, plan, store=self.store)

    def remove(self, name: str, **arguments: Any) -> Deletion:
        return remove(f"{ROOT}/{name}", store=self.store, **arguments)

    def annotate(self, name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return annotate_on(self.store, self.url(name), metrics)

    def pin(self, name: str, reason: str | None = None) -> None:
        pin_on(self.store, self.url(name), reason)
