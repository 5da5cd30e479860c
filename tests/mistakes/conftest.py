"""One interpreter for all scripts, and a server that a test can tell what to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty import FaultyServer, serve
from tests.mistakes.running import Interpreter


@pytest.fixture(scope="package")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    interpreter = Interpreter(tmp_path_factory.mktemp("script"))
    yield interpreter
    interpreter.close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server
