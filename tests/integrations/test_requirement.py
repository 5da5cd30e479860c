"""What an adapter says without its framework."""

from __future__ import annotations

from importlib import metadata

import pytest

from dcp_s3.integrations import requirement
from dcp_s3.integrations.requirement import require


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(requirement.metadata, "version", version)
    return versions


def test_a_missing_framework_is_named_with_its_versions(installed: dict[str, str]) -> None:
    with pytest.raises(
        ImportError, match=r"needs megatron-core>=0\.16,<0\.17.*pip install 'megatron-core>=0\.16,<0\.17'"
    ):
        require("megatron", "megatron-core", "0.16", "0.17")


@pytest.mark.parametrize("version", ["0.16", "0.16.0", "0.16.1", "0.16.1+cu128", "0.16.9.post1"])
def test_versions_that_are_supported(installed: dict[str, str], version: str) -> None:
    installed["megatron-core"] = version
    require("megatron", "megatron-core", "0.16", "0.17")


@pytest.mark.parametrize("version", ["0.15.3", "0.17", "0.17.0rc0", "1.0", "unknown"])
def test_versions_that_are_not(installed: dict[str, str], version: str) -> None:
    installed["megatron-core"] = version
    with pytest.raises(ImportError, match=rf"supports megatron-core>=0\.16,<0\.17, and {version} is installed"):
        require("megatron", "megatron-core", "0.16", "0.17")
