"""What `import dcp_s3` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dcp_s3


def test_dir_is_what_is_public() -> None:
    assert dir(dcp_s3) == sorted(dcp_s3.__all__)
    assert not [name for name in dir(dcp_s3) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize("name", [name for name in dcp_s3.__all__ if name not in ("errors", "events", "__version__")])
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(dcp_s3, name)
    assert found.__module__.startswith("dcp_s3.")
    assert found.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dcp_s3' has no attribute 'S3Storagewriter'"):
        dcp_s3.S3Storagewriter  # type: ignore[attr-defined] # noqa: B018


def test_torch_is_imported_only_with_what_needs_it() -> None:
    program = "import sys, dcp_s3; assert 'torch' not in sys.modules; dcp_s3.Policy, dcp_s3.S3StorageWriter"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
