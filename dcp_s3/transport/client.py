"""boto3 clients: one per process and connection settings, made when first needed.

A writer is pickled into a spawned process and must survive fork, so nothing above this module holds a client.
The cache is keyed by process id: a forked child makes its own clients rather than share sockets.
"""

from __future__ import annotations

import os
import platform
import threading
from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from dcp_s3._version import __version__
from dcp_s3.settings import Settings
from dcp_s3.transport.answers import check_answers
from dcp_s3.transport.body import send_without_copy
from dcp_s3.transport.checksum_support import drop_checksums
from dcp_s3.transport.flight import make_abortable

# A fixed text: botocore's own is put together anew for each request, which takes a sixth of a request's CPU.
_USER_AGENT = f"dcp_s3/{__version__} Boto3/{boto3.__version__} Python/{platform.python_version()}"

# Saves and loads of one process that may overlap before connections are closed rather than kept for reuse.
_SAVES_AT_ONCE = 4

_clients: dict[tuple[int, Settings], Any] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    # A lock held by another thread at the time of the fork would stay locked for ever.
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def config_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of botocore's (and aiobotocore's) Config for these settings.

    Retries are ours (`retry`): botocore must try once. Payload signing is off because every part carries a
    checksum of its own, and hashing it again would cost more than sending it.
    """
    return {
        "connect_timeout": settings.connect_timeout,
        "read_timeout": settings.read_timeout,
        "max_pool_connections": _SAVES_AT_ONCE * settings.concurrency,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False, "addressing_style": settings.addressing_style},
        "user_agent": _USER_AGENT,
    }


def client_options(settings: Settings) -> dict[str, Any]:
    """Endpoint and region as keyword arguments for a client; empty where AWS's own chain decides."""
    options: dict[str, Any] = {}
    if settings.endpoint_url:
        options["endpoint_url"] = settings.endpoint_url
    if settings.region:
        options["region_name"] = settings.region
    return options


def get_client(settings: Settings) -> Any:
    """This process's boto3 S3 client for ``settings``. Thread safe."""
    cache_key = (os.getpid(), settings)
    client = _clients.get(cache_key)
    if client is not None:
        return client
    with _lock:
        client = _clients.get(cache_key)
        if client is None:
            client = _session().client("s3", config=Config(**config_options(settings)), **client_options(settings))
            for operation in ("UploadPart", "PutObject"):
                client.meta.events.register(f"before-send.s3.{operation}", send_without_copy)
            check_answers(client)
            drop_checksums(client, settings.endpoint_url)
            make_abortable(client)
            _clients[cache_key] = client
    return client


def _session() -> Any:
    """A boto3 session of our own: the default one is not safe to create clients from in threads.

    Its answers have times as S3 wrote them: nobody here looks at them, and parsing one costs a tenth of a request.
    """
    core = botocore.session.get_session()
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return boto3.session.Session(botocore_session=core)


def forget_client(settings: Settings) -> None:
    """Let the next `get_client` make a new client, which reads the credentials anew. Requests under way go on."""
    with _lock:
        _clients.pop((os.getpid(), settings), None)


def close_clients() -> None:
    """Close this process's clients and their idle connections. The next request makes new ones."""
    with _lock:
        for client in _clients.values():
            client.close()
        _clients.clear()
