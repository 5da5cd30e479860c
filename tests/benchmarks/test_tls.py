"""The endpoint with TLS that benchmarks use."""

from __future__ import annotations

import pytest

from benchmarks import tls
from benchmarks.loopback import measure_loopback


@pytest.mark.skipif(tls.nginx() is None, reason="nginx is not installed")
def test_all_bytes_pass() -> None:
    save, load = measure_loopback(3 * 2**20, 2, tls=True)
    assert save.wall_seconds > 0
    assert load.wall_seconds > 0


def test_without_nginx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "nginx", lambda: None)
    with pytest.raises(RuntimeError, match=r"nginx is not installed .*apt install"), tls.tls_in_front_of("127.0.0.1:1"):
        pass
