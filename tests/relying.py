"""What the tests of torch say when something of it moves."""

from __future__ import annotations

import torch


def moved(what: str, relied_on: str) -> str:
    return f"torch {torch.__version__}: {what}. What relied on it: {relied_on}"
