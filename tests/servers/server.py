"""What the tests know of an S3 server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ServerUnavailable(Exception):
    """This server cannot run here; the message is the reason that the skip shows."""


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and what it can do beyond the common ground.

    conditional_writes: PutObject honours If-None-Match: *.
    verifies_checksums: a wrong x-amz-checksum-crc64nvme is refused, the right one is stored and
        given back.
    handle: the server object itself where it runs in this process (memory).
    """

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    conditional_writes: bool
    verifies_checksums: bool
    session_token: str | None = None
    region: str = "us-east-1"
    handle: Any = None

    @property
    def is_local(self) -> bool:
        return self.name != "external"
