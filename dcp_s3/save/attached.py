"""The attachments that a writer was given, until the saves begin that they are for."""

from __future__ import annotations

import threading
from typing import Any

from dcp_s3.checkpoint.attachments import Attachment
from dcp_s3.errors import SaveProtocolError
from dcp_s3.url import CheckpointURL


class Attachments:
    """Attachments by the URL of their save; None: the next save, whatever its URL. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[CheckpointURL | None, dict[str, Attachment]] = {}
        self._copied: set[CheckpointURL | None] = set()

    def add(self, url: CheckpointURL | None, attachment: Attachment) -> None:
        """Keep an attachment.

        Raises:
            SaveProtocolError: there is another one of that name, with other bytes.
        """
        with self._lock:
            if url in self._copied:
                self._copied.discard(url)
                self._of.pop(url, None)  # of a save that has gone
            kept = self._of.setdefault(url, {}).setdefault(attachment.name, attachment)
        if kept.data != attachment.data:
            raise SaveProtocolError(
                f"{attachment.name!r} is already attached to this save, with other bytes. Remedy: attach it once, or "
                "under another name"
            )

    def take(self, url: CheckpointURL) -> list[Attachment]:
        """Those of the save to ``url`` that begins now. They are not kept.

        Raises:
            SaveProtocolError: two have one name, and other bytes.
        """
        with self._lock:
            both = (self._of.pop(None, {}), self._of.pop(url, {}))
        found = Attachments()
        for attachment in (each for one in both for each in one.values()):
            found.add(None, attachment)
        return list(found._of.get(None, {}).values())

    def hand_over(self) -> Attachments:
        """A new object for a copy of the writer, which saves in another process. What is for the next save, whatever
        its URL, goes there. What is for a URL stays here, too, until more is attached to it."""
        other = Attachments()
        with self._lock:
            other._of = {url: dict(attached) for url, attached in self._of.items()}
            self._of.pop(None, None)
            self._copied = set(self._of)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"_of": self._of, "_copied": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
