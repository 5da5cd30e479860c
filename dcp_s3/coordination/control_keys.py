"""A small key-value store on S3 for messages between the ranks of one attempt, without collectives."""

from __future__ import annotations

import contextlib
from typing import Any

from dcp_s3 import errors
from dcp_s3.coordination.identity import STORE_PREFIX, Attempt, store_error
from dcp_s3.coordination.values import seal_text, unseal_text
from dcp_s3.format.layout import board_object
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, Store
from dcp_s3.torch_private import default_store
from dcp_s3.url import CheckpointURL


class ControlKeys:
    """Values by key (letters, digits, hyphens), each written once: objects below the root of a run. Thread safe."""

    def __init__(self, store: Store, root: CheckpointURL, attempt: Attempt) -> None:
        self._store, self._root, self._attempt = store, root, attempt

    def offer(self, key: str, value: str) -> str:
        """Set a value, unless there is one. Returns the one that stands. After a StorageError it may be set or not."""
        # First a look, for stores that ignore the condition. There, of values set at once the last one stands.
        if (found := self.look(key)) is None:
            with contextlib.suppress(errors.PreconditionFailedError):
                self._store.put(self._key(key), seal_text("note", value), expect=ABSENT)
            found = self.look(key)
        return value if found is None else found

    def look(self, key: str) -> str | None:
        """The value, or None. A SaveProtocolError if there is something that is no value."""
        path = self._key(key)
        try:
            data = self._store.get(path).data
        except errors.ObjectNotFoundError:
            return None
        if (found := unseal_text("note", data)) is None:
            # Not the value of this rank instead: others may have read what was there before.
            raise errors.SaveProtocolError(
                f"s3://{self._root.bucket}/{path} is damaged, or something else has written it: by it the ranks agree "
                "on what they save and restore. Remedy: delete it, and restart all ranks together",
                url=str(self._root),
            )
        return found

    def remove(self, *keys: str) -> None:
        """Remove values that nobody needs any more. A failure leaves a few bytes behind."""
        with contextlib.suppress(errors.StorageError):
            self._store.delete(map(self._key, keys))

    def _key(self, key: str) -> str:
        return self._root.key(board_object(self._attempt.id, key))


class _GroupKeys(ControlKeys):
    """In the store of the process group."""

    def __init__(self, store: Any, attempt: Attempt) -> None:
        self._group, self._prefix = store, f"{STORE_PREFIX}board/{attempt.id}/"

    def offer(self, key: str, value: str) -> str:
        try:
            found: bytes = self._group.compare_set(self._prefix + key, "", value)
        except RuntimeError as error:
            raise store_error(error) from error
        return found.decode()

    def look(self, key: str) -> str | None:
        name = self._prefix + key
        try:
            # Not `get` alone: it waits for the key.
            found: bytes | None = self._group.get(name) if self._group.check([name]) else None
        except RuntimeError as error:
            raise store_error(error) from error
        return None if found is None else found.decode()

    def remove(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError):
            for key in keys:
                self._group.delete_key(self._prefix + key)


def open_control_keys(
    root: CheckpointURL, attempt: Attempt, settings: Settings, *, limit: Limit = UNLIMITED
) -> ControlKeys:
    """Those of an attempt: in the store of the default process group, without one below ``root``."""
    group = default_store()
    return ControlKeys(store_of(root, settings, limit), root, attempt) if group is None else _GroupKeys(group, attempt)
