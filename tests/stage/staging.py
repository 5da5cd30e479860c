"""What the tests of the stager stage."""

from __future__ import annotations

from typing import Any

from dcp_s3 import S3Stager


def stage_once(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    staged = S3Stager(options or None).stage(state)
    assert isinstance(staged, dict)
    return staged


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value
