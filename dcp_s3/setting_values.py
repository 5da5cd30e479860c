"""What the values of settings may be, as text or as objects. Pure; messages say what is expected."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from dcp_s3.units import parse_duration, parse_size, parse_size_or_fraction

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_SIZE = 5 * 2**20
MAX_PART_SIZE = 5 * 2**30

Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrFraction = Annotated[int | float, BeforeValidator(parse_size_or_fraction)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
# For one request. Sockets wait in poll(2), which counts milliseconds in 31 bits: 24 days at most.
RequestSeconds = Annotated[Seconds, Field(gt=0, le=86400)]


def _parse_directory(value: object) -> object:
    path = os.path.expanduser(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(path, str) and not os.path.isabs(path):
        raise ValueError(
            "expected an absolute path like /nvme/spill (or ~/spill): after a restart from elsewhere, a relative one "
            "is another directory, and what waits in the old one is not found"
        )
    return path


Directory = Annotated[str, BeforeValidator(_parse_directory)]


def _parse_part_size(value: object) -> object:
    if value == "auto":
        return value
    size = parse_size(value)
    if isinstance(size, int) and not MIN_PART_SIZE <= size <= MAX_PART_SIZE:
        raise ValueError("expected auto, or a size from 5MiB to 5GiB (S3's limits)")
    return size


def _parse_connections(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 512:
        raise ValueError("expected auto, or a whole number from 1 to 512")
    return value


PartSize = Annotated[int | Literal["auto"], BeforeValidator(_parse_part_size)]
Connections = Annotated[int | Literal["auto"], BeforeValidator(_parse_connections)]


def check_endpoint(url: str) -> None:
    """Check that S3 requests can be sent to a URL.

    Raises:
        ValueError: the URL has no scheme, a scheme other than http and https, no host, or an invalid port.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        guess = f"http://{url}" if re.fullmatch(r"[\w.-]+(:\d{1,5})?", url) else "http://localhost:9000"
        raise ValueError(f"expected http://host[:port] or https://host[:port], for example {guess}")


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a `step_pattern`.

    Raises:
        ValueError: the pattern is not a regular expression, or does not have exactly one group.
    """
    example = r"expected a regular expression with one group around the digits, for example step-(\d+)"
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{example} ({error})") from None
    if compiled.groups != 1:
        raise ValueError(f"{example}; this one has {compiled.groups} groups (others: (?:...))")
    return compiled
