"""Carries an error past DCP's loader, which would replace what `read_metadata` raises."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors


class UnreadableMetadata(Metadata):
    """Stands in for metadata that could not be read; raises the reason as soon as it is used."""

    def __init__(self, error: errors.DcpS3Error) -> None:
        object.__setattr__(self, "_reason", error)

    def fail(self) -> NoReturn:
        raise object.__getattribute__(self, "_reason")

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "state_dict_metadata",
            "planner_data",
            "storage_data",
            "storage_meta",
            "version",
        ):
            UnreadableMetadata.fail(self)
        return object.__getattribute__(self, name)
