"""The page for 3 a.m.: its messages are those of the code (its commands run in test_blocks.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (_ROOT / "docs" / "3am.md").read_text(), re.MULTILINE | re.DOTALL)
_SOURCE = "\n".join(path.read_text() for path in (_ROOT / "dcp_s3").rglob("*.py"))
# What the messages on the page are known by, as it stands in the code.
_PHRASES = [
    "no new checkpoint, and the earlier ones untouched; `dcp-s3 prune` removes what was uploaded",
    "was not saved to {each.url}, and nothing raised it",
    "Remedy: close the CheckpointManager, or use it in a `with`",
    "Missing key in checkpoint state_dict: ",
    "spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them",
    "raise DCP_S3_PART_SIZE, or lower DCP_S3_CONCURRENCY: fewer, larger requests; ",
    "an object goes straight to S3: ",
    "Checkpoint already exists: a committed checkpoint is at ",
    "holds a checkpoint that is newer than this one, which was not put in its place",
    "was not deleted: {why}. Remedy: `unpin` it, wait, or pass ",
    "Remedy: raise or unset ",
]


def test_every_block_is_a_message_or_is_run() -> None:
    assert {kind for kind, _ in _BLOCKS} == {"sh", "text"}
    assert sum(kind == "sh" for kind, _ in _BLOCKS) >= 8


@pytest.mark.parametrize("phrase", _PHRASES)
def test_the_messages_are_those_of_the_code(phrase: str) -> None:
    assert phrase in _SOURCE
    fixed = re.split(r"\{.*?\}|%s", phrase)
    page = " ".join(" ".join(block for kind, block in _BLOCKS if kind == "text").split())
    assert all(" ".join(part.split()) in page for part in fixed)
