"""A job that is told to end, whatever phase a save is in: it becomes a checkpoint in time, or can never be one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, commit
from ckptlib.storage import resolve

GATES = """
    import os, time

    def gated(function, is_gated):
        def call(*args, **options):
            if is_gated(*args):
                open(os.environ["REACHED"], "w").close()
                while not os.path.exists(os.environ["GATE"]):
                    time.sleep(0.01)
            return function(*args, **options)
        return call

    phase = os.environ["PHASE"]
    if phase == "staging":
        os.memfd_create = gated(os.memfd_create, lambda name: True)
    if phase == "write":
        os.fsync = gated(os.fsync, lambda fd: "iter_0000004/__" in os.readlink(f"/proc/self/fd/{fd}"))
    if phase == "commit":
        worker = "ckptlib.worker" in open("/proc/self/cmdline").read()
        os.link = gated(os.link, lambda _, to: worker and "iter_0000004" in to and to.endswith("decision.json"))
"""
"""Imported by every Python process of the job: it stops in one phase of a save until the gate opens."""

TRAINER = """
    import sys, time, torch
    from ckptlib import AsyncOptions, Cadence, Checkpointer, ExitSignals, Schedule

    with ExitSignals(("SIGTERM",)) as signals:
        cadence = Cadence(Schedule(save_interval=4), signals=signals)
        options = AsyncOptions(at_limit="skip")  # a save that waits for another hears no signal
        tell = lambda notice: print(notice.name, flush=True)
        job = Checkpointer("root", run="run", io_mode="async", background=options, on_event=tell)
        state = {"w": torch.zeros(4)}
        job.save(state, iteration=0, io_mode="sync")
        iteration = 0
        while True:
            iteration += 1
            state["w"] += 1
            time.sleep(0.02)
            action = cadence.should_save_now(iteration)
            in_time = not action.exit or job.drain(float(sys.argv[1]))
            if action.save and in_time:
                job.save(state, iteration=iteration)
            if action.exit:
                break
        in_time = in_time and job.drain(float(sys.argv[1]))
        print("drained", iteration, in_time, flush=True)
        job.close()
"""


@contextmanager
def trainer(folder: Path, phase: str, grace: float) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has stopped in this phase and was told to end, twice."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(textwrap.dedent(GATES))
    (folder / "trainer.py").write_text(textwrap.dedent(TRAINER))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(Path(ckptlib.__file__).parents[1])]),
        "PHASE": phase,
        "GATE": str(folder / "gate"),
        "REACHED": str(folder / "reached"),
    }
    with subprocess.Popen(
        [sys.executable, "trainer.py", str(grace)], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (folder / "reached").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            yield process
        finally:
            (folder / "gate").touch()
            process.wait(60)


def resumed(folder: Path) -> tuple[int, float]:
    state = {"w": torch.zeros(4)}
    iteration = Checkpointer(str(folder / "root"), run="run").restore(state).iteration
    return iteration, state["w"][0].item()


@pytest.mark.parametrize("phase", ["staging", "write", pytest.param("commit", marks=pytest.mark.deep)])
def test_a_job_that_is_told_to_end_leaves_what_it_was_saving_and_where_it_stopped(tmp_path: Path, phase: str) -> None:
    with trainer(tmp_path, phase, grace=60) as process:
        (tmp_path / "gate").touch()
        assert process.stdout is not None
        said = process.stdout.read().split("\n")
    assert process.returncode == 0
    (ending,) = [line for line in said if line.startswith("drained")]
    _, last, in_time = ending.split()
    assert in_time == "True"
    assert (tmp_path / "root/iter_0000004/metadata.json").exists()
    assert resumed(tmp_path) == (int(last), float(last)), "the last step of the job is where the next one begins"


@pytest.mark.parametrize("phase", [pytest.param("write", marks=pytest.mark.deep), "commit"])
def test_w4_what_is_not_done_within_the_grace_period_is_aborted_and_stays_so(tmp_path: Path, phase: str) -> None:
    with trainer(tmp_path, phase, grace=1) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line.split())
            if line.startswith("drained"):
                break
        assert said[-1][0] == "drained"
        assert said[-1][2] == "False"
        assert ["save_drained"] in said
        storage, path = resolve(str(tmp_path / "root/iter_0000004"))
        (save,) = commit.list_saves(storage, path)
        assert save.decision is not None
        assert (save.decision.outcome, save.decision.decided_by) == ("abort", "drain")
        (tmp_path / "gate").touch()  # only now the worker goes on
    assert process.returncode == 0
    assert commit.read_save(storage, path, save.save_id).decision == save.decision
    assert resumed(tmp_path) == (0, 0.0)
