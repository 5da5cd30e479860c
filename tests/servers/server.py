"""What the tests know of an S3 server; and the in-memory one, in this process, whose state is at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.memory_s3 import MemoryS3


class ServerUnavailable(Exception):
    """This server cannot run here; the message is the reason that the skip shows."""


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and what it can do beyond the common ground.

    conditional_writes: PutObject honours If-None-Match: *.
    handle: the server object itself where it runs in this process (memory).
    """

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    conditional_writes: bool
    session_token: str | None = None
    region: str = "us-east-1"
    handle: Any = None

    @property
    def is_local(self) -> bool:
        return self.name != "external"


@contextlib.contextmanager
def memory() -> Iterator[S3Server]:
    with MemoryS3() as handle:
        yield S3Server(
            name="memory",
            endpoint_url=handle.endpoint_url,
            access_key="test-access-key",
            secret_key="test-secret-key",
            conditional_writes=True,
            handle=handle,
        )
