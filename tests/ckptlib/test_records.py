"""JSON records find every change to themselves, and read what newer minor versions write."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import records
from ckptlib.errors import IntegrityError, RecordError, VersionError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(TEXT.filter(lambda name: name not in ("record", "schema", "digest")), PLAIN, max_size=5)


def sealed(body: dict[str, object]) -> bytes:
    """A record of any schema, with a digest that is right."""
    digest = hashlib.sha256(records.canonical(body)).hexdigest()
    return records.canonical({**body, "digest": digest}) + b"\n"


@given(BODIES)
def test_a_record_reads_back_as_it_was_written(body: dict[str, object]) -> None:
    value = records.decode("begin", records.encode("begin", body), "begin.json")
    assert {name: value[name] for name in body} == body


@given(BODIES, st.integers(0), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_detected(body: dict[str, object], position: int, mask: int) -> None:
    data = bytearray(records.encode("begin", body))
    data[position % len(data)] ^= mask
    with pytest.raises(IntegrityError, match=r"begin\.json"):
        records.decode("begin", bytes(data), "begin.json")


def test_a_changed_byte_that_makes_half_a_surrogate_pair_is_detected() -> None:
    data = records.encode("begin", {"run": "/ud800"})
    with pytest.raises(RecordError, match=r"begin\.json"):
        records.decode("begin", data.replace(b"/ud800", rb"\ud800"), "begin.json")


def test_every_bit_of_a_record_is_protected() -> None:
    whole = records.encode("begin", {"run": "a/b", "iteration": 10, "lr": 1e-05, "nested": {"x": [1.0, -0.0, None]}})
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with pytest.raises(IntegrityError):
                records.decode("begin", bytes(data), "begin.json")


@given(BODIES, st.integers(0))
def test_a_truncated_record_is_detected(body: dict[str, object], length: int) -> None:
    data = records.encode("begin", body)
    with pytest.raises(RecordError, match=r"begin\.json"):
        records.decode("begin", data[: length % len(data)], "begin.json")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"record":"begin"}',
        b'{"record":"begin","schema":"\xc2\xb2.0"}',
        b'{"record":"begin","schema":"1.0","x":NaN}',
        b'{"record":"begin","schema":"1.0","x":"\\ud800"}',
        b'{"record":"begin","x":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_record_is_called_damaged(data: bytes) -> None:
    with pytest.raises(RecordError, match=r"where/begin\.json"):
        records.decode("begin", data, "where/begin.json")


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(RecordError, match="not a decision record"):
        records.decode("decision", records.encode("begin", {}), "decision.json")


def test_members_of_a_newer_minor_version_are_read_past() -> None:
    data = sealed({"record": "begin", "schema": "1.9", "iteration": 3, "added_later": {"x": 1}})
    assert records.decode("begin", data, "begin.json")["iteration"] == 3


def test_a_newer_major_version_is_refused_by_name() -> None:
    for schema in ("2.0", "10.3"):
        with pytest.raises(VersionError, match=f"schema {schema}.*newer ckptlib"):
            records.decode("begin", sealed({"record": "begin", "schema": schema}), "begin.json")


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object(), "\ud800", {"x": "\udfff"}], ids=repr)
def test_what_json_cannot_express_is_refused_when_it_is_written(value: object) -> None:
    with pytest.raises(RecordError, match="not expressible"):
        records.encode("begin", {"x": value})


@given(st.integers() | st.floats())
def test_numbers_survive_a_record_with_their_type(value: float) -> None:
    """A count of samples must not come back as a float: 2**53 + 1 would change, and ranges would refuse it."""
    there = json.loads(records.canonical(records.number_to_json(value)))
    back = records.number_from_json(there)
    assert type(back) is type(value)
    assert back == value or (math.isnan(back) and math.isnan(value))
