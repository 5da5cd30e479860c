"""What the adapter to torchtitan says without torchtitan, or with another version of it."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import NoReturn

import pytest

from dcp_s3.integrations import requirement

_MODULE = "dcp_s3.integrations.torchtitan"


def test_without_torchtitan_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> NoReturn:
        raise metadata.PackageNotFoundError

    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    monkeypatch.setattr(requirement.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"(torchtitan>=0\.3,<0\.4), which is missing.*'\1'"):
        importlib.import_module(_MODULE)


@pytest.mark.parametrize("version", ["0.2.2", "0.4.0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    monkeypatch.setattr(requirement.metadata, "version", lambda _: version)
    with pytest.raises(ImportError, match=rf"supports torchtitan>=0\.3,<0\.4, and {version} is installed"):
        importlib.import_module(_MODULE)
