"""A proxy in front of an S3 server that counts what passes, and does what networks, load balancers and stores do wrong.

Bodies pass in pieces; nothing is held back but the few small ones that it has to change.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import urlsplit

from tests.support.faults import ERRORS, Fault, Kind, Lacking
from tests.support.http_messages import (
    ConnectionLostError,
    Head,
    body_pieces,
    framed,
    operation_of,
    part_number_of,
    read_head,
    sign_again,
)
from tests.support.s3_server import S3Server


@dataclass
class Passed:
    """A request that came, whatever became of it.

    Attributes:
        fault: what was done to it.
        uploaded: bytes of the request's body that came from the client so far.
        downloaded: bytes of the response's body that went to it.
    """

    operation: str
    key: str
    fault: Kind | None
    uploaded: int = 0
    downloaded: int = 0


class FaultProxy:
    """Listens on a free port of its own; `endpoint` is what clients are given. Use it as a context manager.

    Attributes:
        faults: looked through in order for each request; the first that strikes is done. May change at any time.
        lacking: what the store behind it does not seem to know.
        most_parts: that it takes for one upload; None: as many as the server.
    """

    def __init__(self, server: S3Server, faults: Iterable[Fault] = (), *, lacking: Iterable[Lacking] = ()) -> None:
        self.faults: list[Fault] = list(faults)
        self.lacking: frozenset[Lacking] = frozenset(lacking)
        self.most_parts: int | None = None
        self._server = server
        target = urlsplit(server.endpoint)
        self._target = (target.hostname or "", target.port or 80)
        self._lock = threading.Lock()
        self._passed: list[Passed] = []
        self._links: set[_Link] = set()
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> str:
        """Where clients connect to."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections and threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            for link in self._links:
                link.shutdown()
        for thread in self._threads:
            thread.join()

    @property
    def passed(self) -> list[Passed]:
        """All requests so far."""
        with self._lock:
            return list(self._passed)

    def forget(self) -> None:
        """Counts from zero."""
        with self._lock:
            self._passed.clear()

    def counts(self) -> Counter[str]:
        """Requests of each operation."""
        return Counter(passed.operation for passed in self.passed)

    def bytes_uploaded(self) -> int:
        """Of the bodies of all requests."""
        return sum(passed.uploaded for passed in self.passed)

    def bytes_downloaded(self, operation: str = "*") -> int:
        """Of the bodies of all responses, or of those to one kind of request."""
        return sum(p.downloaded for p in self.passed if fnmatch.fnmatchcase(p.operation, operation))

    # --- one connection, one thread -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            link = _Link(client, self._target, self._closing)
            thread = threading.Thread(target=self._serve, args=(link,), name="fault-proxy-connection", daemon=True)
            with self._lock:
                self._links.add(link)
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: _Link) -> None:
        try:
            while (head := read_head(link.from_client)) is not None:
                if not self._one_request(link, head):
                    break
        except (OSError, ConnectionLostError, ValueError):
            pass  # one side has gone: so does the other
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _one_request(self, link: _Link, head: Head) -> bool:
        """Whether the connection goes on."""
        operation, key = operation_of(head)
        with self._lock:
            fault = next((fault for fault in self.faults if fault.strikes(operation, key)), None)
            link.passing = Passed(operation, key, None if fault is None else fault.kind)
            self._passed.append(link.passing)
        return self._pass(link, head, operation, fault)

    def _pass(self, link: _Link, head: Head, operation: str, fault: Fault | None) -> bool:
        kind = None if fault is None else fault.kind
        if fault is not None and kind == "delay":
            self._closing.wait(fault.seconds)
        refusal = ERRORS.get(kind or "") or self._refusal(head, operation)
        if refusal is not None:
            if head.get("Expect") is None:  # a client that asks first need not send its body
                for _ in link.request_pieces(head):
                    pass
            return link.send_error(head, *refusal)
        if kind == "cut_before":
            return link.cut()
        pieces = self._request(link, head, operation, kind)
        if kind == "hang":
            return link.hang()
        link.send_request(head, pieces)
        if kind == "cut_upload":
            return link.cut()
        response = link.read_response()
        body = link.response_pieces(head, response)
        if kind in ("cut_after", "hang_after", "error_after", "error_in_200"):
            for _ in body:
                pass
            if kind == "cut_after":
                return link.cut()
            if kind == "hang_after":
                return link.hang()
            status, code, message = ERRORS["internal_error"]
            return link.send_error(head, 200 if kind == "error_in_200" else status, code, message)
        return self._respond(link, head, operation, response, body, kind)

    def _refusal(self, head: Head, operation: str) -> tuple[int, str, str] | None:
        """What a store refuses that the server behind it takes."""
        if operation == "DeleteObjects" and "digests" in self.lacking and head.get("Content-MD5") is None:
            return 400, "MissingContentMD5", "Missing required header for this request: Content-MD5"
        if operation == "UploadPart" and self.most_parts is not None and part_number_of(head) > self.most_parts:
            return 400, "InvalidArgument", f"Part number must be an integer between 1 and {self.most_parts}"
        return None

    def _request(self, link: _Link, head: Head, operation: str, kind: Kind | None) -> Iterator[bytes]:
        """The body that the server gets; changes the head."""
        if head.drop("Expect"):
            link.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        pieces = link.request_pieces(head)
        changed = self._strip_conditions(head, operation)
        if "digests" in self.lacking:
            changed |= head.drop(r"x-amz-(sdk-)?checksum-.*|x-amz-trailer|content-md5")
            if operation == "CompleteMultipartUpload":
                content = re.sub(rb"<Checksum\w+>.*?</Checksum\w+>", b"", b"".join(pieces))
                head.set("Content-Length", str(len(content)))
                pieces = iter([content])
            changed = True  # nor does it compare the content with the digest that is signed
        if kind == "flip_upload":
            pieces = _flipped(pieces, head.length // 2)
            changed = True
        if kind == "cut_upload":
            pieces = _first(pieces, head.length // 2)
        if changed:
            sign_again(head, self._server.secret)
        return pieces

    def _strip_conditions(self, head: Head, operation: str) -> bool:
        if "conditions" in self.lacking or (
            "conditions_of_completion" in self.lacking and operation == "CompleteMultipartUpload"
        ):
            return head.drop("if-(none-)?match")
        return False

    def _respond(
        self, link: _Link, head: Head, operation: str, response: Head, body: Iterator[bytes], kind: Kind | None
    ) -> bool:
        size = response.length
        if "digests" in self.lacking:
            response.drop(r"x-amz-checksum-.*")
            if operation in ("CompleteMultipartUpload", "CopyObject") and not response.chunked:
                content = re.sub(rb"<Checksum\w+>.*?</Checksum\w+>", b"", b"".join(body))
                response.set("Content-Length", str(len(content)))
                body = iter([content])
        if kind == "flip_download":
            body = _flipped(body, size // 2)
        if kind == "short_download" and not head.start.startswith("HEAD"):
            body = _first(body, size // 2)
            response.set("Content-Length", str(size // 2))
        if kind == "cut_download":
            body = _first(body, size // 2)
        link.send_response(response, body)
        if kind == "cut_download":
            return link.cut()
        if kind == "short_download":
            link.leave_server()
        return "close" not in (response.get("Connection") or "", head.get("Connection") or "")


class _Link:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, target: tuple[str, int], closing: threading.Event) -> None:
        self._client = client
        self._target = target
        self._closing = closing
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.from_client: BinaryIO = client.makefile("rb")
        self._server: socket.socket | None = None
        self._from_server: BinaryIO | None = None
        self.passing = Passed("", "", None)

    def send(self, data: bytes) -> None:
        self._client.sendall(data)

    def request_pieces(self, head: Head) -> Iterator[bytes]:
        for piece in body_pieces(self.from_client, head):
            self.passing.uploaded += len(piece)
            yield piece

    def response_pieces(self, request: Head, response: Head) -> Iterator[bytes]:
        assert self._from_server is not None
        if request.start.startswith("HEAD") or response.status in (204, 304):
            return iter(())
        return body_pieces(self._from_server, response)

    def send_request(self, head: Head, pieces: Iterable[bytes]) -> None:
        if self._server is None:
            self._server = socket.create_connection(self._target)
            self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._from_server = self._server.makefile("rb")
        try:
            self._server.sendall(head.encoded())
            for data in framed(head, pieces):
                self._server.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered without reading the body

    def leave_server(self) -> None:
        """The rest of its response is not read; the next request gets another connection."""
        for end in (self._from_server, self._server):
            if end is not None:
                end.close()
        self._from_server = self._server = None

    def read_response(self) -> Head:
        assert self._from_server is not None
        while True:
            head = read_head(self._from_server)
            if head is None:
                raise ConnectionLostError
            if head.status != 100:
                return head

    def send_response(self, head: Head, body: Iterable[bytes]) -> None:
        self.send(head.encoded())

        def counted() -> Iterator[bytes]:
            for piece in body:
                self.passing.downloaded += len(piece)
                yield piece

        for data in framed(head, counted()):
            self.send(data)

    def send_error(self, request: Head, status: int, code: str, message: str) -> bool:
        """Answers in the server's place, and ends the connection."""
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        body = b"" if request.start.startswith("HEAD") else text.encode()
        head = Head(f"HTTP/1.1 {status} {code}", [("Content-Type", "application/xml")])
        head.set("Content-Length", str(len(body)))
        if code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
            head.set("x-amz-bucket-region", "eu-west-1")
        head.set("Connection", "close")
        self.send_response(head, [body])
        return False

    def hang(self) -> bool:
        """Until the client gives up."""
        while not self._closing.is_set():
            if select.select([self._client], [], [], 0.05)[0] and not self._client.recv(65536):
                break
        return False

    def cut(self) -> bool:
        """The client sees a reset, not an orderly end."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def shutdown(self) -> None:
        for end in (self._client, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self.from_client, self._client, self._from_server, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()


def _flipped(pieces: Iterable[bytes], at: int) -> Iterator[bytes]:
    """The same with another byte at this place."""
    for piece in pieces:
        if 0 <= at < len(piece):
            piece = piece[:at] + bytes([piece[at] ^ 0x20]) + piece[at + 1 :]
        at -= len(piece)
        yield piece


def _first(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """So many bytes of it; the rest is taken and thrown away only where somebody asks for it."""
    for piece in pieces:
        yield piece[:size]
        size -= len(piece)
        if size <= 0:
            return
