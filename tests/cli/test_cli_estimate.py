"""``ckpt estimate``: the published example as a command, its assumptions as options."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Ckpt
from tests.cli.test_cli_documentation import TEXT

EXAMPLE = ("estimate", "--params", "7.5e9", "--tp", "2", "--pp", "2", "--dp", "64")


def test_the_example_of_the_documentation_is_what_the_command_prints(ckpt: Ckpt) -> None:
    documented = TEXT.split("$ ckpt estimate --params 7.5e9 --tp 2 --pp 2 --dp 64 --mtbf 10h\n")[1]
    documented = documented.split("    assumptions\n")[0]
    printed = ckpt(*EXAMPLE, "--mtbf", "10h").lines
    assert [line.removeprefix("    ") for line in documented.splitlines()] == printed[: printed.index("assumptions")]


def test_the_example_needs_no_catalog_and_says_how_to_get_an_interval(ckpt: Ckpt) -> None:
    ended = ckpt(*EXAMPLE)
    assert ended.code == 0
    for expected in ("105 GB", "15 GB", "30 GB", "60 GB", "352 MB", "59 MB", "410 MB", "26.3 GB", "3.3 GB", "6.6 GB"):
        assert expected in ended.out
    for mode, stall in (("legacy sync", "13 s"), ("sync", "1 s"), ("async", "16 ms")):
        (line,) = [line for line in ended.lines if line.startswith(f"{mode} ")]
        assert f" {stall} " in line
    assert "SAVE EVERY" not in ended.out
    assert "add --mtbf" in ended.err


def test_every_assumption_is_listed_and_its_option_changes_it(ckpt: Ckpt) -> None:
    before = ckpt(*EXAMPLE, "-o", "json").json
    assert len(before["assumptions"]) == 7
    for position, assumption in enumerate(before["assumptions"]):
        after = ckpt(*EXAMPLE, assumption["option"], str(int(assumption["value"] * 2)), "-o", "json").json
        assert after["assumptions"][position]["value"] == 2 * assumption["value"]
        assert {**after, "assumptions": 0} != {**before, "assumptions": 0}, assumption["option"]


def test_the_interval_follows_from_mtbf_and_the_computed_or_the_measured_stall(ckpt: Ckpt) -> None:
    stalls = ckpt(*EXAMPLE, "--mtbf", "10h", "--stall", "500ms", "-o", "json").json["stalls"]
    assert [stall["mode"] for stall in stalls] == ["legacy sync", "sync", "async", "measured"]
    for stall in stalls:
        assert stall["interval_seconds"] == pytest.approx((2 * 36_000 * stall["stall_seconds"]) ** 0.5)
    assert stalls[-1]["interval_seconds"] == pytest.approx(189.7, abs=0.1)
    assert ckpt(*EXAMPLE, "--stall", "2s", "-o", "json").json["stalls"][-1]["interval_seconds"] is None


def test_json_has_exact_numbers_and_no_note(ckpt: Ckpt) -> None:
    ended = ckpt(*EXAMPLE, "-o", "json")
    found = ended.json
    assert ended.err == ""
    assert (found["bytes"], found["bytes_per_rank"], found["legacy_bytes_per_writer"]) == (
        105_000_000_000,
        410_156_250,
        26_250_000_000,
    )
    assert (found["topology"]["tp"], found["ranks"], found["expert_params"]) == (2, 256, None)


def test_parameters_may_be_written_in_short_and_experts_are_counted_apart(ckpt: Ckpt) -> None:
    assert ckpt("estimate", "--params", "7.5B", "-o", "json").json["params"] == 7_500_000_000
    assert ckpt("estimate", "--params", "405M", "-o", "json").json["params"] == 405_000_000
    moe = ckpt(
        "estimate", "--params", "1.2T", "--expert-params", "1.1T", "--tp", "2", "--dp", "64", "--ep", "32", "--etp", "1"
    )
    assert moe.code == 0
    assert "of them in experts            1,100,000,000,000" in moe.out
    assert "tp2-ep32-dp64" in moe.out


def test_an_offloaded_optimizer_is_added_to_the_memory_of_a_node(ckpt: Ckpt) -> None:
    ended = ckpt(*EXAMPLE, "--offload-optimizer")
    assert "host memory per node          6.1 GB" in ended.out
    assert "  optimizer in it             2.8 GB" in ended.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--params", "7e9", "--dp", "0"), "--dp"),
        (("--params", "7e9", "--stream-bandwidth", "0"), "stream bandwidth 0: expected a positive number"),
        (("--params", "7e9", "--d2h-bandwidth", "nan"), "d2h bandwidth nan"),
        (("--params", "7e9", "--expert-params", "8e9"), "more than all params"),
        (("--params", "7e9", "--ep", "2", "--dp", "2"), "no parameters are in experts"),
        (("--params", "7e9", "--expert-params", "1e9", "--ep", "3"), "does not divide"),
        (("--params", "0"), "params 0"),
        (("--params", "many"), "expected a number such as 7.5e9"),
        (("--params", "7e9", "--mtbf", "10"), "is not a duration"),
        (("--params", "7e9", "--mtbf", "0s"), "mtbf 0"),
        (("--tp", "2"), "--params"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_names_it(ckpt: Ckpt, options: tuple[str, ...], complaint: str) -> None:
    ended = ckpt("estimate", *options)
    assert (ended.code, ended.out) == (2, "")
    assert complaint in ended.err


def test_a_narrow_terminal_gets_whole_columns(ckpt: Ckpt) -> None:
    ended = ckpt(*EXAMPLE, "--mtbf", "10h", columns=60)
    table = ended.out.split("stalls\n")[1].split("\n\n")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 60
    assert all(word in table for word in ("STALL", "SAVE EVERY", "13 s", "16 min"))
