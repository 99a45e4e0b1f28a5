"""Memory for staging: how it is filled, what happens where there is too little of it, and what a grace period ends."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import ckptlib
from ckptlib import Checkpointer, background, commit, memory, overlap, staging, worker, workshop
from ckptlib.async_options import AsyncOptions
from ckptlib.background import Job, Outcome
from ckptlib.copying import PIECE_BYTES, Copier
from ckptlib.errors import BackgroundSaveError, CheckpointExistsError, StagingError, StateError
from ckptlib.events import Notice
from ckptlib.sharding import Box
from ckptlib.slices import slices
from ckptlib.staging import aligned
from ckptlib.state import TensorLeaf
from ckptlib.storage import hashing, resolve
from tests.support.ranks import run_ranks

THREAD = AsyncOptions(worker="thread")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def committed(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("iter_*/metadata.json"))


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_copied_by_however_many_threads(threads: int) -> None:
    sizes = [0, 1, 1000, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES]
    sources = [torch.arange(size, dtype=torch.float32) for size in sizes]
    sources += [torch.arange(2 * PIECE_BYTES, dtype=torch.uint8).reshape(1024, -1).T, torch.ones(()), torch.ones(3, 1)]
    sources += [torch.nn.Parameter(torch.ones(5)), torch.ones(3, 4).expand(2, 3, 4)]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copier = Copier(threads)
    copier.copy(list(zip(targets, sources, strict=True)))
    copier.close()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


def test_a_copy_that_fails_in_a_thread_fails() -> None:
    copier = Copier(2)
    with pytest.raises(RuntimeError, match="match"):
        copier.copy([(torch.zeros(2), torch.zeros(3))] * 8)
    copier.close()


# --- slices -----------------------------------------------------------------------------------------------------------


@given(
    shapes=some.lists(some.lists(some.integers(0, 7), max_size=3).map(tuple), max_size=8),
    capacity=some.integers(64, 600),
    dtype=some.sampled_from([torch.float64, torch.float32, torch.uint8]),
)
def test_slices_fit_and_together_are_the_state_in_order(shapes: list[Any], capacity: int, dtype: torch.dtype) -> None:
    leaves = [
        TensorLeaf(
            f"t{i}",
            torch.arange(max(1, int(torch.Size(shape).numel())))[: torch.Size(shape).numel()].to(dtype).reshape(shape),
            shape,
            Box.whole(shape),
        )
        for i, shape in enumerate(shapes)
    ]
    groups = slices(leaves, capacity)
    for group in groups:
        assert sum(aligned(leaf.nbytes) for leaf in group) <= capacity
    assert [key for key, _ in _runs(leaf.key for group in groups for leaf in group)] == [leaf.key for leaf in leaves]
    for leaf in leaves:
        whole = torch.full(leaf.box.shape, 99).to(dtype)
        pieces = [piece for group in groups for piece in group if piece.key == leaf.key]
        for piece in pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))
            whole[place] = piece.tensor
        assert torch.equal(whole, leaf.tensor)
        assert sum(piece.nbytes for piece in pieces) == leaf.nbytes


def _runs(keys: Iterator[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for key in keys:
        if not runs or runs[-1][0] != key:
            runs.append((key, 0))
    return runs


def big_state(fill: float) -> dict[str, Any]:
    """8 MiB in tensors of several sizes; one is larger than half of the memory that the tests give."""
    return {
        "large": torch.full((3, 1024, 512), fill),
        **{f"w{i}": torch.full((128, 1024), fill) for i in range(3)},
        "transposed": torch.full((128, 512), fill).T,
        "small": torch.tensor(fill),
    }


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_state_larger_than_the_budget_is_staged_in_slices_and_says_so(root: str, kind: Any) -> None:
    notices: list[Notice] = []
    options = AsyncOptions(worker=kind, staging_budget=2 * 2**20)
    with Checkpointer(root, run="run", io_mode="async", background=options, on_event=notices.append) as job:
        for iteration in (1, 2):
            tree = {"model": big_state(iteration)}
            job.save(tree, iteration=iteration)
            for tensor in tree["model"].values():
                tensor.fill_(-1)
        assert job.drain(60)
        assert job._background._shop.pool.nbytes <= 2 * 2**20
    assert [notice.name for notice in notices].count("staged_in_slices") == 1
    for iteration in (1, 2):
        target = {"model": big_state(0)}
        ckptlib.load(target, f"{root}/iter_{iteration:07d}", verify="data")
        for name, tensor in big_state(iteration).items():
            assert torch.equal(target["model"][name], tensor), name


class SlowDigest:
    """SHA-256 that lags behind the writes, as on a machine whose cores are busy."""

    def __init__(self) -> None:
        self._real = hashlib.sha256()

    def update(self, data: Any) -> None:
        if len(data) > 2**19:
            time.sleep(0.02)
        self._real.update(data)

    def hexdigest(self) -> str:
        return self._real.hexdigest()


@pytest.mark.parametrize("semantic_type", ["GLOBAL", "LOCAL"])
def test_memory_of_a_slice_is_used_again_only_when_its_digest_is_made(root: str, semantic_type: Any) -> None:
    options = AsyncOptions(worker="thread", staging_budget=2 * 2**20)
    with (
        mock.patch.object(hashing, "hashlib", types.SimpleNamespace(sha256=SlowDigest)),
        Checkpointer(root, run="run", semantic_type=semantic_type, io_mode="async", background=options) as job,
    ):
        tree = {"model": {f"w{i}": torch.full((192 * 1024,), float(i)) for i in range(8)} | big_state(1)}
        job.save(tree, iteration=1).wait(60)
    report = ckptlib.verify(f"{root}/iter_0000001")
    assert report.ok, report.problems
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in tree["model"].items()}}
    ckptlib.load(target, f"{root}/iter_0000001")
    for name, tensor in tree["model"].items():
        assert torch.equal(target["model"][name], tensor), name


def test_memory_that_is_not_free_is_not_taken(root: str) -> None:
    """Pages that are taken at once, beyond what is free, would have the kernel end a process."""
    with (
        mock.patch.object(memory, "available_bytes", return_value=3 * 2**20),
        Checkpointer(root, run="run", io_mode="async", background=THREAD) as job,
    ):
        job.save({"model": big_state(1)}, iteration=1).wait(60)
        assert job._background._shop.pool.nbytes <= 3 * 2**20
        with pytest.raises(StagingError, match="does not fit into free memory"):
            job._background._shop.pool.take(64 * 2**20)
    assert torch.equal(ckptlib.read(f"{root}/iter_0000001")["model.large"], big_state(1)["large"])


def test_a_worker_that_ends_while_slices_are_staged_fails_the_save_and_not_the_next(root: str) -> None:
    options = AsyncOptions(staging_budget=2 * 2**20)
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        job.prepare(4096)
        process = job._background.worker
        assert isinstance(process, worker.WorkerProcess)
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(StagingError, match="ended while it was staged: its worker process ended"):
            job.save({"model": big_state(1)}, iteration=1)
        assert job._background.has_room()
        job.save({"model": big_state(2)}, iteration=2).wait(60)
    assert committed(root) == ["iter_0000002"]


def test_a_trainer_that_gives_up_between_slices_leaves_a_worker_that_goes_on(root: str) -> None:
    options = AsyncOptions(worker="thread", staging_budget=2 * 2**20)
    copies: list[int] = []
    real = Copier.copy

    def copy(copier: Copier, *args: Any, **rest: Any) -> None:
        copies.append(1)
        if len(copies) == 4:
            raise RuntimeError("the device is gone")
        real(copier, *args, **rest)

    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        with mock.patch.object(Copier, "copy", copy), pytest.raises(RuntimeError, match="device"):
            job.save({"model": big_state(1)}, iteration=1)
        job.save({"model": big_state(2)}, iteration=2).wait(60)
    assert committed(root) == ["iter_0000002"]


# --- making ready -----------------------------------------------------------------------------------------------------


def prepare_on_ranks(rank: int, root: str) -> None:
    """Memory is made for what the plan says that a rank writes, not for all that it has."""
    with Checkpointer(root, run="run", io_mode="async", background=THREAD, timeout=60) as job:
        tree = {"model": {f"w{i}": torch.ones(256, 1024) for i in range(8)}}
        job.prepare(tree, progress={"lr": 0.0})
        assert 4 * 2**20 <= job._background._shop.pool.nbytes <= 5 * 2**20
        with mock.patch.object(staging, "Arena", side_effect=AssertionError("made anew")):
            job.save(tree, iteration=1, progress={"lr": 0.1}).wait(60)


def test_what_is_prepared_is_what_the_plan_says(root: str) -> None:
    run_ranks(2, prepare_on_ranks, root)
    assert committed(root) == ["iter_0000001"]


def test_before_stage_frees_what_training_does_not_need_just_then(root: str) -> None:
    called: list[int] = []
    options = AsyncOptions(worker="thread", before_stage=lambda: called.append(1))
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        job.save({"w": torch.ones(1)}, iteration=1)
        assert called == [1]


@pytest.mark.parametrize("io_priority", ["low", "idle"])
def test_a_worker_runs_at_the_priority_that_was_chosen(root: str, io_priority: Any) -> None:
    options = AsyncOptions(nice=7, io_priority=io_priority)
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        job.save({"w": torch.ones(1)}, iteration=1).wait(60)
        process = job._background.worker
        assert isinstance(process, worker.WorkerProcess)
        shown = subprocess.run(["ionice", "-p", str(process.pid)], capture_output=True, text=True, check=True).stdout
        assert shown.startswith("idle" if io_priority == "idle" else "best-effort: prio 7")
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        group = Path(f"/proc/{process.pid}/autogroup")
        assert not group.exists() or group.read_text().endswith(" nice 7\n"), "sessions share the processor first"


def test_a_priority_that_cannot_be_set_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    job = Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(io_priority="low"))
    with pytest.raises(StateError, match=r"ionice .* is not installed"):
        job.prepare(4096)


# --- the end of a grace period ----------------------------------------------------------------------------------------


def slow(gate: threading.Event) -> Callable[..., Outcome]:
    def run(job: Job, *args: Any) -> Outcome:
        assert gate.wait(60)
        return background.run_job(job, *args)

    return run


def test_a_save_that_is_done_within_the_grace_period_is_a_checkpoint(root: str) -> None:
    with Checkpointer(root, run="run", io_mode="async", background=THREAD) as job:
        job.save({"w": torch.ones(1)}, iteration=1)
        assert job.drain(60)
    assert committed(root) == ["iter_0000001"]


def test_w4_at_the_deadline_drain_decides_and_nobody_can_commit_it_later(root: str) -> None:
    gate = threading.Event()
    notices: list[Notice] = []
    with mock.patch.object(workshop, "run_job", slow(gate)):
        job = Checkpointer(root, run="run", io_mode="async", background=THREAD, on_event=notices.append)
        job.save({"w": torch.ones(1)}, iteration=1, io_mode="sync")
        pending = job.save({"w": torch.zeros(1)}, iteration=2)
        started = time.monotonic()
        assert not job.drain(0.5)
        assert time.monotonic() - started < 10
        (notice,) = [notice for notice in notices if notice.name == "save_drained"]
        assert notice.data == {"iteration": 2, "outcome": "abort"}
        gate.set()  # the worker is late: what it does is of no use
        with pytest.raises(BackgroundSaveError, match="aborted by drain: the job ended"):
            pending.wait(60)
        job.close()  # what was told by a notice is not raised
    storage, path = resolve(f"{root}/iter_0000002")
    (save,) = commit.list_saves(storage, path)
    assert save.begin is not None
    assert commit.try_commit(storage, path, save.begin, decided_by="adopt") == save.decision
    assert Checkpointer(root, run="run").restore({"w": torch.zeros(1)}).iteration == 1


def test_w4_a_commit_that_was_faster_than_the_drain_stands(root: str) -> None:
    notices: list[Notice] = []
    decided = threading.Event()

    def run(job: Job, *args: Any) -> Outcome:
        outcome = background.run_job(job, *args)
        decided.set()
        time.sleep(1)  # the trainer hears of it after its deadline
        return outcome

    with mock.patch.object(workshop, "run_job", run):
        job = Checkpointer(root, run="run", io_mode="async", background=THREAD, on_event=notices.append)
        job.save({"w": torch.ones(1)}, iteration=1)
        assert decided.wait(60)
        assert job.drain(0.01)
        job.close()
    assert [notice.data["outcome"] for notice in notices if notice.name == "save_drained"] == ["commit"]
    assert committed(root) == ["iter_0000001"]


def test_a_drain_that_is_told_to_leave_leaves(root: str) -> None:
    gate = threading.Event()
    with mock.patch.object(workshop, "run_job", slow(gate)):
        job = Checkpointer(root, run="run", io_mode="async", background=THREAD)
        job.save({"w": torch.ones(1)}, iteration=1)
        assert not job.drain(0.05, at_deadline="leave")
        gate.set()
        job.close()
    assert committed(root) == ["iter_0000001"]


def test_a_save_that_is_still_being_staged_at_the_deadline_is_aborted_too(root: str) -> None:
    model = torch.nn.Linear(4, 4)
    gate = threading.Event()
    reached = threading.Event()
    real = Copier.copy

    def copy(copier: Copier, *args: Any, **options: Any) -> None:
        reached.set()
        assert gate.wait(60)
        real(copier, *args, **options)

    options = AsyncOptions(worker="thread", staging="overlapped")
    with mock.patch.object(Copier, "copy", copy):
        job = Checkpointer(root, run="run", io_mode="async", background=options)
        job.save({"model": model}, iteration=1)
        assert reached.wait(60)
        assert not job.drain(0.2)
        gate.set()
        job.close()
    overlap.wait_for_copies()
    assert committed(root) == []
    assert "abort" in next(Path(root).glob("iter_0000001/.ckpt/*/decision.json")).read_text()


def test_a_save_that_failed_is_not_drained(root: str) -> None:
    with mock.patch.object(background, "write_package", side_effect=OSError(28, "disk full")):
        job = Checkpointer(root, run="run", io_mode="async", background=THREAD)
        job.save({"w": torch.ones(1)}, iteration=1)
        assert not job.drain(30)
    with pytest.raises(BackgroundSaveError, match="disk full"):
        job.close()


def test_a_save_that_has_not_begun_at_the_deadline_never_begins(root: str) -> None:
    notices: list[Notice] = []
    gate, reached = threading.Event(), threading.Event()
    begin = commit.list_saves

    def late(*args: Any) -> Any:
        reached.set()
        assert gate.wait(60)
        return begin(*args)

    options = AsyncOptions(worker="thread", staging="overlapped")
    job = Checkpointer(root, run="run", io_mode="async", background=options, on_event=notices.append)
    job.prepare(4096)
    with mock.patch.object(commit, "list_saves", late):
        job.save({"model": torch.nn.Linear(2, 2)}, iteration=1)
        assert reached.wait(60)
        assert not job.drain(0.2)
        gate.set()
        assert job.wait_staged(60)
    job.close()
    assert committed(root) == []
    assert [notice.data["outcome"] for notice in notices if notice.name == "save_drained"] == ["not begun"]


# --- workers and their memory -----------------------------------------------------------------------------------------


def test_an_arena_that_makes_way_for_a_larger_one_is_gone_before(root: str) -> None:
    """The worker maps it until the next save: both at once would be beyond the budget."""
    with Checkpointer(root, run="run", io_mode="async") as job:
        job.save({"w": torch.ones(2**20)}, iteration=1).wait(60)
        job.save({"w": torch.ones(2**20)}, iteration=2).wait(60)
        process = job._background.worker
        assert isinstance(process, worker.WorkerProcess)
        before = _staged_bytes(process.pid)
        assert before >= 4 * 2**20
        with mock.patch.object(staging, "Arena", side_effect=StagingError("looked at")), pytest.raises(StagingError):
            job.save({"w": torch.ones(2**21)}, iteration=3)
        assert _staged_bytes(process.pid) == 0
        job.save({"w": torch.ones(2**21)}, iteration=4).wait(60)
        assert ckptlib.verify(f"{root}/iter_0000004").ok


def _staged_bytes(pid: int) -> int:
    """Bytes in the memory files of arenas that a process has open."""
    sizes = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "ckptlib-staging" in os.readlink(fd):
            status = fd.stat()
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def test_a_save_does_not_wait_for_a_worker_that_stands_still(root: str) -> None:
    """What it is told is larger than a socket's buffer."""
    tree = {"model": {f"a rather long name of a tensor {i}": torch.full((1,), float(i)) for i in range(5000)}}
    with Checkpointer(root, run="run", io_mode="async") as job:
        job.prepare(2**20)
        process = job._background.worker
        assert isinstance(process, worker.WorkerProcess)
        os.kill(process.pid, signal.SIGSTOP)
        pending = job.save(tree, iteration=1)
        os.kill(process.pid, signal.SIGCONT)
        pending.wait(60)
    assert ckptlib.read(f"{root}/iter_0000001")["model.a rather long name of a tensor 4999"][0] == 4999


def test_a_message_whose_descriptor_was_lost_is_not_taken_for_one_without() -> None:
    """An arena made anew in its place would be full of zeros, and their digests would be right."""
    ours, theirs = (worker.Connection(sock) for sock in socket.socketpair())
    arena = staging.Arena(4096)
    ours.send(worker.NewArena(1, arena.size), arena.fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError, match="descriptors of a message were lost"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in (ours, theirs, arena):
        each.close()


def test_no_thread_copies_on_when_a_copy_has_failed() -> None:
    copier = Copier(2)
    sources = [torch.ones(2**20) for _ in range(32)]
    targets = [torch.zeros(2**20) for _ in range(32)]
    with pytest.raises(RuntimeError, match="match"):
        copier.copy([(torch.zeros(2), torch.zeros(3)), *zip(targets, sources, strict=True)])
    before = [target[0].item() for target in targets]
    copier.close()
    assert [target[0].item() for target in targets] == before


def test_a_worker_that_ends_while_it_is_handed_a_save_spoils_neither_that_one_nor_later_ones(root: str) -> None:
    add = worker.WorkerProcess.add_arena
    ended: list[int] = []

    def end_first(process: worker.WorkerProcess, *args: Any) -> None:
        if not ended:
            ended.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process._process.wait(60)
        add(process, *args)

    options = AsyncOptions(max_in_flight=2)
    with (
        mock.patch.object(worker.WorkerProcess, "add_arena", end_first),
        Checkpointer(root, run="run", io_mode="async", background=options) as job,
    ):
        for iteration in (1, 2, 3):
            job.save({"w": torch.full((3,), float(iteration))}, iteration=iteration)
        assert job.drain(60)
    assert committed(root) == ["iter_0000001", "iter_0000002", "iter_0000003"]
    assert Path(root, "latest_checkpointed_iteration.txt").read_text() == "3"


def uneven(rank: int, root: str) -> list[str]:
    """Rank 0 has so much of which nothing is known that it stages eagerly, rank 1 has not; an iteration exists."""
    options = AsyncOptions(worker="thread", staging="overlapped")
    job = Checkpointer(root, run="run", io_mode="async", background=options, timeout=60)
    tree: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    job.save(tree, iteration=1).wait(60)
    if rank == 0:
        tree["cache"] = ckptlib.ShardedTensor.from_rank_offsets("cache", torch.zeros(17 * 2**20))
    seen = []
    for iteration in (1, 2, 3):
        try:
            job.save(tree, iteration=iteration)
            seen.append("saved")
        except CheckpointExistsError:
            seen.append("exists")
    job.close(60)
    return seen


@pytest.mark.deep
def test_ranks_that_stage_in_different_ways_stay_in_step(root: str) -> None:
    (first, second) = run_ranks(2, uneven, root)
    assert first == ["exists", "exists", "saved"]
    assert second == ["saved", "exists", "saved"]
    assert committed(root) == ["iter_0000001", "iter_0000003"]
