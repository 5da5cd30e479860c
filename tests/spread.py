"""Checkpoints as earlier versions wrote them with their setting ``prefix_spread``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from dcp_s3.format.layout import data_object, spread
from dcp_s3.save.objects import ObjectNames


@contextlib.contextmanager
def spreading(digits: int = 2) -> Iterator[None]:
    """Saves in the body spread their data over directories of that many hex digits (0: they do not)."""

    def relative_path(names: ObjectNames, number: int) -> str:
        name = data_object(names.rank, number, names.nonce)
        return spread(name, digits) if digits else name

    with mock.patch.object(ObjectNames, "relative_path", relative_path):
        yield
