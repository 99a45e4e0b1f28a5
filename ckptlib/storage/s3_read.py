"""Ranged reads of an object straight into buffers."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlib.errors import StorageError
from ckptlib.storage.base import Range
from ckptlib.storage.s3_errors import InterruptedBodyError
from ckptlib.storage.s3_upload import Target

GAP_BYTES = 256 * 1024
"""Gaps up to this size are read too: at 80 MB/s a request more, of about 25 ms, costs as much as 2 MB."""

REQUEST_BYTES = 8 * 1024 * 1024
"""Larger ranges are cut, so that several connections share them."""

READ_BYTES = 1024 * 1024
"""Bytes taken from a connection at once."""


FEW_PIECES = 16
"""More of them are copied out of one buffer: taking each from the connection would cost more."""


@dataclass(frozen=True)
class Request:
    """One contiguous part of an object.

    Attributes:
        pieces: buffers, in order, each with the offset in the object that fills it; gaps between them are skipped.
    """

    start: int
    stop: int
    pieces: tuple[Range, ...]


def plan_requests(ranges: Sequence[Range], gap: int = GAP_BYTES, most: int = REQUEST_BYTES) -> list[Request]:
    """Which requests read these ranges. Pure.

    Args:
        gap: neighbours that are no further apart than this many bytes share a request.
        most: bytes of a request.
    """
    requests: list[Request] = []
    pieces: list[Range] = []
    start = end = 0
    for offset, buffer in ranges:
        view = buffer.cast("B")
        while view:
            if pieces and not (0 <= offset - end <= gap and offset - start < most):
                requests.append(Request(start, end, tuple(pieces)))
                pieces = []
            if not pieces:
                start = offset
            piece = view[: max(1, most - (offset - start))]
            pieces.append((offset, piece))
            offset += len(piece)
            end = offset
            view = view[len(piece) :]
    if pieces:
        requests.append(Request(start, end, tuple(pieces)))
    return requests


def fetch(target: Target, request: Request) -> None:
    """Fills the buffers of a request: in place, or by way of one buffer where they are many.

    Raises:
        OSError: as `s3_errors.translate` says; the object ends before the request does.
    """
    if len(request.pieces) <= FEW_PIECES:
        _stream(target, request)
        return
    window = memoryview(bytearray(request.stop - request.start))
    _stream(target, Request(request.start, request.stop, ((request.start, window),)))
    for offset, buffer in request.pieces:
        at = offset - request.start
        buffer[:] = window[at : at + len(buffer)]


def fetch_rows(target: Target, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
    """Fills rows, (n, length), each from `stride` bytes after the one before, with all that lies between read too."""
    window = np.empty((len(rows) - 1) * stride + rows.shape[1], np.uint8)
    _stream(target, Request(offset, offset + len(window), ((offset, window.data),)))
    rows[...] = np.lib.stride_tricks.as_strided(window, rows.shape, (stride, 1), writeable=False)


def cut_rows(
    offset: int, stride: int, rows: npt.NDArray[np.uint8], gap: int = GAP_BYTES, most: int = REQUEST_BYTES
) -> list[tuple[int, npt.NDArray[np.uint8]]] | None:
    """Which rows share a request: their offset, and they. None: they are too far apart to. Pure."""
    if stride - rows.shape[1] > gap:
        return None
    step = max(1, most // stride)
    return [(offset + first * stride, rows[first : first + step]) for first in range(0, len(rows), step)]


def _stream(target: Target, request: Request) -> None:
    """Fills buffers as the bytes come. A connection that breaks is made again where it broke."""
    at = request.start

    def get() -> None:
        nonlocal at
        answer = target.connection.client.get_object(
            Bucket=target.bucket, Key=target.key, Range=f"bytes={at}-{request.stop - 1}", **target.read_extras
        )
        body = answer["Body"]
        said = answer.get("ContentRange", "")
        if not said.startswith(f"bytes {at}-"):
            body.close()
            reason = f"asked for bytes from {at} on, got {said or 'all of it'}: this store ignores ranges"
            raise StorageError(errno.EIO, f"{target.url}: {reason}")
        try:
            for offset, buffer in request.pieces:
                if offset + len(buffer) <= at:
                    continue
                while at < offset:  # a gap
                    at += _take(body, None, offset - at)
                while at < offset + len(buffer):
                    at += _take(body, buffer[at - offset :], len(buffer))
        finally:
            body.close()

    target.ask(f"read of bytes {request.start} to {request.stop}", get)


def read_all(body: Any) -> bytes:
    """All of an answer."""
    with contextlib.closing(body), _interrupted():
        data: bytes = body.read()
    return data


def _take(body: Any, into: memoryview | None, most: int) -> int:
    """Some of the next bytes of an answer, into the front of a buffer; the number of bytes."""
    with _interrupted():
        data = body.read(min(most if into is None else len(into), READ_BYTES))
    if not data:
        raise InterruptedBodyError("the answer ended early")
    if into is not None:
        into[: len(data)] = data
    return len(data)


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (BotoCoreError, HTTPError, OSError) as error:
        raise InterruptedBodyError(str(error)) from error
