"""HTTP/1.1 as a proxy in front of an S3 server needs it: heads, bodies piece by piece, operations, signatures."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

PIECE_BYTES = 64 * 1024


class ConnectionLostError(Exception):
    """The other side closed the connection in the middle of a message."""


@dataclass
class Head:
    """A start line, and headers in their order; names keep their case and are compared without it."""

    start: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for found, value in self.headers if found.lower() == name.lower()), None)

    def set(self, name: str, value: str) -> None:
        """Replaces a header, in its place."""
        found = [i for i, (other, _) in enumerate(self.headers) if other.lower() == name.lower()]
        if found:
            self.headers[found[0]] = (self.headers[found[0]][0], value)
        else:
            self.headers.append((name, value))

    def drop(self, pattern: str) -> bool:
        """Removes headers whose whole name matches, in any case; whether there was one."""
        kept = [(name, value) for name, value in self.headers if not re.fullmatch(pattern, name, re.IGNORECASE)]
        dropped = len(kept) < len(self.headers)
        self.headers = kept
        return dropped

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks that say their length."""
        return (self.get("Transfer-Encoding") or "").lower() == "chunked"

    @property
    def length(self) -> int:
        """Bytes of the body, where it is not chunked."""
        return int(self.get("Content-Length") or 0)

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.start.split()[1])

    def encoded(self) -> bytes:
        """As it is sent."""
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


def read_head(source: BinaryIO) -> Head | None:
    """The next head; None: the connection ended before it."""
    start = source.readline()
    if not start:
        return None
    head = Head(start.decode("latin-1").strip())
    while (line := source.readline()) not in (b"\r\n", b"\n"):
        if not line:
            raise ConnectionLostError
        name, _, value = line.decode("latin-1").partition(":")
        head.headers.append((name.strip(), value.strip()))
    return head


def body_pieces(source: BinaryIO, head: Head) -> Iterator[bytes]:
    """The content of a body, as it comes."""
    if head.chunked:
        while size := int(source.readline().split(b";")[0] or b"0", 16):
            yield from _exactly(source, size)
            source.readline()
        while source.readline() not in (b"\r\n", b"\n", b""):
            pass  # trailers
    else:
        yield from _exactly(source, head.length)


def framed(head: Head, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same as it is sent."""
    if not head.chunked:
        yield from pieces
        return
    for piece in pieces:
        if piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def _exactly(source: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = source.read1(min(size, PIECE_BYTES))  # type: ignore[attr-defined]
        if not piece:
            raise ConnectionLostError
        size -= len(piece)
        yield piece


_OF_OBJECT = {
    "GET": (("uploadId", "ListParts"), ("attributes", "GetObjectAttributes"), ("", "GetObject")),
    "HEAD": (("", "HeadObject"),),
    "PUT": (("uploadId", "UploadPart"), ("", "PutObject")),
    "POST": (("uploads", "CreateMultipartUpload"), ("uploadId", "CompleteMultipartUpload")),
    "DELETE": (("uploadId", "AbortMultipartUpload"), ("", "DeleteObject")),
}
_OF_BUCKET = {
    "GET": (
        ("list-type", "ListObjectsV2"),
        ("uploads", "ListMultipartUploads"),
        ("versions", "ListObjectVersions"),
        ("versioning", "GetBucketVersioning"),
        ("", "GetBucket"),
    ),
    "HEAD": (("", "HeadBucket"),),
    "PUT": (("policy", "PutBucketPolicy"), ("", "PutBucket")),
    "POST": (("delete", "DeleteObjects"),),
    "DELETE": (("", "DeleteBucket"),),
}


def operation_of(head: Head) -> tuple[str, str]:
    """What a request with a path-style address asks for, by the S3 API's name, and the key."""
    method, target, _ = head.start.split(" ")
    parts = urlsplit(target)
    _, _, key = parts.path.lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    table = _OF_OBJECT if key else _OF_BUCKET
    operation = next((name for word, name in table.get(method, ()) if not word or word in query), method)
    if head.get("x-amz-copy-source"):
        operation = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}.get(operation, operation)
    return operation, unquote(key) or query.get("prefix", [""])[0]


def part_number_of(head: Head) -> int:
    """Of the upload of a part; 0: it is none."""
    query = parse_qs(urlsplit(head.start.split(" ")[1]).query)
    return int(query.get("partNumber", ["0"])[0])


def sign_again(head: Head, secret: str) -> None:
    """Signs a request whose headers were changed as its sender would have; the content of its body does not count.

    AWS Signature Version 4, https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
    """
    match = re.match(
        r"AWS4-HMAC-SHA256 Credential=[^/]+/([^,]+), ?SignedHeaders=([^,]+),", head.get("Authorization") or ""
    )
    if match is None:
        return
    scope, signed_before = match.groups()
    head.set("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    signed = [name for name in signed_before.split(";") if head.get(name) is not None]
    method, target, _ = head.start.split(" ")
    path, _, query = target.partition("?")
    terms = sorted(term if "=" in term else f"{term}=" for term in query.split("&") if term)
    lines = [f"{name}:{' '.join((head.get(name) or '').split())}" for name in signed]
    canonical = "\n".join([method, path, "&".join(terms), *lines, "", ";".join(signed), "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", head.get("x-amz-date") or "", scope, digest])
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = re.sub(r"SignedHeaders=[^,]+", f"SignedHeaders={';'.join(signed)}", head.get("Authorization") or "")
    head.set("Authorization", re.sub(r"Signature=\w+", f"Signature={signature}", authorization))
