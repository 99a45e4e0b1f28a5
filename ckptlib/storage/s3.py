"""Amazon S3 and what speaks its protocol. Paths are ``bucket/key``.

Promises of `base` kept here: an object appears whole or not at all, and is durable when the store says so; `create` is
a small PUT under ``If-None-Match: *`` (W4: some stores ignore it on the completion of an upload), on stores that were
seen to honour it (`s3_probe`). S3 lists and reads strictly after writes; nothing is cached. There are no directories.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlib.errors import ExclusiveCreateError
from ckptlib.storage import base, s3_parts, s3_settings
from ckptlib.storage.base import Capabilities, Entry, Range, Unfinished, Vouched
from ckptlib.storage.s3_client import Connection, ask, backoff, connect
from ckptlib.storage.s3_copy import copy_object
from ckptlib.storage.s3_errors import BUSY, InterruptedBodyError, Refusal, code_of, was_repeated
from ckptlib.storage.s3_options import S3Options
from ckptlib.storage.s3_probe import Probe
from ckptlib.storage.s3_read import cut_rows, fetch, fetch_rows, plan_requests, read_all
from ckptlib.storage.s3_upload import S3WriteStream, Target, uploads_below

DELETE_KEYS = 1000
"""Keys per DeleteObjects request."""


class S3Storage(base.Defaults):
    """Storage in buckets of one store.

    Args:
        options: how to reach it.
        single_writer: the caller vouches that nobody else writes; allows `create` where it is not exclusive.
    """

    capabilities = Capabilities(exclusive_create=True, name="s3", whole_files=True, reads_at_once=8)

    def __init__(self, options: S3Options | None = None, *, single_writer: bool = False) -> None:
        self.options = options or S3Options()
        self._single_writer = single_writer
        self._resumes = False
        payer = {"RequestPayer": "requester"} if self.options.requester_pays else {}
        self._read_extras = payer
        self._extras = {**payer, **self.options.s3_additional_kwargs}

    @property
    def connection(self) -> Connection:
        """Of this process: one that was forked makes its own."""
        return connect(self.options)

    def open_write(self, path: str, *, size: int | None = None) -> S3WriteStream:
        """Starts an upload; of `resuming`, continues one that a dead process left under the same name."""
        target = self._target(path)
        if self.stat(path) is not None:
            raise FileExistsError(errno.EEXIST, "object exists", self.url(path))
        return S3WriteStream(target, size=size, resume=self._resumes)

    def resuming(self) -> S3Storage:
        """Uploads of the same names are continued: their parts with the same content need not be sent again."""
        again = copy.copy(self)
        again._resumes = True
        return again

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """One PUT, whose digest the store checks."""
        self._put(path, data)

    def create(self, path: str, data: bytes) -> None:
        """One conditional PUT."""
        if not self.probe(base.parent(path)).honours_if_none_match():
            if not self._single_writer:
                raise ExclusiveCreateError(
                    f"{self.url(path)}: this store ignores If-None-Match, so two writers could both commit. Pass "
                    "single_writer=True if you are sure that only this job writes here."
                )
            if self.stat(path) is not None:
                raise FileExistsError(errno.EEXIST, "object exists", self.url(path))
            self._put(path, data)
            return
        self._put_if(path, data, IfNoneMatch="*")

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """One conditional PUT after a look; on a store that ignores the condition, the look is all."""
        try:
            found, etag = self._get(path)
        except FileNotFoundError:
            found, etag = None, None
        if found != old:
            return False
        probe = self.probe(base.parent(path))
        conditions = {}
        if etag is None and probe.honours_if_none_match():
            conditions = {"IfNoneMatch": "*"}
        elif etag is not None and probe.honours_if_match():
            conditions = {"IfMatch": etag}
        try:
            self._put_if(path, new, **conditions)
        except (FileExistsError, FileNotFoundError):  # changed, or gone, since
            return False
        return True

    def copy(self, source: str, target: str) -> None:
        """Inside the store."""
        copy_object(self._target(source), self._target(target))

    def same_content(self, one: str, other: str) -> bool:
        """By the digests that the store keeps of both, where these are of the same kind; else by reading."""
        try:
            left, right = self.vouched(one), self.vouched(other)
        except FileNotFoundError:
            return False
        if left is not None and right is not None:
            if left.size != right.size:
                return False
            if left.sha256 is not None and right.sha256 is not None:
                return left.sha256 == right.sha256
            if left.composite is not None and left.composite == right.composite:
                return True  # others may only be cut into other parts
        return base.equal_bytes(self, one, other)

    def get(self, path: str) -> bytes:
        """One GET."""
        return self._get(path)[0]

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        """Ranged GETs side by side: neighbours, and what small gaps divide, in one."""
        target = self._target(path)
        self._side_by_side([partial(fetch, target, request) for request in plan_requests(ranges)])

    def read_rows(self, path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """Rows with gaps that are not large travel together with these."""
        parts = cut_rows(offset, stride, rows)
        if parts is None:
            self.read_into(path, base.ranges_of_rows(offset, stride, rows))
            return
        target = self._target(path)
        self._side_by_side([partial(fetch_rows, target, start, stride, part) for start, part in parts])

    def list(self, path: str) -> list[Entry]:
        """One request for each 1,000 names below."""
        bucket, key = _split(path)
        prefix = f"{key}/" if key else ""
        entries: dict[Entry, None] = {}
        after: dict[str, str] | None = {}
        while after is not None:
            page = self._page(path, bucket, prefix, after)
            after = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else None
            for item in page.get("Contents", ()):
                if name := item["Key"].removeprefix(prefix).rstrip("/"):  # some tools make objects to show directories
                    entries[Entry(name, item["Key"].endswith("/"), item["Size"])] = None
            for item in page.get("CommonPrefixes", ()):
                if name := item["Prefix"].removeprefix(prefix).rstrip("/"):
                    entries[Entry(name, True, 0)] = None
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, path: str) -> int | None:
        """One HEAD."""
        try:
            size: int = self._call(path, "look", "head_object")["ContentLength"]
        except FileNotFoundError:
            return None
        return size

    def vouched(self, path: str) -> Vouched | None:
        """One HEAD: the SHA-256 that the store checked when the object was written and keeps since.

        It does not read the object again: bytes that went bad on its disks since are found by reading alone.
        """
        head = self._call(path, "look", "head_object", ChecksumMode="ENABLED")
        said = head.get("ChecksumSHA256")
        if said is None:
            return None
        if not self.probe(base.parent(path)).rejects_wrong_digests():
            return None
        digest, _, count = said.partition("-")
        sha256 = s3_parts.from_base64(digest)
        size = head["ContentLength"]
        if sha256 is None:
            return None
        if count.isdecimal():
            return Vouched(size, composite=sha256, parts=int(count))
        if "-" in head["ETag"]:  # an upload in parts whose digest does not say of how many it is
            return None
        return Vouched(size, sha256=sha256)

    def first_part(self, path: str) -> int | None:
        """One HEAD. A store that does not know part numbers answers with the whole, and says nothing of parts."""
        head = self._call(path, "look", "head_object", PartNumber=1)
        size: int = head["ContentLength"]
        return size if "PartsCount" in head else None

    def remove_each(self, paths: Iterable[str]) -> dict[str, OSError]:
        """A request for each 1,000 names of a bucket."""
        failures: dict[str, OSError] = {}
        for bucket, group in itertools.groupby(dict.fromkeys(paths), key=lambda path: _split(path)[0]):
            keys = [key for path in group if (key := _split(path)[1])]
            for start in range(0, len(keys), DELETE_KEYS):
                group_of_keys = keys[start : start + DELETE_KEYS]
                try:
                    failures |= self._delete(bucket, group_of_keys)
                except OSError as error:
                    failures |= {f"{bucket}/{key}": error for key in group_of_keys}
        return failures

    def unfinished(self, path: str) -> Sequence[Unfinished]:
        """Multipart uploads that were neither completed nor ended."""
        bucket, key = _split(path)
        target = Target(self.connection, bucket, key, self.url(path), self._extras, self._read_extras)
        return [
            Unfinished(f"{bucket}/{upload['Key']}", upload["UploadId"], upload["Initiated"].timestamp())
            for upload in uploads_below(target, f"{key}/" if key else "")
        ]

    def discard(self, unfinished: Unfinished) -> None:
        """Ends an upload and frees its parts."""
        self._target(unfinished.path).end(unfinished.token)

    def notices(self, path: str) -> Sequence[tuple[str, bool]]:
        """Settings of the bucket that keep, or remove, what others think is gone, or there."""
        bucket, key = _split(path)

        def setting(method: str) -> dict[str, Any]:
            try:
                answer: dict[str, Any] = ask(
                    self.connection,
                    method.removeprefix("get_").replace("_", " "),
                    self.url(bucket),
                    lambda: getattr(self.connection.client, method)(Bucket=bucket),
                )
            except OSError as error:
                return {} if code_of(error) in s3_settings.NOT_SET else {"unknown": error}
            return answer

        return s3_settings.notices(
            key,
            setting("get_bucket_versioning"),
            setting("get_bucket_lifecycle_configuration"),
            setting("get_object_lock_configuration"),
        )

    def url(self, path: str) -> str:
        """``s3://bucket/key``."""
        return f"s3://{path}"

    def probe(self, path: str) -> Probe:
        """Questions to the store about the bucket of a directory."""
        bucket, key = _split(path)
        return Probe(self.connection, bucket, f"{key}/" if key else "", self._extras)

    def _side_by_side(self, reads: Sequence[Callable[[], None]]) -> None:
        if len(reads) == 1:
            reads[0]()
            return
        futures = [self.connection.threads.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        finally:  # after an error nobody may still write into the buffers
            for future in futures:
                future.cancel()
            wait(futures)

    def _target(self, path: str) -> Target:
        bucket, key = _split(path)
        if not key:
            raise IsADirectoryError(errno.EISDIR, "a bucket is no file", self.url(path))
        return Target(self.connection, bucket, key, self.url(path), self._extras, self._read_extras)

    def _page(self, path: str, bucket: str, prefix: str, after: dict[str, str]) -> Any:
        arguments = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", **self._read_extras, **after}
        client = self.connection.client
        return ask(self.connection, "list", self.url(path), lambda: client.list_objects_v2(**arguments))

    def _call(self, path: str, what: str, method: str, **arguments: Any) -> Any:
        return self._target(path).call(what, method, **arguments)

    def _get(self, path: str) -> tuple[bytes, str]:
        """Content, which the client compares with the digest that the store keeps, if any; and entity tag."""
        target = self._target(path)

        def get() -> tuple[bytes, str]:
            answer = target.connection.client.get_object(
                Bucket=target.bucket, Key=target.key, ChecksumMode="ENABLED", **target.read_extras
            )
            data = read_all(answer["Body"])
            if len(data) != answer["ContentLength"]:
                raise InterruptedBodyError(f"{len(data)} of {answer['ContentLength']} bytes came")
            return data, answer["ETag"]

        content: tuple[bytes, str] = target.ask("read", get)
        return content

    def _put(self, path: str, data: bytes, **conditions: str) -> None:
        self._target(path).put(data, hashlib.sha256(data).hexdigest(), **conditions)

    def _put_if(self, path: str, data: bytes, **conditions: str) -> None:
        """A conditional PUT. One whose answer was lost finds its own object when it is sent again: no conflict."""
        try:
            self._put(path, data, **conditions)
        except (FileExistsError, FileNotFoundError) as error:
            if not was_repeated(error) or not self._holds(path, data):
                raise

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self.get(path) == data
        except FileNotFoundError:
            return False

    def _delete(self, bucket: str, keys: Sequence[str]) -> dict[str, OSError]:
        """One DeleteObjects; what the store was too busy for, again."""
        final: dict[str, OSError] = {}
        for attempt in range(1, self.options.attempts + 1):
            busy: dict[str, OSError] = {}
            for item in self._delete_once(bucket, keys):
                path = f"{bucket}/{item['Key']}"
                error = self.connection.translate(Refusal(item), "removal", self.url(path))
                if item.get("Code") in BUSY:
                    busy[path] = error
                elif not isinstance(error, FileNotFoundError):
                    final[path] = error
            if not busy or attempt == self.options.attempts:
                return final | busy
            keys = [_split(path)[1] for path in busy]
            time.sleep(backoff(attempt, busy=True))
        raise AssertionError("attempts are at least one")

    def _delete_once(self, bucket: str, keys: Sequence[str]) -> Iterable[dict[str, Any]]:
        """What the store could not remove, as it says so itself: key, code, message."""
        request = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = ask(
            self.connection,
            "removal" if len(keys) == 1 else f"removal of this and {len(keys) - 1} others",
            self.url(f"{bucket}/{keys[0]}"),
            lambda: self.connection.client.delete_objects(Bucket=bucket, Delete=request, **self._read_extras),
        )
        errors: Sequence[dict[str, Any]] = answer.get("Errors", ())
        return errors


def _split(path: str) -> tuple[str, str]:
    """Bucket and key of a path."""
    bucket, _, key = path.partition("/")
    return bucket, key
