"""Values: checkpoint URLs, sizes and durations, errors (which travel by pickle), and the panel of a failure."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.errors import InvalidURLError
from dcp_s3.failures import WIDTH, name_failed, panel
from dcp_s3.limit import Deadline
from dcp_s3.units import format_size, parse_duration, parse_size, plural
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url

# --- URLs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        ("s3://bucket/run/step-1", "bucket", "run/step-1"),
        ("s3://bucket/run/step-1/", "bucket", "run/step-1"),
        ("S3://bucket/x", "bucket", "x"),
        ("s3://bucket", "bucket", ""),
        ("s3://my.bucket/läuf 1/50%+x", "my.bucket", "läuf 1/50%+x"),
        ("s3://arn:aws:s3:us-east-1:1:accesspoint/ap/run", "arn:aws:s3:us-east-1:1:accesspoint/ap", "run"),
    ],
)
def test_parse(text: str, bucket: str, prefix: str) -> None:
    assert parse_url(text) == CheckpointURL(bucket, prefix)


@pytest.mark.parametrize(
    "text",
    [
        "", "bucket/x", "/tmp/x", "gs://bucket/x", "s3://", "s3:///x", "s3://b_/../x", "s3://bucket//x",
        "s3://bucket/a/./b", "s3://bucket/../b", "s3://bucket/" + "k" * 1000, {"the": "state"},
    ],
    ids=repr,
)  # fmt: skip
def test_bad_urls_name_what_is_expected(text: Any) -> None:
    with pytest.raises(InvalidURLError, match=r"s3://|bytes|segment"):
        parse_url(text)


def test_a_path_of_pathlib_is_the_url_that_it_was_made_of() -> None:
    for url in ("s3://bucket/run/step-1", "s3://bucket"):
        folded = PurePosixPath(url)
        assert is_s3_url(folded)
        assert str(parse_url(folded)) == str(parse_url(str(folded))) == url
    for path in (Path("/s3:/bucket/x"), Path("s3/bucket"), "s3:bucket/x", b"s3:/bucket/x", None):
        assert not is_s3_url(path)
        with pytest.raises(InvalidURLError, match="expected s3://bucket/prefix"):
            parse_url(path)  # type: ignore[arg-type]


_SEGMENT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=12)


@given(st.lists(_SEGMENT.filter(lambda segment: segment not in (".", "..")), min_size=1, max_size=6))
def test_any_key_survives_a_round_trip(segments: list[str]) -> None:
    url = CheckpointURL("bucket", "/".join(segments))
    assert parse_url(str(url)) == url


# --- sizes and durations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "64MiB", 64 * 2**20), (parse_size, "64 mib", 64 * 2**20), (parse_size, "5GB", 5 * 10**9),
        (parse_size, "8M", 8 * 2**20), (parse_size, "1.5KiB", 1536), (parse_size, "77", 77), (parse_size, 9, 9),
        (parse_duration, "30s", 30), (parse_duration, "250ms", 0.25), (parse_duration, "5m", 300),
        (parse_duration, "2h", 7200), (parse_duration, "1d", 86400), (parse_duration, 3, 3), (parse_duration, "7", 7),
    ],
)  # fmt: skip
def test_sizes_and_durations(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text", ["", "MiB", "1XB", "-5", "1e3", None, True, -1, 10**400, "9" * 400, float("nan"), float("inf"), 2**63]
)
def test_what_is_none_is_refused(text: object) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError, match="expected"):
            parse(text)


def test_sizes_and_counts_for_people() -> None:
    assert [format_size(n) for n in (5, 1536, 3 * 2**20, 2**40)] == ["5 B", "1.5 KiB", "3.0 MiB", "1.0 TiB"]
    assert [plural(count, "object") for count in (0, 1, 2)] == ["0 objects", "1 object", "2 objects"]
    assert plural(2, "entry") == "2 entries"


# --- errors ----------------------------------------------------------------------------------------------


def test_errors_are_one_hierarchy_and_travel_by_pickle() -> None:
    public = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    values: dict[Any, Any] = {"int": 3, "str": "b", "float": 0.5}
    for kind in public:
        assert issubclass(kind, errors.DcpS3Error)
        declared = {name: type(getattr(kind, name)).__name__ for name in dir(kind) if not name.startswith("_")}
        given = {name: values[found] for name, found in declared.items() if found in values}
        error = kind("text", **given)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (kind, "text", vars(error))
        assert set(given) <= set(vars(copy))
    with pytest.raises(TypeError, match="SettingsError has no attribute 'url'"):
        errors.SettingsError("text", url="s3://b/x")


def test_a_deadline_names_its_setting_or_what_else_one_can_do() -> None:
    assert str(Deadline("DCP_S3_SAVE_TIMEOUT", 9.0, 0.0).error("the save", "1 of 2 parts")) == (
        "the save was not done within DCP_S3_SAVE_TIMEOUT = 9 s: 1 of 2 parts. Remedy: raise or unset "
        "DCP_S3_SAVE_TIMEOUT, or check the endpoint and the network"
    )
    assert str(Deadline("", 450.0, 0.0).error("the deletion")) == (
        "the deletion was not done within 450 s. Remedy: check the endpoint and the network, and try again"
    )


# --- failures --------------------------------------------------------------------------------------------


_STEP = "s3://bucket/run/step-00001000"


def _denied(rank: int) -> errors.AccessDeniedError:
    return errors.AccessDeniedError(
        f"PutObject on {_STEP}/__{rank}_0-ab{rank}f.distcp failed: AccessDenied. Remedy: the role needs s3:PutObject"
    )


def test_equal_causes_of_all_ranks_are_told_once() -> None:
    text = panel(
        f"the save of step 1000 to {_STEP}",
        {rank: _denied(rank) for rank in range(512)},
        left="nothing",
        last_good="step 900",
        resume="manager.restore(state)",
    )
    assert text.splitlines() == [
        f"the save of step 1000 to {_STEP} failed on ranks 0 to 511",
        f"  Cause: AccessDeniedError: PutObject on {_STEP}/__0_0-ab0f.distcp failed:",
        "    AccessDenied",
        "  Remedy: the role needs s3:PutObject",
        "  Left: nothing",
        "  Last good: step 900",
        "  Resume: manager.restore(state)",
    ]


def test_different_causes_name_their_ranks() -> None:
    failures: dict[int, BaseException] = {0: _denied(0), 2: _denied(2), 1: ZeroDivisionError("in the planner")}
    lines = panel("the save", failures).splitlines()
    assert lines[0] == "the save failed on ranks 0 to 2"
    assert lines[1].startswith("  On ranks 0, 2: AccessDeniedError: ")
    assert "  On rank 1: ZeroDivisionError: in the planner" in lines
    assert name_failed(failures).endswith("; rank 1 cannot go on: ZeroDivisionError: in the planner")


def test_a_rank_that_failed_because_of_another_one_is_left_out() -> None:
    failures: dict[int, BaseException] = {0: errors.PeerReadError("rank 1 failed", rank=1), 1: _denied(1)}
    assert panel("the load", failures).startswith("the load failed on rank 1\n  Cause: AccessDeniedError")


@given(st.dictionaries(st.integers(0, 1000), st.text(max_size=3000), min_size=1, max_size=20))
def test_a_panel_is_narrow_and_short_whatever_the_errors_say(texts: dict[int, str]) -> None:
    lines = panel("the save", {rank: ValueError(text) for rank, text in texts.items()}).split("\n")
    words = [word for text in texts.values() for word in text.split()]
    assert all(len(line) <= max(WIDTH, 20 + max(map(len, words), default=0)) for line in lines)
