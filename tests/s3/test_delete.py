"""Deletes on S3: a prune on every server, batches, and stores that are different."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3 import errors, prune
from dcp_s3.s3.bucket import Quirk, forget_quirks, knows
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import DeleteTarget
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.retention.making import keys, save

NAMES = ["step-1", "step 2", "step+3", "%20 step 4", "ü-step5", "step&<6>", "a\"b'step7", "step-10"]
RUN = f"s3://{BUCKET}/run"


def test_names_of_every_kind_and_only_these(s3: Any, root: str) -> None:
    run = root + "/läuf +%2B"
    for name in NAMES:
        save(f"{run}/{name}")
        save(f"{run}x/{name}")
    kept = {"step-10": keys(s3, f"{run}/step-10")}
    others = keys(s3, f"{run}x")
    report = prune(run, lambda *_: {"step-10": ["asked for"]})
    assert (report.ok, report.left_alone) == (True, ())
    assert {each.name for each in report.deleted} == set(NAMES) - set(kept)
    assert keys(s3, run) == {f"{name}/{path}": size for name, found in kept.items() for path, size in found.items()}
    assert keys(s3, f"{run}x") == others


# --- batches, and stores that are different ------------------------------------------------------


@pytest.fixture
def store(faulty: FaultyServer) -> S3Store:
    """With the objects a, b, c."""
    forget_quirks()
    store = S3Store(BUCKET, Settings())
    for key in "abc":
        store.put(key, b"1")
    return store


def test_credentials_that_have_expired_say_nothing_of_the_store(store: S3Store, faulty: FaultyServer) -> None:
    faulty.rule = lambda request: Fault.error(400, "ExpiredToken") if request.operation == "DeleteObjects" else None
    with pytest.raises(errors.CredentialsError):
        store.delete(["a", "b"])
    assert not knows(Quirk.NO_BATCH_DELETES, store)
    assert set(faulty.s3.objects(BUCKET)) == set("abc")


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
def test_a_store_that_refuses_conditions_that_hold_is_asked_without(
    store: S3Store, faulty: FaultyServer, keys: list[str]
) -> None:
    faulty.rule = lambda request: Fault.error(412, "PreconditionFailed") if "if-match" in request.headers else None
    assert store.delete([DeleteTarget(key, store.head(key).etag) for key in keys]) == []
    assert not set(keys) & faulty.s3.objects(BUCKET).keys()


def test_throttled_keys_are_tried_again(store: S3Store, faulty: FaultyServer) -> None:
    left = [6]

    def throttle(request: Any) -> Fault | None:
        if request.operation == "DeleteObjects" and left[0]:
            left[0] -= 1
            return Fault.delete_partly("SlowDown") if left[0] % 2 else Fault.error(503, "SlowDown")
        return None

    faulty.rule = throttle
    assert store.delete(["a", "b"]) == []
    assert (left, faulty.s3.objects(BUCKET)) == ([0], {"c": 1})


def test_newlines_in_keys_of_a_batch(store: S3Store, faulty: FaultyServer) -> None:
    """XML makes spaces of them unless they are escaped."""
    for key in ("a\n-2\r", "a -2 "):
        store.put(key, b"1")
    assert store.delete(["a\n-2\r", "b"]) == []
    assert faulty.s3.objects(BUCKET).keys() == {"a", "a -2 ", "c"}


def test_a_key_that_is_never_deleted_fails_and_the_others_go(store: S3Store, faulty: FaultyServer) -> None:
    faulty.rule = lambda _: Fault.delete_partly("AccessDenied")
    with pytest.raises(errors.AccessDeniedError, match="'a' was not deleted"):
        store.delete(["a", "b", "c"])
    assert faulty.s3.objects(BUCKET) == {"a": 1}
