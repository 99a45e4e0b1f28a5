"""The demo's own tools: it must see what it claims to see, and leave nothing behind."""

import json
import os
import signal
import sys
from pathlib import Path

import demo
import psutil
import pytest
from plot import plot_losses, read_journal
from ranks import Ranks, RanksFailedError
from saves import SaveOnDisk, begun_saves, flip_byte
from stage import DemoFailedError

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def put(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_save_is_unfinished_between_its_first_data_and_its_last_record(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000040"
    save = SaveOnDisk(directory, "000001-a-b")
    put(directory / ".ckpt/000001-a-b/begin.json")
    assert begun_saves(tmp_path) == [save]
    assert save.iteration == 40
    assert not save.unfinished(2)
    put(directory / "__0_0.000001-a-b.distcp")
    put(directory / ".ckpt/000001-a-b/rank_0.json")
    assert save.unfinished(2)
    put(directory / ".ckpt/000001-a-b/rank_1.json")
    assert not save.unfinished(2)
    put(directory / ".ckpt/000001-a-b/decision.json")
    assert save.decided
    assert not save.unfinished(3)


def test_flipping_a_byte_changes_one_byte_and_not_the_size(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(100)))
    offset = flip_byte(path)
    changed = [index for index, byte in enumerate(path.read_bytes()) if byte != index]
    assert changed == [offset]
    assert path.stat().st_size == 100


def test_all_ranks_freeze_and_die_together(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    ranks = Ranks(3, SLEEP, log=tmp_path / "log", env=clean_environment)
    pids = [process.pid for process in ranks.processes]
    assert {os.getpgid(pid) for pid in pids} == {pids[0]}
    assert ranks.freeze()
    assert {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}
    ranks.thaw()
    assert ranks.running()
    assert ranks.freeze()
    assert ranks.kill() == [-signal.SIGKILL] * 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_failed_rank_ends_the_others_and_shows_the_log(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no such luck'); time.sleep(60)"
    ranks = Ranks(2, [sys.executable, "-c", code], log=tmp_path / "log", env=clean_environment)
    with pytest.raises(RanksFailedError, match="no such luck"):
        ranks.wait(30)
    assert [process.poll() for process in ranks.processes] == [-signal.SIGKILL, 1]


def test_the_journal_is_read_per_attempt_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    start = {"topology": "TP=2 x DP=2", "save_id": None}
    records = [
        {"event": "started", "attempt": 1, "iteration": 0, **start},
        *({"iteration": i, "loss": 5.0 - i / 10, "lr": 0.1, "attempt": 1} for i in range(1, 9)),
        {"event": "resumed", "attempt": 2, "iteration": 4, **start, "save_id": "s", "topology": "TP=1 x DP=2"},
        *({"iteration": i, "loss": 5.0 - i / 10, "lr": 0.1, "attempt": 2} for i in range(5, 12)),
    ]
    journal.write_text("\n".join(map(json.dumps, records)) + '\n{"iteration": 12, "lo')
    first, second = read_journal(journal)
    assert (first.start, first.last, first.save_id) == (0, 8, None)
    assert (second.start, second.last, second.save_id, second.topology) == (4, 11, "s", "TP=1 x DP=2")
    assert second.losses[5] == first.losses[5]

    plot_losses([first, second], tmp_path / "loss.png", marks={"killed": 9, "damaged": 8}, title="test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_empties_only_what_an_earlier_demo_wrote(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with demo.fresh_directory(out):
        put(out / "deep" / "file")
        with pytest.raises(DemoFailedError, match="another demo runs"), demo.fresh_directory(out):
            pass
    with demo.fresh_directory(out):
        assert [path.name for path in out.iterdir()] == [demo.MARKER]
    put(tmp_path / "mine" / "thesis.tex")
    with pytest.raises(DemoFailedError, match="not from an earlier demo"), demo.fresh_directory(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine" / "thesis.tex").exists()
