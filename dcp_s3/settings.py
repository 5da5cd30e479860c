"""All tunables in one place: the environment (prefix ``DCP_S3_``) and keyword settings that override it.

The environment is read when a `Settings` object is made, never at import. What is left unset follows AWS's own
chain (``AWS_ENDPOINT_URL_S3``, ``AWS_PROFILE``, instance roles, ...): credentials are never settings here, so
they can not end up in a repr, a log or a pickle of ours.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dcp_s3.errors import SettingsError
from dcp_s3.units import parse_duration, parse_size, parse_size_or_fraction

logger = logging.getLogger(__name__)

ENV_PREFIX = "DCP_S3_"

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_SIZE = 5 * 2**20
MAX_PART_SIZE = 5 * 2**30

Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrFraction = Annotated[int | float, BeforeValidator(parse_size_or_fraction)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
# Of one request. poll(2), on which sockets wait, counts milliseconds in 31 bits: 24 days at most.
RequestSeconds = Annotated[Seconds, Field(gt=0, le=86400)]


def _parse_directory(value: object) -> object:
    path = os.path.expanduser(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(path, str) and not os.path.isabs(path):
        raise ValueError(
            "expected an absolute path like /nvme/spill (or ~/spill): a relative one is another directory after a "
            "restart from elsewhere, which would not find what waits in it"
        )
    return path


Directory = Annotated[str, BeforeValidator(_parse_directory)]


class Settings(BaseSettings):
    """What one writer or reader is configured with. Immutable, hashable, and safe to pickle and to print.

    Raises:
        SettingsError: names the variable, the value found and what is allowed.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        validate_default=False,
    )

    endpoint_url: str | None = None
    """S3 endpoint, for stores other than AWS. Unset: AWS's own chain."""
    region: str | None = None
    """Region name. Unset: AWS's own chain."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """How the bucket goes into the request's URL. ``path`` for most stores other than AWS; ``auto`` lets
    botocore choose (path style for IP addresses and bucket names with dots)."""

    part_size: Size = Field(default=64 * 2**20, ge=MIN_PART_SIZE, le=MAX_PART_SIZE)
    """Bytes of one part of a multipart upload, and the most that one ranged GET fetches. 64 MiB: a request costs about
    1 ms of CPU in botocore whatever its size, which at 32 MiB was a sixth of the client's CPU (docs/performance.md)."""
    concurrency: int = Field(default=8, ge=1, le=512)
    """Requests in flight per process, each way. 8: S3 serves about 90 MB/s to one connection; with the usual
    8 processes per host this fills 5 GiB/s."""
    buckets_per_rank: int = Field(default=4, ge=1, le=256)
    """At most this many objects per rank and save; small states get fewer."""
    checksum: Literal["auto", "crc64nvme", "crc32c", "none"] = "auto"
    """Checksum sent with every part, for S3 to reject damage in flight. ``auto`` is CRC-64/NVME. ``none`` also
    leaves out the checksums of items and objects, so that a load can not verify them."""

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of what is written. Unset: the bucket's default."""
    sse_kms_key_id: str | None = None
    """KMS key for ``sse=aws:kms``."""
    storage_class: str | None = None
    """Storage class of data objects, for example ``STANDARD_IA``. Unset: the bucket's default."""
    expected_bucket_owner: str | None = Field(default=None, pattern=r"^\d{12}$")
    """AWS account id (12 digits) that must own the bucket; S3 refuses every request otherwise."""

    retry_attempts: int = Field(default=8, ge=1, le=100)
    """How often one request is tried in all before the save or load fails."""
    connect_timeout: RequestSeconds = 5.0
    """Seconds to wait for a connection."""
    read_timeout: RequestSeconds = 60.0
    """Seconds without a byte before a request counts as broken."""
    save_timeout: Seconds | None = Field(default=None, gt=0)
    """Seconds in which a rank must have written its data, and the coordinator committed. After that the save is given
    up, with a `DeadlineExceededError`, and what it uploaded is removed. Unset: no limit."""
    load_timeout: Seconds | None = Field(default=None, gt=0)
    """Seconds in which a rank must have loaded, from the moment it has the metadata. Unset: no limit."""

    read_gap: Size = Field(default=256 * 2**10, ge=0)
    """Bytes between two ranges of an object that a load rather fetches and throws away than asks around. 256 KiB is
    what S3 sends on one connection (90 MB/s) in a tenth of a request's latency (about 30 ms): a higher value makes
    fewer requests, a lower one moves fewer bytes."""
    read_waste: float = Field(default=0.0025, ge=0, allow_inf_nan=False)
    """Bytes between ranges that a load fetches and throws away at most, as a share of those that it needs."""
    load_buffers: Size = Field(default=512 * 2**20, ge=2**20)
    """Bytes of host memory, per process, through which a load brings what it can not receive in place: tensors on a
    device, strided ones, other dtypes, parts of rows."""
    hedge_percentile: float = Field(default=95.0, ge=0, lt=100)
    """A ranged GET that takes longer, to its first byte or between two blocks of its body, than this percentage of
    those before it is raced by a second one. 0: never. At most one in ten is, and none while S3 throttles."""
    hedge_min_delay: Seconds = Field(default=0.2, gt=0)
    """Seconds without a byte before which no request is raced, however fast the others are. 0.2: S3's first byte
    comes within that of nearly all requests, while those that straggle take seconds."""

    prefix_spread: int = Field(default=0, ge=0, le=4)
    """Without effect: names were spread below the checkpoint, where S3's partitions are always cold. A larger
    ``part_size`` keeps very large jobs below what S3 takes. Checkpoints that were saved so are still read."""

    staging_limit: SizeOrFraction | None = None
    """Host memory for the staged copies of asynchronous saves, per process: bytes (``64GiB``), or a fraction (``0.5``,
    ``50%``) of the memory that is available when the stager is made, divided by the ranks on the host
    (``LOCAL_WORLD_SIZE``). Unset: no limit."""
    staging_generations: int = Field(default=2, ge=1, le=64)
    """At most this many staged copies at a time; while all are being saved, the next asynchronous save waits."""
    spill_dir: Directory | None = None
    """Local directory (NVMe) for what exceeds ``staging_limit``, and for objects that wait for S3; an absolute path, or
    one with ``~``. Unset: no spilling. Processes of one host may share it; those of different hosts must not."""
    spill_limit: Size | None = Field(default=None, ge=2**20)
    """Bytes of objects that may wait in ``spill_dir``. Unset: as much as fits."""
    spill_keep: Size | None = None
    """Bytes of uploaded objects that stay in ``spill_dir`` for loads on this host. Unset: none."""
    spill_after: RequestSeconds = 20.0
    """Seconds after which a part that S3 does not take counts as refused; its object goes to ``spill_dir``, if set."""
    durability: Literal["s3", "local"] = "s3"
    """When a save is done: ``s3``, when it is committed on S3; ``local``, when every rank has it on its disk
    (``spill_dir``), from where it is uploaded and committed in the background."""

    retention: str | None = None
    """Policies in one line, for example ``latest:3 best:2:val_loss:min every:10000 within:48h daily:7``: what prune
    keeps when it is given none. Unset: everything that is committed."""
    retention_grace: Seconds = Field(default=86400.0, ge=0)
    """Seconds for which objects of a save that is not committed, and open multipart uploads, count as a save in
    progress. After that they are leftovers."""
    reader_lease: Seconds | None = Field(default=None, ge=10, le=30 * 86400)
    """Seconds for which a load keeps prune from deleting the checkpoint, renewed while it runs. Unset: no lease."""
    step_pattern: str | None = None
    """Regular expression with a group of digits that finds the step in a checkpoint's name, for example
    ``step-(\\d+)``. Unset: the last number in it."""

    load_sharing: bool = True
    """Whether the ranks of a load read what several of them need once, from S3, and send it to each other. Needs a
    process group with gloo for CPU tensors; off on one rank is off on all."""
    allow_dtype_cast: bool = True
    """Whether a load may convert a saved tensor to another dtype, as torch's readers do; one warning tells of those
    whose values may not all fit. Off: `DtypeMismatchError`, before anything is changed."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
            if self.durability == "local" and self.spill_dir is None:
                raise SettingsError(
                    "DCP_S3_DURABILITY = 'local' needs a local directory. Remedy: set DCP_S3_SPILL_DIR to one"
                )
        except ValidationError as error:
            raise SettingsError(_explain(error, values)) from None
        _warn_of_unknown_variables(type(self))
        if self.prefix_spread and "prefix_spread" not in _warned:
            _warned.add("prefix_spread")
            logger.warning(
                "DCP_S3_PREFIX_SPREAD = %d has no effect any more: S3 was not spared by it. Remedy: unset it; for very "
                "large jobs set a larger DCP_S3_PART_SIZE, so that a save makes fewer requests", self.prefix_spread,
            )  # fmt: skip

    @field_validator("staging_limit")
    @classmethod
    def _some_memory(cls, value: int | float | None) -> int | float | None:
        if isinstance(value, int) and value < 2**20:
            raise ValueError("expected at least 1MiB, or a fraction like 0.5 or 50%")
        return value

    @field_validator("step_pattern")
    @classmethod
    def _one_group(cls, value: str | None) -> str | None:
        if value is not None:
            compile_step_pattern(value)
        return value

    @field_validator("endpoint_url")
    @classmethod
    def _plain_http_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        check_endpoint(value)
        parts = urlsplit(value)
        if parts.username or parts.password:
            raise ValueError("expected a URL without credentials: those belong to AWS's own chain")
        return value.rstrip("/")


def check_endpoint(url: str) -> None:
    """Whether S3 requests can be sent to a URL.

    Raises:
        ValueError: it has no scheme, another one than http and https, no host, or a port that is none.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        guess = f"http://{url}" if re.fullmatch(r"[\w.-]+(:\d{1,5})?", url) else "http://localhost:9000"
        raise ValueError(f"expected http://host[:port] or https://host[:port], for example {guess}")


def aws_variable(*names: str) -> tuple[str, str] | None:
    """The first of these environment variables of AWS's own chain that is set: its name and value."""
    return next(((name, value) for name in names if (value := os.environ.get(name))), None)


def aws_endpoint_variable() -> tuple[str, str] | None:
    """The variable of AWS's own chain that names the endpoint of S3, and its value."""
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    return None if ignored else aws_variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def require_endpoint(source: str, url: str) -> None:
    """`check_endpoint` of what ``source`` says.

    Raises:
        SettingsError: it is none.
    """
    try:
        check_endpoint(url)
    except ValueError as error:
        raise SettingsError(f"{source} = {url!r} is not allowed: {error}") from None


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern for `step_pattern`.

    Raises:
        ValueError: it is no regular expression, or has not exactly one group.
    """
    example = r"expected a regular expression with one group around the digits, for example step-(\d+)"
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{example} ({error})") from None
    if compiled.groups != 1:
        raise ValueError(f"{example}; this one has {compiled.groups} groups (others: (?:...))")
    return compiled


def _explain(error: ValidationError, given: Mapping[str, Any]) -> str:
    lines = []
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else "settings"
        name = name.removeprefix(ENV_PREFIX.lower())
        source = f"setting {name!r}" if name in given else f"{ENV_PREFIX}{name.upper()}"
        if detail["type"] == "extra_forbidden":
            known = ", ".join(sorted(Settings.model_fields))
            lines.append(f"{source} is not a setting; there are: {known}")
            continue
        found = given.get(name, os.environ.get(ENV_PREFIX + name.upper(), detail["input"]))
        value = "<hidden>" if "credentials" in detail["msg"] else repr(found)
        lines.append(f"{source} = {value} is not allowed: {detail['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)


def local_world_size() -> int:
    """Ranks on this host as the launcher tells it (torchrun sets ``LOCAL_WORLD_SIZE``), otherwise 1."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdecimal() else 1


_warned: set[str] = set()


def _warn_of_unknown_variables(cls: type[Settings]) -> None:
    known = {ENV_PREFIX + name.upper() for name in cls.model_fields}
    for name in os.environ:
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper in known or upper.startswith(ENV_PREFIX + "TEST_"):
            continue
        if name not in _warned:
            _warned.add(name)
            logger.warning(
                "%s is set but is no setting of dcp_s3; there are: %s",
                name,
                ", ".join(sorted(known)),
            )


SettingsLike = Settings | Mapping[str, Any] | None


def resolve_settings(settings: SettingsLike) -> Settings:
    """A `Settings` object from what a constructor was given: one, a mapping of overrides, or None.

    Raises:
        SettingsError: a value is not allowed, or there is no such setting; or `AWS_ENDPOINT_URL_S3`, which is in force
            without ``endpoint_url``, is no URL.
    """
    if settings is not None and not isinstance(settings, (Settings, Mapping)):
        raise SettingsError(f"settings must be a Settings object, a mapping or None, not {type(settings).__name__}")
    resolved = settings if isinstance(settings, Settings) else Settings(**dict(settings or {}))
    # Before anything is saved or loaded. That of a profile is looked at when a client is made.
    if resolved.endpoint_url is None and (variable := aws_endpoint_variable()) is not None:
        require_endpoint(*variable)
    return resolved
