"""Times as people write them: ``48h``, ``48h`` ago, or a date. Pure, except for the local time zone."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_UNITS = {"ms": "milliseconds", "s": "seconds", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_duration(value: str) -> timedelta:
    """A duration: ``500ms``, ``90s``, ``15min``, ``48h``, ``7d``, ``2w``.

    Raises:
        ValueError: it is none. A bare ``m`` is refused: minutes or months?
    """
    duration = _duration(value)
    if duration is None:
        raise ValueError(f"{value!r} is not a duration (a number with one of {', '.join(_UNITS)})")
    return duration


def parse_since(value: str) -> datetime | timedelta:
    """A duration as `parse_duration` reads it, or an ISO date or time, local unless it names a zone.

    Raises:
        ValueError: it is neither.
    """
    duration = _duration(value)
    if duration is not None:
        return duration
    try:
        return datetime.fromisoformat(value).astimezone()
    except ValueError:
        units = ", ".join(_UNITS)
        raise ValueError(
            f"{value!r} is neither a duration (a number with one of {units}) nor a date like 2026-11-29"
        ) from None


def _duration(value: str) -> timedelta | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", value)
    if match is None or match[2] not in _UNITS:
        return None
    try:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        return None
