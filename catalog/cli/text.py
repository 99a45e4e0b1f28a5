"""How values are written for people: sizes, times, numbers, names. Pure, except for the local time zone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size(count: int) -> str:
    """Bytes with three significant digits in the binary unit that fits: ``812 GiB``, ``3.42 MiB``, ``17 B``."""
    value = float(count)
    unit = 0
    # 999.5 would round to four digits in this unit.
    while value >= 999.5 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{count} B"
    texts = (f"{value:.{digits}f}" for digits in (2, 1, 0))
    return f"{next((text for text in texts if len(text) <= 4), str(round(value)))} {UNITS[unit]}"


def decimal_size(count: int) -> str:
    """Bytes in powers of ten, as networks and filesystems are rated: ``410 MB``, ``26.3 GB``, ``105 GB``, ``15 GB``.

    Whole numbers; from GB on with one decimal below 100.
    """
    value, unit = Decimal(count), 0
    while value >= Decimal("999.5") and unit < len(DECIMAL_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = Decimal("0.1") if unit >= 3 and value < 100 else Decimal(1)
    return f"{_bare(value.quantize(digits, ROUND_HALF_UP))} {DECIMAL_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time that is known by its order of magnitude, with two digits: ``16 ms``, ``1.2 s``, ``8.5 min``, ``13 h``."""
    scales = ((1.0, "ms", 0.001), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0))
    unit, scale = next(((unit, scale) for below, unit, scale in scales if seconds < below), ("d", 86_400.0))
    value = Decimal(str(seconds / scale))
    digits = Decimal(1).scaleb(max(value.adjusted() - 1, -3) if value else 0)
    return f"{_bare(value.quantize(digits, ROUND_HALF_EVEN))} {unit}"


def percent(share: float) -> str:
    """A share with two digits: ``0.21 %``, ``5.3 %``, ``16 %``."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def local_minute(moment: datetime | None) -> str:
    """A time as ``2026-11-29 11:15 CET``: local, with the zone named."""
    return "-" if moment is None else _local(moment).strftime("%Y-%m-%d %H:%M %Z")


def local_second(moment: datetime | None) -> str:
    """A time as ``2026-11-29 11:15:07 CET``."""
    return "-" if moment is None else _local(moment).strftime("%Y-%m-%d %H:%M:%S %Z")


def utc_iso(moment: datetime) -> str:
    """A time for programs: ``2026-11-29T10:15:07.123Z``."""
    return _aware(moment).astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(value: float) -> str:
    """A duration in tenths of a second."""
    return f"{value:.1f}"


def number(value: float) -> str:
    """A metric with four significant digits; whole numbers in full."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.4g}"


def numbers(values: Mapping[str, float]) -> str:
    """Metrics on one line: ``loss=1.881 val_loss=1.93``."""
    return " ".join(f"{printable(name)}={number(value)}" for name, value in values.items())


def printable(text: str) -> str:
    """Text that cannot steer the terminal: control characters are written as their escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def paragraphs(message: str) -> str:
    """A message of several lines, each of them `printable`."""
    return "\n".join(printable(line) for line in message.splitlines())


def count(amount: int, noun: str) -> str:
    """``1 checkpoint``, ``3 checkpoints``."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def _bare(value: Decimal) -> str:
    """Without exponent and without zeros after the last digit: ``110``, ``15``, ``1.2``."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _aware(moment: datetime) -> datetime:
    """The catalog's clock is UTC (S2); SQLite gives it back without saying so."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _local(moment: datetime) -> datetime:
    return _aware(moment).astimezone()
