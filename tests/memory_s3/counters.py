"""What a server has counted, and how another process asks for it."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

#: GET answers the counters as JSON, DELETE resets them. No bucket can have this name.
PATH = "/_counters"


class Reader(NamedTuple):
    """Whose reads, of what."""

    access_key: str
    """That the request was signed in the name of; empty if it was not signed."""
    key: str


@dataclass
class Reads:
    """GetObject requests for one key."""

    requests: int = 0
    bytes_out: int = 0


@dataclass
class Counters:
    """What a server has done since it started or its counters were reset."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests by operation, those refused included."""
    bytes_in: int = 0
    """Bytes of request bodies received and kept."""
    bytes_out: int = 0
    """Bytes of response bodies sent, those that the client broke off included."""
    peak_in_flight: int = 0
    """Most requests being handled at once."""
    reads: defaultdict[Reader, Reads] = field(default_factory=lambda: defaultdict(Reads))
    """GetObject requests by access key and object."""

    def dump(self) -> bytes:
        reads = [[*reader, reads.requests, reads.bytes_out] for reader, reads in self.reads.items()]
        return json.dumps(vars(self) | {"reads": reads}).encode()

    @classmethod
    def load(cls, text: bytes) -> Counters:
        fields = json.loads(text)
        fields["requests"] = Counter(fields["requests"])
        fields["reads"] = defaultdict(Reads, {Reader(a, k): Reads(*counts) for a, k, *counts in fields["reads"]})
        return cls(**fields)


def fetch_counters(endpoint_url: str) -> Counters:
    """Those of a server in any process, when it has answered every request that it has begun."""
    return Counters.load(_ask(endpoint_url, "GET"))


def reset_counters(endpoint_url: str) -> None:
    """Let a server count from zero, when it has answered every request that it has begun."""
    _ask(endpoint_url, "DELETE")


def _ask(endpoint_url: str, method: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(endpoint_url + PATH, method=method), timeout=60) as answer:
        text: bytes = answer.read()
        return text
