"""One Settings object: environment, overrides, clear errors, no secrets."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, Settings, settings
from dcp_s3.errors import SettingsError
from dcp_s3.settings import unknown_variables


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
    assert writer.settings.concurrency == 5
    assert S3StorageReader("s3://bucket/x").settings.concurrency == 6
    assert S3StorageReader("s3://bucket/x", settings={"concurrency": 7}).settings.concurrency == 7
    assert S3StorageReader("s3://bucket/x", settings=writer.settings).settings is writer.settings


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


@pytest.mark.parametrize(
    "text",
    [
        "[default]\nendpoint_url = minio:9000\n",
        "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = minio:9000\n",
    ],
)
def test_an_endpoint_of_a_profile_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
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
