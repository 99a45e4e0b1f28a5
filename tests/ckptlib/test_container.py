"""Containers made from templates are what `torch.save` writes, for every dtype of torch."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.container import Template, template
from ckptlib.errors import UnsupportedError
from ckptlib.state import dtype_name, dtype_of, leaf_bytes
from ckptlib.torch_file import skeleton
from tests.support.tilings import shapes

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def can_be_saved(dtype: torch.dtype) -> bool:
    """torch itself cannot save quantized tensors without their scale, nor bare bits and sub-byte integers."""
    try:
        with warnings.catch_warnings(action="ignore"):
            data = io.BytesIO()
            torch.save(torch.empty(2, dtype=dtype), data)
            torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    except Exception:
        return False
    return True


DTYPES = [dtype for dtype in ALL_DTYPES if can_be_saved(dtype)]
SHAPES = [(), (1,), (5,), (3, 4), (0,), (2, 0, 3), (2, 1, 2, 3)]


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern, except for bool, where only two have a meaning."""
    empty = torch.empty(shape, dtype=dtype)
    raw = some_bytes(empty.numel() * empty.element_size(), seed)
    return (raw % 2).bool().reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)


def contain(form: Template, payload: bytes) -> bytes:
    return form.head + payload + form.tail_with(zlib.crc32(payload))


def records_of(data: bytes) -> list[tuple[str, int, bytes]]:
    """Name, place and content of each record; only the checksum that torch makes of its own writing may differ."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        return [
            (info.filename, info.header_offset, b"" if "serialization_id" in info.filename else archive.read(info))
            for info in infos
        ]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(leaf_bytes(tensor))


def test_the_dtypes_of_training_are_among_those_tested() -> None:
    names = {dtype_name(dtype) for dtype in DTYPES}
    assert {
        *("float64", "float32", "float16", "bfloat16", "bool", "complex64", "complex128", "complex32"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    } <= names


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_container_is_record_for_record_what_torch_saves(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        form = template(dtype, shape)
        data = contain(form, raw(tensor))
        reference = io.BytesIO()
        torch.save(tensor, reference)
        assert records_of(data) == records_of(reference.getvalue()), shape
        assert len(data) == form.length
        assert form.payload == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_torch_loads_a_container_with_weights_only_and_the_zip_checks_out(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape, seed=1)
        data = contain(template(dtype, shape), raw(tensor))
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert raw(loaded) == raw(tensor)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None


@given(shapes(max_dims=4, max_side=7), st.sampled_from(DTYPES))
def test_any_shape_is_contained(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, shape)
    data = contain(template(dtype, shape), raw(tensor))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert raw(loaded) == raw(tensor)
    assert loaded.shape == shape


def test_a_wrong_crc_is_found_by_the_zip() -> None:
    form = template(torch.float32, (4,))
    payload = bytes(range(16))
    data = form.head + payload + form.tail_with(zlib.crc32(payload) ^ 1)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_a_container_beyond_four_gigabytes_has_zip64_sizes() -> None:
    """Sizes in the template are final: nothing but the CRC is patched, so they must be right where 32 bits end."""
    form = template(torch.uint8, (5 * 2**30,))
    assert form.payload == 5 * 2**30
    assert len(form.head) < 4096
    assert len(form.tail) < 4096
    assert struct.pack("<Q", 5 * 2**30) in form.tail
    assert len(form.crc_at) == 2


def test_what_torch_lays_out_otherwise_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="qint8"):
        template(torch.qint8, (4,))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_is_found_again_by_its_name(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype


def test_a_payload_whose_size_reads_like_the_signature_of_a_directory() -> None:
    """The descriptor behind a payload holds its size: 0x02014b50 bytes are the letters of a directory entry.

    The memory is never touched, so nothing of it is there.
    """
    size = int.from_bytes(b"PK\x01\x02", "little")
    known = template(torch.uint8, (size + 64,))  # the same up to the size: payloads are aligned to 64 bytes
    assert template(torch.uint8, (size,)).crc_at == known.crc_at
    forms = [skeleton({"w": torch.empty(nbytes, dtype=torch.uint8)}, "state")[0] for nbytes in (size, size + 64)]
    assert forms[0].payloads == (size,)
    assert forms[0].crc_at == forms[1].crc_at
    (at,) = forms[0].crc_at
    entry = forms[0].segments[-1][at - 16 :]
    assert entry[:4] == b"PK\x01\x02"
    assert b"/data/0" in entry[:120]
