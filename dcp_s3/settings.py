"""All tunables in one place: the environment (prefix ``DCP_S3_``), and keyword settings that override it.

The environment is read when a `Settings` object is made, never at import. Whatever is unset follows AWS's own chain
(``AWS_ENDPOINT_URL_S3``, ``AWS_PROFILE``, instance roles, ...). Credentials are never settings here, so they cannot end
up in a repr, a log or a pickle of dcp_s3.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dcp_s3.errors import SettingsError
from dcp_s3.launcher import Launch, read_launch
from dcp_s3.reprs import one_line
from dcp_s3.setting_values import (
    Connections,
    Directory,
    PartSize,
    RequestSeconds,
    Seconds,
    Size,
    SizeOrFraction,
    check_endpoint,
    compile_step_pattern,
)

logger = logging.getLogger(__name__)

ENV_PREFIX = "DCP_S3_"

_MOST_CONNECTIONS = 64
_LARGE_PART = 64 * 2**20


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
    profile: str | None = Field(default=None, min_length=1)
    """Profile in AWS's configuration files, with its credentials, endpoint and region, rather than ``AWS_PROFILE`` and
    the credentials in the environment. Unset: AWS's own chain."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket goes in the request's URL. Most stores other than AWS need ``path``. ``auto`` lets botocore
    choose (path style for IP addresses and bucket names with dots)."""

    part_size: PartSize = "auto"
    """Bytes in one part of a multipart upload, and the most that one ranged GET fetches. ``auto``: 8 to 64 MiB, so that
    every connection has parts to send; more where very many ranks would exceed S3's limit on requests."""
    concurrency: Connections = "auto"
    """Most requests in flight per process in each direction. Below that, connections grow for as long as more of them
    move more bytes, and what was found is kept for the next save or load. ``auto``: 64, which carry 5 GiB/s from S3."""
    buckets_per_rank: int = Field(default=4, ge=1, le=256)
    """At most this many objects per rank and save; small states get fewer."""
    checksum: Literal["auto", "crc64nvme", "crc32c", "none"] = "auto"
    """Checksum sent with every part, so that S3 rejects damage in flight. ``auto`` is CRC-64/NVME. ``none`` also omits
    the checksums of items and objects, so a load cannot verify them."""

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of written objects. Unset: the bucket's default."""
    sse_kms_key_id: str | None = None
    """KMS key for ``sse=aws:kms``."""
    storage_class: str | None = None
    """Storage class of data objects, for example ``STANDARD_IA``. Unset: the bucket's default."""
    expected_bucket_owner: str | None = Field(default=None, pattern=r"^\d{12}$")
    """AWS account id (12 digits) that must own the bucket. If another account owns it, S3 refuses every request."""

    retry_attempts: int = Field(default=8, ge=1, le=100)
    """Attempts for one request, including the first, before the save or load fails."""
    connect_timeout: RequestSeconds = 5.0
    """Seconds to wait for a connection."""
    read_timeout: RequestSeconds = 60.0
    """Seconds without a byte before a request counts as broken."""
    save_timeout: Seconds | None = Field(default=None, gt=0)
    """Seconds in which a rank must write its data, and the coordinator commit. After that the save is given up with a
    `DeadlineExceededError`, and what it uploaded is removed. Unset: no limit."""
    load_timeout: Seconds | None = Field(default=None, gt=0)
    """Seconds in which a rank must load, counted from when it has the metadata. Unset: no limit."""

    read_gap: Size = Field(default=256 * 2**10, ge=0)
    """Largest gap in bytes between two ranges of an object that a load fetches and throws away, rather than send two
    requests. 256 KiB is what S3 sends on one connection (90 MB/s) in a tenth of a request's latency (about 30 ms). A
    higher value makes fewer requests; a lower one moves fewer bytes."""
    read_waste: float = Field(default=0.0025, ge=0, allow_inf_nan=False)
    """The most that a load may fetch and throw away in gaps, as a fraction of the bytes that it needs."""
    load_buffers: Size = Field(default=512 * 2**20, ge=2**20)
    """Bytes of host memory, per process, for loading what cannot be received in place: tensors on a device, strided
    ones, other dtypes, parts of rows."""
    hedge_percentile: float = Field(default=95.0, ge=0, lt=100)
    """Hedge a ranged GET with a second one if it takes longer than this percentile of earlier ones, to its first byte
    or between two blocks of its body. 0: never. At most one in ten is hedged, and none while S3 throttles."""
    hedge_min_delay: Seconds = Field(default=0.2, gt=0)
    """Seconds without a byte before a request may be hedged, however fast the others are. 0.2: nearly all requests get
    S3's first byte within that time; those that straggle take seconds."""

    prefix_spread: int = Field(default=0, ge=0, le=4)
    """No longer has an effect: it spread names below the checkpoint's URL, where S3's partitions are always cold. A
    larger ``part_size`` keeps very large jobs below S3's request limits. Checkpoints saved with it can still be
    read."""

    staging_limit: SizeOrFraction | None = None
    """Host memory per process for the staged copies of asynchronous saves: bytes (``64GiB``), or a fraction (``0.5``,
    ``50%``) of the memory available when the stager is made, divided by the ranks on the host (``LOCAL_WORLD_SIZE``).
    Unset: no limit."""
    staging_generations: int = Field(default=2, ge=1, le=64)
    """Staged copies that may exist at a time. While all of them are being saved, the next asynchronous save waits."""
    spill_dir: Directory | None = None
    """Local directory (NVMe) for staged copies beyond ``staging_limit``, and for objects that wait for S3: an absolute
    path, or one with ``~``. Unset: no spilling. Processes of one host may share it; those of different hosts must
    not."""
    spill_limit: Size | None = Field(default=None, ge=2**20)
    """Bytes of objects that may wait in ``spill_dir``. Unset: as much as fits."""
    spill_keep: Size | None = None
    """Bytes of uploaded objects that stay in ``spill_dir`` for loads on this host. Unset: none."""
    spill_after: RequestSeconds = 20.0
    """Seconds after which a part that S3 does not take counts as refused. Its object then goes to ``spill_dir``, if
    set."""
    durability: Literal["s3", "local"] = "s3"
    """When a save is done. ``s3``: when it is committed on S3. ``local``: when every rank has it on its disk
    (``spill_dir``); it is then uploaded and committed in the background."""

    merge_ranks: bool = True
    """Whether the ranks of a save without collectives make one checkpoint together. Off: each commits one for
    itself, as torch's writers do."""
    run_id: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of this start of the job, for saves without collectives: the same on all ranks, and never used again, unless
    torchrun or SLURM count the restart. Unset: what the process group and the launcher say (torchrun, SLURM)."""
    rank_timeout: RequestSeconds = 60.0
    """Seconds without progress after which a rank counts as dead in a save without collectives."""

    retention: str | None = None
    """Policies in one line, for example ``latest:3 best:2:val_loss:min every:10000 within:48h daily:7``: what prune
    keeps if it is given no policy. Unset: everything that is committed."""
    retention_grace: Seconds = Field(default=86400.0, ge=0)
    """Seconds for which the objects of an uncommitted save, and open multipart uploads, count as a save in progress.
    After that they are leftovers."""
    reader_lease: Seconds | None = Field(default=None, ge=10, le=30 * 86400)
    """Seconds for which a load keeps prune from deleting the checkpoint, renewed while it runs. Unset: no lease."""
    step_pattern: str | None = None
    """Regular expression with one group of digits that finds the step in a checkpoint's name, for example
    ``step-(\\d+)``. Unset: the number after ``step``, ``iter``, ``checkpoint`` or ``epoch``, or the whole name."""

    load_sharing: bool = True
    """Whether data that several ranks of a load need is read from S3 once and sent between the ranks. Needs a process
    group with gloo for CPU tensors. Off on one rank means off on all."""
    allow_dtype_cast: bool = True
    """Whether a load may convert a saved tensor to another dtype, as torch's readers do. One warning names the tensors
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
                "DCP_S3_PREFIX_SPREAD = %d has no effect any more: it did not relieve S3. Remedy: unset it; for very "
                "large jobs set a larger DCP_S3_PART_SIZE, so that a save makes fewer requests", self.prefix_spread,
            )  # fmt: skip

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Only what differs from the defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                yield name, value

    def __repr__(self) -> str:
        return one_line("Settings", **dict(self.__repr_args__()))

    __str__ = __repr__

    @property
    def max_connections(self) -> int:
        """Most requests in flight per process in each direction."""
        return _MOST_CONNECTIONS if self.concurrency == "auto" else self.concurrency

    @property
    def max_part_size(self) -> int:
        """Most bytes of a part or a ranged GET, unless S3's limits require more."""
        return _LARGE_PART if self.part_size == "auto" else self.part_size

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


def aws_variable(*names: str) -> tuple[str, str] | None:
    """The first of ``names``, environment variables of AWS's own chain, that is set: its name and value."""
    return next(((name, value) for name in names if (value := os.environ.get(name))), None)


_AWS_CHAIN = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CA_BUNDLE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def aws_environment() -> int:
    """A number that changes with the variables from which AWS's own chain takes endpoint, region and credentials."""
    return hash(tuple(map(os.environ.get, _AWS_CHAIN)))


def aws_endpoint_variable() -> tuple[str, str] | None:
    """The environment variable of AWS's own chain that sets the endpoint of S3: its name and value."""
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    return None if ignored else aws_variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def require_endpoint(source: str, url: str) -> None:
    """Check an endpoint with `check_endpoint`. The error names ``source``, where the URL came from.

    Raises:
        SettingsError: the URL is not an endpoint.
    """
    try:
        check_endpoint(url)
    except ValueError as error:
        raise SettingsError(f"{source} = {url!r} is not allowed: {error}") from None


def _explain(error: ValidationError, given: Mapping[str, Any]) -> str:
    lines = []
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else "settings"
        name = name.removeprefix(ENV_PREFIX.lower())
        source = f"setting {name!r}" if name in given else f"{ENV_PREFIX}{name.upper()}"
        if detail["type"] == "extra_forbidden":
            lines.append(f"{source} is not a setting. Remedy: {_suggest(name, Settings.model_fields)}")
            continue
        found = given.get(name, os.environ.get(ENV_PREFIX + name.upper(), detail["input"]))
        value = "<hidden>" if "credentials" in detail["msg"] else repr(found)
        lines.append(f"{source} = {value} is not allowed: {detail['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Let settings have other values in the environment, here and in processes that are started meanwhile.

    Args:
        values: values by name of the setting, as text; None leaves the environment as it is.
    """
    names = {name: ENV_PREFIX + name.upper() for name, value in values.items() if value is not None}
    before = {variable: os.environ.get(variable) for variable in names.values()}
    os.environ.update({variable: str(values[name]) for name, variable in names.items()})
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a process that this one starts: its own, with changes."""
    return {**os.environ, **changes}


def launch() -> Launch:
    """What the launcher says about this process.

    Raises:
        SettingsError: see `read_launch`.
    """
    return read_launch(os.environ)


def local_world_size() -> int:
    """Ranks on this host, from the launcher (torchrun sets ``LOCAL_WORLD_SIZE``); otherwise 1."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdecimal() else 1


_warned: set[str] = set()


def unknown_variables() -> dict[str, str]:
    """The variables with the prefix that are not settings, each with the closest setting; empty if none is close."""
    known = [ENV_PREFIX + name.upper() for name in Settings.model_fields]
    ours = [name for name in os.environ if name.upper().startswith(ENV_PREFIX)]
    return {
        name: next(iter(difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.75)), "")
        for name in ours
        if name.upper() not in known and not name.upper().startswith(ENV_PREFIX + "TEST_")
    }


def _warn_of_unknown_variables(cls: type[Settings]) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # the first rank of each host says so
    known = [ENV_PREFIX + name.upper() for name in cls.model_fields]
    for name in unknown_variables():
        if name not in _warned:
            _warned.add(name)
            remedy = _suggest(name.upper(), known)
            logger.warning("%s is set but is not a setting of dcp_s3. Remedy: %s", name, remedy)


def _suggest(name: str, known: Iterable[str]) -> str:
    """What to do about a name that is not known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"


SettingsLike = Settings | Mapping[str, Any] | None


def resolve_settings(settings: SettingsLike) -> Settings:
    """The `Settings` for what a constructor was given: a `Settings` object, a mapping of overrides, or None.

    Raises:
        SettingsError: a value is not allowed; there is no such setting; or ``endpoint_url`` is unset and
            `AWS_ENDPOINT_URL_S3`, used instead, is not a URL.
    """
    if settings is not None and not isinstance(settings, (Settings, Mapping)):
        raise SettingsError(f"settings must be a Settings object, a mapping or None, not {type(settings).__name__}")
    resolved = settings if isinstance(settings, Settings) else Settings(**dict(settings or {}))
    # Checked before anything is saved or loaded. A profile's endpoint is checked when a client is made.
    if resolved.endpoint_url is None and (variable := aws_endpoint_variable()) is not None:
        require_endpoint(*variable)
    return resolved
