"""``ckpt resume``: the resume point, or why none (R2, R6, V4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from catalog import Catalog
from tests.catalog.training import Training, flip_a_byte
from tests.cli.conftest import RUN, Ckpt, record, verify


@pytest.fixture(scope="module")
def judged_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Catalog, Training]]:
    """For tests that only read: iterations 100 and 200 verified, 300 corrupt, 400 not verified yet."""
    place = tmp_path_factory.mktemp("judged")
    training = Training(place / "root", RUN)
    with Catalog(str(place / "catalog.db"), create=True) as catalog:
        record(training, catalog, 100, 200, 300, 400)
        flip_a_byte(training.data_file(300))
        for iteration in (100, 200, 300):
            verify(catalog, iteration)
        yield catalog, training


@pytest.fixture
def judged(ckpt: Ckpt, judged_run: tuple[Catalog, Training], monkeypatch: pytest.MonkeyPatch) -> Training:
    """Makes `ckpt` work on `judged_run`."""
    catalog, training = judged_run
    monkeypatch.setenv("CKPT_DB", str(catalog))
    return training


def test_the_resume_point_is_the_newest_verified_one_with_why_each_newer_is_not(ckpt: Ckpt, judged: Training) -> None:
    ended = ckpt("resume", RUN, "--explain", "-o", "json")
    point = ended.json
    assert (ended.code, point["iteration"], point["url"]) == (0, 200, str(judged.directory(200)))
    assert point["progress"] == {"consumed_samples": 1600, "lr": 0.001}
    assert [(c["iteration"], c["chosen"], c["verdict"]) for c in point["candidates"]] == [
        (200, True, "verified"),
        (300, False, "corrupt"),
        (400, False, "unverified"),
    ]
    assert [c["reason"] for c in point["candidates"]] == [
        "resume point",
        "rejected: is corrupt: its bytes are not what was written",
        "rejected: is not verified yet",
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_explanation_is_a_table_with_whole_sentences(ckpt: Ckpt, judged: Training, columns: int) -> None:
    out = ckpt("resume", RUN, "--explain", columns=columns).out
    assert f"checkpoint  {judged.directory(200)}" in out
    header, *lines = (line.rstrip() for line in out.split("candidates, newest last\n")[1].splitlines())
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines if line[:4].strip()] == ["200", "300", "400"]
    decisions = " ".join(line[header.index("DECISION") :] for line in lines)
    expected = "resume point rejected: is corrupt: its bytes are not what was written rejected: is not verified yet"
    assert " ".join(decisions.split()) == expected


def test_without_the_explanation_a_note_says_that_newer_ones_were_rejected(ckpt: Ckpt, judged: Training) -> None:
    ended = ckpt("resume", RUN)
    assert "rejected:" not in ended.out
    assert f"2 newer checkpoints rejected. Why: ckpt resume '{RUN}' --explain" in ended.err
    point = ckpt("resume", RUN, "-o", "json").json
    assert (point["rejected_newer"], point["candidates"]) == (2, [])


def test_path_only_prints_the_url_and_nothing_else_whatever_the_format(ckpt: Ckpt, judged: Training) -> None:
    for options in ([], ["-o", "json"], ["-q"]):
        ended = ckpt("resume", RUN, "--path-only", *options)
        assert (ended.code, ended.out, ended.err) == (0, f"{judged.directory(200)}\n", "")


def test_unverified_ones_are_taken_only_on_request_and_corrupt_ones_never(ckpt: Ckpt, judged: Training) -> None:
    assert ckpt("resume", RUN, "--allow-unverified", "-o", "json").json["iteration"] == 400
    ended = ckpt("resume", RUN, "--at", "300", "--allow-unverified")
    assert ended.code == 21
    assert "is corrupt" in ended.out


def test_an_explicit_iteration_is_exact_or_nothing(ckpt: Ckpt, judged: Training) -> None:
    """R6: nothing falls back silently."""
    assert ckpt("resume", RUN, "--at", "100", "--path-only").out == f"{judged.directory(100)}\n"
    for iteration, word in (("400", "not verified"), ("150", "nearest"), ("0", "no checkpoint at iteration 0")):
        ended = ckpt("resume", RUN, "--at", iteration, "--path-only")
        assert (ended.code, ended.out) == (21, "")
        assert word in ended.err


def test_iteration_zero_is_a_checkpoint_like_any_other(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 0)
    verify(catalog, 0)
    assert ckpt("resume", RUN, "--at", "0", "-o", "json").json["iteration"] == 0


def test_nothing_eligible_is_exit_21_with_every_reason_and_what_to_do(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 1, 2)
    ended = ckpt("resume", RUN)
    assert ended.code == 21
    assert ended.out.count("rejected: is not verified yet") == 2
    assert f"ckpt verify '{RUN}'" in ended.err
    ended = ckpt("resume", RUN, "-o", "json")
    assert ended.code == 21
    assert (ended.json["iteration"], ended.json["url"], len(ended.json["candidates"])) == (None, None, 2)
    assert ended.error == {"message_type": "exit_error", "code": 21, "error": f"run {RUN!r}: no resume point"}


def test_training_needs_the_optimizer_and_evaluation_only_the_model(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 1)
    record(training, catalog, 2, at=1, contents=["model"])
    verify(catalog, 1)
    verify(catalog, 2)
    assert ckpt("resume", RUN, "-o", "json").json["iteration"] == 1
    assert ckpt("resume", RUN, "--for", "eval", "-o", "json").json["iteration"] == 2
    assert "holds no optimizer" in ckpt("resume", RUN, "--explain").out


def test_an_unknown_run_has_no_resume_point_and_similar_names_are_given(ckpt: Ckpt, judged: Training) -> None:
    ended = ckpt("resume", "team/llama 7B", "--path-only")
    assert (ended.code, ended.out) == (21, "")
    assert repr(RUN) in ended.err


@pytest.mark.parametrize("options", [["--at", "-1"], ["--at", "x"], ["--for", "fun"], ["--atx", "1"]])
def test_wrong_options_are_usage_errors(ckpt: Ckpt, catalog: Catalog, options: list[str]) -> None:
    ended = ckpt("resume", RUN, *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
