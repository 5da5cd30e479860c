"""The adapter to Megatron-Core where that is not installed."""

from __future__ import annotations

import importlib

import pytest


def test_without_megatron_it_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"needs (megatron-core>=0\.16,<0\.17), .*pip install '\1'"):
        importlib.import_module("dcp_s3.integrations.megatron")
