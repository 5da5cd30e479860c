"""One client for an endpoint, whatever else the settings say; few of them; and each request hangs as long as it may."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import Settings, errors
from dcp_s3.limit import Limit
from dcp_s3.s3 import client as client_module
from dcp_s3.s3.client import close_clients, get_client
from dcp_s3.s3.store import S3Store
from tests.servers import S3Server

pytestmark = [
    pytest.mark.servers("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

KIB = 1024


SAME: list[dict[str, Any]] = [
    {"part_size": "8MiB"}, {"concurrency": 3}, {"save_timeout": 17.0}, {"read_timeout": 3.0},
    {"staging_limit": "1GiB"}, {"retry_attempts": 2},
]  # fmt: skip
OTHER: list[dict[str, Any]] = [
    {"endpoint_url": "http://127.0.0.1:9"}, {"region": "eu-west-3"}, {"addressing_style": "virtual"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SAME + OTHER, ids=lambda settings: next(iter(settings)))
def test_only_what_connections_depend_on_makes_another_client(s3_env: S3Server, settings: dict[str, Any]) -> None:
    assert (get_client(Settings(**settings)) is get_client(Settings())) == (settings in SAME)


def test_a_profile_makes_another_client(s3_env: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert get_client(Settings(profile="lab")) is not get_client(Settings())
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    close_clients()
    assert get_client(Settings(profile="lab")).meta.region_name == "eu-north-1"


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
def test_what_changes_in_the_environment_makes_another_client(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = get_client(Settings())
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    changed = get_client(Settings())
    assert changed is not before
    monkeypatch.delenv(name)


def test_few_clients_are_kept(s3_env: S3Server) -> None:
    close_clients()
    for number in range(client_module._MOST_CLIENTS + 1):
        client = get_client(Settings(region=f"region-{number}"))
    assert len(client_module._clients) == client_module._MOST_CLIENTS
    assert get_client(Settings(region=f"region-{number}")) is client
    close_clients()


class _Silent:
    """Accepts connections and says nothing."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def test_a_request_hangs_as_long_as_its_own_settings_say(s3_env: S3Server) -> None:
    with _Silent() as url:
        patient = Settings(endpoint_url=url, retry_attempts=1, read_timeout=600.0)
        get_client(patient)  # the client is made with the long timeout
        hasty = S3Store("bucket", patient, Limit(hang=0.2))
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                hasty.get("key")
            except errors.TransferError as error:
                failures.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    [failure] = failures
    assert "ReadTimeout" in str(failure)
    close_clients()
