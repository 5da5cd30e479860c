"""What limits a save or load, and which setting would change it: from figures alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dcp_s3.bench.figures import Transfer
from dcp_s3.units import format_size

Cause = Literal["throttling", "too_short", "cpu", "ceiling", "connection", "network"]

_SHORT_SECONDS = 1.0
"""Below that, connections have not been compared (`s3.width`): a few windows of 0.2 s."""
_BUSY = 0.8
"""Share of the host's CPU time from which on it is what limits."""
_S3_CONNECTION = (50 * 2**20, 130 * 2**20)
"""Bytes per second of one connection that are typical of S3, which gives 85 to 90 MB/s:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html"""
_MOST_CONNECTIONS = 512  # that DCP_S3_CONCURRENCY may be
_LARGE_PART = 64 * 2**20


@dataclass(frozen=True)
class Surroundings:
    """What the figures were measured with."""

    ranks: int
    cores: int
    """CPU cores that the ranks may use, together."""
    most_connections: int
    """Most connections of a rank in each direction, by the settings."""
    part_size: int | None
    """Bytes of a part, by the settings. None: chosen by dcp_s3."""


@dataclass(frozen=True)
class Finding:
    """What limits saves, or loads."""

    direction: str
    cause: Cause
    text: str
    """A clause for people."""
    suggestion: str | None = None
    """What to change, and why. None: nothing would help, or nothing is known to."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the suggestion."""
        return {"direction": self.direction, "cause": self.cause, "text": self.text}


def find_limit(last: Transfer, host: Surroundings) -> Finding:
    """What limited a transfer.

    Args:
        last: figures of the last round: those of a process that has found its number of connections.
        host: what it was measured with.
    """

    def found(cause: Cause, text: str, suggestion: str | None = None) -> Finding:
        return Finding(last.direction, cause, text, suggestion)

    if last.throttled:
        small = host.part_size is None or host.part_size < _LARGE_PART
        return found(
            "throttling",
            f"S3 throttles: it refused {last.throttled} requests. It adapts to a lasting load within minutes",
            "DCP_S3_PART_SIZE=64MiB: fewer requests for the same bytes" if small else None,
        )
    if last.seconds < _SHORT_SECONDS:
        return found(
            "too_short",
            f"it took {last.seconds:.2f} s, too short to tell",
            "a larger --size: this one is too small to measure",
        )
    share = last.cpu_seconds / last.seconds / host.cores
    if share >= _BUSY:
        return found(
            "cpu",
            f"the CPU of this host: the ranks use {share:.0%} of its {_count(host.cores, 'core')}",
            f"at most {_count(host.cores, 'rank')} on this host: there are more ranks than cores"
            if host.ranks > host.cores
            else None,
        )
    each = last.bytes_per_second / (host.ranks * max(1, last.connections))
    if last.connections >= host.most_connections:
        more = min(_MOST_CONNECTIONS, 2 * host.most_connections)
        return found(
            "ceiling",
            f"the settings: a rank uses all {_count(host.most_connections, 'connection')} that DCP_S3_CONCURRENCY "
            f"allows, and each carries {format_size(each)}/s",
            f"DCP_S3_CONCURRENCY={more}: see whether more connections move more bytes"
            if more > host.most_connections
            else None,
        )
    if _S3_CONNECTION[0] <= each <= _S3_CONNECTION[1]:
        return found(
            "connection",
            f"each of the {_count(last.connections, 'connection')} of a rank carries {format_size(each)}/s, as is "
            "typical of S3: more of them carry more, where a rank has enough to send",
            f"--ranks {2 * host.ranks}: ranks have connections of their own" if 2 * host.ranks <= host.cores else None,
        )
    return found(
        "network",
        f"the network or the server: {_count(last.connections, 'connection')} of a rank carry {format_size(each)}/s "
        "each, and neither the CPU nor the settings are at their limit",
    )


def suggestions(findings: list[Finding]) -> list[str]:
    """What to change, each thing once; empty if nothing would help."""
    return list(dict.fromkeys(each.suggestion for each in findings if each.suggestion is not None))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
