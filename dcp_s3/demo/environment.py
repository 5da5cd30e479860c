"""The environment of the demo, which is a program of its own: it leads itself and its training to its server."""

from __future__ import annotations

import os

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Small parts, few at a time: a state of 60 MB is then uploaded like one of many gigabytes, in several multipart uploads
# at once, and takes long enough to be interrupted.
_UPLOADS = {"DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "1"}


def lead_to(endpoint_url: str) -> None:
    """Replace everything in the environment that leads to a real S3: the demo must not go there unasked."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "DCP_S3_")) or name.lower() in _PROXIES:
            del os.environ[name]
    os.environ |= {
        "DCP_S3_ENDPOINT_URL": endpoint_url,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def slow_uploads_down() -> None:
    """Make uploads long enough to be interrupted, unless the user has set how they go."""
    for name, value in _UPLOADS.items():
        os.environ.setdefault(name, value)
