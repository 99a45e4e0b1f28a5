"""The layout of `torch.save` containers is found from their headers, and every byte of them is accounted for."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import archive
from ckptlib.errors import RecordError
from ckptlib.storage import PosixStorage


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


TENSOR = saved(torch.arange(3000, dtype=torch.float32))


def test_a_payload_is_found_where_torch_put_it() -> None:
    layout = archive.parse_whole(TENSOR, "x")
    record = layout.records["data/0"]
    assert torch.equal(torch.frombuffer(bytearray(TENSOR), dtype=torch.float32, count=3000, offset=record.offset),
                       torch.arange(3000.0))  # fmt: skip
    archive.check_crcs(TENSOR, layout, "x")
    assert set(layout.records) >= {"data.pkl", "data/0", "byteorder", "version"}


@pytest.mark.parametrize("name", ["archive", "common", "a_longer_name_of_an_archive"])
def test_the_archive_may_have_any_name(name: str, tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / f"{name}.pt")
    layout = archive.parse_whole((tmp_path / f"{name}.pt").read_bytes(), "x")
    assert layout.records["data/0"].size == 8


def test_the_two_ends_are_enough(tmp_path: Path) -> None:
    """R3: two small reads per item, whatever the size of its payload; several items in one call."""
    big = saved(torch.zeros(100_000))
    (tmp_path / "f").write_bytes(b"before" + big + TENSOR)
    extents = [archive.Extent(6, len(big)), archive.Extent(6 + len(big), len(TENSOR))]
    windows = archive.read_windows(PosixStorage(), str(tmp_path / "f"), extents, "f")
    assert archive.parse(windows[0], "f") == archive.parse_whole(big, "f")
    assert archive.parse(windows[1], "f") == archive.parse_whole(TENSOR, "f")


def test_a_long_directory_is_read_too(tmp_path: Path) -> None:
    """Hundreds of records: the central directory does not fit into the usual read."""
    data = saved([torch.full((9,), i) for i in range(400)])
    (tmp_path / "f").write_bytes(data)
    (window,) = archive.read_windows(PosixStorage(), str(tmp_path / "f"), [archive.Extent(0, len(data))], "f")
    with pytest.raises(RecordError, match="was not read"):
        archive.parse(window, "f")  # objects are read whole, only tensors by their ends
    assert len(archive.parse_whole(data, "f").records) > 400


@given(st.integers(0, len(TENSOR) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_damage_wherever_it_matters(position: int, bit: int) -> None:
    """First-read verification: payload by CRC-32, everything around it by agreement of headers and directory."""
    data = bytearray(TENSOR)
    data[position] ^= 1 << bit
    try:
        layout = archive.parse_whole(data, "x")
        archive.check_crcs(data, layout, "x")
    except RecordError:
        return
    # What is left: words of the end records that say which program wrote the archive.
    end = TENSOR.rindex(b"PK\x06\x06")
    assert end + 12 <= position < end + 16
    assert layout == archive.parse_whole(TENSOR, "x")


@given(st.integers(0, len(TENSOR) - 1))
def test_a_cut_off_container_is_damage(length: int) -> None:
    with pytest.raises(RecordError):
        archive.parse_whole(TENSOR[:length], "x")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_container_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        archive.parse_whole(data, "x")


def zipped(build: Callable[[zipfile.ZipFile], None], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as target:
        build(target)
    return out.getvalue()


def two_roots(target: zipfile.ZipFile) -> None:
    target.writestr("one/data.pkl", b"N.")
    target.writestr("two/version", b"3")


def twice(target: zipfile.ZipFile) -> None:
    target.writestr("archive/data.pkl", b"N.")
    with pytest.warns(UserWarning, match="Duplicate"):
        target.writestr("archive/data.pkl", b"N.")


def bare(target: zipfile.ZipFile) -> None:
    target.writestr("data.pkl", b"N.")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (zipped(lambda z: z.writestr("a/data.pkl", bytes(10**7)), zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(two_roots), "records below"),
        (zipped(twice), "data.pkl"),
        (zipped(bare), "data.pkl"),
        (zipped(lambda z: None), "nothing"),
        (b"junk" + TENSOR, "end record"),
        (TENSOR + b"junk", "end record"),
        (TENSOR + TENSOR, "disagree"),
    ],
    ids=["zip bomb", "two roots", "one name twice", "no root", "empty", "junk before", "junk behind", "two archives"],
)
def test_an_archive_that_torch_would_not_write_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        archive.parse_whole(data, "x")


@pytest.mark.parametrize("field", ["count", "size", "offset"])
def test_an_absurd_directory_is_refused_without_reading_it(field: str) -> None:
    data = bytearray(TENSOR)
    at = data.rindex(b"PK\x06\x06") + {"count": 24, "size": 40, "offset": 48}[field]
    struct.pack_into("<Q", data, at, 2**62)
    with pytest.raises(RecordError):
        archive.parse_whole(data, "x")


def test_payloads_beyond_four_gibibytes_are_located(tmp_path: Path) -> None:
    """zip64 sizes and descriptors. The file is sparse: nothing of its payload is written or read."""
    count = 5 * 2**28  # float32: 5 GiB
    with torch.serialization.skip_data():
        torch.save(torch.empty(count), tmp_path / "big.pt")
    size = (tmp_path / "big.pt").stat().st_size
    (window,) = archive.read_windows(PosixStorage(), str(tmp_path / "big.pt"), [archive.Extent(0, size)], "big")
    record = archive.parse(window, "big").records["data/0"]
    assert record.size == 4 * count
    assert record.offset % 64 == 0
