"""Several objects of a small state, which would be one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.planner import WriteItem

from dcp_s3.save.plan import WriteBucket, plan_buckets


@contextlib.contextmanager
def separate_objects(*prefixes: str) -> Iterator[None]:
    """Saves in the body give what begins with each of ``prefixes`` an object of its own."""

    def plan(items: Sequence[WriteItem], **options: Any) -> list[WriteBucket]:
        groups: dict[str, list[WriteItem]] = {}
        for item in items:
            prefix = next((each for each in prefixes if item.index.fqn.startswith(each)), "")
            groups.setdefault(prefix, []).append(item)
        return [bucket for group in groups.values() for bucket in plan_buckets(group, **options)]

    with mock.patch("dcp_s3.save.save.plan_buckets", plan):
        yield
