"""What a store does, found out by trying: some answer "done" to conditions and digests that they never looked at.

Amazon's own is not probed: it documents all three. Answers are kept for the process, per endpoint and bucket. A probe
writes tiny objects beside what it is asked about, under names of their own, and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ckptlib.storage import s3_parts
from ckptlib.storage.s3_client import Connection, ask
from ckptlib.storage.s3_errors import code_of

log = logging.getLogger("ckptlib")

_NOT_UNDERSTOOD = frozenset({"NotImplemented", "501", "InvalidArgument", "400", "MethodNotAllowed", "405"})
_CONDITION = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})
_DIGEST = frozenset({"BadDigest", "InvalidDigest", "InvalidRequest", "XAmzContentChecksumMismatch"})


class Probe:
    """Questions about one bucket.

    Args:
        prefix: where probes may be written, with its trailing slash.
        extras: parameters of every write.
    """

    def __init__(self, connection: Connection, bucket: str, prefix: str, extras: Mapping[str, Any]) -> None:
        self._connection = connection
        self._bucket = bucket
        self._prefix = prefix
        self._extras = extras

    def honours_if_none_match(self) -> bool:
        """Whether a PUT under ``If-None-Match: *`` fails when the name exists.

        Raises:
            OSError: nothing may be written here, or the store failed. So for the others.
        """
        return self._answer("If-None-Match", self._try_if_none_match)

    def honours_if_match(self) -> bool:
        """Whether a PUT under ``If-Match`` fails with another entity tag, and succeeds with that of the object."""
        return self._answer("If-Match", self._try_if_match)

    def rejects_wrong_digests(self) -> bool:
        """Whether objects and parts with a SHA-256 that does not fit are refused: only then is one it shows its own.

        Whoever may not write cannot find out; then it is not known to.
        """
        try:
            return self._answer("x-amz-checksum-sha256", self._try_digest)
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._connection.facts[self._bucket, "x-amz-checksum-sha256"] = False
            return False

    def _answer(self, question: str, try_it: Callable[[str], bool]) -> bool:
        if self._connection.is_aws:
            return True
        with self._connection.lock:
            answer = self._connection.facts.get((self._bucket, question))
            if answer is None:
                answer = bool(ask(self._connection, "probe", self._url, lambda: self._try(try_it)))
                self._connection.facts[self._bucket, question] = answer
                log.info("%s: %s is %s", self._url, question, "honoured" if answer else "NOT honoured")
        return answer

    def _try(self, try_it: Callable[[str], bool]) -> bool:
        """One try, under a name of its own: what an earlier one left is not mistaken for an answer."""
        key = f"{self._prefix}.probe-{uuid.uuid4().hex}"
        try:
            return try_it(key)
        finally:
            with contextlib.suppress(Exception):
                self._send("delete_object", Key=key)

    def _try_if_none_match(self, key: str) -> bool:
        def put() -> Any:
            return self._put(key, b"one", IfNoneMatch="*")

        return self._refused(put, _CONDITION) is None and self._refused(put, _CONDITION) is True

    def _try_if_match(self, key: str) -> bool:
        etag = self._send("put_object", Key=key, Body=b"one", **self._extras)["ETag"]
        other = '"' + "0" * 32 + '"'
        return (
            self._refused(lambda: self._put(key, b"two", IfMatch=other), _CONDITION) is True
            and self._refused(lambda: self._put(key, b"two", IfMatch=etag), _CONDITION) is None
        )

    def _try_digest(self, key: str) -> bool:
        wrong = s3_parts.to_base64(hashlib.sha256(b"other").hexdigest())
        if self._refused(lambda: self._put(key, b"one", ChecksumSHA256=wrong), _DIGEST) is not True:
            return False
        upload = self._send("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256", **self._extras)["UploadId"]
        part = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": 1, "Body": b"one"}
        client = self._connection.client
        try:
            return self._refused(lambda: client.upload_part(ChecksumSHA256=wrong, **part), _DIGEST) is True
        finally:
            self._send("abort_multipart_upload", Key=key, UploadId=upload)

    def _refused(self, request: Callable[[], Any], codes: frozenset[str]) -> bool | None:
        """Sends a request once.

        Returns:
            None: it was carried out. True: it was refused, with one of these codes. False: it was not understood.
        """
        try:
            request()
        except Exception as error:
            code = code_of(error)
            if code in codes:
                return True
            if code in _NOT_UNDERSTOOD:
                return False
            raise
        return None

    def _put(self, key: str, data: bytes, **conditions: str) -> Any:
        return self._send("put_object", Key=key, Body=data, **{**self._extras, **conditions})

    def _send(self, method: str, **arguments: Any) -> Any:
        return getattr(self._connection.client, method)(Bucket=self._bucket, **arguments)

    @property
    def _url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"
