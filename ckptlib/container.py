"""Writes one tensor as `torch.save` would, without copying or re-serialising its payload.

A `torch.save` file is an uncompressed zip. For a given dtype and shape everything but the payload and its CRC-32 is
the same bytes each time, and the CRC-32 stands *behind* the payload (in the data descriptor, and again in the central
directory). So the head and tail are made once per (dtype, shape) with `torch.serialization.skip_data`, kept, and
written around the tensor's own memory. What comes out is what `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import IO, cast

import torch

from ckptlib import archive
from ckptlib.errors import UnsupportedError

_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL = b"PK\x01\x02"


@dataclass(frozen=True)
class Template:
    """A container without payload.

    Attributes:
        head: bytes before the payload.
        tail: bytes behind it, with zeros where the CRC-32 goes.
        crc_at: offsets in `tail` where the CRC-32 is written, little-endian.
        payload: bytes of the payload.
    """

    head: bytes
    tail: bytes
    crc_at: tuple[int, ...]
    payload: int

    @property
    def length(self) -> int:
        """Bytes of the whole container."""
        return len(self.head) + self.payload + len(self.tail)

    def tail_with(self, crc32: int) -> bytes:
        """The tail for a payload with this CRC-32 (zip polynomial)."""
        tail = bytearray(self.tail)
        for at in self.crc_at:
            struct.pack_into("<I", tail, at, crc32)
        return bytes(tail)


@functools.lru_cache(maxsize=65536)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """The container for a contiguous tensor of this dtype and shape. About 1 ms the first time, then free.

    Raises:
        UnsupportedError: `torch.save` lays this tensor out in another way (quantized, sparse, ...).
    """
    # Nothing is read from this memory, and nothing is written to it: pages are never touched.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    payload = tensor.numel() * tensor.element_size()
    sink = SparseSink()
    try:
        with torch.serialization.skip_data():
            torch.save(tensor, cast(IO[bytes], sink))  # write, seek, tell, flush are all it calls
    except (RuntimeError, KeyError) as error:
        raise UnsupportedError(f"{dtype} {list(shape)}: torch.save cannot write it in pieces: {error}") from error
    return _split(sink, payload, f"{dtype} {list(shape)}")


class SparseSink:
    """A seekable file that keeps what is written and never stores the hole where the payload would be."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        self.pieces.append((self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 1:
            offset += self._position
        elif whence == 2:
            offset += max((at + len(data) for at, data in self.pieces), default=0)
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        return

    def joined(self) -> list[tuple[int, bytes]]:
        """What was written, by offset; neighbours are one piece, so that every hole lies between two."""
        runs: list[tuple[int, list[bytes]]] = []
        end = -1
        for at, data in sorted(self.pieces):
            if at == end:
                runs[-1][1].append(data)
            elif data:
                runs.append((at, [data]))
            end = at + len(data)
        return [(at, b"".join(parts)) for at, parts in runs]


def _split(sink: SparseSink, payload: int, what: str) -> Template:
    """Cuts what was written at the payload: the record `data/0`, found by its local header."""
    end = max(at + len(data) for at, data in sink.pieces)
    # Records before the payload take some hundred bytes, records behind it likewise: only these are materialised.
    blob = _materialise(sink, 0, min(end, 64 * 1024))
    name_at = blob.find(b"/data/0")
    header_at = blob.rfind(b"PK\x03\x04", 0, name_at)
    if name_at < 0 or header_at < 0:
        raise UnsupportedError(f"{what}: torch.save stores no plain payload for it; it cannot be written in pieces")
    name_length, extra_length = struct.unpack_from("<HH", blob, header_at + 26)
    payload_at = header_at + 30 + name_length + extra_length
    head = blob[:payload_at]
    tail = _materialise(sink, payload_at + payload, end)
    if payload == 0:  # nothing to check: the CRC-32 of nothing is the zero that stands there
        return Template(head, tail, (), 0)
    if tail[:4] != _DESCRIPTOR:
        raise UnsupportedError(f"{what}: torch.save put no data descriptor behind the payload")
    crc_at = [4]
    # By the end record: the size in the descriptor may read like the signature of the directory.
    at = archive.directory_start(archive.SparseWindow(end, sink.joined()), what) - payload_at - payload
    while tail[at : at + 4] == _CENTRAL:
        name_length, extra_length, comment_length = struct.unpack_from("<HHH", tail, at + 28)
        if tail[at + 46 : at + 46 + name_length].endswith(b"/data/0"):
            crc_at.append(at + 16)
        at += 46 + name_length + extra_length + comment_length
    if len(crc_at) != 2:
        raise UnsupportedError(f"{what}: torch.save wrote a central directory that names its payload otherwise")
    return Template(head, tail, tuple(crc_at), payload)


def _materialise(sink: SparseSink, start: int, end: int) -> bytes:
    """Bytes [start, end) of what was written; holes read as zeros."""
    out = bytearray(end - start)
    for at, data in sink.pieces:
        first, last = max(at, start), min(at + len(data), end)
        if first < last:
            out[first - start : last - start] = data[first - at : last - at]
    return bytes(out)
