"""docs/security.md and the code say the same of permissions, and its policies allow them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dcp_s3.checkup.doctor import PERMISSIONS, permission_for
from dcp_s3.checkup.probes import CONFIGURATION

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
BLOCKS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]


def test_the_table_in_the_docs_has_these_permissions() -> None:
    table = DOCUMENT.partition("and no others:")[2].partition("`s3:ListBucket` is needed")[0].strip().splitlines()
    rows = [
        f"| {', '.join(f'`{name}`' for name in each.operations)} | `{each.action}`"
        f"{' (on the bucket)' if each.on_bucket else ''} | {each.used_by} |"
        for each in PERMISSIONS
    ]
    assert table[2:] == rows


def test_the_policies_in_the_docs_allow_every_permission_where_it_is_granted() -> None:
    statements = {each["Sid"]: each for block in BLOCKS for each in block.get("Statement", ())}
    names = ("TrainingObjects", "TrainingBucket")
    granted = {(action, statements[name]["Resource"]) for name in names for action in statements[name]["Action"]}
    bucket, objects = "arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/PREFIX/*"
    needed = {(each.action, bucket if each.on_bucket else objects) for each in PERMISSIONS}
    assert granted == needed
    assert set(statements["TrainingKey"]["Action"]) == {"kms:GenerateDataKey", "kms:Decrypt"}


def test_the_docs_say_what_allows_a_look_at_the_configuration() -> None:
    for operation, action in CONFIGURATION.items():
        assert f"| `{operation}` | `{action}` |" in DOCUMENT


def test_each_operation_has_its_action() -> None:
    assert permission_for("HeadObject").action == "s3:GetObject"
    assert permission_for("ListMultipartUploads").action == "s3:ListBucketMultipartUploads"
