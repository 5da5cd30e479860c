"""Times in S3's answers."""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Mapping
from typing import Any

import botocore.utils


def timestamp(value: datetime.datetime | str) -> float:
    """A time from S3's answer, parsed or not, in seconds since the epoch; without a zone it is in UTC."""
    time = _parse(value) if isinstance(value, str) else value
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.timezone.utc)
    return time.timestamp()


def _parse(value: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))  # as S3 writes it
    except ValueError:
        parsed: datetime.datetime = botocore.utils.parse_timestamp(value)
        return parsed


def server_time(answer: Mapping[str, Any]) -> float | None:
    """When S3 answered by its own clock, in seconds since the epoch; None if it does not tell."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return timestamp(email.utils.parsedate_to_datetime(headers["date"]))
    except (KeyError, ValueError, TypeError):
        return None
