"""The two ways results leave the program: tables for people, JSON for programs. Verbs only hand over dataclasses.

Results go to standard output. Notes, progress and errors go to standard error, so that a pipe carries results only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from catalog.cli import text
from catalog.cli.columns import Column, Row, columns_of, is_empty, to_json

Advance = Callable[[int, int], None]
"""Progress: (done, total)."""

PIPE_WIDTH = 100_000
"""Columns of a table that goes into a file or a pipe: nothing is wrapped or left out there."""

PROSE_WIDTH = 20
"""A column of sentences gets at least so many columns of the terminal, or all it needs."""

GAP = 2
"""Spaces between two columns."""


class Output(Protocol):
    """What a verb can say."""

    def rows(self, row_type: type[Row], rows: Sequence[Row], *, known: Collection[str] = ()) -> None:
        """A list of results, perhaps an empty one.

        Args:
            known: fields that whoever asked knows already: left out of tables.
        """

    def document(self, document: Row) -> None:
        """One result: its values, then its lists of rows as tables."""

    def preview(self, document: Row) -> None:
        """What is about to happen, before the question whether it should. The result follows."""

    def note(self, message: str) -> None:
        """A remark for people: what happened, which command comes next."""

    def error(self, message: str, code: int) -> None:
        """Why the program ends with this exit code."""

    def progress(self, label: str) -> AbstractContextManager[Advance]:
        """Shows the progress of long work, in bytes, while the block runs, if somebody is watching."""

    def busy(self, label: str) -> AbstractContextManager[None]:
        """Shows that work of unknown length goes on, if somebody is watching."""


class JsonOutput:
    """One JSON value per command on standard output; an ``exit_error`` object on standard error."""

    def rows(self, row_type: type[Row], rows: Sequence[Row], *, known: Collection[str] = ()) -> None:
        """A JSON array of objects with all fields."""
        self._print(rows)

    def document(self, document: Row) -> None:
        """A JSON object."""
        self._print(document)

    def preview(self, document: Row) -> None:
        """Nothing: there is one JSON value per command, and that is the result."""

    def note(self, message: str) -> None:
        """Nothing: notes are for people."""

    def error(self, message: str, code: int) -> None:
        """``{"message_type": "exit_error", "code": 20, "error": "..."}`` on one line."""
        line = json.dumps({"message_type": "exit_error", "code": code, "error": message}, ensure_ascii=False)
        _write(sys.stderr, line)

    @contextmanager
    def progress(self, label: str) -> Iterator[Advance]:
        """Nothing is shown."""
        yield lambda done, total: None

    @contextmanager
    def busy(self, label: str) -> Iterator[None]:
        """Nothing is shown."""
        yield

    def _print(self, value: object) -> None:
        _write(sys.stdout, json.dumps(to_json(value), ensure_ascii=False, allow_nan=False, indent=2))


class TableOutput:
    """Tables and sentences for people. `wide` adds the columns of ``-v``; `quiet` leaves out notes and progress."""

    def __init__(self, *, wide: bool = False, quiet: bool = False) -> None:
        self._wide = wide
        self._quiet = quiet
        self._out = _console(sys.stdout)
        self._err = _console(sys.stderr)

    def rows(self, row_type: type[Row], rows: Sequence[Row], *, known: Collection[str] = ()) -> None:
        """A table with a header line; no lines drawn, so that it can be cut and searched."""
        if rows:
            self._print_table(row_type, rows, known)

    def document(self, document: Row) -> None:
        """Single values as ``label  value`` lines, then each list of rows as a table under its header."""
        values: list[tuple[str, Text]] = []
        tables: list[tuple[Column, Sequence[Row]]] = []
        for name, column in columns_of(type(document), wide=self._wide):
            value = getattr(document, name)
            if _is_rows(value):
                tables.append((column, value))
            elif not is_empty(value):
                values.append((column.header, column.cell(value)))
        width = max((len(label) for label, _ in values), default=0)
        for label, cell in values:
            for line in cell.split("\n"):
                # Not wrapped here: a URL that the terminal wraps by itself can still be copied.
                self._out.print(Text.assemble((f"{label:{width}}  ", "bold"), line), soft_wrap=True)
                label = ""
        for column, rows in tables:
            self._out.print()
            self._out.print(Text(column.header, style="bold"))
            shown = rows if self._wide or not column.limit else rows[-column.limit :]
            if len(shown) < len(rows):
                self._out.print(Text(f"({len(rows) - len(shown)} more, with -v)", style="dim"))
            self._print_table(type(rows[0]), shown)

    def preview(self, document: Row) -> None:
        """As a result."""
        self.document(document)
        self._out.print()

    def note(self, message: str) -> None:
        """One paragraph on standard error."""
        if not self._quiet:
            self._err.print(Text(text.paragraphs(message)), soft_wrap=True)

    def error(self, message: str, code: int) -> None:
        """``error: ...`` on standard error."""
        self._err.print(Text.assemble(("error: ", "bold red"), text.paragraphs(message)), soft_wrap=True)

    @contextmanager
    def progress(self, label: str) -> Iterator[Advance]:
        """A bar with bytes, rate and remaining time, only on a terminal."""
        if self._quiet or not self._err.is_terminal:
            yield lambda done, total: None
            return
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            _RateColumn(),
            TimeRemainingColumn(),
            console=self._err,
            transient=True,
        )
        with bar:
            task = bar.add_task(text.printable(label), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextmanager
    def busy(self, label: str) -> Iterator[None]:
        """A spinner, only on a terminal."""
        if self._quiet or not self._err.is_terminal:
            yield
            return
        with self._err.status(Text(text.printable(label))):
            yield

    def _print_table(self, row_type: type[Row], rows: Sequence[Row], known: Collection[str] = ()) -> None:
        shown = [
            (column, [column.cell_of(row, name) for row in rows])
            for name, column in columns_of(row_type, wide=self._wide)
            if name not in known and not (column.optional and all(is_empty(getattr(row, name)) for row in rows))
        ]
        natural = [max(cell_len(column.header), *(cell.cell_len for cell in cells)) for column, cells in shown]
        least = [
            min(width, PROSE_WIDTH) if column.prose else width
            for width, (column, _) in zip(natural, shown, strict=True)
        ]
        # Columns are dropped whole: a truncated digest or time is worth nothing. Whoever asks for more gets it all.
        while not self._wide and _total(least) > self._out.width:
            droppable = max(range(len(shown)), key=lambda i: shown[i][0].drop)
            if shown[droppable][0].drop == 0:
                break
            del shown[droppable], natural[droppable], least[droppable]
        if self._wide or _total(natural) <= self._out.width:
            self._out.print(Text("\n").join(_lines(shown, natural)), soft_wrap=True)
        else:
            self._out.print(_wrapped(shown, whole=_total(least) <= self._out.width))


class _RateColumn(ProgressColumn):
    """Bytes per second, in the units of everything else."""

    def render(self, task: Task) -> Text:
        """Empty until there is a rate."""
        return Text(f"{text.size(int(task.speed))}/s" if task.speed else "")


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _lines(shown: Sequence[tuple[Column, Sequence[Text]]], widths: Sequence[int]) -> Iterator[Text]:
    """A table that fits, line by line: ten times as fast as one that may have to wrap."""
    heads = [Text(column.header, style="bold") for column, _ in shown]
    for cells in (heads, *zip(*(cells for _, cells in shown), strict=True)):
        line = Text()
        for cell, width, (column, _) in zip(cells, widths, shown, strict=True):
            blanks = " " * (width - cell.cell_len)
            line.append(blanks if column.justify == "right" else "")
            line.append_text(cell)
            line.append(("" if column.justify == "right" else blanks) + " " * GAP)
        line.rstrip()
        yield line


def _wrapped(shown: Sequence[tuple[Column, Sequence[Text]]], *, whole: bool) -> Table:
    """A table whose prose is wrapped, and everything else too unless it fits `whole`: broken rather than cut."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, _ in shown:
        table.add_column(column.header, justify=column.justify, no_wrap=whole and not column.prose, overflow="fold")
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*cells)
    return table


def _is_rows(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and hasattr(value[0], "__dataclass_fields__")


def _console(stream: TextIO) -> Console:
    """A console on this stream. Without a terminal and without ``COLUMNS`` nothing limits the width."""
    limited = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=stream, width=None if limited else PIPE_WIDTH, highlight=False, markup=False, emoji=False)
