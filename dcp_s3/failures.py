"""What failed on which ranks, in a few words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dcp_s3.errors import PeerReadError

_MOST_CAUSES = 3
_MOST_TEXT = 1000
# Hex names, sizes and times differ from rank to rank even if the cause is the same.
_OWN = re.compile(r"[0-9a-f]*\d[0-9a-f]*")


def explain(failures: Mapping[int, BaseException]) -> str:
    """``on rank 1: AccessDeniedError: ...``. Ranks with the same cause share one entry, in the words of the first."""
    return "; ".join(f"on {ranks}: {cause}" for ranks, cause in _causes(failures))


def name_failed(failures: Mapping[int, BaseException]) -> str:
    """``rank 1 cannot go on: ZeroDivisionError: ...``."""
    return "; ".join(f"{ranks} cannot go on: {cause}" for ranks, cause in _causes(failures))


def _causes(failures: Mapping[int, BaseException]) -> list[tuple[str, str]]:
    """Ranks and cause."""
    causes = real_causes(failures)
    alike: dict[tuple[type, str], list[int]] = {}
    for rank, error in causes.items():
        alike.setdefault((type(error), _OWN.sub("#", str(error))), []).append(rank)
    told = [(_name(ranks), _tell(causes[ranks[0]])) for ranks in alike.values()]
    left = sorted(rank for ranks in list(alike.values())[_MOST_CAUSES:] for rank in ranks)
    return told[:_MOST_CAUSES] + ([(_name(left), "other causes")] if left else [])


def real_causes(failures: Mapping[int, BaseException]) -> dict[int, BaseException]:
    """Leave out the ranks that failed only because another one did, unless all of them say so."""
    causes = {rank: error for rank, error in failures.items() if not isinstance(error, PeerReadError)}
    return causes or dict(failures)


def _tell(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _name(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 to 7, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    several = len(runs) > 1 or runs[0][0] != runs[0][1]
    named = (str(first) if first == last else f"{first} to {last}" for first, last in runs)
    return f"rank{'s' if several else ''} {', '.join(named)}"
