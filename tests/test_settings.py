"""One Settings object: environment, overrides, clear errors, no secrets."""

import logging
import pickle

import pytest

from dcp_s3 import S3StorageReader, S3StorageWriter, Settings
from dcp_s3.errors import SettingsError


def test_environment_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "64MiB")
    monkeypatch.setenv("DCP_S3_READ_TIMEOUT", "2m")
    monkeypatch.setenv("DCP_S3_REGION", "")  # as good as unset
    settings = Settings(concurrency=3)
    assert (settings.part_size, settings.read_timeout, settings.concurrency) == (64 * 2**20, 120.0, 3)
    assert settings.region is None
    assert Settings(part_size="8MiB").part_size == 8 * 2**20


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
        ("PART_SIZE", "1MiB", "5242880"),
        ("CONCURRENCY", "many", "integer"),
        ("CHECKSUM", "md5", "crc64nvme"),
        ("ADDRESSING_STYLE", "both", "'path'"),
        ("CONNECT_TIMEOUT", "soon", "30s"),
        ("EXPECTED_BUCKET_OWNER", "me", "12"),
        ("ENDPOINT_URL", "localhost:9000", "http://"),
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


def test_an_unknown_setting_lists_those_that_exist() -> None:
    with pytest.raises(SettingsError, match=r"part_sise.*part_size"):
        S3StorageWriter("s3://bucket/x", settings={"part_sise": 1})
    with pytest.raises(SettingsError, match="mapping"):
        S3StorageWriter("s3://bucket/x", settings=3)  # type: ignore[arg-type]


def test_a_misspelled_variable_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DCP_S3_PARTSIZE", "64MiB")
    with caplog.at_level(logging.WARNING, "dcp_s3.settings"):
        Settings()
    assert "DCP_S3_PARTSIZE" in caplog.text


def test_no_secret_gets_into_repr_or_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHUSH")
    writer = S3StorageWriter("s3://bucket/x")
    shown = repr(writer.settings).encode() + pickle.dumps(writer) + repr(vars(writer)).encode()
    assert b"hush" not in shown.lower()
    with pytest.raises(SettingsError) as failure:
        Settings(endpoint_url="https://user:hush@host")
    assert "hush" not in str(failure.value)
