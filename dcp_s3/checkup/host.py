"""Checks of this host and of the way to S3: settings, versions, spill disk, credentials, endpoint, clock, identity."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
import botocore.session
from botocore.config import Config

from dcp_s3 import errors
from dcp_s3.checkup.probes import CheckResult, Examination, fail, from_error, ok, skip, warn
from dcp_s3.retention.parse import policy_from_settings
from dcp_s3.s3.botocore_private import expiry_of
from dcp_s3.s3.client import find_chain
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, describe, status_code, to_storage_error
from dcp_s3.settings import ENV_PREFIX, resolve_settings, unknown_variables
from dcp_s3.spill.store import SpillStore, as_spill_error
from dcp_s3.units import format_size, plural
from dcp_s3.versions import TESTED, __version__, is_newer_than_tested

# --- this host -----------------------------------------------------------------------------------------

_MOUNTS = Path("/proc/mounts")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.s3fs", "fuse.goofys", "fuse.mount-s3", "fuse.geesefs", "lustre", "ceph")


def check_settings(exam: Examination) -> CheckResult:
    settings = exam.settings = resolve_settings(exam.given)
    policy_from_settings(settings)
    chain = find_chain(settings)
    unknown = unknown_variables()
    if unknown:
        remedies = "; ".join(f"{variable}: {remedy}" for variable, remedy in unknown.items())
        return warn(f"not a setting of dcp_s3, so without effect: {', '.join(unknown)}", remedies)
    shown = [f"{ENV_PREFIX}{each.upper()}={getattr(settings, each)}" for each in sorted(settings.model_fields_set)]
    shown += [f"{each} {value.value} ({value.source})" for each, value in chain.items()]
    return ok(f"valid; set are {', '.join(shown)}" if shown else "valid; none is set")


def check_versions(exam: Examination) -> CheckResult:
    versions = {package: importlib.metadata.version(package) for package in ("torch", "awscrt", "boto3")}
    found = f"dcp_s3 {__version__}, Python {platform.python_version()}, "
    found += ", ".join(f"{package} {version}" for package, version in versions.items())
    if is_newer_than_tested(versions["torch"]):
        return warn(
            f"{found}: dcp_s3 was never run with this torch, the newest was {TESTED[-1]}",
            "save and load a small state first; pip install --upgrade dcp-s3, or an earlier torch",
        )
    return ok(found)


def check_spill(exam: Examination) -> CheckResult:
    if exam.settings.spill_dir is None:
        return skip("DCP_S3_SPILL_DIR is unset: while S3 is away, saves fail")
    path = Path(exam.settings.spill_dir)
    if not path.exists() and exam.read_only:
        return skip(f"{path} does not exist; the first save makes it")
    if not exam.read_only:
        with as_spill_error(path, "write"):
            _try_disk(path)
    store = SpillStore(path)
    waiting = store.scan()
    broken = [*store.list_broken(), *store.list_refused()]
    free = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    kind = filesystem_of(path, _MOUNTS.read_text()) if _MOUNTS.exists() else ""
    found = ", ".join(part for part in (str(path), kind, f"{format_size(free)} free") if part)
    local = "set DCP_S3_SPILL_DIR to a directory on a local disk (NVMe)"
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{found}: {kind} is memory, which a reboot empties", local)
    if kind in _REMOTE:
        return warn(f"{found}: {kind} is not a local disk: it may be away when S3 is; hosts must not share it", local)
    if broken:
        return warn(f"{found}; damaged or set aside: {plural(len(broken), 'save')}", "dcp-s3 drain --status says why")
    if waiting:
        size = format_size(sum(save.journal.size for save in waiting))
        return warn(
            f"{found}, {plural(len(waiting), 'save')} ({size}) waiting for S3",
            "dcp-s3 drain uploads and commits them; the next save from here does, too",
        )
    if free < 2**30:
        return warn(f"{found}: hardly room for a checkpoint", "free space there, or use a larger disk")
    return ok(found)


def _try_disk(directory: Path) -> None:
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
    finally:
        for each in made:
            each.rmdir()


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem that holds a path, by the text of ``/proc/mounts``; empty if none does."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, mount, found, *_ = [*line.split(), "", "", ""]
        mounted = mount.replace("\\040", " ").rstrip("/") + "/"
        if mount and f"{path.resolve()}/".startswith(mounted) and len(mounted) >= len(best):
            best, kind = mounted, found
    return kind


# --- the way to S3 -------------------------------------------------------------------------------------

# A round trip between regions; in one region it takes a few milliseconds, and S3 answers within tens.
_FAR_SECONDS = 0.15
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed
_SKEW_WARNS, _SKEW_FAILS = 60.0, 900.0
_RENEWED = ("assume-role", "assume-role-with-web-identity", "container-role", "iam-role", "custom-process")
_RENEW = "for long runs an instance or pod role, or credential_process in the profile: those are renewed"
_STS_ERRORS: tuple[type[Exception], ...] = (*REQUEST_ERRORS, ValueError)


def check_credentials(exam: Examination) -> CheckResult:
    session = botocore.session.get_session()
    try:
        credentials: Any = session.get_credentials()
        frozen = credentials and credentials.get_frozen_credentials()
        if not (frozen and frozen.access_key and frozen.secret_key):
            raise boto.NoCredentialsError
    except boto.BotoCoreError as error:
        return from_error(to_storage_error(error, "HeadBucket", exam.url.bucket, "", 1))
    key, method = str(frozen.access_key), str(credentials.method)
    source = "the environment (AWS_ACCESS_KEY_ID)" if method == "env" else method
    if method in ("shared-credentials-file", "config-file"):
        source += f", profile {session.profile or 'default'!r}"
    # An id that can be recognised, but not used.
    found = f"{key[:4]}...{key[-4:]} from {source}" if len(key) >= 12 else f"an access key from {source}"
    try:
        exam.ask("ListObjectsV2", Prefix=exam.key(""), MaxKeys=1, attempts=1)
    except errors.CredentialsError as error:
        refused = from_error(error)
        return replace(refused, found=f"{found}, which the endpoint refuses: {refused.found}")
    except errors.StorageError:
        pass  # later checks say it
    return judge_expiry(found, method, expiry_of(credentials), is_temporary=bool(frozen.token), now=time.time())


def judge_expiry(found: str, method: str, expires: float | None, *, is_temporary: bool, now: float) -> CheckResult:
    """``expires`` and ``now`` in seconds since the epoch; None if it is not known."""
    if expires is None and not is_temporary:
        return ok(f"{found}; they do not expire")
    if expires is None:
        return warn(f"{found}; they are temporary (a session token), until when is not known", _RENEW)
    minutes = int(abs(expires - now) // 60)
    span = f"{minutes // 60} h {minutes % 60} min"
    if expires <= now:
        return fail(f"{found}; they expired {span} ago", "get new ones; " + _RENEW)
    if method in _RENEWED:
        return ok(f"{found}; they are renewed, next within {span}")
    return warn(f"{found}; they expire in {span}, and are not renewed", _RENEW)


def check_endpoint(exam: Examination) -> CheckResult:
    where = str(exam.client.meta.endpoint_url)
    try:
        exam.greet()  # connects
        seconds = exam.greet()
    except errors.StorageError as error:
        exam.dead = "the endpoint is not reachable"
        failure = from_error(error)
        remedy = "check DCP_S3_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3, or the profile), DNS, firewall and proxy"
        if "CERTIFICATE" in failure.found.upper():
            remedy = "AWS_CA_BUNDLE=/path/of/your/authority.pem, and in DCP_S3_ENDPOINT_URL a name of the certificate"
        elif f"//{exam.url.bucket}." in failure.found and exam.settings.endpoint_url is not None:
            remedy = "DCP_S3_ADDRESSING_STYLE=path keeps the bucket out of the host's name"
        return replace(failure, remedy=remedy)
    found = f"{where} answers in {seconds * 1000:.1f} ms"
    if seconds > _FAR_SECONDS:
        return warn(f"{found}: S3 is far away", "train in the region of the bucket; does a proxy lead elsewhere?")
    if where.startswith("http://") and not where.startswith(("http://localhost", "http://127.0.0.1")):
        return warn(f"{found}, without TLS: nothing in flight is protected", "an https:// endpoint, if it has one")
    return ok(found)


def check_clock(exam: Examination) -> CheckResult:
    if exam.skew is None:
        return skip("the endpoint's answers have no Date", cell="not told")
    seconds = abs(exam.skew)
    if seconds < 2:
        return ok("this host's clock agrees with the endpoint's", cell="agrees")
    cell = f"{seconds:.0f} s {'behind' if exam.skew > 0 else 'ahead'}"  # the endpoint's clock, seen from this host
    found = f"this host's clock is {seconds:.0f} s {'ahead of' if exam.skew > 0 else 'behind'} the endpoint's"
    if seconds > _SKEW_WARNS:
        remedy = "synchronise it (NTP, chrony); S3 refuses requests from 15 minutes on"
        return (fail if seconds > _SKEW_FAILS else warn)(found, remedy, cell=cell)
    return ok(found, cell=cell)


def check_identity(exam: Examination) -> CheckResult:
    endpoint, region = str(exam.client.meta.endpoint_url), exam.client.meta.region_name or "us-east-1"
    is_aws = is_aws_endpoint(endpoint)
    config = Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 1, "mode": "standard"})
    try:
        # Stores other than AWS are asked at their own endpoint: their credentials are sent to nobody else.
        client: Any = botocore.session.get_session().create_client(
            "sts", region_name=region, config=config, endpoint_url=None if is_aws else endpoint
        )
        answer: dict[str, Any] = client.get_caller_identity()
    except _STS_ERRORS as error:
        if is_aws and status_code(error) in (400, 401, 403):
            found = f"STS does not accept the credentials: {describe(error)}"
            return fail(found, "check the credentials, their expiry, and the clock of this host")
        answer = {}
    if not answer.get("Arn"):
        what = "STS is not reachable from here" if is_aws else "an S3-only endpoint: it has no STS"
        return skip(f"{what}; saves and loads do not need it")
    return ok(f"{answer['Arn']}, account {answer.get('Account', 'unknown')}")


def is_aws_endpoint(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
