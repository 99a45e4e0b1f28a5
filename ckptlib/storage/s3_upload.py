"""One file on its way to S3: a multipart upload from the memory that the caller hands over, without copies of it.

Each part goes with its SHA-256, so that the store rejects what was damaged on the way (W1); that of the whole file is
computed beside it. What fits one part is one PUT. Nothing but `S3WriteStream.finish` completes an upload: an
exception, a dropped stream or a dead process leave no object, at most an upload that `S3Storage.unfinished` lists.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptlib.errors import StorageError
from ckptlib.storage import s3_parts
from ckptlib.storage.base import Buffer, Written
from ckptlib.storage.hashing import StreamHasher
from ckptlib.storage.s3_client import Connection, ask
from ckptlib.storage.s3_errors import code_of
from ckptlib.storage.s3_parts import Body

log = logging.getLogger("ckptlib")


SMALL_BYTES = 64 * 1024
"""Pieces up to this size are copied together."""


@dataclass(frozen=True)
class Sent:
    """A part that the store has.

    Attributes:
        etag: the store's entity tag: with it, and with the number, the part is named when the upload is completed.
        sha256: (hex) of its bytes.
    """

    etag: str
    sha256: str


@dataclass(frozen=True)
class Target:
    """Where an upload goes.

    Attributes:
        url: for people.
        extras: parameters of every write: encryption, storage class.
        read_extras: those of every other request: who pays.
    """

    connection: Connection
    bucket: str
    key: str
    url: str
    extras: dict[str, Any]
    read_extras: dict[str, Any]

    def ask(self, what: str, request: Callable[[], Any]) -> Any:
        """See `s3_client.ask`."""
        return ask(self.connection, what, self.url, request)

    def call(self, what: str, method: str, before: Callable[[], None] = lambda: None, **arguments: Any) -> Any:
        """One request about this object, by the name of the client's method.

        Args:
            before: called before every try.
        """
        extras = self.extras if method in _WRITES else self.read_extras
        parameters = {"Bucket": self.bucket, "Key": self.key, **extras, **arguments}
        body = arguments.get("Body")

        def request() -> Any:
            before()
            if isinstance(body, Body):
                body.seek(0)  # the client rewinds it only for repetitions of its own
            return getattr(self.connection.client, method)(**parameters)

        return self.ask(what, request)

    def put(self, body: Body | bytes, sha256: str, **conditions: Any) -> Any:
        """Writes the whole object in one request; the store checks the digest (hex)."""
        return self.call("write", "put_object", Body=body, ChecksumSHA256=s3_parts.to_base64(sha256), **conditions)

    def end(self, upload: str) -> None:
        """Ends an upload and frees its parts; one that is gone is fine.

        Raises:
            OSError: see `s3_errors.translate`.
        """
        try:
            self.call("end of the upload", "abort_multipart_upload", UploadId=upload)
        except OSError as error:
            if code_of(error) not in ("NoSuchUpload", "404"):
                raise

    def left(self) -> str | None:
        """The newest upload of this object that was neither completed nor ended, where that can be found out."""
        try:
            uploads = [upload for upload in uploads_below(self, self.key) if upload["Key"] == self.key]
        except OSError as error:
            log.info("%s: cannot look for an earlier upload: %s", self.url, error)
            return None
        return max(uploads, key=lambda upload: upload["Initiated"])["UploadId"] if uploads else None


_WRITES = frozenset({"put_object", "create_multipart_upload", "copy_object"})
"""Methods that take what an object shall be like: encryption, storage class."""


def uploads_below(target: Target, prefix: str) -> Iterator[dict[str, Any]]:
    """Uploads of the bucket that were neither completed nor ended, of names that begin so.

    MinIO finds by a prefix only the uploads of the one object that is named so; asked for all, it lists all.
    """
    found = False
    for upload in _uploads(target, prefix):
        found = True
        yield upload
    if not found and prefix and not target.connection.is_aws:
        yield from (upload for upload in _uploads(target, "") if upload["Key"].startswith(prefix))


def _uploads(target: Target, prefix: str) -> Iterator[dict[str, Any]]:
    client = target.connection.client
    markers: dict[str, str] | None = {}
    while markers is not None:
        arguments = {"Bucket": target.bucket, "Prefix": prefix, **target.read_extras, **markers}
        answer = target.ask("look for uploads", partial(client.list_multipart_uploads, **arguments))
        yield from answer.get("Uploads", ())
        markers = None
        if answer.get("IsTruncated"):
            markers = {"KeyMarker": answer["NextKeyMarker"]}
            if answer.get("NextUploadIdMarker"):
                markers["UploadIdMarker"] = answer["NextUploadIdMarker"]


class S3WriteStream:
    """An object being written from front to back.

    Args:
        size: bytes to come, about; None: not known.
        resume: go on with an upload of this object that another writer left, who is dead.
    """

    def __init__(self, target: Target, *, size: int | None = None, resume: bool = False) -> None:
        options = target.connection.options
        self._target = target
        self._max_parts = options.max_parts
        self._part_size = s3_parts.first_part_size(size, options.part_size, options.max_parts)
        self._in_flight = options.concurrency
        self._hasher = StreamHasher()
        self._held: list[memoryview | bytearray] = []
        self._held_size = 0
        self._size = 0
        self._resume = resume
        self._upload: str | None = None
        self._given_up = threading.Event()
        self._present: dict[int, tuple[str, str | None, int]] = {}
        self._parts: list[Future[Sent]] = []
        self._waiting: deque[Future[Sent]] = deque()

    def write(self, data: Buffer) -> None:
        """Keeps views; a part that is complete is sent, by another thread."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        self._hasher.update(view)
        self._size += len(view)
        while view:
            room = s3_parts.part_size(len(self._parts), self._part_size, self._max_parts) - self._held_size
            if not room:  # only now is it certain that there is another part
                self._send()
                continue
            self._hold(view[:room])
            view = view[room:]

    def _hold(self, view: memoryview) -> None:
        """Small pieces are copied together: each that is sent by itself costs a system call."""
        self._held_size += len(view)
        if len(view) > SMALL_BYTES:
            self._held.append(view)
        elif self._held and isinstance(self._held[-1], bytearray):
            self._held[-1] += view
        else:
            self._held.append(bytearray(view))

    def release(self) -> None:
        """Waits for the parts in flight; what is not a part yet is copied."""
        while self._waiting:
            self._wait()
        self._hasher.settle()
        self._held = [bytearray(b"".join(self._held))]

    def finish(self) -> Written:
        """Sends the rest and completes the upload; then looks at what the store has."""
        if not self._parts:
            return self._finish_small()
        if self._held_size:
            self._send()
        parts = [part.result() for part in self._parts]
        digests = tuple(part.sha256 for part in parts)
        self._complete(parts, digests)
        return Written(self._size, self._hasher.digest(), self._part_size, digests)

    def abort(self) -> None:
        """Ends the upload; the caller is already handling an error."""
        self._hasher.close()
        self._given_up.set()
        for part in self._parts:
            part.cancel()
        for part in self._parts:  # one that arrives after the end of the upload would stay as an orphan
            with contextlib.suppress(BaseException):
                part.result()
        self._held.clear()
        if self._upload is not None:
            try:
                self._target.end(self._upload)
            except OSError as error:
                log.warning("%s: an unfinished upload may remain: %s", self._target.url, error)

    def _finish_small(self) -> Written:
        digest = self._hasher.digest()
        # A client asks before it sends a file; not before it sends bytes.
        self._target.put(b"".join(self._held) if self._size <= SMALL_BYTES else Body(self._held), digest)
        self._check_stored(None)
        return Written(self._size, digest)

    def _send(self) -> None:
        if self._upload is None:
            self._begin()
        if len(self._parts) == self._max_parts:
            raise StorageError(
                errno.EFBIG,
                f"{self._target.url}: more than {self._max_parts} parts; raise part_size in storage_options",
            )
        while len(self._waiting) >= self._in_flight:
            self._wait()
        body, self._held, self._held_size = Body(self._held), [], 0
        part = self._target.connection.threads.submit(self._send_part, len(self._parts), body)
        self._parts.append(part)
        self._waiting.append(part)

    def _begin(self) -> None:
        """Begins an upload, or goes on with one."""
        self._upload = self._target.left() if self._resume else None
        if self._upload is not None:
            self._present = self._list_parts()
        else:
            answer = self._target.call("upload", "create_multipart_upload", ChecksumAlgorithm="SHA256")
            self._upload = answer["UploadId"]

    def _wait(self) -> None:
        self._waiting.popleft().result()

    def _send_part(self, number: int, body: Body) -> Sent:
        sha256 = body.sha256()
        if (there := self._present.get(number)) is not None:
            etag, known, size = there
            if size == len(body) and (known == sha256 or (known is None and etag.strip('"') == body.md5())):
                return Sent(etag, sha256)
        answer = self._target.call(
            f"upload {self._upload} part {number + 1}",
            "upload_part",
            self._go_on,
            UploadId=self._upload,
            PartNumber=number + 1,
            Body=body,
            ChecksumSHA256=s3_parts.to_base64(sha256),
        )
        return Sent(answer["ETag"], sha256)

    def _go_on(self) -> None:
        """A part is not tried again when nobody wants it any more."""
        if self._given_up.is_set():
            raise StorageError(errno.ECANCELED, f"{self._target.url}: the upload was given up")

    def _list_parts(self) -> dict[int, tuple[str, str | None, int]]:
        """Parts that the upload has: by number, from 0: entity tag, SHA-256 where the store tells it, size."""
        found: dict[int, tuple[str, str | None, int]] = {}
        after = 0
        while True:
            answer = self._target.call("parts of it", "list_parts", UploadId=self._upload, PartNumberMarker=after)
            for part in answer.get("Parts", ()):
                digest = part.get("ChecksumSHA256")
                known = None if digest is None else s3_parts.from_base64(digest)
                found[part["PartNumber"] - 1] = (part["ETag"], known, part["Size"])
            if not answer.get("IsTruncated"):
                return found
            after = answer["NextPartNumberMarker"]

    def _complete(self, parts: list[Sent], digests: tuple[str, ...]) -> None:
        listed = [
            {"PartNumber": number, "ETag": part.etag, "ChecksumSHA256": s3_parts.to_base64(part.sha256)}
            for number, part in enumerate(parts, 1)
        ]
        composite = s3_parts.composite(digests)
        try:
            self._target.call(
                "completion of the upload",
                "complete_multipart_upload",
                UploadId=self._upload,
                MultipartUpload={"Parts": listed},
                ChecksumSHA256=f"{s3_parts.to_base64(composite)}-{len(parts)}",
                ChecksumType="COMPOSITE",
            )
        except OSError as error:
            # The answer to a completion that took place may have been lost; its repetition finds no upload.
            if code_of(error) != "NoSuchUpload" or not self._is_stored(composite, len(parts)):
                raise
        self._check_stored(composite)

    def _is_stored(self, composite: str, count: int) -> bool:
        head = self._head()
        if head is None or head["ContentLength"] != self._size:
            return False
        said = head.get("ChecksumSHA256")
        return said is None or said.split("-")[0] == s3_parts.to_base64(composite)

    def _check_stored(self, composite: str | None) -> None:
        head = self._head()
        if head is None or head["ContentLength"] != self._size:
            found = "nothing" if head is None else f"{head['ContentLength']} bytes"
            raise StorageError(errno.EIO, f"{self._target.url}: wrote {self._size} bytes, the store has {found}")
        said = head.get("ChecksumSHA256")
        if composite is not None and said is not None and said.split("-")[0] != s3_parts.to_base64(composite):
            raise StorageError(errno.EIO, f"{self._target.url}: the store has other content than was written")

    def _head(self) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = self._target.call("look", "head_object", ChecksumMode="ENABLED")
        except FileNotFoundError:
            return None
        return answer
