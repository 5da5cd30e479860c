"""Checks of who asks: where the credentials come from, how long they hold, and whose they are."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import botocore.exceptions as boto
import botocore.session
from botocore.config import Config

from dcp_s3 import errors
from dcp_s3.checkup.examination import Examination
from dcp_s3.checkup.result import CheckResult, failed, from_error, passed, skipped, warned
from dcp_s3.s3.botocore_private import expiry_of
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, describe, status_code, to_storage_error

# https://boto3.amazonaws.com/v1/documentation/api/latest/guide/credentials.html
_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the credentials file",
    "config-file": "the configuration file",
    "custom-process": "credential_process of the profile",
    "assume-role": "a role that the profile assumes",
    "assume-role-with-web-identity": "a pod's web identity",
    "container-role": "the container's role (ECS, EKS Pod Identity)",
    "iam-role": "the instance's role",
    "sso": "single sign-on",
}
_RENEWED = ("assume-role", "assume-role-with-web-identity", "container-role", "iam-role", "custom-process")
_STS_ERRORS: tuple[type[Exception], ...] = (*REQUEST_ERRORS, ValueError)
_RENEW = "for long runs an instance or pod role, or credential_process in the profile: those are renewed"


def check_credentials(name: str, exam: Examination) -> CheckResult:
    """Which credentials AWS's own chain finds, until when they hold, and whether the endpoint takes them."""
    session = botocore.session.get_session()
    try:
        credentials = session.get_credentials()
        if credentials is None:
            raise boto.NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        if not frozen.access_key or not frozen.secret_key:
            raise boto.NoCredentialsError
    except boto.BotoCoreError as error:
        return from_error(name, to_storage_error(error, "HeadBucket", exam.url.bucket, "", 1))
    method = str(credentials.method)
    source = _SOURCES.get(method, method)
    if method in ("shared-credentials-file", "config-file"):
        source += f", profile {session.profile or 'default'!r}"
    found = f"{shorten(frozen.access_key)} from {source}"
    if not exam.dead:
        try:
            exam.ask("ListObjectsV2", Prefix=exam.probes.key(""), MaxKeys=1, attempts=1)
        except errors.CredentialsError as error:
            refused = from_error(name, error)
            return replace(refused, found=f"{found}, which the endpoint refuses: {refused.found}")
        except errors.StorageError:
            pass  # later checks say it
    return judge_expiry(name, found, method, expiry_of(credentials), is_temporary=bool(frozen.token), now=time.time())


def judge_expiry(
    name: str, found: str, method: str, expires: float | None, *, is_temporary: bool, now: float
) -> CheckResult:
    """The result for credentials that expire at a time (seconds since the epoch), or of which that is not known."""
    if expires is None and not is_temporary:
        return passed(name, f"{found}; they do not expire")
    if expires is None:
        return warned(name, f"{found}; they are temporary (a session token), until when is not known", _RENEW)
    left = expires - now
    if left <= 0:
        return failed(name, f"{found}; they expired {_minutes(-left)} ago", "get new ones; " + _RENEW)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
    if method in _RENEWED:
        return passed(name, f"{found}; they are renewed, next before {when}")
    return warned(name, f"{found}; they expire in {_minutes(left)} ({when}), and are not renewed", _RENEW)


def _minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def shorten(access_key: str) -> str:
    """An access key id that can be recognised, but not used."""
    return f"{access_key[:4]}...{access_key[-4:]}" if len(access_key) >= 12 else "an access key"


def check_identity(name: str, exam: Examination) -> CheckResult:
    """Whose credentials they are, by STS. Stores other than AWS are asked at their own endpoint: their credentials are
    sent to nobody else."""
    endpoint = str(exam.client.meta.endpoint_url)
    is_aws = is_aws_endpoint(endpoint)
    session = botocore.session.get_session()
    config = Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 1, "mode": "standard"})
    try:
        client: Any = session.create_client(
            "sts",
            region_name=exam.client.meta.region_name or "us-east-1",
            config=config,
            endpoint_url=None if is_aws else endpoint,
        )
        answer: dict[str, Any] = client.get_caller_identity()
    except _STS_ERRORS as error:
        if is_aws and status_code(error) in (400, 401, 403):
            return failed(
                name,
                f"STS does not accept the credentials: {describe(error)}",
                "check the credentials, their expiry, and the clock of this host",
            )
        what = "STS is not reachable from here" if is_aws else "an S3-only endpoint: it has no STS"
        return skipped(name, f"{what}; saves and loads do not need it")
    if not answer.get("Arn"):
        return skipped(name, "an S3-only endpoint: it has no STS; saves and loads do not need it")
    return passed(name, f"{answer['Arn']}, account {answer.get('Account', 'unknown')}")


def is_aws_endpoint(url: str) -> bool:
    """Whether an endpoint is one of AWS."""
    host = url.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
