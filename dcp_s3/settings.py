"""All tunables in one place: the environment (prefix ``DCP_S3_``), read when a `Settings` object is made, and keyword
settings that override it. Whatever is unset follows AWS's own chain (``AWS_ENDPOINT_URL_S3``, ``AWS_PROFILE``, instance
roles, ...). Credentials are never settings here, so they cannot end up in a repr, a log or a pickle of dcp_s3.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from dcp_s3.errors import SettingsError
from dcp_s3.units import one_line, parse_duration, parse_size, parse_size_or_fraction

logger = logging.getLogger(__name__)

ENV_PREFIX = "DCP_S3_"

_MOST_CONNECTIONS = 64
_LARGE_PART = 64 * 2**20

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_SIZE = 5 * 2**20
MAX_PART_SIZE = 5 * 2**30

Size = Annotated[int, BeforeValidator(parse_size)]
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


def _parse_part_size(value: object) -> object:
    if value != "auto" and not MIN_PART_SIZE <= (value := parse_size(value)) <= MAX_PART_SIZE:
        raise ValueError("expected auto, or a size from 5MiB to 5GiB (S3's limits)")
    return value


def _parse_connections(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if value != "auto" and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 512):
        raise ValueError("expected auto, or a whole number from 1 to 512")
    return number


def _parse_staging_limit(value: object) -> object:
    found = parse_size_or_fraction(value)
    if isinstance(found, int) and found < 2**20:
        raise ValueError("expected at least 1MiB, or a fraction like 0.5 or 50%")
    return found


def parse_endpoint(url: str) -> str:
    """The URL of an endpoint. ValueError: it has no scheme, one other than http and https, no host, an invalid port, or
    credentials."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        guess = f"http://{url}" if re.fullmatch(r"[\w.-]+(:\d{1,5})?", url) else "http://localhost:9000"
        raise ValueError(f"expected http://host[:port] or https://host[:port], for example {guess}")
    if parts.username or parts.password:
        raise ValueError("expected a URL without credentials: those belong to AWS's own chain")
    return url.rstrip("/")


class Settings(BaseSettings):
    """The configuration of one writer or reader. Immutable, hashable, and safe to pickle and to print.

    >>> settings = Settings(spill_dir="/nvme/spill", staging_limit="64GiB")
    >>> S3StorageWriter("s3://bucket/run/step-3000", settings=settings)
    S3StorageWriter('s3://bucket/run/step-3000')
    >>> Settings(part_size="1MiB")
    Traceback (most recent call last):
    dcp_s3.errors.SettingsError: setting 'part_size' = '1MiB' is not allowed: expected auto, or a size ...

    Raises:
        SettingsError: names the variable, the value found and what is allowed.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, validate_default=False
    )

    endpoint_url: Annotated[str, AfterValidator(parse_endpoint)] | None = None
    """S3 endpoint, for stores other than AWS. Unset: AWS's own chain."""
    region: str | None = None
    """Region name. Unset: AWS's own chain."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket goes in the request's URL. Most stores other than AWS need ``path``. ``auto`` lets botocore
    choose (path style for IP addresses and bucket names with dots)."""

    part_size: Annotated[int | Literal["auto"], BeforeValidator(_parse_part_size)] = "auto"
    """Bytes in one part of a multipart upload, and the most that one ranged GET fetches. ``auto``: 8 to 64 MiB, so that
    every connection has parts to send; more where very many ranks would exceed S3's limit on requests."""
    concurrency: Annotated[int | Literal["auto"], BeforeValidator(_parse_connections)] = "auto"
    """Most requests in flight per process in each direction. Up to that, a process adds connections while more of them
    move more bytes, and begins the next save or load with the number found. ``auto``: 64, which carry 5 GiB/s from
    S3."""
    max_bandwidth: Size | None = Field(default=None, ge=2**16)
    """Most bytes per second that a process uploads (``200MiB``), all its saves together. Unset: no limit."""
    checksum: Literal["auto", "crc64nvme", "none"] = "auto"
    """Checksum sent with every part, so that S3 rejects damage in flight. ``auto`` is CRC-64/NVME where the store knows
    it. ``none`` also omits the checksums of items and objects, so a load cannot verify them."""

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of written objects. Unset: the bucket's default."""
    sse_kms_key_id: str | None = None
    """KMS key for ``sse=aws:kms``."""
    storage_class: str | None = None
    """Storage class of data objects, for example ``STANDARD_IA``. Unset: the bucket's default."""
    expected_bucket_owner: str | None = Field(default=None, pattern=r"^\d{12}$")
    """AWS account id (12 digits) that must own the bucket. If another account owns it, S3 refuses every request."""
    requester_pays: bool = False
    """Pay for the requests, if the bucket is one with Requester Pays. Without it S3 refuses them."""

    split_replicated: bool = False
    """Split tensor chunks above 64 MiB that several ranks hold (DDP, HSDP) by rows among these ranks, instead of
    having one of them write all. Replicas must then be equal."""

    incremental: bool = False
    """Have S3 copy what has not changed since the last save of the process (frozen layers, adapters), instead of
    sending it again. Each checkpoint stays whole on its own. Needs checksums."""

    retry_attempts: int = Field(default=8, ge=1, le=100)
    """Attempts for one request, including the first, before the save or load fails."""
    read_timeout: RequestSeconds = 60.0
    """Seconds without a byte before a request counts as broken."""
    stall_timeout: Seconds = Field(default=600.0, ge=0, le=86400)
    """Seconds without progress (less than 1 KiB/s moved, and no request succeeded) after which a save, a load, a prune
    or any other work on S3 ends with a `DeadlineExceededError`. Waiting for other ranks does not count, nor does the
    time in which S3 completes an upload or copies, if it says so. What can go to ``spill_dir`` goes there instead.
    0: no limit."""
    save_timeout: Seconds | None = Field(default=None, gt=0)
    """Seconds in which a rank must write its data, and the coordinator commit. After that the save is given up with a
    `DeadlineExceededError`, and what it uploaded is removed. Unset: no limit."""

    staging_limit: Annotated[int | float, BeforeValidator(_parse_staging_limit)] | None = None
    """Host memory per process for the staged copies of asynchronous saves: bytes (``64GiB``), or a fraction (``0.5``,
    ``50%``) of the memory available when the stager is made, divided by the ranks on the host (``LOCAL_WORLD_SIZE``).
    Unset: no limit."""
    spill_dir: Annotated[str, BeforeValidator(_parse_directory)] | None = None
    """Local directory (NVMe) for staged copies beyond ``staging_limit``, and for objects that wait for S3: an absolute
    path, or one with ``~``. Unset: no spilling. Processes of one host may share it; those of different hosts must
    not."""
    spill_limit: Size | None = Field(default=None, ge=2**20)
    """Bytes of objects that may wait in ``spill_dir``. Unset: as much as fits."""
    spill_after: RequestSeconds = 20.0
    """Seconds after which a part that S3 does not take counts as refused. Its object then goes to ``spill_dir``, if
    set."""
    durability: Literal["s3", "local"] = "s3"
    """When a save is done. ``s3``: when it is committed on S3. ``local``: when every rank has it on its disk
    (``spill_dir``); it is then uploaded and committed in the background."""

    run_id: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of this start of the job, for saves without collectives: the same on all ranks, and another one at each
    start, unless torchrun or SLURM count the restarts. Unset: from the process group or the launcher (torchrun,
    SLURM)."""
    rank_timeout: RequestSeconds = 300.0
    """Seconds without progress after which a save without collectives takes a rank for dead: it has not joined the
    save, or none of its bytes moves. Must be longer than what one rank may do before it saves, for example an
    evaluation."""

    retention: str | None = None
    """Policies in one line, for example ``latest:3 best:2:val_loss:min every:10000 within:48h daily:7``: what prune
    keeps if it is given no policy. Unset: everything that is committed."""
    retention_grace: Seconds = Field(default=86400.0, ge=0)
    """Seconds for which the objects of an uncommitted save, and open multipart uploads, count as a save in progress.
    After that they are leftovers."""
    reader_lease: Seconds | None = Field(default=None, ge=10, le=30 * 86400)
    """Seconds for which a load keeps prune from deleting the checkpoint, renewed while it runs. Unset: no lease."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
            if self.durability == "local" and self.spill_dir is None:
                raise SettingsError(
                    "DCP_S3_DURABILITY = 'local' needs a local directory. Remedy: set DCP_S3_SPILL_DIR to one"
                )
            if self.incremental and self.checksum == "none":  # by which such a save knows what has changed
                raise SettingsError(
                    "incremental saves need checksums, and DCP_S3_CHECKSUM = 'none' turns them off. Remedy: "
                    "DCP_S3_CHECKSUM=auto, or neither incremental=True nor DCP_S3_INCREMENTAL"
                )
        except ValidationError as error:
            lines = []
            for detail in error.errors():
                name = str(detail["loc"][0]) if detail["loc"] else "settings"
                name = name.removeprefix(ENV_PREFIX.lower())
                source = f"setting {name!r}" if name in values else f"{ENV_PREFIX}{name.upper()}"
                if detail["type"] == "extra_forbidden":
                    lines.append(f"{source} is not a setting. Remedy: {_suggest(name, Settings.model_fields)}")
                    continue
                found = values.get(name, os.environ.get(ENV_PREFIX + name.upper(), detail["input"]))
                why = detail["msg"].removeprefix("Value error, ")
                lines.append(f"{source} = {_shown(found, why)} is not allowed: {why}")
            raise SettingsError("; ".join(lines)) from None
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the first rank of each host says so
            for variable, remedy in unknown_variables().items():
                if variable not in _warned:
                    _warned.add(variable)
                    logger.warning("%s is set but is not a setting of dcp_s3. Remedy: %s", variable, remedy)

    def __repr__(self) -> str:
        values = {name: (getattr(self, name), field.default) for name, field in type(self).model_fields.items()}
        return one_line("Settings", **{name: value for name, (value, default) in values.items() if value != default})

    __str__ = __repr__

    @property
    def max_connections(self) -> int:
        """Most requests in flight per process in each direction."""
        return _MOST_CONNECTIONS if self.concurrency == "auto" else self.concurrency

    @property
    def max_part_size(self) -> int:
        """Most bytes of a part or a ranged GET, unless S3's limits require more."""
        return _LARGE_PART if self.part_size == "auto" else self.part_size


def aws_variable(*names: str) -> tuple[str, str] | None:
    """The first of these environment variables that is set: its name and value."""
    return next(((name, value) for name in names if (value := os.environ.get(name))), None)


def aws_endpoint_variable() -> tuple[str, str] | None:
    """The environment variable of AWS's own chain that sets the endpoint of S3: its name and value."""
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    return None if ignored else aws_variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def require_endpoint(source: str, url: str) -> None:
    """Check the endpoint that ``source`` names: a SettingsError that says so."""
    try:
        parse_endpoint(url)
    except ValueError as error:
        raise SettingsError(f"{source} = {_shown(url, str(error))} is not allowed: {error}") from None


def _shown(value: object, why: str) -> str:
    return "<hidden>" if "credentials" in why else repr(value)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Let environment variables have other values, here and in processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update({name: before[name] for name in variables if name in before})


_warned: set[str] = set()


def unknown_variables() -> dict[str, str]:
    """The variables with the prefix that are not settings, each with what to do about it."""
    known = [ENV_PREFIX + name.upper() for name in Settings.model_fields]
    found = {}
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(ENV_PREFIX + "TEST_"):
            found[variable] = _suggest(name, known)
    return found


def _suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else f"unset it; there are: {', '.join(names)}"


SettingsLike = Settings | Mapping[str, Any] | None


def stored_settings(values: Mapping[str, Any]) -> Settings:
    """The `Settings` of a `model_dump` by perhaps another version: what does not exist here is left out."""
    known = {name: value for name, value in values.items() if name in Settings.model_fields}
    if known.get("checksum") == "crc32c":  # of earlier versions
        known["checksum"] = "auto"  # not what the environment says: it may say the same
    return Settings(**known)


def resolve_settings(settings: SettingsLike, **arguments: bool | None) -> Settings:
    """The `Settings` for what a constructor was given; its ``arguments`` that are not None come first. Raises
    SettingsError if a value is not allowed, there is no such setting, or ``endpoint_url`` is unset and
    `AWS_ENDPOINT_URL_S3`, used instead, is not a URL."""
    if settings is not None and not isinstance(settings, (Settings, Mapping)):
        raise SettingsError(f"settings must be a Settings object, a mapping or None, not {type(settings).__name__}")
    given = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(settings, Settings):
        resolved = Settings(**(settings.model_dump() | given)) if given else settings
    else:
        resolved = Settings(**{**(settings or {}), **given})
    # Checked before anything is saved or loaded. A profile's endpoint is checked when a client is made.
    if resolved.endpoint_url is None and (variable := aws_endpoint_variable()) is not None:
        require_endpoint(*variable)
    return resolved
