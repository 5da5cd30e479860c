"""A failed staging that travels through DCP, so that every rank learns of it.

If `stage` raised on one rank, the others would wait forever for it in the collectives of the save. So with several
ranks it returns a `FailedStaging` instead of a copy. This looks like a state until the save is in its first collective
step. There it raises on its rank, and the save fails on all ranks with the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NoReturn
from uuid import uuid4

from dcp_s3.errors import StagingError
from dcp_s3.stage.turns import StagedDict
from dcp_s3.tracebacks import portable, without_tracebacks

logger = logging.getLogger(__name__)

MARK = "__dcp_s3_staging_failed__"

_failures: dict[str, BaseException] = {}


class _RaiseWhenSaved:
    """Raises the cause when it is pickled, by any planner or writer."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        logger.error("a state could not be staged: %s: %s", type(self._error).__name__, self._error)
        raise self._error


class FailedStaging(StagedDict):
    """The state returned for a staging that failed.

    Args:
        error: the cause.
    """

    def __init__(self, error: BaseException) -> None:
        if portable(error) is None:
            error = StagingError(f"{type(error).__name__}: {error}")
        without_tracebacks(error)
        self.error = error
        # Unique: a plan that DCP cached for one failure must not be taken for that of another.
        self.name = f"{MARK}{uuid4().hex}"
        super().__init__({self.name: _RaiseWhenSaved(error)})
        _failures[self.name] = error


def forget(state: FailedStaging) -> None:
    """Drop a failure that another process will raise."""
    _failures.pop(state.name, None)


def raise_if_failed(names: Iterable[str]) -> None:
    """Raise the cause if one of ``names``, the FQNs of a plan, marks a failed staging of this process."""
    for name in names:
        if name.startswith(MARK):
            error = _failures.pop(name, None)
            if error is not None:
                raise error
