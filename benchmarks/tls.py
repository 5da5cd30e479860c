"""A TLS endpoint in front of a plain one: nginx, as in front of many an S3 server.

nginx and its stream module must be installed (Debian: nginx-light and libnginx-mod-stream). The cipher is AES-128-GCM,
over TLS 1.3.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import trustme

_MODULES = ("/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so")
_START_SECONDS = 10.0
_CONFIGURATION = """\
{module}
pid {directory}/nginx.pid;
error_log {directory}/error.log;
daemon off;
worker_processes 2;
events {{ worker_connections 4096; }}
stream {{
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {directory}/server.pem;
    ssl_certificate_key {directory}/server.pem;
    ssl_protocols TLSv1.3;
    ssl_prefer_server_ciphers on;
    ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384;
    ssl_session_cache shared:sessions:1m;
    proxy_buffer_size 256k;
    proxy_pass {upstream};
  }}
}}
"""


def nginx() -> str | None:
    """The nginx to run, None if there is none."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@contextlib.contextmanager
def tls_in_front_of(upstream: str) -> Iterator[tuple[int, Path]]:
    """Terminate TLS in front of ``upstream`` (``host:port``).

    Yields:
        The port on 127.0.0.1, and the certificate authority's file (for ``AWS_CA_BUNDLE``).

    Raises:
        RuntimeError: nginx is missing or does not start.
    """
    program = nginx()
    if program is None:
        raise RuntimeError("nginx is not installed (Debian: apt install nginx-light libnginx-mod-stream)")
    with tempfile.TemporaryDirectory(prefix="dcp-bench-tls-") as name:
        directory = Path(name)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(directory / "authority.pem"))
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        module = next((f"load_module {path};" for path in _MODULES if os.path.exists(path)), "")
        configuration = directory / "nginx.conf"
        configuration.write_text(
            _CONFIGURATION.format(module=module, directory=directory, port=port, upstream=upstream)
        )
        with subprocess.Popen([program, "-c", str(configuration), "-p", name, "-e", f"{name}/error.log"]) as process:
            try:
                _await(process, port, directory / "error.log")
                yield port, directory / "authority.pem"
            finally:
                process.terminate()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nginx does not listen: {log.read_text()[-2000:] if log.exists() else 'no log'}")
