"""Real Megatron-Core jobs: GPT, DDP and its optimizers, saved and loaded by us and by Megatron-Core itself.

Two ranks run all checks of `tests.megatron.trainer`, each a method there; here is one test per check.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

import pytest

from tests.megatron.judging import JUDGE_PYTHON, REPOSITORY
from tests.megatron.trainer import CHECKS

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]  # half a minute; a loaded machine is slow, not broken

RANKS = 2


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, str]]:
    """What went wrong in each check, on each rank."""
    folder = tmp_path_factory.mktemp("trainer")
    logs = [folder / f"rank_{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank in range(RANKS):
        with logs[rank].open("w") as log:
            processes.append(
                subprocess.Popen(
                    [str(JUDGE_PYTHON), "-m", "tests.megatron.trainer", str(folder), str(rank), str(RANKS)],
                    cwd=REPOSITORY,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    try:
        codes = [process.wait(timeout=140) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0] * RANKS, text
    print(text)
    return [json.loads((folder / f"verdicts_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_trainers_agree_that(check: str, verdicts: list[Mapping[str, str]]) -> None:
    wrong = "\n".join(f"rank {rank}: {found[check]}" for rank, found in enumerate(verdicts) if found[check])
    assert not wrong, wrong
