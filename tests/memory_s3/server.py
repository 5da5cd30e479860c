"""The server itself: a listening socket, a thread per connection, counters, faults."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from urllib.parse import parse_qsl, unquote

from . import answers, counters
from .counters import Counters, Reader
from .faults import Fault, FaultFunction, RequestInfo
from .http import Connection, Head, Link, MalformedRequestError, Response, discard, receive, render
from .memory import Body, Pool
from .operations import Call, Operations, identify
from .store import CHECKSUM, S3Error, Store

_log = logging.getLogger(__name__)

# Seconds in which an answer that a client has got is counted. Requests that are held up are not waited for longer.
_SETTLES = 0.5


class MemoryS3:
    """An S3 server in memory, on threads of this process.

    A context manager; leaving it stops the server and frees the memory. Path-style addressing only.
    Signatures are never verified; ETags are opaque, not MD5.
    """

    def __init__(
        self,
        port: int = 0,
        preallocate: int = 0,
        fault: FaultFunction | None = None,
        *,
        record_requests: bool = True,
        clock: Callable[[], float] = time.time,
        link: Link | None = None,
    ) -> None:
        """Take the settings: a port (0: a free one), bytes of memory to touch at start, what is asked before each
        request, whether heads are kept in `request_log`, the server's time, what lies between it and clients."""
        self.fault = fault
        self._address = ("127.0.0.1", port)
        self._record_requests, self._clock, self._link = record_requests, clock, link
        self._store = Store(clock)
        self._operations = Operations(self._store)
        self._preallocate, self._pool = preallocate, Pool()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._connections: dict[Connection, threading.Thread] = {}
        self._numbers = itertools.count(1)
        self._request_log: list[RequestInfo] = []
        self._in_flight = 0
        self.reset_counters()

    def __enter__(self) -> MemoryS3:
        self._pool = Pool(self._preallocate)
        self._listener = socket.create_server(self._address, backlog=1024)
        self._address = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="memory-s3-accept", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port and every connection, and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() does not
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            connection.shut_down()
            thread.join()

    # What tests look at

    @property
    def endpoint_url(self) -> str:
        host, port = self._address
        return f"http://{host}:{port}"

    @property
    def in_flight(self) -> int:
        """Requests being handled at this moment; a fault function sees its own among them."""
        with self._lock:
            return self._in_flight

    @property
    def counters(self) -> Counters:
        """The counters as they stand now, or in a moment: clients have their answers before these are counted."""
        with self._lock:
            self._idle.wait_for(lambda: not self._in_flight, _SETTLES)
            return copy.deepcopy(self._counted)

    def reset_counters(self) -> None:
        with self._lock:
            self._counted = Counters(peak_in_flight=self._in_flight)
            self._request_log.clear()

    @property
    def request_log(self) -> list[RequestInfo]:
        """The requests since the last reset, in order of arrival (if recorded)."""
        with self._lock:
            return list(self._request_log)

    def create_bucket(self, bucket: str) -> None:
        self._store.create_bucket(bucket)

    def objects(self, bucket: str) -> dict[str, int]:
        return {key: stored.size for key, stored in self._store.objects(bucket).items()}

    def open_uploads(self, bucket: str) -> list[str]:
        """Keys of the multipart uploads that are neither complete nor aborted."""
        return [upload.key for upload in self._store.uploads(bucket)]

    def read(self, bucket: str, key: str) -> bytes:
        return bytes(self._store.get(bucket, key).body)

    # Threads

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed
            connection = Connection(sock, self._link)
            thread = threading.Thread(target=self._serve, args=(connection,), name="memory-s3-connection", daemon=True)
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            while (head := connection.read_head()) is not None:
                if not self._answer(connection, head):
                    return
        except MalformedRequestError as error:
            _log.debug("closing a connection: %s", error)
            refusal = S3Error(400, "BadRequest", str(error))
            with contextlib.suppress(OSError):
                connection.send(answers.error(refusal, resource="", request_id="0"), keep=False)
        except OSError as error:
            _log.debug("connection lost: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _answer(self, connection: Connection, head: Head) -> bool:
        """Handle one request; returns whether the connection can take another."""
        if head.target == counters.PATH:
            return self._answer_counters(connection, head)
        info = self._identify(head)
        with self._lock:
            counted = self._counted
            counted.requests[info.operation] += 1
            if info.operation == "GetObject":
                counted.reads[_reader(info)].requests += 1
            self._in_flight += 1
            counted.peak_in_flight = max(counted.peak_in_flight, self._in_flight)
            if self._record_requests:
                self._request_log.append(info)
        try:
            fault = None if self.fault is None else self.fault(info)
            return self._answer_with(connection, head, info, fault or Fault.delay(0))
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.notify_all()

    def _answer_counters(self, connection: Connection, head: Head) -> bool:
        # The client of a request has its answer before this server has counted it.
        with self._lock:
            self._idle.wait_for(lambda: not self._in_flight)
        if head.method == "DELETE":
            self.reset_counters()
        body = Body.of(self.counters.dump())
        connection.send(Response(200, body, {"Content-Type": "application/json"}), keep=True)
        return True

    def _answer_with(self, connection: Connection, head: Head, info: RequestInfo, fault: Fault) -> bool:
        if fault.kind == "straggle":
            self._wait(connection, fault.seconds)
        elif fault.seconds and fault.kind != "stall":
            time.sleep(fault.seconds)
        if fault.kind == "reset":
            connection.reset()
            return False
        expects = head.headers.get("expect", "").lower() == "100-continue"
        refusal = None
        if fault.kind in ("error", "error_in_200"):
            refusal = self._error(S3Error(fault.status, fault.code, "Injected by the fault function."), info)
        if refusal is not None and expects:
            # The body has not been sent, and the client may or may not send it: start afresh.
            self._send(connection, info, refusal, keep=False)
            return False
        if expects:
            connection.send_bytes(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.kind == "reset_request":
            discard(connection, min(fault.after_bytes, head.content_length))
            connection.reset()
            return False
        response = refusal or Response()
        if refusal is not None or (fault.kind == "forge" and not fault.applied):
            discard(connection, head.content_length)
        else:
            response = self._perform(connection, head, info, fault)
        if fault.kind == "forge":
            forged = Response(fault.status, Body.of(fault.body), dict(fault.headers))
            connection.send(forged, keep=True, body=info.method != "HEAD")
            return True
        if fault.kind == "apply_then_reset":
            connection.reset()
            return False
        if fault.kind == "cut_head":
            connection.send_head(response, limit=fault.after_bytes)
            return False
        if fault.kind == "drip":
            for byte in render(response, body=info.method != "HEAD"):
                self._wait(connection, 1 / fault.bytes_per_second)
                connection.send_bytes(bytes([byte]))
            return True
        is_slow = fault.kind in ("stall", "crawl") and len(response.body) > fault.after_bytes
        is_cut = fault.kind in ("truncate", "reset_response")
        keep = not is_cut and head.headers.get("connection", "").lower() != "close"
        self._send(connection, info, response, keep=keep, limit=fault.after_bytes if is_cut or is_slow else None)
        if fault.kind == "reset_response":
            connection.reset()
        if is_slow:
            self._send_slowly(connection, response.body.slice(fault.after_bytes, len(response.body)), fault)
        return keep

    def _send_slowly(self, connection: Connection, rest: Body, fault: Fault) -> None:
        step = max(1, int(fault.bytes_per_second / 50)) if fault.kind == "crawl" else len(rest)
        for start in range(0, len(rest), step):
            part = rest.slice(start, min(start + step, len(rest)))
            self._wait(connection, len(part) / fault.bytes_per_second if fault.kind == "crawl" else fault.seconds)
            for piece in part.pieces:
                connection.send_bytes(piece)
            with self._lock:
                self._counted.bytes_out += len(part)

    def _wait(self, connection: Connection, seconds: float) -> None:
        """Sleep; ConnectionError if the client hangs up meanwhile."""
        if connection.wait_for_end(seconds):
            raise ConnectionError("the client hung up")

    def _perform(self, connection: Connection, head: Head, info: RequestInfo, fault: Fault) -> Response:
        received = receive(connection, head.content_length, self._pool, verify=CHECKSUM in head.headers)
        with self._lock:
            self._counted.bytes_in += len(received)
        not_deleted = fault.code if fault.kind == "delete_partly" else ""
        call = Call(info.bucket, info.key, info.query, info.headers, received, not_deleted)
        try:
            if fault.kind == "repeat":
                with contextlib.suppress(S3Error):
                    self._operations.handle(info.operation, call)
            return self._operations.handle(info.operation, call)
        except S3Error as error:
            return self._error(error, info)
        except Exception:  # noqa: BLE001 - a bug here must not take the connection down
            _log.exception("%s failed", info.operation)
            return self._error(S3Error(500, "InternalError", "See the server's log"), info)

    def _send(
        self, connection: Connection, info: RequestInfo, response: Response, *, keep: bool, limit: int | None = None
    ) -> None:
        has_body = info.method != "HEAD" and response.status not in (204, 304)
        headers = {
            "x-amz-request-id": f"{info.number:016X}",
            "Date": formatdate(self._clock(), usegmt=True),
            "Server": "MemoryS3",
            **response.headers,
        }
        response = Response(response.status, response.body, headers)
        try:
            connection.send(response, keep=keep, body=has_body, limit=limit)
        finally:
            with self._lock:
                self._counted.bytes_out += connection.sent
                if info.operation == "GetObject":
                    self._counted.reads[_reader(info)].bytes_out += connection.sent

    def _identify(self, head: Head) -> RequestInfo:
        path, _, query_string = head.target.partition("?")
        bucket, _, key = unquote(path).removeprefix("/").partition("/")
        query = dict(parse_qsl(query_string, keep_blank_values=True))
        operation = identify(head.method, key, query, head.headers)
        number, size = next(self._numbers), head.content_length
        return RequestInfo(number, operation, head.method, bucket, key, query, head.headers, size)

    def _error(self, error: S3Error, info: RequestInfo) -> Response:
        resource = f"/{info.bucket}/{info.key}" if info.key else f"/{info.bucket}"
        return answers.error(error, resource=resource, request_id=f"{info.number:016X}")


def _reader(info: RequestInfo) -> Reader:
    credential = info.headers.get("authorization", "").partition("Credential=")[2]
    return Reader(credential.partition("/")[0], info.key)
