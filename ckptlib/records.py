"""Small JSON records that protect themselves: canonical bytes with a digest of their own inside. Pure.

A record is a JSON object in canonical form (sorted keys, no spaces, UTF-8) whose ``digest`` member is the SHA-256 of
the same object without it. Reading demands that the bytes are exactly the canonical form of what they say, so one
flipped bit anywhere, also in a space or a sign, is found. Unknown members are kept out of the way and ignored;
a newer major ``schema`` is a clear error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ckptlib.errors import RecordError, VersionError

SCHEMA_MAJOR = 1
SCHEMA = f"{SCHEMA_MAJOR}.0"


def canonical(value: Any) -> bytes:
    """Canonical JSON bytes of plain data.

    Raises:
        RecordError: `value` holds something JSON cannot express (NaN included: see `number_to_json`).
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()  # refuses halves of surrogate pairs
    except (TypeError, ValueError) as error:
        raise RecordError(f"not expressible as a record: {error}") from error


def encode(kind: str, body: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a record of this kind, with schema and digest."""
    value = {"record": kind, "schema": SCHEMA, **body}
    value["digest"] = hashlib.sha256(canonical(value)).hexdigest()
    return canonical(value) + b"\n"


def decode(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """Reads what `encode` wrote.

    Args:
        kind: the expected kind of record.
        data: its bytes.
        where: path, for messages.

    Raises:
        RecordError: the bytes are not an undamaged record of this kind.
        VersionError: its schema is a newer major version.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: not a {kind} record (no JSON: {error}); it is damaged or truncated") from error
    if not isinstance(value, dict) or value.get("record") != kind:
        raise RecordError(f"{where}: not a {kind} record")
    schema = str(value.get("schema", ""))
    major = schema.partition(".")[0]
    if major.isdecimal() and int(major) > SCHEMA_MAJOR:
        raise VersionError(
            f"{where}: written with schema {schema}; this ckptlib reads up to {SCHEMA_MAJOR}.x. Use a newer ckptlib."
        )
    digest = value.pop("digest", None)
    try:
        sealed = canonical(value)
    except RecordError as error:
        raise RecordError(f"{where}: damaged {kind} record: {error}") from error
    expected = hashlib.sha256(sealed).hexdigest()
    if digest != expected or data != canonical({**value, "digest": digest}) + b"\n":
        raise RecordError(f"{where}: damaged {kind} record (digest {digest}, its content gives {expected})")
    return value


def relative_path(value: Any, where: str) -> str:
    """A path that a record names: below the iteration directory, whatever it says.

    Raises:
        RecordError: absolute, empty, or leads out of the directory.
    """
    if not isinstance(value, str) or not value or any(part in ("", ".", "..") for part in value.split("/")):
        raise RecordError(f"{where}: names the file {value!r}, which is not below the iteration directory")
    return value


def number_to_json(value: float) -> float | int | str:
    """A number as JSON can say it: non-finite ones become ``"nan"``, ``"inf"``, ``"-inf"``."""
    return value if math.isfinite(value) else str(float(value))


def number_from_json(value: float | int | str) -> float:
    """Reads `number_to_json`; whole numbers stay whole."""
    return float(value) if isinstance(value, str) else value
