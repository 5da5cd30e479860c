"""What every process of the tests needs and would otherwise do anew: imports, and the parsed description of S3.

The fork server imports this module, and what is forked from it has it all. Nothing here starts a thread or opens a
connection.
"""

from __future__ import annotations

import functools
from typing import Any

import boto3
import botocore.session

import dcp_s3

#: Imported by the fork server: what the functions that ranks run import is mostly this.
MODULES = [
    "fsspec",
    "torch",
    "torch._dynamo",  # imported by the first DTensor: a second of CPU
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._async_process_executor",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "pytest",
    "tests.memory_s3",
    "tests.ranks",
    "tests.preload",
]


def share_service_models() -> None:
    """Let every botocore session of this process use what one has parsed: 70 ms and 8 MB for each client otherwise."""
    botocore.session.create_loader = functools.cache(_uncached)


def _warm_up() -> None:
    for name in dcp_s3.__all__:
        getattr(dcp_s3, name)
    from dcp_s3.s3.client import client_options
    from dcp_s3.settings import Settings

    session = botocore.session.get_session()
    client_options(Settings(), session)
    secrets: Any = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    boto3.Session(botocore_session=session, **secrets).client("s3").close()


_uncached = botocore.session.create_loader
share_service_models()
_warm_up()
