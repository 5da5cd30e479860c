"""docs/security.md and the code say the same of permissions and policies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dcp_s3.checkup.doctor import (
    PERMISSIONS,
    bucket_arn,
    permission_for,
    prune_versions_policy,
    training_policy,
)
from dcp_s3.checkup.probes import CONFIGURATION

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
BLOCKS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]
ARN = bucket_arn("BUCKET")


def actions(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


def test_the_table_in_the_docs_has_these_permissions() -> None:
    table = DOCUMENT.partition("and no others:")[2].partition("`s3:ListBucket` is needed")[0].strip().splitlines()
    rows = [
        f"| {', '.join(f'`{name}`' for name in each.operations)} | `{each.action}`"
        f"{' (on the bucket)' if each.on_bucket else ''} | {each.used_by} |"
        for each in PERMISSIONS
    ]
    assert table[2:] == rows


def test_the_policies_in_the_docs_are_these() -> None:
    assert training_policy(ARN, "PREFIX") in BLOCKS
    assert prune_versions_policy(ARN, "PREFIX") in BLOCKS
    (with_key,) = [block for block in BLOCKS if "TrainingKey" in json.dumps(block)]
    policy = training_policy(ARN, "PREFIX", kms_key="arn:aws:kms:REGION:ACCOUNT:key/KEY")
    assert policy["Statement"][-1] == with_key["Statement"][0]


def test_the_docs_say_what_allows_a_look_at_the_configuration() -> None:
    for operation, action in CONFIGURATION.items():
        assert f"| `{operation}` | `{action}` |" in DOCUMENT


def test_the_policies_allow_every_permission() -> None:
    policies = actions(training_policy(ARN, "p")) | actions(prune_versions_policy(ARN, "p"))
    assert policies == {each.action for each in PERMISSIONS} | {"s3:DeleteObjectVersion"}


@pytest.mark.parametrize(
    ("bucket", "region", "arn"),
    [
        ("b", "", "arn:aws:s3:::b"),
        ("b", "cn-north-1", "arn:aws-cn:s3:::b"),
        ("b", "us-gov-west-1", "arn:aws-us-gov:s3:::b"),
        ("arn:aws:s3:eu-west-1:1:accesspoint/a", "eu-west-1", "arn:aws:s3:eu-west-1:1:accesspoint/a"),
    ],
)
def test_arns(bucket: str, region: str, arn: str) -> None:
    assert bucket_arn(bucket, region) == arn


def test_objects_of_a_whole_bucket_and_of_an_access_point() -> None:
    assert training_policy(ARN, "")["Statement"][0]["Resource"] == "arn:aws:s3:::BUCKET/*"
    point = "arn:aws:s3:eu-west-1:1:accesspoint/a"
    assert training_policy(point, "run")["Statement"][0]["Resource"] == f"{point}/object/run/*"


def test_each_operation_has_its_action() -> None:
    assert permission_for("HeadObject").action == "s3:GetObject"
    assert permission_for("ListParts").action == "s3:ListMultipartUploadParts"
