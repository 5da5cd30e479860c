"""What goes with every request, and how many there are at once: settings, clients, processes, bandwidth, maps."""

from __future__ import annotations

import collections
import multiprocessing
import os
import pickle
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest, list_checkpoints
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import Piece
from dcp_s3.offline.copy import copy
from dcp_s3.retention.prune import prune
from dcp_s3.s3 import multipart
from dcp_s3.s3.bucket import AT_ONCE, map_in_threads
from dcp_s3.s3.client import get_client
from dcp_s3.s3.pressure import Pace
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings, resolve_settings
from tests.faulty import BUCKET, FaultyServer, close_clients
from tests.memory_s3 import Fault
from tests.memory_store import MemoryStore
from tests.objects import separate_objects
from tests.s3.waiting import LONG
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
ROOT = f"s3://{BUCKET}/run"


def test_a_missing_bucket_has_its_own_error(bucket: str) -> None:
    nowhere = S3Store("no-such-bucket-here", Settings())
    for action in (lambda: nowhere.get("k").data, lambda: nowhere.exists("k"), lambda: nowhere.put("k", b"")):
        with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket-here"):
            action()


def test_encryption_class_owner_and_payer_go_with_all_requests_that_need_them(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket with requester pays refuses what lacks the header, whatever has a price."""
    seen: dict[str, list[Any]] = collections.defaultdict(list)

    def rule(request: Any) -> Fault | None:
        seen[request.operation].append(request)
        return None if request.headers.get("x-amz-request-payer") == "requester" else Fault.error(403, "AccessDenied")

    faulty.rule = rule
    settings = {
        "part_size": "5MiB", "sse": "aws:kms", "sse_kms_key_id": "key-1", "storage_class": "STANDARD_IA",
        "expected_bucket_owner": "123456789012", "requester_pays": True,
    }  # fmt: skip
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", 5 * MIB)
    for step in (1, 2):
        state = {"large": torch.randn(MIB * 3 // 2), "small": torch.randn(100)}
        with separate_objects("small"):
            dcp.save(state, storage_writer=S3StorageWriter(f"{ROOT}/step-{step}", settings=settings))
        dcp.load(state, storage_reader=S3StorageReader(f"{ROOT}/step-{step}", settings=settings))
    copy(f"{ROOT}/step-1", f"s3://{BUCKET}/copy", settings=settings)
    assert prune(ROOT, "latest:1", settings=settings, grace=0, force=True).ok
    store = S3Store(BUCKET, Settings(**settings))
    with pytest.raises(ZeroDivisionError):
        store.put_stream("run/broken", 12 * MIB, (Piece.of(bytes(6 * MIB)) if i < 2 else 1 // 0 for i in range(3)))
    store.head("copy/.metadata")
    store.delete(["copy/.metadata"])
    assert seen.keys() >= {
        "GetObject", "HeadObject", "PutObject", "CopyObject", "CreateMultipartUpload", "UploadPart", "UploadPartCopy",
        "CompleteMultipartUpload", "AbortMultipartUpload", "ListObjectsV2", "ListMultipartUploads",
        "DeleteObject", "DeleteObjects",
    }  # fmt: skip
    for operation, requests in seen.items():
        for key, headers in ((each.key, each.headers) for each in requests):
            assert headers["x-amz-expected-bucket-owner"] == "123456789012"
            if operation in ("PutObject", "CopyObject", "CreateMultipartUpload"):
                assert headers["x-amz-server-side-encryption"] == "aws:kms"
                assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
                is_data = operation != "PutObject" or key.endswith(".distcp")
                assert headers.get("x-amz-storage-class") == ("STANDARD_IA" if is_data else None)
            if operation in ("CopyObject", "UploadPartCopy"):
                assert headers["x-amz-copy-source-if-match"]
                assert headers["x-amz-source-expected-bucket-owner"] == "123456789012"


EXPRESS = "training--use1-az4--x-s3"


def test_checkpoints_of_a_directory_bucket_are_saved_found_loaded_replaced_and_pruned(faulty: FaultyServer) -> None:
    """As the in-memory server knows directory buckets (S3 Express One Zone)."""
    run = f"s3://{EXPRESS}/run"
    faulty.s3.create_bucket(EXPRESS)
    store = S3Store(EXPRESS, Settings())

    def state(value: float) -> dict[str, torch.Tensor]:
        return {"large": torch.full((3 * MIB,), value), "small": torch.full((9,), value)}

    for step in (1, 2, 3, 3):
        writer = S3StorageWriter(f"{run}/step-{step}", overwrite=True, settings={"part_size": "5MiB"})
        dcp.save(state(step), storage_writer=writer)
    store.client.create_multipart_upload(Bucket=EXPRESS, Key="run/step-2/left-open")
    for upload in store.uploads("run/step-2/left"):
        store.abort(upload)
    assert [info.name for info in list_checkpoints(run)] == ["step-1", "step-2", "step-3"]
    found = latest(run)
    assert found is not None
    loaded = state(0)
    dcp.load(loaded, storage_reader=S3StorageReader(str(found.url)))
    assert all(torch.equal(loaded[name], value) for name, value in state(3).items())
    assert prune(run, "latest:1", grace=0, force=True).ok
    assert [info.name for info in list_checkpoints(run)] == ["step-3"]
    assert {key.split("/")[1] for key in faulty.s3.objects(EXPRESS)} == {"step-3"}
    assert faulty.s3.open_uploads(EXPRESS) == []
    assert faulty.s3._operations.refused == [], "nothing was asked for that such a bucket does not take"


# --- bandwidth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [2**16, 10 * MIB, 200 * MIB])
@pytest.mark.parametrize("senders", [1, 32])
def test_so_many_bytes_per_second_are_let_through(rate: int, senders: int) -> None:
    """On a clock of its own: each sender sends its next slice when it may."""
    pace, sent = Pace(rate), 0
    due = [0.0] * senders
    while (now := min(due)) < 10:
        sender = due.index(now)
        due[sender] = now + max(pace.reserve(pace.slice_size, now), 1e-6)
        sent += pace.slice_size if due[sender] < 10 else 0
    assert 0.9 <= sent / (10 * rate) <= 1.1


SAME: list[dict[str, Any]] = [
    {"part_size": "8MiB"}, {"concurrency": 3}, {"save_timeout": 17.0}, {"read_timeout": 3.0},
    {"staging_limit": "1GiB"}, {"retry_attempts": 2},
]  # fmt: skip
OTHER: list[dict[str, Any]] = [
    {"endpoint_url": "http://127.0.0.1:9"}, {"region": "eu-west-3"}, {"addressing_style": "virtual"},
]  # fmt: skip


def test_only_what_connections_depend_on_makes_another_client(
    memory_server: S3Server, s3_env: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = get_client(Settings())
    assert [settings for settings in SAME if get_client(Settings(**settings)) is not usual] == []
    assert [settings for settings in OTHER if get_client(Settings(**settings)) is usual] == []
    monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
    found = []
    for url in ("http://127.0.0.1:8", "http://127.0.0.1:9"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        found.append(get_client(Settings(region="us-east-1")))
    assert len({usual, *found}) == 3


def test_a_request_hangs_as_long_as_its_own_settings_say(memory_server: S3Server, s3_env: S3Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and says nothing
        patient = Settings(
            endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}", retry_attempts=1, read_timeout=600.0
        )
        get_client(patient)  # the client is made with the long timeout
        with pytest.raises(errors.TransferError, match="ReadTimeout"):
            S3Store("bucket", patient, Limit(hang=0.2)).get("key")
    close_clients()


def _in_child(settings: Settings, bucket: str, connection: Any) -> None:
    target = S3Store(bucket, settings)
    connection.send((target.known.gate.state.limit, target.known.gate.state.in_flight, target.get("k").data))
    os._exit(0)


@pytest.mark.quick("fork")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_process_has_a_client_and_a_limit_of_its_own(memory_server: Any, bucket: str, method: str) -> None:
    settings = Settings()
    target = S3Store(bucket, settings)
    target.put("k", b"from parent")
    assert pickle.loads(pickle.dumps(target)) == target
    gate = target.known.gate
    assert gate.enter()
    gate.throttled(time.monotonic())
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(settings, bucket, theirs))  # type: ignore[attr-defined]
    with gate._changed:  # as if another thread held it
        child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv() == (None, 0, b"from parent")
    child.join()
    gate.leave(0, succeeded=False)
    assert (gate.state.limit, target.get("k").data) == (2, b"from parent"), "the parent's connections are whole"


def test_credentials_are_read_anew_after_they_were_refused(
    memory_server: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(region="eu-north-1")  # a client of its own
    key = "AWS_ACCESS_KEY_ID"
    right = os.environ[key]
    monkeypatch.delenv(key)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(errors.CredentialsError, match="AWS_ACCESS_KEY_ID"):
        S3Store(bucket, settings).get("k")
    monkeypatch.setenv(key, right)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", memory_server.secret_key)
    with pytest.raises(errors.ObjectNotFoundError):
        S3Store(bucket, settings).get("k")


def test_many_are_under_way_at_once_but_not_more_than_that_also_inside_another() -> None:
    free, together = threading.Semaphore(AT_ONCE), threading.Barrier(AT_ONCE)

    def inner(store: MemoryStore, item: int) -> int:
        assert free.acquire(blocking=False), "more than that"
        time.sleep(0.001)
        free.release()
        return item

    def outer(store: MemoryStore, item: int) -> int:
        if item < AT_ONCE:
            together.wait(LONG)  # all of them are there at once
        return sum(map_in_threads(store, inner, range(item)))

    assert map_in_threads(MemoryStore(), outer, range(3 * AT_ONCE))[:4] == [0, 0, 1, 3]


def test_the_first_failure_is_raised_and_cancels_the_others() -> None:
    begun: list[int] = []
    ended: list[bool] = []

    def work(store: MemoryStore, item: int) -> None:
        begun.append(item)
        if item == AT_ONCE - 1:
            raise ValueError("the first")
        assert store.limit.cancel is not None
        ended.append(store.limit.cancel.wait(LONG))
        store.limit.check("another request")

    with pytest.raises(ValueError, match="the first"):
        map_in_threads(MemoryStore(), work, range(10 * AT_ONCE))
    assert ended == [True] * (AT_ONCE - 1)
    assert sorted(begun) == list(range(AT_ONCE))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp_s3-requests")]


def test_a_single_item_needs_no_thread_and_none_is_begun_after_it_was_cancelled() -> None:
    cancel = threading.Event()
    store = MemoryStore().within(Limit(cancel=cancel))
    assert map_in_threads(store, lambda *_: threading.current_thread(), [1]) == [threading.current_thread()]
    cancel.set()
    with pytest.raises(Cancelled):
        map_in_threads(store, lambda *_: pytest.fail("it was cancelled"), [1])


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (2**21, ["HTTP/1.1 100 Continue\r\n\r\n"]),
        (2**16, ["HTTP/1.1 100 ", "Continue\r\nVia: proxy\r\n\r\n"]),
        (2**16, list("HTTP/1.0 100\r\n\r\n")),
        (2**16 - 1, []),
        (0, []),
    ],
)
def test_a_body_is_sent_when_the_server_wants_it(size: int, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However it says so, and in however many pieces; a small one at once, without being asked for."""
    received = []

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, sock.makefile("rb") as file:
            head = list(iter(file.readline, b"\r\n"))
            assert (b"Expect: 100-continue\r\n" in head) is bool(told)
            for piece in told:
                sock.sendall(piece.encode())
                time.sleep(0.01)
            received.append(file.read(size))
            sock.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        settings = resolve_settings({"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}", "region": "r"})
        S3Store("bucket", settings).put("key", data := random.Random(size).randbytes(size))
        server.join()
    assert received == [data]
