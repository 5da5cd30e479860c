"""Bodies without copies."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.s3.body import GatherBody
from dcp_s3.s3.botocore_private import send_without_copy

BUFFERS = st.lists(st.binary(max_size=40), max_size=8)


def body_of(buffers: list[bytes]) -> GatherBody:
    return GatherBody([memoryview(b) for b in buffers])


@given(BUFFERS, st.lists(st.integers(-1, 30), max_size=12))
def test_reads_as_the_buffers_laid_end_to_end(buffers: list[bytes], sizes: list[int]) -> None:
    body, model = body_of(buffers), io.BytesIO(b"".join(buffers))
    assert len(body) == len(model.getvalue())
    for size in sizes:
        assert body.read(size) == model.read(size)
        assert body.tell() == model.tell()
    body.seek(0)
    assert body.read() == model.getvalue()
    assert body.seek(-len(model.getvalue()), io.SEEK_END) == 0


@given(BUFFERS)
def test_chunks_are_all_bytes_in_order_and_can_be_had_again(buffers: list[bytes]) -> None:
    body = body_of(buffers)
    for _ in range(2):
        assert b"".join(body.chunks()) == b"".join(buffers)


def test_large_buffers_go_out_as_they_are_and_small_ones_joined() -> None:
    large = bytearray(200_000)
    body = GatherBody([memoryview(b"head"), memoryview(b"er"), memoryview(large), memoryview(b"tail")])
    chunks = list(body.chunks())
    assert [len(chunk) for chunk in chunks] == [6, 200_000, 4]
    assert isinstance(chunks[1], memoryview)
    assert chunks[1].obj is large


class _Request:
    def __init__(self, body: object) -> None:
        self.body = body


def test_the_handler_replaces_our_bodies_only() -> None:
    ours, other = _Request(body_of([b"x"])), _Request(b"bytes")
    send_without_copy(request=ours)
    send_without_copy(request=other)
    assert not hasattr(ours.body, "read")
    assert list(ours.body) == [b"x"] == list(ours.body)  # type: ignore[call-overload]
    assert other.body == b"bytes"


def test_a_body_is_sent_from_the_memory_itself(memory_server: object, bucket: str, s3: object) -> None:
    """No read() of the body on the real path, so no copy: a body that cannot be read still arrives."""
    from dcp_s3.s3.store import S3Store
    from dcp_s3.settings import Settings

    class Unreadable(GatherBody):
        def read(self, size: int = -1) -> bytes:
            pytest.fail("the body was read")

    target = S3Store(bucket, Settings())
    data = bytearray(b"ab" * 500_000)
    target.client.put_object(Bucket=bucket, Key="k", Body=Unreadable([memoryview(data)]))
    assert target.get("k").data == data


def test_no_single_send_is_long() -> None:
    """A socket's timeout is for a whole sendall: a large part in one would need a fast connection."""
    large = bytes(5 * 2**20 + 1)
    chunks = list(GatherBody([memoryview(large)]).chunks())
    assert max(len(chunk) for chunk in chunks) <= 2**20
    assert b"".join(chunks) == large


def test_botocore_may_rewind_what_is_sent() -> None:
    """As it does before it repeats a request in another region."""
    request = _Request(body_of([b"ab", b"c"]))
    send_without_copy(request=request)
    assert b"".join(request.body) == b"abc"  # type: ignore[call-overload]
    request.body.seek(0)  # type: ignore[attr-defined]
    assert b"".join(request.body) == b"abc"  # type: ignore[call-overload]
