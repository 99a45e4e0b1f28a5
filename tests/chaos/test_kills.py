"""SIGKILL of any one process of a job that saves asynchronously: nothing that was staged is lost, nothing is left (W7).

The processes are the trainer and the worker of each rank, rank 0's among them, which commits, and the launcher, which
hosts the store.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.chaos import trainer
from tests.chaos.driver import Moment, kill_at, staged_by_all, wait_until
from tests.chaos.judge import committed, judge, take_over
from tests.chaos.trainer import TOKEN, Job
from tests.support.workers import assert_no_segment_is_left, shared_segments


def live_through(moment: Moment, folder: Path) -> None:
    """One job, one kill, the next attempt, the judgement."""
    before = shared_segments()
    job = kill_at(moment, folder)
    take_over(job, moment)
    judge(job, moment)
    assert_no_segment_is_left(before)


FEW = [
    Moment(1, 2, "trainer", 0, after=2, delay=0.0, at_once=True),  # its worker is only being started
    pytest.param(Moment(2, 2, "trainer", 1, after=6, delay=0.02, at_once=False), marks=pytest.mark.deep),
    Moment(3, 2, "worker", 0, after=5, delay=0.01, at_once=False),
]


@pytest.mark.parametrize("moment", FEW, ids=str)
def test_a_process_that_is_killed_loses_nothing_that_was_staged(tmp_path: Path, moment: Moment) -> None:
    live_through(moment, tmp_path)


FIRST = int(os.environ.get("CKPT_CHAOS_SEED", time.time()))  # a failure names its seed


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(int(os.environ.get("CKPT_CHAOS_MOMENTS", 50))))
def test_any_process_killed_at_any_moment_loses_nothing_that_was_staged(tmp_path: Path, number: int) -> None:
    moment = Moment.of(FIRST + number)
    print(moment)
    live_through(moment, tmp_path)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_process_groups_of_torchrun_and_its_trainers_are_killed_and_what_was_staged_is_committed(
    tmp_path: Path,
) -> None:
    """As a scheduler ends a step of a job: nothing of it is asked, all of it is gone at once, but the workers."""
    before = shared_segments()
    job = Job(str(tmp_path), 2, 1000, uuid.uuid4().hex)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program += [trainer.__file__, str(tmp_path), job.token, str(job.saves)]
    environment = os.environ | {TOKEN: job.token, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(program, start_new_session=True, env=environment, stderr=subprocess.DEVNULL) as torchrun:
        groups = {torchrun.pid}
        try:
            wait_until("the save", lambda: staged_by_all(job) >= {2})
            groups |= {os.getpgid(child.pid) for child in psutil.Process(torchrun.pid).children()}
        finally:
            for group in groups:
                os.killpg(group, signal.SIGKILL)
    moment = Moment(0, 2, "trainer", 0, after=2, delay=0.0, at_once=False)
    take_over(job, moment)
    judge(job, moment)
    assert committed(job) >= {1, 2}
    assert_no_segment_is_left(before)
