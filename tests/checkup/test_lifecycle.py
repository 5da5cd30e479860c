"""What lifecycle rules would do to checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3.checkup.bucket import find_harm

EXPIRE: dict[str, Any] = {"Expiration": {"Days": 30}}
PREFIX = "team/run/"


def rule(**fields: Any) -> dict[str, Any]:
    return {"ID": "r", "Status": "Enabled", **fields}


@pytest.mark.parametrize(
    "found",
    [
        rule(**EXPIRE),  # of the whole bucket
        rule(Filter={}, **EXPIRE),
        rule(Filter={"Prefix": "team/"}, **EXPIRE),
        rule(Prefix="team/run/", **EXPIRE),  # as before there were filters
        rule(Filter={"Prefix": "team/run/step-1"}, **EXPIRE),  # some of them
        rule(Filter={"And": {"Prefix": "team/", "ObjectSizeGreaterThan": 10**6}}, **EXPIRE),
        rule(Expiration={"Date": "2030-01-01"}),
        rule(Transitions=[{"Days": 30, "StorageClass": "GLACIER"}]),
        rule(Transitions=[{"Days": 3, "StorageClass": "STANDARD_IA"}, {"Days": 90, "StorageClass": "DEEP_ARCHIVE"}]),
    ],
)
def test_rules_that_harm_checkpoints(found: dict[str, Any]) -> None:
    assert "'r'" in find_harm(found, PREFIX)
    assert not find_harm({**found, "Status": "Disabled"}, PREFIX)


@pytest.mark.parametrize(
    "found",
    [
        rule(Filter={"Prefix": "team/other/"}, **EXPIRE),
        rule(Filter={"Tag": {"Key": "k", "Value": "v"}}, **EXPIRE),
        rule(Filter={"And": {"Prefix": "team/", "Tags": [{"Key": "k", "Value": "v"}]}}, **EXPIRE),
        rule(Expiration={"ExpiredObjectDeleteMarker": True}),
        rule(Transitions=[{"Days": 30, "StorageClass": "GLACIER_IR"}]),  # read like any other
        rule(Transitions=[{"Days": 0, "StorageClass": "INTELLIGENT_TIERING"}]),
        rule(AbortIncompleteMultipartUpload={"DaysAfterInitiation": 7}),
        rule(NoncurrentVersionExpiration={"NoncurrentDays": 7}),
    ],
)
def test_rules_that_do_not(found: dict[str, Any]) -> None:
    assert find_harm(found, PREFIX) == ""
