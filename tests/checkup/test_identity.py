"""Where credentials come from and how long they hold. Never what they are."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from dcp_s3.checkup.host import check_credentials, is_aws_endpoint, judge_expiry
from dcp_s3.checkup.probes import CheckResult, Examination
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.servers.process import free_port

KEY, SECRET, TOKEN = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-EXAMPLEKEY", "a-session-token-EXAMPLE"


def check() -> CheckResult:
    return check_credentials(
        Examination(parse_url("s3://bucket/run"), False, None, Settings(endpoint_url=f"http://127.0.0.1:{free_port()}"))
    )


def set_key(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    names = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, **more}
    for name, value in names.items():
        monkeypatch.setenv(name, value)


def test_lasting_ones_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)
    found = check()
    assert found.status == "ok"
    assert found.found == "AKIA...MPLE from the environment (AWS_ACCESS_KEY_ID); they do not expire"


def test_those_of_a_profile_are_named_by_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[trainer]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    assert "shared-credentials-file, profile 'trainer'" in check().found


def test_temporary_ones_without_a_known_end_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch, AWS_SESSION_TOKEN=TOKEN)
    found = check()
    assert found.status == "warning"
    assert "temporary" in found.found
    assert TOKEN not in str(found)


def test_temporary_ones_with_an_end_are_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that botocore still keeps the end where `expiry_of` looks for it."""
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=5, minutes=30, seconds=30)
    set_key(monkeypatch, AWS_SESSION_TOKEN=TOKEN, AWS_CREDENTIAL_EXPIRATION=end.isoformat())
    found = check()
    assert found.status == "warning"
    assert "they expire in 5 h 30 min" in found.found
    assert "instance or pod role" in found.remedy


@pytest.mark.parametrize(("method", "status"), [("iam-role", "ok"), ("sso", "warning")])
def test_those_that_are_renewed_are_good(method: str, status: str) -> None:
    assert judge_expiry("x", method, 7200.0, is_temporary=True, now=3600.0).status == status
    assert judge_expiry("x", method, 3600.0, is_temporary=True, now=7200.0).status == "failed"


def test_nothing_that_could_be_used_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch, AWS_ACCESS_KEY_ID="short")
    found = check().found
    assert found.startswith("an access key from")
    assert "short" not in found


@pytest.mark.parametrize(
    ("url", "is_aws"),
    [
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("http://127.0.0.1:9000", False),
        ("https://amazonaws.com.example.org", False),
    ],
)
def test_other_stores_are_told_from_aws(url: str, is_aws: bool) -> None:
    assert is_aws_endpoint(url) is is_aws
