"""The settings of staging: from the environment, and as arguments."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3 import S3Stager, Settings
from dcp_s3.errors import SettingsError
from dcp_s3.stage import stager as stager_module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 * 2**30),
        ("1MiB", 2**20),
        ("2GB", 2 * 10**9),
        ("5000000", 5_000_000),
        ("0.5", 0.5),
        (".25", 0.25),
        ("50%", 0.5),
        ("12.5 %", 0.125),
        ("1.0", 1.0),
        ("100%", 1.0),
        ("", None),
    ],
)
def test_forms_of_the_limit(monkeypatch: pytest.MonkeyPatch, text: str, expected: int | float | None) -> None:
    monkeypatch.setenv("DCP_S3_STAGING_LIMIT", text)
    found = Settings().staging_limit
    assert found == expected
    assert type(found) is type(expected)  # 1.0 is all of the memory, 1 would be a byte


@pytest.mark.parametrize(
    ("value", "expected"), [(2**30, 2**30), (0.5, 0.5), (1.0, 1.0), (4e9, 4 * 10**9), ("50%", 0.5), (None, None)]
)
def test_the_limit_as_an_argument(value: Any, expected: int | float | None) -> None:
    found = Settings(staging_limit=value).staging_limit
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("text", ["0", "-1", "150%", "abc", "1", "0.0", "0%", "1.5", "-0.5", "1e3", "64XB", "%"])
def test_bad_limits_name_the_variable_and_what_is_allowed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DCP_S3_STAGING_LIMIT", text)
    with pytest.raises(SettingsError) as failure:
        S3Stager()
    message = str(failure.value)
    assert "DCP_S3_STAGING_LIMIT" in message
    assert repr(text) in message
    assert "expected" in message


@pytest.mark.parametrize("value", [0, 1, -1, -0.5, 0.0, 1.5, True, [1], float("nan")])
def test_bad_limits_as_arguments(value: Any) -> None:
    with pytest.raises(SettingsError, match="staging_limit"):
        S3Stager({"staging_limit": value})


def test_an_infinite_limit_is_refused() -> None:
    with pytest.raises(SettingsError, match="staging_limit"):
        S3Stager({"staging_limit": float("inf")})


@pytest.mark.parametrize("value", [0, -1, "two", 1.5])
def test_bad_generations(value: Any) -> None:
    with pytest.raises(SettingsError, match="generations"):
        S3Stager(generations=value)


def test_defaults_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    assert (settings.staging_limit, settings.spill_dir) == (None, None)
    monkeypatch.setenv("DCP_S3_STAGING_LIMIT", "2MiB")
    monkeypatch.setenv("DCP_S3_SPILL_DIR", "/somewhere")
    pool = S3Stager()._pool
    assert (pool.limit, pool.generations, pool.spill_dir) == (2**21, 2, "/somewhere")
    assert S3Stager(generations=5)._pool.generations == 5


def test_a_fraction_is_shared_by_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager_module, "measure_available", lambda: 80 * 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert S3Stager({"staging_limit": "50%"})._pool.limit == 10 * 2**20
    assert S3Stager({"staging_limit": "8MiB"})._pool.limit == 8 * 2**20


def test_the_memory_is_measured_only_for_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("not Linux")

    monkeypatch.setattr(stager_module, "measure_available", fail)
    assert S3Stager({"staging_limit": "8MiB"})._pool.limit == 8 * 2**20
    assert S3Stager()._pool.limit is None
    with pytest.raises(OSError, match="not Linux"):
        S3Stager({"staging_limit": 0.5})
