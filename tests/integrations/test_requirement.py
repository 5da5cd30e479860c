"""What an adapter says without its framework, or with a version of it that it was not written for."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata

import pytest

from dcp_s3.integrations import requirement
from dcp_s3.integrations.requirement import require

ADAPTERS = {
    "accelerate": "accelerate>=1.15,<2",
    "lightning": "lightning>=2.6,<2.7",
    "megatron": "megatron-core>=0.16,<0.17",
    "torchtitan": "torchtitan>=0.3,<0.4",
    "transformers": "transformers>=5.23,<6",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages: what is not in here is not installed."""
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(requirement.metadata, "version", version)
    for name in ADAPTERS:
        monkeypatch.delitem(sys.modules, f"dcp_s3.integrations.{name}", raising=False)
    return versions


@pytest.mark.parametrize(("name", "wanted"), ADAPTERS.items())
def test_a_missing_framework_is_named_with_its_versions(installed: dict[str, str], name: str, wanted: str) -> None:
    with pytest.raises(ImportError, match=rf"needs {re.escape(wanted)}, .*pip install '{re.escape(wanted)}'"):
        importlib.import_module(f"dcp_s3.integrations.{name}")


@pytest.mark.parametrize(("name", "wanted"), ADAPTERS.items())
def test_other_versions_are_refused_by_every_adapter(installed: dict[str, str], name: str, wanted: str) -> None:
    package, _, range_ = wanted.partition(">=")
    installed[package] = range_.partition("<")[2]  # the first that is too new
    says = rf"supports {re.escape(wanted)}, and {installed[package]} is installed"
    with pytest.raises(ImportError, match=says):
        importlib.import_module(f"dcp_s3.integrations.{name}")


def test_transformers_needs_accelerate_too(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.23.0"
    with pytest.raises(ImportError, match=r"needs accelerate>=1\.15,<2, which is missing"):
        importlib.import_module("dcp_s3.integrations.transformers")


@pytest.mark.parametrize("version", ["0.16", "0.16.0", "0.16.1", "0.16.1+cu128", "0.16.9.post1"])
def test_versions_that_are_supported(installed: dict[str, str], version: str) -> None:
    installed["megatron-core"] = version
    require("megatron", "megatron-core", "0.16", "0.17")


@pytest.mark.parametrize("version", ["0.15.3", "0.17", "0.17.0rc0", "1.0", "unknown"])
def test_versions_that_are_not(installed: dict[str, str], version: str) -> None:
    installed["megatron-core"] = version
    with pytest.raises(ImportError, match=rf"supports megatron-core>=0\.16,<0\.17, and {version} is installed"):
        require("megatron", "megatron-core", "0.16", "0.17")
