"""Points in time as people write them: ``48h`` ago, or a date. Pure, except for the local time zone."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_since(value: str) -> datetime | timedelta:
    """A duration (``90s``, ``15min``, ``48h``, ``7d``, ``2w``) or an ISO date or time, local unless it names a zone.

    Raises:
        ValueError: it is neither. A bare ``m`` is refused: minutes or months?
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", value)
    if match and match[2] in _UNITS:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    try:
        return datetime.fromisoformat(value).astimezone()
    except ValueError:
        units = ", ".join(_UNITS)
        raise ValueError(
            f"{value!r} is neither a duration (a number with one of {units}) nor a date like 2026-11-29"
        ) from None
