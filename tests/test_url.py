"""Checkpoint URLs."""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.errors import InvalidURLError
from dcp_s3.url import CheckpointURL, is_s3_url, parse_url


class _Text(os.PathLike[str]):
    """A path of another library."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __fspath__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        ("s3://bucket/run/step-1", "bucket", "run/step-1"),
        ("s3://bucket/run/step-1/", "bucket", "run/step-1"),
        ("S3://bucket/x", "bucket", "x"),
        ("s3://bucket", "bucket", ""),
        ("s3://my.bucket/läuf 1/50%+x", "my.bucket", "läuf 1/50%+x"),
        (
            "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/ap/run",
            "arn:aws:s3:us-east-1:123456789012:accesspoint/ap",
            "run",
        ),
    ],
)
def test_parse(text: str, bucket: str, prefix: str) -> None:
    assert parse_url(text) == CheckpointURL(bucket, prefix)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bucket/x",
        "/tmp/x",
        "gs://bucket/x",
        "s3://",
        "s3:///x",
        "s3://b_/../x",
        "s3://bucket//x",
        "s3://bucket/a/./b",
        "s3://bucket/../b",
        "s3://bucket/" + "k" * 1000,
    ],
)
def test_bad_urls_name_what_is_expected(text: str) -> None:
    with pytest.raises(InvalidURLError, match=r"s3|bytes|segment"):
        parse_url(text)


@pytest.mark.parametrize("kind", [str, Path, PurePosixPath, _Text, str.upper])
def test_what_pathlib_folds_is_unfolded(kind: Callable[[str], Any]) -> None:
    for url in ("s3://bucket/run/step-1", "s3://bucket"):
        folded = kind(str(PurePosixPath(url)))
        assert is_s3_url(folded)
        assert str(parse_url(folded)).lower() == url
    assert parse_url(kind("s3://bucket/x")).bucket.lower() == "bucket"


def test_other_paths_stay_what_they_are() -> None:
    for path in (Path("/s3:/bucket/x"), Path("s3/bucket"), "s3:", "s3:bucket/x", b"s3:/bucket/x", Path("x/s3:/bucket")):
        assert not is_s3_url(path)
        with pytest.raises(InvalidURLError, match="expected s3://bucket/prefix"):
            parse_url(path)  # type: ignore[arg-type]


def test_keys_names_and_children() -> None:
    url = parse_url("s3://bucket/run/step-7")
    assert url.key(".metadata") == "run/step-7/.metadata"
    assert url.name == "step-7"
    assert str(url.child("x")) == "s3://bucket/run/step-7/x"
    assert parse_url("s3://bucket").key("a") == "a"


@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=12).filter(
            lambda s: s not in (".", "..")
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_key_survives_a_round_trip(segments: list[str]) -> None:
    url = CheckpointURL("bucket", "/".join(segments))
    assert parse_url(str(url)) == url


def test_is_s3_url_looks_at_text_only() -> None:
    assert is_s3_url("s3://x")
    assert not is_s3_url(b"s3://x")
    assert not is_s3_url(None)
