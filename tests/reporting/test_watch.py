"""What a look makes of what it sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dcp_s3.reporting.watch import Look, SaveInProgress, Watcher, with_rates
from dcp_s3.s3.async_store import open_async_store
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.retention.making import put

NOW = 1_700_000_000.0
SAVE = SaveInProgress("step-2", 1000, 1, 2, False, NOW - 60, NOW - 5, 5000)
LOOK = Look("s3://bucket/run", NOW, None, (SAVE,), (), (), 1, 1, 3)


def test_a_rate_is_bytes_between_two_looks_and_gives_the_rest() -> None:
    [found] = with_rates([replace(SAVE, size=3000)], NOW + 4, LOOK)
    assert found.rate == 500
    assert found.rest == 4
    assert with_rates([SAVE], NOW + 4, None) == (SAVE,)
    assert SAVE.rest is None


def test_no_rest_is_made_up() -> None:
    [still] = with_rates([SAVE], NOW + 4, LOOK)
    assert (still.rate, still.rest) == (0, None)
    [larger] = with_rates([replace(SAVE, size=9000)], NOW + 4, LOOK)
    assert larger.rest is None  # larger than the newest one already
    [other] = with_rates([replace(SAVE, name="step-3")], NOW + 4, LOOK)
    assert other.rate is None
    [less] = with_rates([replace(SAVE, size=10)], NOW + 4, LOOK)
    assert less.rate == 0
    assert with_rates([SAVE], NOW, LOOK) == (SAVE,)  # within one second of S3's clock


@pytest.mark.servers("memory")
def test_looks_come_round_to_every_directory_and_back_to_the_busy_ones(root: str, s3: Any) -> None:
    for step in range(20):
        put(s3, f"{root}/step-{step}", "__0_0-abcdef012345.distcp")
    url = parse_url(root)

    async def watch() -> list[set[str]]:
        async with open_async_store(url.bucket, resolve_settings(None)) as store:
            watcher = Watcher(store, url, 8)
            return [{save.name for save in (await watcher.look()).saves} for _ in range(12)]

    looks = asyncio.run(watch())
    assert set().union(*looks) == {f"step-{step}" for step in range(20)}
    assert all({"step-19", "step-18"} <= each for each in looks)


@pytest.mark.servers("memory")
def test_the_bytes_of_an_upload_are_those_of_its_parts(bucket: str, s3: Any) -> None:
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key="a")["UploadId"]
    for number in (1, 2, 7):
        s3.upload_part(Bucket=bucket, Key="a", UploadId=upload_id, PartNumber=number, Body=b"x" * 10 * number)

    async def count() -> tuple[int, int]:
        async with open_async_store(bucket, resolve_settings(None)) as store:
            [upload] = await store.uploads("")
            before = await store.uploaded_bytes(upload)
            await store.abort(upload)
            return before, await store.uploaded_bytes(upload)

    assert asyncio.run(count()) == (100, 0)
