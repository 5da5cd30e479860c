"""What the adapters to Accelerate and the Trainer say without them, or with other versions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata

import pytest

from dcp_s3.integrations import requirement


@pytest.fixture
def import_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    def load(name: str, **versions: str) -> object:
        def version(package: str) -> str:
            if package not in versions:
                raise metadata.PackageNotFoundError(package)
            return versions[package]

        monkeypatch.setattr(requirement.metadata, "version", version)
        monkeypatch.delitem(sys.modules, f"dcp_s3.integrations.{name}", raising=False)
        return importlib.import_module(f"dcp_s3.integrations.{name}")

    return load


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_missing_framework_is_named_with_its_versions(import_with: Callable[..., object], name: str) -> None:
    with pytest.raises(ImportError, match=rf"needs ({name}>=\S+), .*pip install '\1'"):
        import_with(name)


@pytest.mark.parametrize(
    ("name", "versions", "says"),
    [
        ("accelerate", {"accelerate": "1.14.0"}, r"supports accelerate>=1\.15,<2, and 1\.14\.0 is installed"),
        ("accelerate", {"accelerate": "2.0"}, r"supports accelerate>=1\.15,<2, and 2\.0 is installed"),
        ("transformers", {"transformers": "4.57"}, r"supports transformers>=5\.23,<6, and 4\.57 is installed"),
        ("transformers", {"transformers": "5.23.0"}, r"needs accelerate>=1\.15,<2, which is missing"),
    ],
)
def test_a_version_that_is_not_supported_is_named(
    import_with: Callable[..., object], name: str, versions: dict[str, str], says: str
) -> None:
    with pytest.raises(ImportError, match=says):
        import_with(name, **versions)
