"""Quirks of stores: features that this process has found some of them to lack.

A store that lacks something is recognised by its answers, not by its name. A new quirk needs a new `Quirk` here, and
one place in its operation that calls `learn`, and `knows` if later requests are to differ.
"""

from __future__ import annotations

import enum
import logging
from typing import Protocol

from dcp_s3.forking import reset_in_child
from dcp_s3.settings import Settings

logger = logging.getLogger(__name__)


class Place(Protocol):
    """A bucket as some settings reach it."""

    @property
    def name(self) -> str:
        """Name of the bucket."""

    @property
    def settings(self) -> Settings:
        """Settings by which the bucket is reached."""


class Quirk(enum.Enum):
    """Features that a store may lack, with the message that is logged once for each bucket.

    The message has the store's endpoint and answer.
    """

    NO_CONDITIONAL_WRITES = (
        "%s does not know conditional writes (If-None-Match, If-Match): two jobs that save to one URL at one time will "
        "not be told apart%s"
    )
    NO_CHECKSUMS = (
        "%s refuses checksums (x-amz-checksum-*): parts are sent without, so that it cannot notice damage on the way. "
        "Loads check what they get, as always%s"
    )
    NO_BATCH_DELETES = "%s has no DeleteObjects: objects are deleted one by one%s"
    NO_UPLOAD_LISTS = "%s does not list multipart uploads: those that were left open may cost storage%s"


_known: dict[tuple[Quirk, str | None, str], bool] = {}
reset_in_child(_known.clear)


def knows(quirk: Quirk, place: Place) -> bool:
    """Whether the store of this bucket has shown the quirk."""
    return (quirk, place.settings.endpoint_url, place.name) in _known


def learn(quirk: Quirk, place: Place, why: Exception | None = None) -> None:
    """Note that the store of this bucket has the quirk; ``why`` is its answer, for the log."""
    key = (quirk, place.settings.endpoint_url, place.name)
    if key in _known:
        return
    _known[key] = True
    logger.warning(quirk.value, place.settings.endpoint_url or "the S3 endpoint", "" if why is None else f": {why}")


def forget() -> None:
    """Forget all quirks."""
    _known.clear()
