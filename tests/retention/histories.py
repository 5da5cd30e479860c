"""Random runs for property tests."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.retention.plan import LeftoverObject, OpenUpload
from dcp_s3.retention.policy import (
    AnyOf,
    KeepBest,
    KeepDaily,
    KeepEvery,
    KeepLatest,
    KeepWithin,
    Policy,
)

NOW = 1_700_000_000.0
DAY = 86400.0


def info(name: str = "step-1", **fields: Any) -> CheckpointInfo:
    """A committed checkpoint an hour old."""
    step = int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdigit() else None
    usual: dict[str, Any] = {
        "state": "committed", "step": step, "created_at": NOW - 3600, "world_size": 1, "objects": 1, "size": 10,
        "modified_at": NOW - 3600, "save_id": "ab", "etag": '"e"',
    }  # fmt: skip
    return CheckpointInfo(url=f"s3://bucket/run/{name}", name=name, **(usual | fields))


_times = st.one_of(
    st.none(), st.floats(NOW - 100 * DAY, NOW), st.floats(NOW, NOW + 10 * DAY), st.sampled_from([0.0, NOW, math.nan])
)
_values = st.one_of(
    st.floats(-3, 3),
    st.integers(-3, 3),
    st.booleans(),
    st.sampled_from([math.nan, math.inf, -math.inf, "good", 10**400]),
)
_infos = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["committed"] * 6 + ["incomplete", "in_progress", "leftover", "local"]),
        "step": st.one_of(st.none(), st.integers(0, 60)),
        "created_at": _times,
        "modified_at": _times,
        "written_at": _times,
        "metrics": st.dictionaries(st.sampled_from(["loss", "acc"]), _values),
        "pinned": st.sampled_from([False] * 9 + [True]),
        "leased_until": st.one_of(st.none(), st.none(), st.floats(NOW - 200, NOW + 200)),
        "waiting": st.sampled_from([False] * 9 + [True]),
        "damage": st.sampled_from([None, None, None, "broken"]),
        "foreign": st.booleans(),
    }
)


def histories() -> st.SearchStrategy[list[CheckpointInfo]]:
    """Checkpoints of one root, in any order of step and time."""
    return st.lists(_infos, max_size=12).map(
        lambda found: [info(f"c{number}", **fields) for number, fields in enumerate(found)]
    )


_counts = st.integers(1, 6)
single_policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(KeepLatest, _counts),
    st.builds(KeepBest, _counts, st.sampled_from(["loss", "acc", "x:y"]), st.sampled_from(["min", "max"]),
              st.sampled_from(["keep", "drop"])),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepWithin, st.integers(0, 50 * 86400)),
    st.builds(KeepDaily, _counts),
)  # fmt: skip
policies: st.SearchStrategy[Policy] = st.one_of(
    single_policies, st.lists(single_policies, min_size=1, max_size=3).map(lambda found: AnyOf(tuple(found)))
)

_places = st.integers(0, 14).map(lambda number: f"c{number}")
uploads = st.lists(
    st.builds(
        lambda place, number, time: OpenUpload(f"run/{place}/__{number}_0-ab.distcp", f"u{number}", time, place),
        _places, st.integers(0, 99), st.floats(NOW - 3 * DAY, NOW + 60),
    ),
    max_size=5,
)  # fmt: skip
leftovers = st.lists(
    st.builds(
        lambda place, number, time, lease: LeftoverObject(f"run/{place}/{number}", 5, time, place, is_lease=lease),
        _places, st.integers(0, 99), st.floats(NOW - 3 * DAY, NOW + 60), st.booleans(),
    ),
    max_size=5,
)  # fmt: skip
