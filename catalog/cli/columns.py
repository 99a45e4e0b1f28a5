"""How the fields of a row dataclass look as columns. One declaration feeds tables and JSON, so they cannot drift.

A row (or document) is a frozen dataclass. Its field names are the keys of the JSON form. A field that is declared with
`column`, as in ``bytes: int = column("SIZE", text.size)``, is also shown to people; others are for programs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol

from rich.text import Text

from catalog.cli import text

Show = Callable[[Any], str | Text]
Justify = Literal["left", "right"]


class Row(Protocol):
    """A dataclass instance."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def plain(value: Any) -> str:
    """Any value as text that cannot steer the terminal."""
    return text.printable(str(value))


def is_empty(value: Any) -> bool:
    """Whether there is nothing to show: None, or an empty text, list or mapping. Zero is something."""
    return value is None or value == "" or value == () or value == {}


def lines(values: Sequence[str]) -> str:
    """Sentences, one per line."""
    return "\n".join(plain(value) for value in values)


def tick(value: bool) -> str:
    """``yes`` where something holds, nothing where it does not."""
    return "yes" if value else ""


@dataclass(frozen=True)
class Column:
    """How a field is shown to people.

    Attributes:
        header: of the column, or the label of a single value.
        show: the value as text.
        justify: numbers go right.
        drop: columns with the highest value are left out first on a narrow terminal; 0 is never left out.
        wide: only shown with ``-v``.
        optional: not shown where no row has a value.
        prose: sentences and lists: wrapped at words on a narrow terminal, so that names and numbers stay whole.
        limit: of a list of rows, only so many of the last ones are shown without ``-v``; 0 for all.
        beside: a member of the row whose text is shown behind the value, where there is any.
    """

    header: str
    show: Show = plain
    justify: Justify = "left"
    drop: int = 0
    wide: bool = False
    optional: bool = False
    prose: bool = False
    limit: int = 0
    beside: str = ""

    def cell_of(self, row: Row, name: str) -> Text:
        """A field of a row as a cell."""
        cell = self.cell(getattr(row, name))
        more = getattr(row, self.beside) if self.beside else ""
        return Text.assemble(cell, " ", plain(more)) if more else cell

    def cell(self, value: Any) -> Text:
        """The value as a cell; ``-`` for what is not there."""
        if is_empty(value):
            return Text("-", style="dim")
        shown = self.show(value)
        return shown if isinstance(shown, Text) else Text(shown)


def column(
    header: str,
    show: Show = plain,
    *,
    justify: Justify = "left",
    drop: int = 0,
    wide: bool = False,
    optional: bool = False,
    prose: bool = False,
    limit: int = 0,
    beside: str = "",
    default: Any = MISSING,
) -> Any:
    """A dataclass field that people see too; see `Column`."""
    shown = Column(
        header, show, justify, drop=drop, wide=wide, optional=optional, prose=prose, limit=limit, beside=beside
    )
    return field(default=default, metadata={"column": shown})


def columns_of(row_type: type[Row], *, wide: bool) -> list[tuple[str, Column]]:
    """The shown fields of a row type: (field name, column), in order."""
    shown = ((entry.name, entry.metadata.get("column")) for entry in fields(row_type))
    return [(name, column) for name, column in shown if column is not None and (wide or not column.wide)]


def to_json(value: Any) -> Any:
    """Plain JSON of rows and documents: times in UTC, non-finite numbers as ``"nan"``, ``"inf"``, ``"-inf"``."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, datetime):
        return text.utc_iso(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(entry) for entry in value]
    return value


_STYLES = {
    "verified": "green",
    "ok": "green",
    "unverified": "yellow",
    "unverifiable": "magenta",
    "unreadable": "magenta",
    "extra": "cyan",
    "suspect": "bold yellow",
    "corrupt": "bold red",
    "missing": "bold red",
    "size": "bold red",
    "digest": "bold red",
    "aborted": "dim",
    "deleting": "dim",
    "deleted": "dim",
    "writing": "cyan",
    "adopt": "green",
    "adopted": "green",
    "commit and adopt": "green",
    "decided": "green",
    "take back": "green",
    "taken back": "green",
    "mark missing": "bold red",
    "marked missing": "bold red",
    "reappeared": "bold yellow",
    "skipped": "bold yellow",
    "incomplete": "yellow",
    "unmanaged": "dim",
}


def state(value: str) -> Text:
    """A lifecycle or a verdict in its colour."""
    return Text(plain(value), style=_STYLES.get(value, ""))
