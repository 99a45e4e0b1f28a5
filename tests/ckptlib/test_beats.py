"""Signs of life of a save in flight, and a new attempt that waits for them (W8)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, beats, commit, roots, settling
from ckptlib.async_options import AsyncOptions
from ckptlib.beats import Beat, Pulse, Watch, in_flight, interval_of
from ckptlib.errors import RecordError, StateError
from ckptlib.events import Notice
from ckptlib.manifest import Begin
from ckptlib.storage import PosixStorage
from tests.support.gates import Gate

THREAD = AsyncOptions(worker="thread", heartbeat=0.05)


def beat(rank: int = 0, counter: int = 1, written: int = 0, total: int = 100, **of: Any) -> Beat:
    fixed = {"interval": 2.0, "host": "elsewhere", "machine": "elsewhere", "pid": 1, "started": 1, "at": 1e9}
    return Beat("000001-000000000001-00000001", rank, counter, written, total, **(fixed | of))


def begin(world_size: int = 1, save_id: str = "000001-000000000001-00000001") -> Begin:
    return Begin(save_id, "run", 1, "attempt", 7, world_size, "plan")


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 200, 201, 1024, 16_384])
def test_all_ranks_together_make_at_most_a_hundred_beats_a_second(world_size: int) -> None:
    interval = interval_of(world_size)
    assert interval >= beats.HEARTBEAT
    assert round(world_size / interval) <= beats.PUTS_PER_SECOND
    firsts = [beats.first_after(rank, world_size) for rank in range(world_size)]
    assert firsts[0] == 0
    if interval > beats.HEARTBEAT:  # also the first ones
        assert all(sum(second <= at < second + 1 for at in firsts) <= 100 for second in (0, 1, 50))


def test_a_rank_is_lost_when_its_counter_stood_still_for_three_intervals_of_our_own_clock() -> None:
    watch = Watch()
    assert watch.lost([0, 1], {0: beat(0, 1), 1: beat(1, 1)}, now=100.0) == ()
    assert watch.lost([0, 1], {0: beat(0, 2, at=0.0), 1: beat(1, 1, at=9e9)}, now=105.9) == ()
    assert watch.lost([0, 1], {0: beat(0, 3), 1: beat(1, 1)}, now=106.1) == (1,)


def test_a_rank_that_writes_no_more_is_still_alive_while_its_counter_moves() -> None:
    """A write that hangs in the kernel looks like this; how long that is waited for is the caller's bound."""
    watch = Watch()
    for counter in range(100):
        assert watch.lost([0], {0: beat(0, counter, written=7)}, now=2.0 * counter) == ()


def test_a_rank_that_never_beat_is_lost_when_the_others_have_had_three_intervals() -> None:
    watch = Watch()
    assert watch.lost([0, 1], {0: beat(0, 1)}, now=0.0) == ()
    assert watch.lost([0, 1], {0: beat(0, 9)}, now=6.1) == (1,)


def test_nobody_is_waited_for_where_nothing_beats() -> None:
    assert Watch().lost([0, 1], {}, now=0.0) == (0, 1)


def test_a_worker_that_is_only_starting_is_given_the_time_for_its_first_beat() -> None:
    watch = Watch(first=15.0)
    assert watch.lost([0, 1], {}, now=100.0) == ()
    assert watch.lost([0, 1], {0: beat(0, 1)}, now=110.0) == ()
    assert watch.lost([0, 1], {0: beat(0, 2)}, now=115.1) == (1,)
    assert Watch(first=15.0).lost([0], {0: beat(0, 1)}, now=0.0) == ()


def test_progress_counts_recorded_ranks_in_full_and_unknown_ones_like_the_others() -> None:
    seen = {0: beat(0, written=100), 1: beat(1, written=26)}
    assert str(in_flight(begin(2), missing=[1], beats=seen)) == "63 %"
    assert in_flight(begin(4), missing=[1, 2, 3], beats=seen).total == 400
    assert in_flight(begin(4), missing=[1, 2], beats=seen).written == 226
    written = {0: beat(0, written=100)}
    assert str(in_flight(begin(1), missing=[0], beats=written)) == "99 %", "not all of it is durable"
    assert str(in_flight(begin(1), missing=[], beats=written)) == "100 %"
    assert str(in_flight(begin(3), missing=[0, 1, 2], beats={})) == "0 %"


def test_a_beat_comes_back_from_storage_as_it_was_and_a_damaged_one_does_not() -> None:
    data = beat().encode()
    assert Beat.decode(data, "b") == beat()
    with pytest.raises(RecordError):
        Beat.decode(data.replace(b"100", b"101"), "b")
    for wrong in ({"interval": 0.0}, {"written": -1}, {"pid": -5}):
        with pytest.raises(RecordError, match="cannot be"):
            Beat.decode(replace(beat(), **wrong).encode(), "b")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_an_interval_that_means_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(StateError, match="heartbeat"):
        AsyncOptions(heartbeat=seconds)


def test_waiting_for_older_saves_is_shorter_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="settle_wait"):
        Checkpointer(str(tmp_path), run="run", timeout=5, settle_wait=5)


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_process_of_this_machine_is_known_to_be_dead_and_another_never() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        alive = beat(machine=beats.this_machine(), pid=process.pid, started=beats._started(process.pid))
        assert not beats.is_dead(alive)
        assert beats.is_dead(replace(alive, started=alive.started - 1)), "its process id was used again"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert beats.is_dead(alive), "a zombie does nothing any more"
    assert beats.is_dead(alive)
    assert not beats.is_dead(replace(alive, machine="another"))
    assert not beats.is_dead(replace(alive, machine=""))


# --- a pulse ----------------------------------------------------------------------------------------------------------


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pulse_beats_until_it_is_stopped(tmp_path: Path) -> None:
    storage = PosixStorage()
    pulse = Pulse(storage, str(tmp_path), begin(), 0, 10, base=0.01)
    pulse.wrote(4)
    pulse.wrote(3)
    wait_for(lambda: beats.read_beats(storage, str(tmp_path), begin()).get(0, beat()).written == 7)
    before = beats.read_beats(storage, str(tmp_path), begin())[0].counter
    wait_for(lambda: beats.read_beats(storage, str(tmp_path), begin())[0].counter > before)
    pulse.stop()
    last = beats.read_beats(storage, str(tmp_path), begin())[0]
    assert (last.pid, last.host, last.total) == (os.getpid(), socket.gethostname(), 10)
    assert not pulse._thread.is_alive()


def test_a_storage_that_refuses_beats_is_told_of_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = mock.Mock(put=mock.Mock(side_effect=OSError("quota")))
    with caplog.at_level(logging.WARNING, "ckptlib"):
        pulse = Pulse(storage, str(tmp_path), begin(), 0, 10, base=0.01)
        wait_for(lambda: storage.put.call_count > 3)
        pulse.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "save 000001-000000000001-00000001: no sign of life of rank 0: quota"
    ]


def test_a_beat_is_of_no_other_save_or_rank(tmp_path: Path) -> None:
    storage = PosixStorage()
    for rank, wrong in enumerate([replace(beat(0), save_id="other"), beat(5)]):
        storage.put(f"{commit.save_dir(str(tmp_path), begin().save_id)}/{commit.beat_name(rank)}", wrong.encode())
    assert beats.read_beats(storage, str(tmp_path), begin(2)) == {}


def test_saves_in_hand_beat_also_while_they_wait_for_their_turn_and_leave_nothing(tmp_path: Path) -> None:
    gate = Gate("w.b")
    state = {"w": {"a": torch.zeros(6_300_000, dtype=torch.uint8), "b": torch.zeros(3_650_000, dtype=torch.uint8)}}
    options = replace(THREAD, max_in_flight=2)
    with gate.patched, Checkpointer(str(tmp_path), run="run", io_mode="async", background=options) as job:
        for iteration in (1, 2):
            job.save(state, iteration=iteration)
        assert gate.reached.wait(60)
        paths = [str(tmp_path / f"iter_000000{iteration}") for iteration in (1, 2)]
        saves = [commit.list_saves(PosixStorage(), path)[0].begin for path in paths]

        def shown(i: int) -> str:
            assert saves[i] is not None
            return str(beats.look(PosixStorage(), paths[i], saves[i]))

        wait_for(lambda: shown(0) == "63 %")
        wait_for(lambda: next(Path(paths[1]).glob(".ckpt/0*/beat_0.json"), None))
        assert shown(1) == "0 %"
        gate.opened.set()
        assert job.drain(60)
    assert list(tmp_path.rglob("beat_*")) == []
    assert [found.state for found in roots.scan(PosixStorage(), str(tmp_path)).found] == ["committed"] * 2


def test_a_save_that_is_short_makes_no_beat_where_nobody_needs_one_at_once(tmp_path: Path) -> None:
    Pulse(PosixStorage(), str(tmp_path), begin(), 0, 10, base=60, at_once=False).stop()
    assert list(tmp_path.rglob("beat_*")) == []


# --- settling ---------------------------------------------------------------------------------------------------------


def begun(root: Path, *, world_size: int = 2) -> tuple[str, Begin]:
    """An undecided save of attempt 1 that nobody writes."""
    roots.open_root(PosixStorage(), str(root), "run")
    roots.start_attempt(PosixStorage(), str(root), "run", None)
    path = roots.iteration_path(str(root), 7)
    commit.begin_save(PosixStorage(), path, begin(world_size))
    return path, begin(world_size)


def settled(root: Path, wait: float = 60.0) -> tuple[str, list[settling.Waiting]]:
    """Why the save was aborted, and what was told meanwhile."""
    waits: list[settling.Waiting] = []
    (done,) = settling.settle(PosixStorage(), str(root), 2, wait=wait, on_wait=waits.append)
    assert done.decision is not None
    assert done.decision.outcome == "abort"
    return done.decision.reason or "", waits


def test_w8_a_save_without_signs_of_life_is_aborted_at_once(tmp_path: Path) -> None:
    begun(tmp_path)
    with mock.patch.object(settling.time, "sleep") as slept:
        assert settled(tmp_path) == ("attempt 2 began; ranks 0-1 had not finished", [])
    assert slept.call_count == 0


def test_w8_ranks_of_other_machines_that_stand_still_are_given_three_of_their_intervals(tmp_path: Path) -> None:
    path, save = begun(tmp_path)
    for rank in (0, 1):
        name = f"{commit.save_dir(path, save.save_id)}/{commit.beat_name(rank)}"
        PosixStorage().put(name, beat(rank, interval=0.1).encode())
    started = time.monotonic()
    reason, waits = settled(tmp_path)
    assert reason.endswith("ranks 0-1 had not finished; ranks 0-1 gave no sign of life")
    assert time.monotonic() - started >= 0.3
    assert [sorted(waiting.writing) for waiting in waits] == [[0, 1]]
    assert "rank 0 on elsewhere" in str(waits[0])


def test_w8_a_save_that_goes_on_for_ever_is_waited_for_within_the_bound(tmp_path: Path) -> None:
    path, save = begun(tmp_path, world_size=1)
    pulse = Pulse(PosixStorage(), path, save, 0, 10, base=0.02)
    try:
        wait_for(lambda: beats.read_beats(PosixStorage(), path, save))
        assert settled(tmp_path, wait=0.5)[0].endswith("(settle_wait) is over")
    finally:
        pulse.stop()


def test_w8_a_part_that_failed_or_was_never_begun_is_not_waited_for_however_busy_the_others_are(tmp_path: Path) -> None:
    path, save = begun(tmp_path)
    pulse = Pulse(PosixStorage(), path, save, 0, 10, base=0.05)
    try:
        wait_for(lambda: beats.read_beats(PosixStorage(), path, save))
        commit.publish_failure(PosixStorage(), path, save.save_id, 1, "disk of rank 1")
        assert settled(tmp_path)[0].endswith("rank 1: disk of rank 1")
    finally:
        pulse.stop()


# --- whole jobs -------------------------------------------------------------------------------------------------------

GATED_FSYNC = """
    import os, time
    fsync = os.fsync
    def gated(fd):
        while "iter_0000007/__" in os.readlink(f"/proc/self/fd/{fd}") and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
        fsync(fd)
    os.fsync = gated
"""
"""Imported by every Python process of the job: the data of iteration 7 becomes durable when the gate opens."""

TRAINER = """
    import os, signal, sys, torch
    import torch.distributed as dist
    from ckptlib import AsyncOptions, Checkpointer, ShardedTensor
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Checkpointer(sys.argv[1], run="run", io_mode="async", background=AsyncOptions(heartbeat=float(sys.argv[2])))
    for iteration in (3, 7):
        rows = torch.full((2,), float(iteration))
        job.save({"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, 2))}, iteration=iteration)
    print("staged", job._background.worker.pid, flush=True)
    signal.pause()
"""


@pytest.fixture
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Process ids of two workers that are writing iteration 7, whose trainers were killed together."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(textwrap.dedent(GATED_FSYNC))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(Path(ckptlib.__file__).parents[1])]),
        "GATE": str(tmp_path / "gate"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    (tmp_path / "trainer.py").write_text(textwrap.dedent(TRAINER))
    command = f'for RANK in 0 1; do RANK=$RANK "{sys.executable}" trainer.py root {request.param} & done; wait'
    pids: list[int] = []
    with subprocess.Popen(
        ["/bin/sh", "-c", command], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as trainers:  # fmt: skip
        try:
            assert trainers.stdout is not None
            for _ in range(2):
                word, pid = trainers.stdout.readline().split()
                assert word == "staged"
                pids.append(int(pid))
            wait_for(lambda: len([*(tmp_path / "root/iter_0000007").glob(".ckpt/0*/beat_*.json")]) == 2)
            os.killpg(trainers.pid, signal.SIGKILL)
            yield pids
        finally:
            (tmp_path / "gate").touch()
            if trainers.poll() is None:
                os.killpg(trainers.pid, signal.SIGKILL)
            wait_for(lambda: all(beats._started(pid) is None for pid in pids))


def resumed(root: Path, on_event: Any) -> tuple[int, list[float]]:
    state = {"w": torch.zeros(4)}
    with Checkpointer(str(root), run="run", on_event=on_event) as job:
        iteration = job.restore(state).iteration
    return iteration, state["w"].tolist()


@pytest.mark.parametrize("workers", [0.1], indirect=True)
def test_w8_a_new_attempt_waits_for_workers_that_outlived_their_trainers_and_resumes_from_their_save(
    tmp_path: Path, workers: list[int]
) -> None:
    notices: list[Notice] = []

    def on_event(notice: Notice) -> None:
        notices.append(notice)
        if notice.name == "settle_waiting":
            (tmp_path / "gate").touch()

    assert resumed(tmp_path / "root", on_event) == (7, [7.0] * 4)
    (waited,) = [notice for notice in notices if notice.name == "settle_waiting"]
    assert waited.data["ranks"] == [0, 1]
    assert f"(pid {workers[0]})" in waited.message or f"(pid {workers[1]})" in waited.message


@pytest.mark.parametrize("workers", [60.0], indirect=True)
@pytest.mark.parametrize("whom", [[1], pytest.param([0, 1], marks=pytest.mark.deep)], ids=str)
def test_w8_an_attempt_after_the_end_of_a_worker_takes_the_older_save_without_waiting_for_its_beats(
    tmp_path: Path, workers: list[int], whom: list[int]
) -> None:
    """Three intervals would be three minutes: that the process has ended is seen at once."""
    for i in whom:
        os.kill(workers[i], signal.SIGKILL)
    wait_for(lambda: all(beats._started(workers[i]) is None for i in whom))
    started = time.monotonic()
    assert resumed(tmp_path / "root", None) == (3, [3.0] * 4)
    assert time.monotonic() - started < 60


SLOW_START = """
    import os, sys, time
    while "ckptlib.worker" in " ".join(sys.orig_argv) and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.01)
"""
"""Imported by every Python process of the job: workers begin to start when the gate opens."""

HASTY_TRAINER = """
    import os, signal, torch
    from ckptlib import Checkpointer
    Checkpointer("root", run="run", io_mode="async").save({"w": torch.full((4,), 7.0)}, iteration=7)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_w8_a_worker_that_is_still_starting_when_its_trainer_dies_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has shown nothing yet; its trainer has, when it handed the save over."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(textwrap.dedent(SLOW_START))
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(ckptlib.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "GATE": str(tmp_path / "gate")}
    command = [sys.executable, "-c", textwrap.dedent(HASTY_TRAINER)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=False, timeout=100)
    monkeypatch.setattr(beats, "FIRST", 0.0)
    notices: list[Notice] = []

    def on_event(notice: Notice) -> None:
        notices.append(notice)
        if notice.name == "settle_waiting":
            (tmp_path / "gate").touch()

    try:
        assert resumed(tmp_path / "root", on_event) == (7, [7.0] * 4)
    finally:
        (tmp_path / "gate").touch()
    assert [notice.name for notice in notices] == ["settle_waiting", "settled"]
