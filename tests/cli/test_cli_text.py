"""The pure parts of the command line: names, global options anywhere, sizes, times, durations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.cli import text
from catalog.cli.arguments import FLAGS, VALUED, hoist, output_format
from catalog.cli.durations import parse_duration, parse_since
from catalog.cli.selector import Selector, parse


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# --- RUN@ITER ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_text", "runs", "expected"),
    [
        ("llama", ["llama"], Selector("llama")),
        ("llama@300", ["llama"], Selector("llama", 300)),
        ("llama@0", ["llama"], Selector("llama", 0)),
        ("llama@0000300", ["llama"], Selector("llama", 300)),
        ("team/llama 7B@10000000", ["team/llama 7B"], Selector("team/llama 7B", 10_000_000)),
        ("me@host@5", ["me@host"], Selector("me@host", 5)),
        ("me@host", ["me@host"], Selector("me@host")),
        ("sweep@3", ["sweep@3"], Selector("sweep@3")),
        ("sweep@3@40", ["sweep@3"], Selector("sweep@3", 40)),
        ("sweep@3", ["sweep@3", "sweep"], Selector("sweep", 3)),
        ("nobody@7", [], Selector("nobody", 7)),
        ("@7", [], Selector("@7")),
        ("run@", ["run@"], Selector("run@")),
        ("run@-1", [], Selector("run@-1")),
        ("run@³", [], Selector("run@³")),
    ],
)
def test_the_iteration_is_read_from_the_right_and_a_run_may_be_called_anything(
    given_text: str, runs: list[str], expected: Selector
) -> None:
    assert parse(given_text, runs) == expected


@given(run=st.text(min_size=1), iteration=st.integers(0, 10**9))
def test_every_run_name_with_an_iteration_is_read_back(run: str, iteration: int) -> None:
    assert parse(str(Selector(run, iteration)), [run]) == Selector(run, iteration)


# --- global options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "hoisted"),
    [
        (["ls", "run", "-o", "json"], ["-o", "json", "ls", "run"]),
        (["ls", "-ojson", "run"], ["-ojson", "ls", "run"]),
        (["ls", "--output=json"], ["--output=json", "ls"]),
        (["init", "--db", "my file.db", "-q"], ["--db", "my file.db", "-q", "init"]),
        (["show", "--", "-o", "json"], ["show", "--", "-o", "json"]),
        (["ls", "--db"], ["--db", "ls"]),
        (["verify", "--database=1", "-x"], ["verify", "--database=1", "-x"]),
    ],
)
def test_global_options_may_follow_the_verb_but_nothing_after_a_double_dash_is_one(
    args: list[str], hoisted: list[str]
) -> None:
    assert hoist(args) == hoisted


@given(
    st.lists(st.sampled_from(["ls", "a b", "--", "--at", "7", "-o", "json", "--db=x", "-q", "--yes", "-vv", "--db"]))
)
def test_moving_global_options_loses_and_invents_nothing(args: list[str]) -> None:
    hoisted = hoist(args)
    assert sorted(hoisted) == sorted(args)
    assert hoist(hoisted) == hoisted
    others = [arg for arg in args if arg in ("ls", "a b", "--at")]
    if not VALUED & set(args):
        assert [arg for arg in hoisted if arg in others] == others
        assert "--" in args or not FLAGS & set(hoisted[hoisted.index("ls") :] if "ls" in hoisted else [])


@pytest.mark.parametrize(
    ("args", "environment", "expected"),
    [
        ([], None, "table"),
        ([], "json", "json"),
        (["-o", "table"], "json", "table"),
        (["-ojson", "ls"], None, "json"),
        (["--output=json", "ls"], None, "json"),
        (["ls", "--", "-ojson"], None, "table"),
        (["-o"], None, "table"),
    ],
)
def test_the_output_format_is_known_even_when_the_command_line_is_wrong(
    args: list[str], environment: str | None, expected: str
) -> None:
    assert output_format(args, environment) == expected


# --- values for people ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10236, "10.0 KiB"),
        (3_590_000, "3.42 MiB"),
        (812 * 2**30, "812 GiB"),
        (2_638_827_906_662, "2.40 TiB"),
        (5000 * 2**60, "5000 EiB"),
    ],
)
def test_sizes_have_three_digits_in_the_unit_that_fits(count: int, expected: str) -> None:
    assert text.size(count) == expected


@given(st.integers(0, 2**70))
def test_every_size_is_right_within_its_digits(count: int) -> None:
    value, unit = text.size(count).split()
    assert float(value) * 1024 ** text.UNITS.index(unit) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (58_593_750, "59 MB"),
        (999_600_000, "1 GB"),
        (3_281_250_000, "3.3 GB"),
        (26_250_000_000, "26.3 GB"),
        (15_000_000_000, "15 GB"),
        (105_000_000_000, "105 GB"),
        (5 * 10**21, "5000 EB"),
    ],
)
def test_decimal_sizes_are_whole_numbers_and_from_gb_on_have_one_decimal_below_a_hundred(
    count: int, expected: str
) -> None:
    assert text.decimal_size(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 ms"),
        (1e-6, "0.001 ms"),
        (0.01640625, "16 ms"),
        (0.5, "500 ms"),
        (1.05, "1 s"),
        (1.26, "1.3 s"),
        (13.125, "13 s"),
        (119.0, "120 s"),
        (972.0, "16 min"),
        (7200.0, "2 h"),
        (36_000.0, "10 h"),
        (172_800.0, "2 d"),
        (1e9, "12000 d"),
    ],
)
def test_a_duration_has_two_digits_in_the_unit_that_fits(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, "0 %"), (0.00095, "0.095 %"), (0.0272, "2.7 %"), (0.16, "16 %"), (1.0, "100 %")]
)
def test_a_share_has_two_digits(share: float, expected: str) -> None:
    assert text.percent(share) == expected


@pytest.mark.usefixtures("berlin")
def test_people_get_local_time_with_its_zone_and_programs_get_utc() -> None:
    moment = datetime(2026, 11, 29, 10, 15, 7, 123456, tzinfo=UTC)
    assert text.local_minute(moment) == "2026-11-29 11:15 CET"
    assert text.local_second(moment) == "2026-11-29 11:15:07 CET"
    assert text.utc_iso(moment) == "2026-11-29T10:15:07.123Z"


def test_control_characters_in_a_name_cannot_steer_the_terminal() -> None:
    assert text.printable("a\x1b[31mred\nb\x9b") == r"a\x1b[31mred\nb\x9b"
    assert text.printable("Läufe/7B 🦙") == "Läufe/7B 🦙"


@pytest.mark.parametrize(
    ("value", "expected"), [(3, "3"), (3.0, "3"), (0.123456, "0.1235"), (1e-7, "1e-07"), (float("nan"), "nan")]
)
def test_metrics_have_four_digits(value: float, expected: str) -> None:
    assert text.number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("15min", timedelta(minutes=15)),
        ("48h", timedelta(hours=48)),
        ("1.5d", timedelta(hours=36)),
        ("2w", timedelta(weeks=2)),
        ("2026-11-29T10:00:00+00:00", datetime(2026, 11, 29, 10, tzinfo=UTC)),
    ],
)
def test_a_point_in_time_is_a_duration_or_a_date(value: str, expected: object) -> None:
    assert parse_since(value) == expected


def test_a_duration_alone_is_no_date_and_has_a_unit() -> None:
    assert parse_duration("500ms") == timedelta(milliseconds=500)
    assert parse_duration("1.5d") == timedelta(hours=36)
    for wrong in ("", "5", "5m", "-5s", "2026-11-29", "1e999d", "9999999999999w"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(wrong)


@pytest.mark.usefixtures("berlin")
def test_a_date_without_a_zone_is_local() -> None:
    assert parse_since("2026-11-29") == datetime(2026, 11, 28, 23, tzinfo=UTC)


@pytest.mark.parametrize("value", ["5m", "5 months", "yesterday", ""])
def test_an_unclear_point_in_time_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="neither a duration"):
        parse_since(value)
