"""What must hold of the store while ranks save without collectives, as a reader sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.coordination.claim import parse_claim
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import CLAIM, DATA_SUFFIX, METADATA, PART_PREFIX, SAVE_ID_KEY, manifest_object
from dcp_s3.format.metadata import load_metadata
from dcp_s3.url import CheckpointURL, parse_url
from tests.coordination.adversary import Adversary

if TYPE_CHECKING:
    from tests.coordination.model import World

ONE, TWO = parse_url("s3://memory/run/step-1"), parse_url("s3://memory/run/step-2")


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclass
class _Commit:
    save_id: str
    order: tuple[int, int]
    needed: dict[str, str]
    """Key and content (see `_contents`) of all that it consists of."""


class Invariants:
    """What must hold after each change of the store."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._overwrites = {url: any(each.overwrite for each in world.turns if each.url == url) for url in (ONE, TWO)}
        self._now: dict[CheckpointURL, _Commit] = {}
        self._before: dict[str, str] = {}
        self._claims: dict[CheckpointURL, tuple[int, int]] = {}
        self.committed: dict[CheckpointURL, list[str]] = {ONE: [], TWO: []}
        """Save ids of all commits, in order."""

    def check(self, adversary: Adversary) -> None:
        """Raises Violation."""
        found = {each.key: each.etag.strip('"').partition("-")[0] for each in adversary.stored.list("").objects}
        for url in (ONE, TWO):
            self._check_commit(adversary, url, found)
            self._check_claim(adversary, url, found)
        self._check_removed(self._before.keys() - found.keys())
        self._before = found

    def check_clean(self, adversary: Adversary) -> None:
        """Nothing is left but what the checkpoints and the claims consist of."""
        found = {each.key for each in adversary.stored.list("").objects}
        needed = {key for each in self._now.values() for key in each.needed}
        if left := found - needed - {url.key(CLAIM) for url in (ONE, TWO)}:
            raise Violation(f"left over: {sorted(left)}")

    def check_reports(self) -> None:
        """What ranks said was so."""
        for actor, claim, turn, outcome, stood in self._world.reports:
            if isinstance(outcome, str):
                if not outcome.startswith(claim.save):
                    raise Violation(f"{actor.name} takes {outcome} for its own")
                if outcome not in self.committed[turn.url]:
                    raise Violation(f"{actor.name} says that {outcome} was committed")
            elif stood is not None and not isinstance(outcome, errors.StorageError):  # which means: nobody knows
                raise Violation(f"{actor.name} says {outcome!r}, but {stood} was committed")

    def _check_commit(self, adversary: Adversary, url: CheckpointURL, found: Mapping[str, str]) -> None:
        key, before = url.key(METADATA), self._now.get(url)
        if key not in found:
            if before is not None:
                raise Violation(f"{url} had a checkpoint")
            return
        if before is None or before.needed[key] != found[key]:
            commit = self._now[url] = self._read(adversary, url, found)
            self.committed[url].append(commit.save_id)
            if before is not None and before.save_id != commit.save_id:
                self._check_replaced(before, commit, url, adversary)
        for each, content in self._now[url].needed.items():
            if found.get(each) != content:
                raise Violation(f"{each} of {self._now[url].save_id} {'is another' if each in found else 'is gone'}")

    def _check_replaced(self, old: _Commit, new: _Commit, url: CheckpointURL, adversary: Adversary) -> None:
        if old.order == new.order and not adversary.honours_conditions:
            return  # another merger of the same save
        if not self._overwrites[url]:
            raise Violation(f"{old.save_id} was replaced by {new.save_id}, without overwrite")
        if self._world.newest_stays and old.order >= new.order:
            raise Violation(f"{old.save_id} {old.order} was replaced by {new.save_id} {new.order}")

    def _read(self, adversary: Adversary, url: CheckpointURL, found: Mapping[str, str]) -> _Commit:
        stored = adversary.stored.get(url.key(METADATA))
        save_id = stored.metadata[SAVE_ID_KEY]
        metadata = load_metadata(stored.data, url=str(url))
        order = self._world.claims.get(save_id[:16])
        if order is None:
            raise Violation(f"nobody's save {save_id}")
        manifest_key = url.key(manifest_object(save_id))
        if manifest_key not in found:
            raise Violation(f"{save_id} has no manifest")
        manifest = Manifest.from_json(adversary.stored.get(manifest_key).data)
        paths = {info.relative_path for info in metadata.storage_data.values()}
        if manifest.save_id != save_id or getattr(metadata.storage_meta, "save_id", None) != save_id:
            raise Violation(f"the manifest of {save_id} is of {manifest.save_id}")
        if manifest.items != len(metadata.storage_data) or not paths <= {each.path for each in manifest.objects}:
            raise Violation(f"the manifest of {save_id} does not fit")
        if manifest.metrics != {"turn": order[1]}:
            raise Violation(f"the metrics of {save_id} are {manifest.metrics}")
        self._check_bytes(adversary, url, metadata, order)
        keys = [url.key(METADATA), manifest_key, *(url.key(each.path) for each in manifest.objects)]
        if missing := [each for each in keys if each not in found]:
            raise Violation(f"{save_id} lacks {missing}")
        return _Commit(save_id, order, {each: found[each] for each in keys})

    def _check_bytes(self, adversary: Adversary, url: CheckpointURL, metadata: Any, order: tuple[int, int]) -> None:
        """Every item is there once, with the bytes of this save."""
        expected = {(each.fqn, each.planned.index.offset): each.bytes_in(*order) for each in self._world.items}
        stored = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        if stored.keys() != expected.keys() or len(stored) != len(metadata.storage_data):
            raise Violation(f"{url} has items {sorted(map(str, stored))}, expected {sorted(map(str, expected))}")
        for each in self._world.items:
            entry = metadata.state_dict_metadata[each.fqn]
            if each.chunk is not None and len(entry.chunks) != each.chunks:
                raise Violation(f"{each.fqn} has {len(entry.chunks)} chunks")
        for name, info in stored.items():
            try:
                data = adversary.stored.get(url.key(info.relative_path)).data
            except errors.ObjectNotFoundError:
                raise Violation(f"{url} lacks {info.relative_path}") from None
            if data[info.offset : info.offset + info.length] != expected[name]:
                raise Violation(f"{name} of {order} has other bytes")

    def _check_claim(self, adversary: Adversary, url: CheckpointURL, found: Mapping[str, str]) -> None:
        """Claims only go on to newer saves."""
        key, before = url.key(CLAIM), self._claims.get(url)
        if key not in found:
            if before is not None:
                raise Violation(f"the claim of {before} is gone")
            return
        if found[key] == self._before.get(key):
            return
        claim = parse_claim(adversary.stored.get(key).data)
        if claim is None:
            raise Violation(f"{key} cannot be read")
        order = self._claims[url] = self._world.claims[claim.save]
        if before is not None and self._world.newest_stays and before > order:
            raise Violation(f"the claim of {before} was replaced by that of {order}")

    def _check_removed(self, removed: Collection[str]) -> None:
        """Nothing that a save without commit needs is removed."""
        done = {save_id[:16] for each in self.committed.values() for save_id in each}
        for key in removed:
            _, prefix, name = key.partition(PART_PREFIX)
            if prefix and name.partition(".")[0] not in done:
                raise Violation(f"{key} was removed, and its save is not committed")
            if key.endswith(DATA_SUFFIX) and not done:
                raise Violation(f"{key} was removed before any commit")
