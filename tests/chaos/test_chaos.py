"""The PyPI tool ckpt-chaos kills a trainer at its file events and resumes it (W1 to W9, R1, R6)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOL = Path(sys.executable).with_name("ckpt-chaos")


def crash_and_resume(
    work: Path, *, points: int, modes: str, ranks: int = 1, crash_rank: int = 0, steps: int = 4, timeout: int
) -> Counter[str]:
    """Runs the tool on the tiny example; returns how often each verdict was given, the control included."""
    run = subprocess.run(
        [
            *(str(TOOL), "run", "--work", str(work / "chaos"), "--timeout", "180"),
            *("--max-points", str(points), "--modes", modes, "--ranks", str(ranks), "--crash-rank", str(crash_rank)),
            *("--checkpoint-glob", "{out}/run/iter_*", "--step-regex", r"resumed from step (\d+)"),
            *("--result-file", "{out}/final.json", "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"),
            *("--", sys.executable, str(HERE / "repeatable.py"), "--root", "{out}"),
            *("--steps", str(steps), "--save-every", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    rows = [json.loads(path.read_text()) for path in (work / "chaos").glob("pt_*/result.json")]
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    # The tool exits 0 also when it could not crash anything: what it did is counted here.
    assert all(row["crashed"] for row in rows if not row["label"].startswith("no crash")), run.stdout[-6000:]
    assert not any(row["drift"] for row in rows), "the file events differ from run to run: the crashes hit other places"
    return Counter("control" if row["label"].startswith("no crash") else "crashed" for row in rows)


@pytest.mark.timeout(300)
def test_a_trainer_killed_at_a_few_file_events_resumes_from_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    assert crash_and_resume(tmp_path, points=4, modes="before,torn", timeout=280) == {"control": 1, "crashed": 4}


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_trainer_killed_at_every_file_event_never_loses_or_mixes_anything(tmp_path: Path) -> None:
    counted = crash_and_resume(tmp_path, points=1000, modes="before,torn,unsynced", timeout=7200)
    assert counted["crashed"] > 100


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("crash_rank", [0, 1])
def test_two_ranks_resume_after_either_is_killed_at_any_file_event(tmp_path: Path, crash_rank: int) -> None:
    counted = crash_and_resume(tmp_path, points=1000, modes="before,torn", ranks=2, crash_rank=crash_rank, timeout=7200)
    assert counted["crashed"] > 10
