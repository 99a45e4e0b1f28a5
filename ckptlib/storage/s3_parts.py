"""Sizes and digests of the parts of a multipart upload, and bodies made of memory that is already there. Pure.

Limits of S3: parts of 5 MiB (but the last) to 5 GiB, 10,000 of them, objects of 5 TiB and more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence

MIB = 1024 * 1024
PART_BYTES = 16 * MIB
"""Small enough that several are in flight for files of a few hundred MiB, large enough that a request costs little."""

MIN_PART_BYTES = 5 * MIB
MAX_PART_BYTES = 5 * 1024 * MIB
MAX_PARTS = 10_000

SEND_BYTES = 1 * MIB
"""Bytes per send(2) call of a body."""


def first_part_size(size: int | None, smallest: int = PART_BYTES, max_parts: int = MAX_PARTS) -> int:
    """Bytes of the first parts of a file of about this size: whole MiB, so that 3/4 of the parts suffice.

    Args:
        size: bytes; None: not known.
        smallest: never less than this.
        max_parts: that the store takes.
    """
    needed = -(-(size or 0) // max(1, max_parts * 3 // 4))
    return smallest if needed <= smallest else min(MAX_PART_BYTES, -(-needed // MIB) * MIB)


def part_size(number: int, first: int, max_parts: int = MAX_PARTS) -> int:
    """Bytes of part `number`, from 0, of a file whose size was not known or turned out to be much larger.

    All are equal until 80 % of the parts are used; then they double with every hundredth of the limit. So a stream that
    begins with parts of 16 MiB can grow beyond 5 TiB.
    """
    beyond = number - max_parts * 8 // 10
    if beyond < 0:
        return first
    return min(MAX_PART_BYTES, first << min(30, beyond // max(1, max_parts // 100) + 1))


def bounds(size: int, first: int, max_parts: int = MAX_PARTS) -> Iterator[tuple[int, int]]:
    """Where each part of a file of `size` bytes begins and ends."""
    start = number = 0
    while start < size:
        stop = min(size, start + part_size(number, first, max_parts))
        yield start, stop
        start, number = stop, number + 1


def composite(part_sha256: Sequence[str]) -> str:
    """SHA-256 (hex) over the raw digests (hex) of the parts: what S3 keeps of a multipart object."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, part_sha256))).hexdigest()


def to_base64(hexadecimal: str) -> str:
    """A digest as S3 writes it."""
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()


def from_base64(text: str) -> str | None:
    """A digest as S3 writes it, in hex; None: it is no SHA-256."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw.hex() if len(raw) == hashlib.sha256().digest_size else None


class Body(io.RawIOBase):
    """Buffers one after the other, as a file that can be sent again. Nothing is copied.

    `read` gives views of the buffers, and more than it was asked for: whoever sends a body asks for a few KiB at a
    time, and each piece costs a system call.
    """

    def __init__(self, buffers: Iterable[memoryview | bytearray]) -> None:
        views = [memoryview(buffer) for buffer in buffers]
        self._pieces = [view[at : at + SEND_BYTES] for view in views for at in range(0, len(view), SEND_BYTES)]
        self._size = sum(map(len, self._pieces))
        self._next = 0
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def sha256(self) -> str:
        """(hex) of all of it."""
        digest = hashlib.sha256()
        for piece in self._pieces:
            digest.update(piece)
        return digest.hexdigest()

    def md5(self) -> str:
        """(hex) of all of it: what the entity tag of a part is in most stores."""
        digest = hashlib.md5(usedforsecurity=False)
        for piece in self._pieces:
            digest.update(piece)
        return digest.hexdigest()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """To its beginning and its end."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """The next piece; all that is left when no size is given."""
        if size is None or size < 0:
            rest = b"".join(self._pieces[self._next :])
            self.seek(0, io.SEEK_END)
            return rest
        if self._next == len(self._pieces):
            return b""
        piece = self._pieces[self._next]
        self._next += 1
        self._at += len(piece)
        return piece  # type: ignore[return-value] # a buffer is as good for a socket

    def tell(self) -> int:
        """Bytes that were read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """To the beginning or the end, or to where it is: clients look how long it is, and send it again."""
        where = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        if where == self._at:
            return where
        if where not in (0, self._size):
            raise io.UnsupportedOperation(f"seek to byte {where} of a body of {self._size}")
        self._at = where
        self._next = 0 if where == 0 else len(self._pieces)
        return where
