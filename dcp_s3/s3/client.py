"""boto3 clients: one for each endpoint that a process talks to, made when first needed; and AWS's own configuration.

A client is keyed only by what its connections depend on, so that saves and loads with other settings or limits share
them. A writer is pickled and must survive fork: nothing above this module holds a client, and a forked child makes its
own rather than share sockets. Each client detects answers that are not S3's, before anything is concluded from them.
"""

from __future__ import annotations

import functools
import platform
import re
import threading
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import boto3
import botocore.exceptions as boto
import botocore.loaders
import botocore.session
from botocore.config import Config

from dcp_s3.errors import SettingsError
from dcp_s3.process import __version__, reset_in_child
from dcp_s3.s3.botocore_private import make_abortable, send_without_copy
from dcp_s3.s3.retry import CONNECT_SECONDS, this_thread
from dcp_s3.settings import Settings, aws_endpoint_variable, aws_variable, require_endpoint

# A fixed text: botocore builds its own for each request, which takes a sixth of a request's CPU.
_USER_AGENT = f"dcp_s3/{__version__} Boto3/{boto3.__version__} Python/{platform.python_version()}"

# Idle connections that are kept: more than the highest concurrency of several saves and loads at once. An upper bound
# only: there are as many idle connections as requests were in flight.
_MOST_CONNECTIONS = 4 * 512
# A client costs about 4 MB. A process talks to one endpoint or two; beyond that the oldest client is dropped.
_MOST_CLIENTS = 8


_Key = tuple[str | None, ...]
_clients: dict[_Key, Any] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _clients.clear()


_load_descriptions = functools.cache(botocore.loaders.create_loader)


def client_options(settings: Settings, session: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments for a client of a botocore session, and for its Config. The session is changed.

    `retry` does the retries: botocore must try only once. Payload signing is off because every part carries a checksum
    of its own, and hashing it again would cost more than sending it. Endpoint and region are left to AWS's own chain
    where the settings have none.
    """
    # Parsed service descriptions are shared: each client would take 70 ms and 8 MB for its own. Times stay as S3 wrote
    # them: parsing one costs a tenth of a request (`bucket.timestamp` does it where one is needed).
    session.register_component("data_loader", _load_descriptions(session.get_config_variable("data_path")))
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    if not settings.endpoint_url:
        find_endpoint(session)  # raises if it is not valid: botocore has a bare ValueError for it
    options = {"endpoint_url": settings.endpoint_url, "region_name": settings.region}
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": settings.read_timeout,
        "max_pool_connections": _MOST_CONNECTIONS,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False, "addressing_style": settings.addressing_style},
        "user_agent": _USER_AGENT,
    }
    return {name: value for name, value in options.items() if value}, config


def get_client(settings: Settings) -> Any:
    """This process's boto3 S3 client for the endpoint of ``settings``. Thread safe."""
    endpoint = settings.endpoint_url or ":".join(aws_endpoint_variable() or ())
    key = endpoint, settings.region, settings.addressing_style
    client = _clients.get(key)
    if client is None:
        with _lock:
            client = _clients.get(key)
            if client is not None:
                return client
            core = botocore.session.Session()  # creating clients from the default one: not thread safe
            options, config = client_options(settings, core)
            client = boto3.session.Session(botocore_session=core).client("s3", config=Config(**config), **options)
            for operation in _WRITES:
                client.meta.events.register(f"before-send.s3.{operation}", send_without_copy)
            client.meta.events.register("before-parse.s3.*", _check)
            make_abortable(client)
            _clients[key] = client
            if len(_clients) > _MOST_CLIENTS:
                _clients.pop(next(iter(_clients))).close()  # requests under way go on
    return client


def forget_client(client: Any) -> None:
    """Let the next `get_client` make a new client, which reads the credentials again. Requests under way go on."""
    with _lock:
        for key in [key for key, each in _clients.items() if each is client]:
            del _clients[key]


# --- AWS's own chain: its variables, then the profile, where the settings say nothing ------------------


class ChainValue(NamedTuple):
    """A value from the chain."""

    source: str
    """Where the value is set: a variable, or a field of a profile."""
    value: str
    """The value itself."""


def find_endpoint(session: Any) -> ChainValue | None:
    """The endpoint of S3 that botocore will choose; None for AWS's own. SettingsError if it is not valid."""
    found = None
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    if (variable := aws_endpoint_variable()) is not None:
        found = ChainValue(*variable)
    else:
        profile = session.get_scoped_config()
        of_s3 = session.full_config.get("services", {}).get(profile.get("services"), {}).get("s3")
        value = (of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None) or profile.get("endpoint_url")
        if value:
            found = ChainValue(f"endpoint_url of {_profile(session)}", str(value))
    if found is not None:
        require_endpoint(found.source, found.value)
    return found


def find_chain(settings: Settings) -> dict[str, ChainValue]:
    """The chain's values for the settings that are left to it, by setting name."""
    session, found = botocore.session.Session(), dict[str, ChainValue | None]()
    try:
        session.get_scoped_config()  # raises if the profile is missing, even if nothing of it is needed
        if settings.endpoint_url is None:
            found["endpoint_url"] = find_endpoint(session)
        if settings.region is None and (variable := aws_variable("AWS_DEFAULT_REGION")) is not None:
            found["region"] = ChainValue(*variable)
        elif settings.region is None and (value := session.get_config_variable("region")):
            found["region"] = ChainValue(f"region of {_profile(session)}", str(value))
    except boto.BotoCoreError as error:
        raise SettingsError(f"AWS's own configuration cannot be read: {error}") from None
    return {name: each for name, each in found.items() if each is not None}


def _profile(session: Any) -> str:
    return f"profile {session.profile or 'default'!r} in {session.get_config_variable('config_file')}"


# --- answers that are not S3's, or not whole ------------------------------------------------------------

# A proxy or a captive portal may answer in place of S3: with a 200 and its own page, or with a 404. And http.client
# takes a connection that ends inside the headers for the end of the headers. botocore reads either as a short answer:
# an object that was stored, an empty listing, an ETag cut in half. Here each answer must have what S3's has. One that
# lacks it counts as a 500, so that the request is retried.

# Statuses of operations that succeeded: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
_STATUS = {"AbortMultipartUpload": (204,), "DeleteObject": (204,), "GetObject": (200, 206), "HeadObject": (200, 206)}
_READS, _WRITES = frozenset({"GetObject", "HeadObject"}), frozenset({"PutObject", "UploadPart"})
_WITH_ETAG = _READS | _WRITES
# Start of the name of the answer's root: stores differ in the rest of it (Result, Response, nothing).
_ROOTS = {
    "CompleteMultipartUpload": b"CompleteMultipartUpload",
    "CreateMultipartUpload": b"InitiateMultipartUpload",
    "DeleteObjects": b"Delete",
    "GetBucketEncryption": b"ServerSideEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": b"LifecycleConfiguration",
    "GetObjectLockConfiguration": b"ObjectLockConfiguration",
    "ListMultipartUploads": b"ListMultipartUploads",
    "ListObjectVersions": b"ListVersions",
    "ListObjectsV2": b"ListBucket",
}
# Element that asks for the next page; each page but the last must have it.
_NEXT = {
    "ListMultipartUploads": b"NextKeyMarker>",
    "ListObjectsV2": b"NextContinuationToken>",
}
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})


def _check(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """botocore ``before-parse`` handler: make a failure of an answer that is not S3's, or not whole, and of one that
    says that something else was stored than what was sent."""
    operation = operation_model.name
    status, headers, body = response_dict["status_code"], response_dict["headers"], response_dict["body"]
    code, message, root = "", "", b""
    # The name of an XML document's root, if the document has an end. The inside is not looked at.
    if isinstance(body, bytes) and (found := _ROOT.match(body)):
        has_end = re.search(rb"</(?:\w+:)?" + found[1] + rb"\s*>\s*$", body[-200:])
        root = found[1] if has_end or _CLOSED.match(body, found.end(1)) else b""
    if status >= 301:  # botocore takes a 300 for a success
        is_error = root == b"Error"
        # S3 says where the bucket is. If a redirection does not, botocore asks, and so on for the answer to that.
        if status in _REDIRECTIONS and "x-amz-bucket-region" not in headers and not is_error:
            code = "NotAnsweredByS3"
        elif not operation.startswith("Head"):  # an answer to HEAD has no body
            # A 404 is an answer on which a save or a prune acts: it may mean a missing bucket, object or upload, and
            # the body says which. Other refusals are errors, whoever gives them.
            may_be = status != 404 or is_error
            if not (may_be if body else headers.get("content-length") == "0"):
                code = "NotAnsweredByS3"
    elif operation in _ROOTS:
        is_last = operation not in _NEXT or not _TRUNCATED.search(body) or _NEXT[operation] in body
        has_id = operation != "CreateMultipartUpload" or b"UploadId>" in body
        is_whole = status == 200 and root.startswith(_ROOTS[operation]) and has_id and is_last
        if not is_whole and root != b"Error":  # S3 began to answer before it failed: botocore makes an error of it
            code = "NotAnsweredByS3"
    else:
        etag, length = headers.get("etag", ""), headers.get("content-length", "")
        if (
            status not in _STATUS.get(operation, (200,))
            or (operation in _WITH_ETAG and (not etag or (etag[0] == '"') != (len(etag) > 1 and etag[-1] == '"')))
            or (operation in _READS and not length.isdigit() and "transfer-encoding" not in headers)
            or (operation == "HeadObject" and not _TIME.fullmatch(headers.get("last-modified", "")))
            or (operation in _WRITES and body.strip())
        ):
            code = "NotAnsweredByS3"
        elif operation in _WRITES:
            for name, sent in this_thread.checksums.items():
                stored = headers.get(name, sent)  # stores that know a checksum send it back
                if stored != sent:
                    code = "BadDigest"
                    message = f"what was stored has another checksum: {name} is {stored}, expected {sent}"
    if code:
        kind = f", type {headers['content-type']}" if headers.get("content-type") else ""
        if hasattr(body, "close"):
            body.close()
        elif body:
            kind += f", beginning with {body[:40].decode('utf-8', 'replace')!r}"
        message = message or (
            f"the answer, with status {status}{kind}, is none of S3's to {operation}, or not whole. Either it was cut "
            "off, or a proxy or captive portal on the way gave it in the place of S3"
        )
        text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        response_dict["status_code"], response_dict["body"] = 500, text.encode()


_TIME = re.compile(r"\w{3}, \d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d \w{3}")
_TRUNCATED = re.compile(rb"IsTruncated>\s*true\s*<", re.IGNORECASE)
_ROOT = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<(?:\w+:)?(\w+)[\s/>]", re.DOTALL)
_CLOSED = re.compile(rb"[^<]*/>\s*$")
