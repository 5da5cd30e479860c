"""Settings: environment, overrides, clear errors, no secrets. Values: checkpoint URLs, sizes and durations, errors
(which travel by pickle), and the panel of a failure."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, Settings, errors, settings
from dcp_s3.errors import InvalidURLError, SettingsError
from dcp_s3.failures import WIDTH, name_failed, panel
from dcp_s3.limit import Deadline
from dcp_s3.settings import unknown_variables
from dcp_s3.units import format_size, parse_duration, parse_size, plural
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url


def test_environment_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "64MiB")
    monkeypatch.setenv("DCP_S3_READ_TIMEOUT", "2m")
    monkeypatch.setenv("DCP_S3_REGION", "")  # as good as unset
    settings = Settings(concurrency=3)
    assert (settings.part_size, settings.read_timeout, settings.concurrency) == (64 * 2**20, 120.0, 3)
    assert settings.region is None
    assert Settings(part_size="8MiB").part_size == 8 * 2**20
    monkeypatch.setenv("HOME", "/home/me")
    assert Settings(spill_dir="~/spill").spill_dir == "/home/me/spill"  # a shell does not always expand it


def test_the_environment_is_read_when_the_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "5")
    writer = S3StorageWriter("s3://bucket/x")
    monkeypatch.setenv("DCP_S3_CONCURRENCY", "6")
    found = [
        S3StorageReader("s3://bucket/x", settings=given).settings
        for given in (None, {"concurrency": 7}, writer.settings)
    ]
    assert [each.concurrency for each in (writer.settings, *found)] == [5, 6, 7, 5]
    assert found[-1] is writer.settings


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PART_SIZE", "64XB", "64MiB"),
        ("PART_SIZE", "1MiB", "5MiB"),
        ("CONCURRENCY", "many", "whole number"),
        ("CONCURRENCY", "9" * 23, "512"),
        ("CHECKSUM", "crc32c", "crc64nvme"),
        ("ADDRESSING_STYLE", "both", "'path'"),
        ("EXPECTED_BUCKET_OWNER", "me", "12"),
        ("ENDPOINT_URL", "localhost:9000", "http://localhost:9000"),
        ("ENDPOINT_URL", "http://localhost:99999", "port"),
        ("SPILL_DIR", "./spill", "absolute"),
        ("SPILL_DIR", "~nobody-of-that-name/spill", "absolute"),
        ("READ_TIMEOUT", "30d", "86400"),
        ("SAVE_TIMEOUT", "9" * 23, "at most"),
        ("SAVE_TIMEOUT", "-1s", "30s"),
        ("SAVE_TIMEOUT", "nan", "30s"),
        ("SPILL_LIMIT", "99999999999TiB", "at most"),
        ("STAGING_LIMIT", "9" * 400, "at most"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(f"DCP_S3_{name}", value)
    with pytest.raises(SettingsError) as failure:
        S3StorageWriter("s3://bucket/x")
    message = str(failure.value)
    assert f"DCP_S3_{name}" in message
    assert value in message
    assert allowed in message


# --- AWS's own chain -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["minio:9000", "//minio:9000", "http://minio:port"])
def test_an_endpoint_of_awss_variables_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=f"{name} = {value!r}.*http://"):  # before anything is saved or loaded
            S3StorageWriter("s3://bucket/x")
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", "http://localhost:1")  # goes before it
    S3StorageWriter("s3://bucket/x")


@pytest.mark.parametrize("text", ["endpoint_url", "services = mine\n[services mine]\ns3 =\n  endpoint_url"])
def test_an_endpoint_of_a_profile_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{text} = minio:9000\n")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("CONFIG_FILE", str(tmp_path / "config"))):
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(SettingsError, match=r"endpoint_url of profile 'default'.*http://minio:9000"):
        dcp_s3.latest("s3://bucket/x")


def test_an_unknown_setting_lists_those_that_exist() -> None:
    with pytest.raises(SettingsError, match=r"part_sise.*part_size"):
        S3StorageWriter("s3://bucket/x", settings={"part_sise": 1})
    with pytest.raises(SettingsError, match="mapping"):
        S3StorageWriter("s3://bucket/x", settings=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "remedy"), [("DCP_S3_PRT_SIZE", "did you mean DCP_S3_PART_SIZE"), ("DCP_S3_BUCKETS_PER_RANK", "unset it")]
)
def test_a_variable_that_is_no_setting_or_is_one_no_more_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, remedy: str
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv(name, "whatever it was")
    with caplog.at_level(logging.WARNING, "dcp_s3.settings"):
        assert Settings() == Settings()
    [message] = caplog.messages
    assert message.startswith(f"{name} is set but is not a setting of dcp_s3. Remedy: {remedy}")
    assert list(unknown_variables()) == [name]


@pytest.mark.parametrize("value", [True, False])
def test_what_a_writer_is_given_comes_before_its_settings(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setenv("DCP_S3_READER_LEASE", "90s")
    given = {"incremental": not value, "split_replicated": not value, "staging_limit": "50%", "spill_dir": "/nvme"}
    made = Settings(**given, durability="local", save_timeout="1h", max_bandwidth="1GiB", retention="latest:3")
    wanted = made.model_copy(update={"incremental": value, "split_replicated": value})
    monkeypatch.setenv("DCP_S3_READER_LEASE", "20s")  # later: what is made stays as it is
    monkeypatch.setenv("DCP_S3_REGION", "elsewhere")
    assert S3StorageWriter(settings=made, incremental=value, split_replicated=value).settings == wanted
    assert S3StorageWriter(settings=made).settings is made
    writer = S3StorageWriter(settings=given, incremental=value)
    assert (writer.settings.incremental, writer.settings.split_replicated) == (value, not value)
    assert (writer.settings.spill_dir, writer.settings.region) == ("/nvme", "elsewhere")


def test_no_secret_gets_into_repr_or_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHUSH")
    writer = S3StorageWriter("s3://bucket/x")
    shown = repr(writer.settings).encode() + pickle.dumps(writer) + repr(vars(writer)).encode()
    assert b"hush" not in shown.lower()
    with pytest.raises(SettingsError) as failure:
        Settings(endpoint_url="https://user:hush@host")
    assert "hush" not in str(failure.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:hush@host")
    with pytest.raises(SettingsError, match=r"AWS_ENDPOINT_URL = <hidden> .*without credentials") as failure:
        S3StorageReader("s3://bucket/x")
    assert "hush" not in str(failure.value)


# --- URLs ------------------------------------------------------------------------------------------------


def test_parse() -> None:
    access_point = "arn:aws:s3:us-east-1:1:accesspoint/ap"
    for text, bucket, prefix in (
        ("s3://bucket/run/step-1", "bucket", "run/step-1"),
        ("s3://bucket/run/step-1/", "bucket", "run/step-1"),
        ("S3://bucket/x", "bucket", "x"),
        ("s3://bucket", "bucket", ""),
        ("s3://my.bucket/läuf 1/50%+x", "my.bucket", "läuf 1/50%+x"),
        (f"s3://{access_point}/run", access_point, "run"),
    ):
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


def test_sizes_and_durations_and_counts_for_people() -> None:
    for parse, text, value in (
        (parse_size, "64MiB", 64 * 2**20), (parse_size, "64 mib", 64 * 2**20), (parse_size, "5GB", 5 * 10**9),
        (parse_size, "8M", 8 * 2**20), (parse_size, "1.5KiB", 1536), (parse_size, "77", 77), (parse_size, 9, 9),
        (parse_duration, "30s", 30), (parse_duration, "250ms", 0.25), (parse_duration, "5m", 300),
        (parse_duration, "2h", 7200), (parse_duration, "1d", 86400), (parse_duration, 3, 3), (parse_duration, "7", 7),
    ):  # fmt: skip
        assert parse(text) == value
    assert [format_size(n) for n in (5, 1536, 3 * 2**20, 2**40)] == ["5 B", "1.5 KiB", "3.0 MiB", "1.0 TiB"]
    assert [plural(count, "object") for count in (0, 1, 2)] == ["0 objects", "1 object", "2 objects"]
    assert plural(2, "entry") == "2 entries"


@pytest.mark.parametrize(
    "text", ["", "MiB", "1XB", "-5", "1e3", None, True, -1, 10**400, "9" * 400, float("nan"), float("inf"), 2**63]
)
def test_what_is_none_is_refused(text: object) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError, match="expected"):
            parse(text)


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


def test_different_causes_name_their_ranks_and_those_that_failed_because_of_others_are_left_out() -> None:
    failures: dict[int, BaseException] = {0: _denied(0), 2: _denied(2), 1: ZeroDivisionError("in the planner")}
    lines = panel("the save", failures).splitlines()
    assert lines[0] == "the save failed on ranks 0 to 2"
    assert lines[1].startswith("  On ranks 0, 2: AccessDeniedError: ")
    assert "  On rank 1: ZeroDivisionError: in the planner" in lines
    assert name_failed(failures).endswith("; rank 1 cannot go on: ZeroDivisionError: in the planner")
    failures = {0: errors.PeerReadError("rank 1 failed", rank=1), 1: _denied(1)}
    assert panel("the load", failures).startswith("the load failed on rank 1\n  Cause: AccessDeniedError")


@given(st.dictionaries(st.integers(0, 1000), st.text(max_size=3000), min_size=1, max_size=20))
def test_a_panel_is_narrow_and_short_whatever_the_errors_say(texts: dict[int, str]) -> None:
    lines = panel("the save", {rank: ValueError(text) for rank, text in texts.items()}).split("\n")
    words = [word for text in texts.values() for word in text.split()]
    assert all(len(line) <= max(WIDTH, 20 + max(map(len, words), default=0)) for line in lines)
