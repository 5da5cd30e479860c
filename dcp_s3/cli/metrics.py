"""``--metrics-port`` of the commands that go on: what this process has done, for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from dcp_s3.cli.app import note

MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", metavar="PORT", min=0, max=65535,
        help="Serve metrics for Prometheus at this TCP port; 0: one that is free.",
    ),
]  # fmt: skip
MetricsAddress = Annotated[
    str, typer.Option("--metrics-address", metavar="ADDRESS", help="Address of --metrics-port; 0.0.0.0: all.")
]


@contextlib.contextmanager
def serving(port: int | None, address: str, *, needs: str) -> Iterator[None]:
    """Serve metrics during the body, if there is a port. ``needs``: the option without which it makes no sense, if that
    is not given; otherwise empty."""
    if port is None:
        yield
        return
    if needs:
        raise typer.BadParameter(f"it is for a process that goes on. Remedy: {needs}", param_hint="--metrics-port")
    try:
        from dcp_s3.integrations.prometheus import serve
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics-port") from None
    server = serve(port, address)
    note(f"metrics: http://{address}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
