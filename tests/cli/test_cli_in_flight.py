"""``ckpt ls`` and ``ckpt scan`` show saves that are being written, which only storage knows of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from catalog import Catalog
from ckptlib import Checkpointer, beats, commit
from ckptlib.async_options import AsyncOptions
from ckptlib.beats import Beat
from ckptlib.manifest import Begin
from ckptlib.storage import PosixStorage
from tests.catalog.training import Training
from tests.cli.conftest import RUN, Ckpt, record
from tests.support.gates import Gate

BEAT = 0.05


@pytest.fixture
def writing(training: Training, catalog: Catalog) -> Iterator[Path]:
    """The directory of iteration 7, of which 63 % are written; iteration 1 is recorded."""
    record(training, catalog, 1)
    gate = Gate("w.b")
    state = {"w": {"a": torch.zeros(6_300_000, dtype=torch.uint8), "b": torch.zeros(3_650_000, dtype=torch.uint8)}}
    options = AsyncOptions(worker="thread", heartbeat=BEAT)
    with gate.patched, Checkpointer(str(training.root), run=RUN, io_mode="async", background=options) as job:
        job.save(state, iteration=7)
        assert gate.reached.wait(60)
        try:
            while not any(beat.written for beat in beats_of(training.directory(7)).values()):
                time.sleep(BEAT)
            yield training.directory(7)
        finally:
            gate.opened.set()
            assert job.drain(60)


def beats_of(directory: Path) -> dict[int, beats.Beat]:
    (save,) = commit.list_saves(PosixStorage(), str(directory))
    assert save.begin is not None
    return beats.read_beats(PosixStorage(), str(directory), save.begin)


def test_a_save_in_flight_is_listed_with_how_far_it_is(ckpt: Ckpt, writing: Path) -> None:
    header, first, second = ckpt("ls", RUN).lines
    assert "finalized" in first
    assert second.split()[:6] == ["7", "2", "persistent", "writing", "63", "%"]
    assert header.index("VERDICT") == second.index("unverified")
    first, second = ckpt("ls", RUN, "-o", "json").json
    assert (first["lifecycle"], first["written"], first["silent_seconds"]) == ("finalized", None, None)
    assert (second["lifecycle"], second["iteration"], second["saved_at"]) == ("writing", 7, None)
    assert 0.63 <= second["written"] < 0.64
    assert second["silent_seconds"] < 30
    assert second["url"] == str(writing)


@pytest.mark.usefixtures("writing")
def test_filters_are_for_saves_in_flight_too(ckpt: Ckpt) -> None:
    def listed(*options: str) -> list[int]:
        return [row["iteration"] for row in ckpt("ls", *options, "-o", "json").json]

    assert listed() == [1, 7]
    assert listed("--latest", "1") == [7]
    assert listed("--state", "writing") == [7]
    assert listed("--state", "finalized") == [1]
    assert listed("--state", "unverified") == [1], "a verdict is about what is finalized"
    assert listed("--kind", "release") == []
    assert listed("--since", "1h") == [1, 7]
    assert listed("--since", "2001-01-01", "--latest", "1") == [7]
    assert listed("--catalog-only") == [1]


def test_a_save_that_gives_no_more_signs_of_life_says_since_when(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 1)
    path = str(training.directory(7))
    begin = Begin("000001-000000000001-00000001", RUN, 1, "attempt", 7, 2, "plan")
    commit.begin_save(PosixStorage(), path, begin)
    assert ckpt("ls", RUN).lines[-1].split()[3:8] == ["writing", "(no", "sign", "of", "life)"]
    assert ckpt("ls", RUN, "-o", "json").json[-1]["written"] is None
    beat = Beat(begin.save_id, 0, 9, 25, 50, 2.0, "host", "machine", 1, 1, at=time.time() - 3 * 3600)
    PosixStorage().put(f"{commit.save_dir(path, begin.save_id)}/{commit.beat_name(0)}", beat.encode())
    assert "writing 25 % (last sign of life 3 h ago)" in ckpt("ls", RUN).out
    assert ckpt("ls", RUN, "-o", "json").json[-1]["overdue"]
    assert "2 of 2 ranks have not finished" in ckpt("scan", str(training.root)).out


def test_a_scan_says_how_far_what_is_incomplete_is(ckpt: Ckpt, writing: Path, training: Training) -> None:
    (item,) = [item for item in ckpt("scan", str(training.root), "-o", "json").json["items"] if item["iteration"] == 7]
    assert item["action"] == "incomplete"
    assert item["reason"] == "writing 63 %; 1 of 1 ranks have not finished"


@pytest.mark.usefixtures("writing")
def test_a_storage_that_cannot_be_read_costs_a_note_and_not_the_list(
    ckpt: Ckpt, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixStorage, path: str) -> list[object]:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(PosixStorage, "list", refuse)
        ended = ckpt("ls", RUN)
    assert ended.code == 0
    assert len(ended.lines) == 2
    assert f"{training.root}: " in ended.err


def test_what_was_committed_and_not_recorded_does_not_vanish(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 1)
    training.attempt(7)
    ended = ckpt("ls", RUN)
    assert ended.lines[-1].split()[:7] == ["7", "2", "persistent", "finalized", "(not", "recorded)", "unverified"]
    assert f"scan {training.root} --adopt" in ended.err
    first, second = ckpt("ls", RUN, "-o", "json").json
    assert (first["recorded"], second["recorded"]) == (True, False)
    assert (second["iteration"], second["bytes"], second["url"]) == (7, None, str(training.directory(7)))
    assert [row["iteration"] for row in ckpt("ls", "--state", "writing", "-o", "json").json] == []
    assert [row["iteration"] for row in ckpt("ls", "--state", "finalized", "-o", "json").json] == [1, 7]
    assert len(ckpt("ls", "--catalog-only").lines) == 2
    record(training, catalog, 8)  # the next attempt of the run
    assert all(row["recorded"] for row in ckpt("ls", RUN, "-o", "json").json)
    assert [row["iteration"] for row in ckpt("ls", RUN, "-o", "json").json] == [1, 7, 8]


@pytest.mark.usefixtures("writing")
def test_show_and_verify_of_a_save_in_flight_say_how_far_it_is(ckpt: Ckpt) -> None:
    for verb in ("show", "verify"):
        ended = ckpt(verb, f"{RUN}@7")
        assert ended.code == 1
        assert f"{RUN}@7: is being written (63 %)" in ended.err
        assert "has no checkpoint" not in ended.err
    assert "is being written" not in ckpt("show", f"{RUN}@8").err


def test_show_of_what_is_not_recorded_says_how_to_record_it(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 1)
    training.attempt(7)
    ended = ckpt("show", f"{RUN}@7")
    assert ended.code == 1
    assert f"is committed and not recorded. To record it: ckpt scan {training.root} --adopt" in ended.err
