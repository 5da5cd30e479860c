"""A bucket through boto3: operations carried out one request after the other, in the caller's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from botocore import xform_name

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3 import listing, multipart, operations, retry
from dcp_s3.s3.client import forget_client, get_client
from dcp_s3.s3.delete import delete
from dcp_s3.s3.flight import hang_at_most
from dcp_s3.s3.operations import Operation, Request, request_arguments
from dcp_s3.s3.throttle import Gate, gate_of
from dcp_s3.settings import Settings
from dcp_s3.store import StoredObject as StoredObject
from dcp_s3.store import Target, Upload

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A bucket as these settings reach it. Holds no connection: cheap, picklable, fork-safe."""

    name: str
    settings: Settings
    limit: Limit = UNLIMITED
    """Of its requests."""

    @property
    def client(self) -> Any:
        """This process's boto3 client."""
        return get_client(self.settings)

    @property
    def gate(self) -> Gate:
        """This process's gate for its data requests."""
        return gate_of(self.settings.endpoint_url, self.name, self.settings.concurrency)

    def within(self, limit: Limit) -> Bucket:
        """The bucket, its requests bounded by ``limit`` and nothing else."""
        return replace(self, limit=limit)

    # --- carrying out -----------------------------------------------------------------------------------

    def run(self, operation: Operation[T], *, cancel: threading.Event | None = None) -> T:
        """Carry out an operation; ``cancel`` ends it as that of the limit does.

        Raises:
            Cancelled: it was cancelled.
            StorageError: what the operation raises.
        """
        try:
            request = next(operation)
            while True:
                try:
                    answer = self._try(request, cancel)
                except errors.StorageError as error:
                    request = operation.throw(error)
                else:
                    request = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    def _try(self, request: Request, cancel: threading.Event | None) -> Any:
        return self.call(
            request.operation, request.key, lambda: self._attempt(request), cancel=cancel, data=request.data
        )

    def _attempt(self, request: Request) -> Any:
        try:
            answer = self.send(request)
        except Exception as error:
            if request.on_failure is not None:
                request.on_failure(error)
            raise
        if "Body" in answer:
            body = answer["Body"]
            answer = {**answer, "Body": body.read() if request.reads_body else body.close()}
        return answer if request.parse is None else request.parse(answer)

    def send(self, request: Request) -> Any:
        """Send a request once.

        Returns:
            boto3's answer; its ``Body``, if there is one, has not been read.

        Raises:
            Exception: what botocore, urllib3 or the socket raise.
        """
        method = getattr(self.client, xform_name(request.operation))
        return method(**operations.common_arguments(self), **request_arguments(request))

    def call(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        cancel: threading.Event | None = None,
        data: bool = False,
        attempts: int | None = None,
    ) -> T:
        """`retry.call` for this bucket. A request with ``data`` waits for its turn while S3 throttles.

        ``attempts``: other than the settings say.
        """
        settings, limit = self.settings, self.limit
        if cancel is not None:
            limit = replace(limit, cancel=cancel)
        most = settings.retry_attempts if limit.attempts is None else min(settings.retry_attempts, limit.attempts)
        tries = retry.Tries(operation, self.name, key, most if attempts is None else attempts, limit)
        connect, read = settings.connect_timeout, settings.read_timeout
        if limit.hang is not None:
            connect, read = min(connect, limit.hang), min(read, limit.hang)

        def attempt() -> T:
            with hang_at_most(connect, read):
                return request()

        try:
            return retry.call(attempt, tries, gate=self.gate, data=data)
        except errors.CredentialsError:
            forget_client(settings)  # the next save or load looks for credentials anew
            raise

    # --- objects ----------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether the object exists.

        Raises:
            BucketNotFoundError, CredentialsError, AccessDeniedError, TransferError: cannot tell.
        """
        return self.run(operations.exists(key))

    def read(self, key: str) -> bytes:
        """All bytes of a small object.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """
        return self.get(key).data

    def get(self, key: str) -> StoredObject:
        """A small object, whole.

        Raises:
            ObjectNotFoundError: there is none; other StorageErrors.
        """
        return self.run(operations.get(key))

    def head(self, key: str, **arguments: Any) -> Mapping[str, Any]:
        """S3's HeadObject answer, with the names of user metadata in lower case.

        Args:
            key: object key.
            arguments: further ones of the request.

        Raises:
            ObjectNotFoundError: there is none (or no such bucket); other StorageErrors.
        """
        return self.run(operations.head(key, **arguments))

    def write(
        self,
        key: str,
        data: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Put a small object.

        Args:
            key: object key.
            data: its bytes.
            if_absent: ask S3 to refuse if the object exists (If-None-Match: *).
            if_match: ask S3 to refuse unless the object has this ETag (If-Match).
            content_type: MIME type.
            metadata: user metadata.

        A refusal is believed only after a look: if the object is the one that was to be written, an earlier attempt
        did it and its answer was lost. Stores that do not know a condition (they answer 501, or refuse one that holds)
        get a plain write, after a warning.

        Raises:
            PreconditionFailedError: the condition does not hold: somebody else wrote the object.
            TransferError: a refusal was false, as often as it was tried; other StorageErrors.
        """
        self.run(
            operations.put(
                self, key, data,
                if_absent=if_absent, if_match=if_match, content_type=content_type, metadata=metadata,
            )
        )  # fmt: skip

    def delete(self, targets: Iterable[str | Target]) -> list[str]:
        """Delete objects, by their keys or as `Target`s; those that do not exist count as deleted.

        Returns:
            Keys that were left alone because they have another ETag. Stores that know no conditional deletes ignore it.

        Raises:
            StorageError: some could not be deleted.
        """
        return self.run(delete(self, [Target(each) if isinstance(each, str) else each for each in targets]))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object whose key starts with ``prefix``, in key order."""
        token: str | None = None
        while True:
            page = self.run(listing.page(prefix, token=token))
            for each in page.objects:
                yield each.key, each.size
            token = page.next_token
            if token is None:
                return

    # --- multipart uploads ------------------------------------------------------------------------------

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Every open multipart upload whose key starts with ``prefix``, by key.

        Raises:
            StorageError: cannot tell.
        """
        return self.run(listing.uploads(prefix))

    def abort(self, upload: Upload) -> None:
        """Abort a multipart upload; one that is gone counts as aborted.

        Raises:
            StorageError: it may stay open.
        """
        self.run(multipart.abort(upload.key, upload.upload_id))

    def abort_quietly(self, upload: Upload) -> bool:
        """`abort`; whether that worked. A failure is logged: another error is on its way to the user."""
        try:
            self.abort(upload)
        except errors.StorageError as error:
            logger.warning("the multipart upload %s of a failed save stays open: %s", upload.upload_id, error)
            return False
        return True
