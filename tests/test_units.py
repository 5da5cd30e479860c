"""Sizes and durations as people write them."""

import pytest

from dcp_s3.units import format_size, parse_duration, parse_size, plural


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("5GB", 5 * 10**9),
        ("8M", 8 * 2**20),
        ("1.5KiB", 1536),
        ("77", 77),
        (9, 9),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "1XB", "-5", "1e3", "0.3", None, True, -1, 1.5, 10**400, 2**63, "8EiB", "9" * 400]
)
def test_bad_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("250ms", 0.25), ("5m", 300), ("2h", 7200), ("1d", 86400), (3, 3), ("7", 7)]
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 parsecs", "-1s", None, False, -2, float("nan"), float("inf"), 1e23, 10**400, "9" * 400, "3651d"],
)
def test_bad_durations_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_duration(text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (5, 1536, 3 * 2**20, 2**40)] == ["5 B", "1.5 KiB", "3.0 MiB", "1.0 TiB"]


def test_counts_are_in_the_right_number() -> None:
    assert [plural(count, "object") for count in (0, 1, 2)] == ["0 objects", "1 object", "2 objects"]
    assert [plural(count, "entry") for count in (1, 2)] == ["1 entry", "2 entries"]
