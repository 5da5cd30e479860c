"""The ranks of a run, and how they agree: by small collectives on objects, or through a store, where the first answer
stands."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_s3.coordination.identity import STORE_PREFIX, Attempt, current_attempt, store_error
from dcp_s3.coordination.processes import CountedSave, count_save
from dcp_s3.coordination.values import seal_text, unseal_text
from dcp_s3.errors import CheckpointError, ObjectNotFoundError, PreconditionFailedError, SaveProtocolError, StorageError
from dcp_s3.failures import portable
from dcp_s3.format.layout import board_object
from dcp_s3.process import is_initialized, launch
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, Store
from dcp_s3.torch_private import default_store
from dcp_s3.url import CheckpointURL, parse_url

T = TypeVar("T")
Failures = dict[int, BaseException]  # by rank
Refuse = Callable[[Failures], Exception]  # makes the error of the ranks on which nothing failed
Decide = Callable[[bool], tuple[bool, int]]
"""From whether a rank has seen SIGTERM: whether to save a step, and in how many steps to ask again."""


class Ranks:
    """The ranks of a process group whose collectives run on the CPU (None: a new gloo group of all ranks, which every
    rank must then make at the same time); a single rank if torch.distributed is not initialised. A CheckpointError if
    this process is not in the group."""

    collective = True
    """Whether the ranks meet in collectives. Otherwise each hears only itself, and fails alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        distributed = is_initialized()
        self._own_group = group is None and distributed
        if self._own_group:
            # Saves run beside the training, and their collectives must not mix.
            group = dist.new_group(backend="gloo")
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1
        if self.rank < 0:
            remedy = "make the CheckpointManager on the ranks of the group only, or leave process_group out"
            raise CheckpointError(f"this process is not in process_group. Remedy: {remedy}")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    @property
    def heard(self) -> Sequence[int]:
        """The ranks that this one agrees with, itself included."""
        return range(self.size) if self.collective else (self.rank,)

    def apart(self) -> Ranks:
        """The same ranks with a gloo group of their own, for collectives beside those of a save under way. All ranks
        call it at the same time."""
        if len(self.heard) == 1:
            return self
        members = dist.get_process_group_ranks(self.group)
        ranks = Ranks(dist.new_group(members, backend="gloo", use_local_synchronization=True))
        ranks._own_group = True
        return ranks

    def close(self) -> None:
        """Let go of the group, and end it if it was made here: no more collectives. Not a collective itself.

        A gloo group that outlives its process's interpreter may abort it: its threads drop tensors of the last
        collective a little later, which needs Python.
        """
        group, self.group = self.group, None
        if self._own_group and group is not None and is_initialized():
            with contextlib.suppress(ValueError):  # destroyed with all others
                dist.destroy_process_group(group)

    def gather(self, value: T) -> list[T]:
        """The values of the ranks that are `heard`, in order."""
        if len(self.heard) == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T], refuse: Refuse, *, alike: bool = False) -> list[T]:
        """Run ``work``, without collectives, on each rank. Returns the results in rank order; if it raises on one rank,
        all raise: that rank what it raised, the others what ``refuse`` makes. With ``alike``, for ``work`` that calls
        user code, all raise that. Anything that can fail on one rank alone belongs in ``work``: if one rank left, the
        others would wait for it in their next collective."""
        value, failure = _run(work)
        answers = self.gather((value, None if failure is None else for_others(failure)))
        if failure is not None and not (alike and isinstance(failure, Exception)):
            raise failure
        failures = {rank: error for rank, (_, error) in zip(self.heard, answers, strict=True) if error is not None}
        if failures:
            raise refuse(failures) from failure
        return [cast(T, value) for value, _ in answers]

    def from_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the first of the ranks that are `heard`. Its result is returned, or its error raised, on
        all of them."""
        if len(self.heard) == 1:
            return function()
        value, failure = _run(function) if self.is_first else (None, None)
        found, error = self.broadcast((value, None if failure is None else for_others(failure)))
        if error is not None:
            raise failure or error
        return cast(T, found)

    def broadcast(self, value: T) -> T:
        """The first rank's value, on all of several ranks."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def decide(self, step: int, decide: Decide, seen: bool) -> tuple[bool, int, bool]:
        """What ``decide`` says of a step on the first rank, and whether any rank has ``seen`` SIGTERM: the same on all,
        by one all-reduce of 48 bytes. A SaveProtocolError if the ranks ask about different steps."""
        decided, failure = _run(lambda: decide(seen)) if self.is_first else (None, None)
        answer, gap = decided or (False, 1)
        failed, save, gap, sigterm, last, first = self.maxima([failure is not None, answer, gap, seen, step, -step])
        if failure is not None:
            raise failure
        if failed:
            raise CheckpointError(f"whether to save step {step} is not known: the policy has failed on rank 0")
        check_same("should_save asks about different steps", [-first, last], SaveProtocolError)
        return bool(save), gap, bool(sigterm)

    def maxima(self, numbers: list[int]) -> list[int]:
        reduced = torch.tensor(numbers, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self.group)
        return cast(list[int], reduced.tolist())

    def choose(self, request: object, find: Callable[[], tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
        """What is found for a request, the same on all ranks."""
        return find()

    def count(self, url: str, step: int) -> CountedSave | None:
        """Count a save, if the ranks tell saves apart by that: before anything of it can fail on this rank alone."""
        return None

    def committed(self, step: int) -> None:
        """The save of a step is committed."""


def _run(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What it returns, or raises: whatever that is, the other ranks wait for this one."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001
        return None, error


def for_others(error: BaseException) -> BaseException:
    """The error as it is sent to the other ranks: an interrupt of one does not interrupt them."""
    copied = portable(error) if isinstance(error, Exception) else None
    return copied or CheckpointError(f"{type(error).__name__}: {error}")


def check_same(what: str, values: Sequence[object], error: type[Exception] = CheckpointError) -> None:
    """Refuse what the ranks have not called alike."""
    if any(value != values[0] for value in values):
        different = list(dict.fromkeys(map(str, values)))
        raise error(f"{what} on the ranks: {' and '.join(different)}. Remedy: call it with the same arguments on all")


# --- without collectives -------------------------------------------------------------------------------


class ControlKeys:
    """Values by key (letters, digits, hyphens), each written once, of the ranks of an attempt: in the store of the
    process group, or without one objects below the root of a run. Thread safe."""

    def __init__(self, store: Store, root: CheckpointURL, attempt: Attempt, group: Any = None) -> None:
        self._store, self._root, self._attempt, self._group = store, root, attempt, group

    def offer(self, key: str, value: str) -> str:
        """Set a value, unless there is one. Returns the one that stands. After a StorageError it may be set or not."""
        path = self._path(key)
        if self._group is not None:
            try:
                return cast(bytes, self._group.compare_set(path, "", value)).decode()
            except RuntimeError as error:
                raise store_error(error) from error
        # First a look, for stores that ignore the condition. There, of values set at once the last one stands.
        if (found := self.look(key)) is None:
            with contextlib.suppress(PreconditionFailedError):
                self._store.put(path, seal_text("note", value), expect=ABSENT)
            found = self.look(key)
        return value if found is None else found

    def look(self, key: str) -> str | None:
        """The value, or None. A SaveProtocolError if there is something that is no value."""
        if self._group is not None:
            return self.offer(key, "") or None  # its `get` would wait for the key
        path = self._path(key)
        try:
            data = self._store.get(path).data
        except ObjectNotFoundError:
            return None
        if (found := unseal_text("note", data)) is None:
            # Not the value of this rank instead: others may have read what was there before.
            raise SaveProtocolError(
                f"s3://{self._root.bucket}/{path} is damaged, or something else has written it: by it the ranks agree "
                "on what they save and restore. Remedy: delete it, and restart all ranks together",
                url=str(self._root),
            )
        return found

    def remove(self, *keys: str) -> None:
        """Remove values that nobody needs any more. A failure leaves a few bytes behind."""
        with contextlib.suppress(StorageError, RuntimeError):
            if self._group is None:
                self._store.delete(map(self._path, keys))
            else:
                for key in keys:
                    self._group.delete_key(self._path(key))

    def _path(self, key: str) -> str:
        if self._group is not None:
            return f"{STORE_PREFIX}board/{self._attempt.id}/{key}"
        return self._root.key(board_object(self._attempt.id, key))


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Of the managers of this process, by what they are for, in the order of their first questions."""


class StoreRanks(Ranks):
    """The ranks of a job without collectives. What has to be the same on all, they settle by control keys: they come to
    the same questions in the same order, though at any time, and the first answer stands. Without ``keys`` there is
    nobody else, or nothing can be written."""

    collective = False

    def __init__(
        self, root: CheckpointURL, settings: Settings, rank: int, size: int, keys: ControlKeys | None, about: str,
        numbers: Mapping[str, Iterator[int]] = _numbers,
    ) -> None:  # fmt: skip
        self.group, self._own_group = None, False
        self._root, self._settings, self.rank, self.size, self._keys = root, settings, rank, size, keys
        self._about = hashlib.blake2b(about.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._numbers, self._number = numbers, -1
        self._restores = self._decisions = 0
        self._last_save = "none"
        self._recent: list[str] = []  # keys of answers since the last save began
        self._older: list[str] = []  # and between that and the one before it
        self._passed: dict[int, list[str]] = {}  # those that no rank needs once the save of a step is committed

    def choose(self, request: object, find: Callable[[], tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
        """What the rank that comes first finds."""
        asked, self._restores = repr(request), self._restores + 1
        # The last save, too: a rank that has lost count must not take an old choice.
        theirs, found = self._settle(f"restore-{self._restores}-{self._last_save}", lambda: [asked, find()])
        check_same("restore asks for different steps (step, metric, mode)", [asked, theirs])
        return None if found is None else tuple(found)

    def decide(self, step: int, decide: Decide, seen: bool) -> tuple[bool, int, bool]:
        """See `Ranks.decide`: the rank that comes first decides, from whether any has said that it has seen SIGTERM."""
        if self._keys is not None and seen:
            self._keys.offer(self._key("sigterm"), "1")

        def first() -> list[Any]:
            known = seen or (self._keys is not None and self._keys.look(self._key("sigterm")) is not None)
            return [step, *decide(known), known]

        asked, answer, gap, known = self._settle(f"decision-{self._decisions}", first)
        check_same("should_save asks about different steps", [asked, step], SaveProtocolError)
        self._decisions += 1
        return answer, gap, known

    def _settle(self, name: str, answer: Callable[[], list[Any]]) -> list[Any]:
        if self._keys is None:
            return answer()
        key = self._key(name)
        if key not in self._recent:
            self._recent.append(key)
        stands = self._keys.look(key)
        found: list[Any] = json.loads(self._keys.offer(key, json.dumps(answer())) if stands is None else stands)
        return found

    def _key(self, name: str) -> str:
        if self._number < 0:
            self._number = next(self._numbers[self._about])
        return f"{self._about}-{self._number}-{name}"

    def count(self, url: str, step: int) -> CountedSave:
        counted = count_save(parse_url(url), self._settings, step=step)
        self._last_save, self._passed[step] = str(step), self._older
        self._older, self._recent = self._recent, []
        now = counted.attempt
        if (now.rank, now.world_size) != (self.rank, self.size):
            raise SaveProtocolError(
                f"{url} is not saved: the CheckpointManager was made on rank {self.rank} of {self.size}, which is rank "
                f"{now.rank} of {now.world_size} now: a process group was made or destroyed since. Remedy: make the "
                "CheckpointManager after init_process_group(), and close it before destroy_process_group()"
            )
        return counted

    def committed(self, step: int) -> None:
        """The save of a step is committed. All ranks have come past the answers from before the last save, a rank that
        a save was committed without, too."""
        old = self._passed.pop(step, [])
        if self.is_first and self._keys is not None and old:
            self._keys.remove(*old)  # at once: there may be hundreds, and the save ends after that


def find_store_ranks(root: CheckpointURL, settings: Settings, *, read_only: bool) -> StoreRanks:
    """The ranks of this job. A SaveProtocolError if several are to save, and nothing tells this attempt of the job from
    another one."""
    about = f"{root} {read_only}"
    if read_only and not is_initialized():  # nothing can be written then
        found = launch()
        return StoreRanks(root, settings, found.rank, found.world_size, None, about)
    attempt = current_attempt(root, settings)
    is_alone = attempt.world_size == 1
    keys = None if is_alone else ControlKeys(store_of(root, settings), root, attempt, default_store())
    return StoreRanks(root, settings, attempt.rank, attempt.world_size, keys, about)
