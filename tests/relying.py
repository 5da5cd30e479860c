"""What the tests of torch say when something of it moves."""

from __future__ import annotations

from typing import Any

import torch

from dcp_s3.process import release

BEFORE_2_10 = release(torch.__version__) < (2, 10)


def in_torchs_order(items: list[Any]) -> list[Any]:
    """Items of a load plan, to be compared with torch's: before 2.10 it had the same ones in another order."""
    return sorted(items, key=repr) if BEFORE_2_10 else items


def moved(what: str, relied_on: str) -> str:
    return f"torch {torch.__version__}: {what}. What relied on it: {relied_on}"
