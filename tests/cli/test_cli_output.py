"""The two output formats: fed by the same dataclasses, so that they cannot drift."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.cli import db, init, resume, scan, show, text, verify_views, views
from catalog.cli.columns import Row, column, columns_of, to_json
from catalog.cli.output import JsonOutput, TableOutput

VIEWS: list[type[Row]] = [
    kind
    for module in (db, init, resume, scan, show, verify_views, views)
    for name, kind in vars(module).items()
    if name.endswith("View") and kind.__module__ == module.__name__
]


@dataclass(frozen=True)
class Fruit:
    """A row."""

    name: str = column("NAME")
    bytes: int = column("SIZE", text.size, justify="right", drop=2)
    note: str = column("NOTE", prose=True)
    extra: str | None = column("EXTRA", drop=1, optional=True)
    secret: int = 7


@dataclass(frozen=True)
class Basket:
    """A document."""

    owner: str = column("owner")
    bought_at: datetime | None = column("bought at", text.utc_iso)  # noqa: RUF009  a field
    fruits: tuple[Fruit, ...] = column("fruits", limit=2)
    internal: float = 0.5


APPLE = Fruit("apple", 2048, "keeps the doctor away", None)
PEAR = Fruit("pear", 5, "soft", "ripe")


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_everything_that_people_see_is_also_a_key_for_programs(view: type[Row]) -> None:
    shown = [name for name, _ in columns_of(view, wide=True)]
    assert shown
    assert set(shown) <= {field.name for field in fields(view)}


def test_rows_are_an_array_of_objects_with_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    JsonOutput().rows(Fruit, [APPLE], known=["name"])
    assert json.loads(capsys.readouterr().out) == [
        {"name": "apple", "bytes": 2048, "note": "keeps the doctor away", "extra": None, "secret": 7}
    ]


def test_rows_are_a_table_without_what_is_empty_known_or_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    output = TableOutput()
    output.rows(Fruit, [APPLE])
    output.rows(Fruit, [APPLE, PEAR], known=["note"])
    output.rows(Fruit, [])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "NAME       SIZE  NOTE",
        "apple  2.00 KiB  keeps the doctor away",
        "NAME       SIZE  EXTRA",
        "apple  2.00 KiB  -",
        "pear        5 B  ripe",
    ]


def test_prose_is_wrapped_before_anything_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "37")
    TableOutput().rows(Fruit, [APPLE])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "NAME       SIZE  NOTE",
        "apple  2.00 KiB  keeps the doctor",
        "                 away",
    ]
    monkeypatch.setenv("COLUMNS", "30")
    TableOutput().rows(Fruit, [APPLE])
    assert "SIZE" not in capsys.readouterr().out


def test_a_document_is_its_values_and_then_its_lists(capsys: pytest.CaptureFixture[str]) -> None:
    basket = Basket("ann", None, (PEAR, PEAR, APPLE))
    TableOutput().document(basket)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "owner  ann",
        "",
        "fruits",
        "(1 more, with -v)",
        "NAME       SIZE  NOTE                   EXTRA",
        "pear        5 B  soft                   ripe",
        "apple  2.00 KiB  keeps the doctor away  -",
    ]
    TableOutput(wide=True).document(basket)
    assert capsys.readouterr().out.count("pear") == 2


def test_notes_are_for_people_and_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    TableOutput().note("Next: eat")
    assert capsys.readouterr() == ("", "Next: eat\n")
    TableOutput(quiet=True).note("Next: eat")
    JsonOutput().note("Next: eat")
    assert capsys.readouterr() == ("", "")


def test_errors_are_one_line_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    TableOutput(quiet=True).error("it is [bold]rotten[/bold]", 20)
    assert capsys.readouterr() == ("", "error: it is [bold]rotten[/bold]\n")
    JsonOutput().error("it is rotten", 20)
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {"message_type": "exit_error", "code": 20, "error": "it is rotten"}


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for output in (TableOutput(), JsonOutput()):
        with output.progress("reading") as advance, output.busy("scanning"):
            advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_names_are_neither_markup_nor_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    output = TableOutput()
    output.rows(Fruit, [Fruit("[red]:apple:\x1b[2J\r", 1, "", None)])
    assert capsys.readouterr().out.splitlines()[1].startswith(r"[red]:apple:\x1b[2J\r ")
    output.note("[red]\x1b[2J\nnext")
    output.error("[red]\x1b[2J", 1)
    assert capsys.readouterr().err == "[red]\\x1b[2J\nnext\nerror: [red]\\x1b[2J\n"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes(timezones=st.just(UTC)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
        max_leaves=10,
    )
)
def test_whatever_a_row_holds_becomes_valid_json(value: object) -> None:
    json.dumps(to_json(value), allow_nan=False)
