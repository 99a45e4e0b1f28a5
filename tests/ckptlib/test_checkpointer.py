"""The facade of a trainer, in one process: attempts, saves, trackers, listeners, restores."""

from __future__ import annotations

import argparse
import math
import os
import random
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, Topology, commit, roots
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import (
    CheckpointExistsError,
    FencedError,
    NoResumePointError,
    StateError,
    StorageUnavailableError,
    UnsupportedError,
)
from ckptlib.events import AttemptEvent, CommitEvent, Notice
from ckptlib.storage import PosixStorage
from tests.support.roots import crash_at, files_of, newest, small_state, states, tracker
from tests.support.trees import assert_same, blanked


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def job(root: str, **options: Any) -> Checkpointer:
    """The next attempt of the run."""
    return Checkpointer(root, **{"run": "run", **options})


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_each_process_lifetime_is_an_attempt_with_a_number_of_its_own(root: str) -> None:
    """W8."""
    assert [job(root).attempt for _ in range(3)] == [1, 2, 3]
    scan = roots.scan(PosixStorage(), root)
    assert [attempt.number for attempt in scan.attempts] == [1, 2, 3]
    assert {attempt.pid for attempt in scan.attempts} == {os.getpid()}
    assert scan.identity is not None
    assert scan.identity.run == "run"


@pytest.mark.parametrize("run", ["with spaces", "a/b/../c", "größe 重み", "quote'\"", "-"])
def test_a_run_may_have_any_printable_name(root: str, run: str) -> None:
    """A run name with spaces or slashes. It never becomes a path."""
    job(root, run=run).save(small_state(), iteration=1)
    assert ckptlib.inspect(f"{root}/iter_0000001").run == run
    assert {*os.listdir(root)} == {".ckpt", "iter_0000001", roots.TRACKER}


@pytest.mark.parametrize("run", ["", "two\nlines", "nul\0", "tab\t", "\ud800"])
def test_a_run_name_that_cannot_be_shown_is_refused(root: str, run: str) -> None:
    with pytest.raises(StateError, match=r"run .*printable"):
        job(root, run=run)
    assert not os.path.exists(root)


def test_a_root_belongs_to_one_run(root: str) -> None:
    """D4."""
    job(root, run="first")
    with pytest.raises(StorageUnavailableError, match=r"belongs to run 'first', not to 'second'"):
        job(root, run="second")


def test_a_topology_must_have_as_many_ranks_as_the_job(root: str) -> None:
    with pytest.raises(StateError, match=r"tp2-dp2 has 4 ranks, torch\.distributed has 1"):
        job(root, topology=Topology(tp=2, dp=2))


@pytest.mark.parametrize("options", [{"save_interval": 0}, {"tracker": "sometimes"}], ids=str)
def test_impossible_options_are_refused_by_name(root: str, options: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(options))):
        job(root, **options)


def test_an_older_attempt_is_fenced_and_commits_nothing(root: str) -> None:
    """W8: two processes believe that they are the job."""
    old, new = job(root), job(root)
    with pytest.raises(FencedError, match="attempt 2 of this run has started, this process is attempt 1"):
        old.save(small_state(), iteration=10)
    assert states(root) == {"iter_0000010": ["aborted"]}
    assert not list(Path(root).rglob("*.distcp"))
    assert not os.path.exists(os.path.join(root, roots.TRACKER))
    new.save(small_state(1.0), iteration=10)
    assert newest(root) == (2, 10)
    assert states(root) == {"iter_0000010": ["aborted", "committed"]}
    with pytest.raises(FencedError):
        old.save(small_state(), iteration=20)
    assert tracker(root) == "10"


def test_a_new_attempt_settles_what_an_older_one_left(root: str) -> None:
    """W7, W8: all records there: committed; something missing: aborted; and then a resume point is chosen."""
    first = job(root)
    with crash_at(commit, "try_commit"):
        first.save(small_state(1.0), iteration=10)
    with crash_at(commit, "publish_record"):
        first.save(small_state(2.0), iteration=20)
    assert states(root) == {"iter_0000010": ["undecided"], "iter_0000020": ["undecided"]}
    events: list[Notice] = []
    second = job(root, on_event=events.append)
    assert states(root) == {"iter_0000010": ["committed"], "iter_0000020": ["aborted"]}
    assert [event.name for event in events] == ["settled", "settled"]
    state = blanked(small_state())
    assert second.restore(state).iteration == 10
    assert_same(state, small_state(1.0))
    assert tracker(root) == "10"


# --- save -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iteration", "name"), [(0, "iter_0000000"), (10_000_000, "iter_10000000")])
def test_the_first_and_the_ten_millionth_iteration_are_iterations(root: str, iteration: int, name: str) -> None:
    """An iteration of 0 and of 10,000,000; the name grows past seven digits."""
    checkpointer = job(root)
    result = checkpointer.save(small_state(3.0), iteration=iteration)
    assert os.path.basename(result.url) == name
    assert tracker(root) == str(iteration)
    state = blanked(small_state())
    restored = job(root).restore(state, at=iteration)
    assert (restored.found, restored.iteration) == (True, iteration)
    assert_same(state, small_state(3.0))


@pytest.mark.parametrize("iteration", [-1, 1.5, "7", None, True])
def test_an_iteration_that_is_none_is_refused_before_any_byte(root: str, iteration: Any) -> None:
    checkpointer = job(root)
    before = files_of(root)
    with pytest.raises(StateError, match="iteration"):
        checkpointer.save(small_state(), iteration=iteration)
    assert files_of(root) == before


def test_the_same_iteration_twice_is_an_error_before_any_byte(root: str) -> None:
    """W9."""
    checkpointer = job(root)
    checkpointer.save(small_state(1.0), iteration=10)
    before = files_of(root)
    with pytest.raises(CheckpointExistsError, match=r"iter_0000010.*already committed.*on_exists='replace'"):
        checkpointer.save(small_state(2.0), iteration=10)
    assert files_of(root) == before


def test_replacing_leaves_the_new_one_alone(root: str) -> None:
    """W9, D2: the old one's files go once the new one is committed; its tombstone stays."""
    checkpointer = job(root)
    old = checkpointer.save(small_state(1.0), iteration=10)
    new = checkpointer.save(small_state(2.0), iteration=10, on_exists="replace")
    names = {name for name in files_of(f"{root}/iter_0000010") if old.save_id in name}
    assert names == {f".ckpt/tombstones/{old.save_id}"}
    state = blanked(small_state())
    report = ckptlib.load(state, new.url)
    assert report.save_id == new.save_id
    assert_same(state, small_state(2.0))
    verdict = ckptlib.verify(new.url)
    assert verdict.ok, verdict.problems


def test_a_crash_while_replacing_leaves_the_old_one(root: str) -> None:
    """W9, C09."""
    checkpointer = job(root)
    old = checkpointer.save(small_state(1.0), iteration=10)
    with crash_at(commit, "try_commit"):
        checkpointer.save(small_state(2.0), iteration=10, on_exists="replace")
    state = blanked(small_state())
    assert ckptlib.load(state, old.url).save_id == old.save_id
    assert_same(state, small_state(1.0))
    assert ckptlib.verify(old.url).ok


def test_a_later_attempt_supersedes_an_iteration_without_ceremony(root: str) -> None:
    """W9: it is this attempt's own commits that are protected."""
    job(root).save(small_state(1.0), iteration=10)
    second = job(root)
    result = second.save(small_state(2.0), iteration=10)
    assert states(root) == {"iter_0000010": ["committed", "committed"]}
    assert ckptlib.load(blanked(small_state()), result.url).save_id == result.save_id
    with pytest.raises(CheckpointExistsError):
        second.save(small_state(3.0), iteration=10)


def test_steps_save_at_the_interval_only(root: str) -> None:
    checkpointer = job(root, save_interval=5)
    saved = [i for i in range(1, 13) if checkpointer.step(small_state(), iteration=i) is not None]
    assert saved == [5, 10]
    assert job(root).step(small_state(), iteration=15) is None  # no interval, no save


def test_a_step_that_saves_nothing_tells_of_what_was_committed_in_the_background(root: str) -> None:
    told = mock.Mock()
    options = AsyncOptions(worker="thread")
    with job(root, io_mode="async", save_interval=3, listeners=[told], background=options) as checkpointer:
        saved = checkpointer.step(small_state(), iteration=3)
        assert saved is not None
        saved.wait(60)
        assert checkpointer.step(small_state(), iteration=4) is None
        assert told.committed.call_count == 1


def test_what_is_recorded_is_what_was_true_at_the_save(root: str) -> None:
    """P29: numbers and arguments that change afterwards change no checkpoint."""
    checkpointer = job(root)
    progress = {"consumed_samples": 640, "lr": 1e-4, "flops": 1e21}
    metrics = {"loss": 2.5, "bad": math.nan, "worst": -math.inf, "numpy": np.float32(0.5), "torch": torch.tensor(2)}
    args = argparse.Namespace(lr=0.1, rank=0)
    result = checkpointer.save(small_state(), iteration=10, progress=progress, metrics=metrics, args=args)
    progress["consumed_samples"] = 0
    args.lr = 99
    begin = ckptlib.inspect(result.url).manifest.begin
    assert begin.progress == {"consumed_samples": 640, "lr": 1e-4, "flops": 1e21}
    assert math.isnan(begin.metrics["bad"])
    assert (begin.metrics["worst"], begin.metrics["numpy"], begin.metrics["torch"]) == (-math.inf, 0.5, 2.0)
    restored = job(root).restore(blanked(small_state()))
    assert restored.progress == begin.progress
    assert type(restored.progress["consumed_samples"]) is int
    assert restored.args == argparse.Namespace(lr=0.1, rank=0)


@pytest.mark.parametrize("value", ["2.5", True, None, [1.0], torch.zeros(2)], ids=repr)
def test_a_metric_that_is_no_number_is_refused_by_name(root: str, value: Any) -> None:
    checkpointer = job(root)
    for option in ("metrics", "progress"):
        with pytest.raises(StateError, match="'loss'"):
            checkpointer.save(small_state(), iteration=1, **{option: {"loss": value}})


def test_names_of_its_own_are_refused_in_the_state(root: str) -> None:
    checkpointer = job(root)
    for name in ("iteration", "args", "progress", "rng_state", "rng_state_by_rank"):
        with pytest.raises(StateError, match=f"'{name}'"):
            checkpointer.save({name: 1}, iteration=1)


def test_contents_that_name_nothing_are_refused(root: str) -> None:
    """A typing error must not save, or restore, nothing."""
    checkpointer = job(root)
    with pytest.raises(StateError, match=r"no part 'modle'; it has 'model'"):
        checkpointer.save(small_state(), iteration=1, contents=["modle"])
    with pytest.raises(StateError, match="expected a collection of names"):
        checkpointer.save(small_state(), iteration=1, contents="model")
    checkpointer.save(small_state(), iteration=1)
    with pytest.raises(StateError, match=r"no part 'modle'"):
        checkpointer.restore(small_state(), contents=["modle"])


def test_parts_are_saved_and_restored_by_choice(root: str) -> None:
    """`contents=` chooses what is saved, optimizer and scheduler separately."""
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "scheduler": {"epoch": 3}}
    checkpointer = job(root, contents=["model", "scheduler"])
    info = ckptlib.inspect(checkpointer.save(state, iteration=1).url)
    assert ({*info.tensors}, "scheduler.epoch" in info.objects) == ({"model.w"}, True)
    assert not [name for name in info.objects if name.startswith("rng_state")]
    everything = checkpointer.save(state, iteration=2, contents=["model", "optimizer", "scheduler", "rng"])
    assert {*ckptlib.inspect(everything.url).tensors} >= {"model.w", "optimizer.m"}
    only_model = {"model": {"w": torch.zeros(2)}}
    job(root).restore(only_model, contents=["model"])
    assert torch.equal(only_model["model"]["w"], torch.ones(2))


def test_local_checkpoints_are_not_offered(root: str) -> None:
    with pytest.raises(UnsupportedError, match="non_persistent_local"):
        job(root).save(small_state(), iteration=1, kind="non_persistent_local")


def test_a_closed_checkpointer_is_closed(root: str) -> None:
    with job(root) as checkpointer:
        checkpointer.save(small_state(), iteration=1)
        checkpointer.poll()
        checkpointer.drain()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(small_state(), iteration=2),
        lambda: checkpointer.restore(small_state()),
        checkpointer.poll,
    ):
        with pytest.raises(StateError, match="closed"):
            call()


def test_a_run_lives_in_memory_too() -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    job(root).save(small_state(4.0), iteration=3)
    state = blanked(small_state())
    assert job(root).restore(state).url == f"{root}/iter_0000003"
    assert_same(state, small_state(4.0))


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_the_tracker_moves_forward_only_within_an_attempt(root: str) -> None:
    """W6; the text is Megatron's: digits without a newline."""
    checkpointer = job(root)
    seen = []
    for iteration in (10, 30, 20, 40):
        checkpointer.save(small_state(), iteration=iteration)
        seen.append(tracker(root))
    assert seen == ["10", "30", "30", "40"]


def test_the_tracker_follows_a_rollback(root: str) -> None:
    """W6, W8: the order is (attempt, iteration), and lineage says where the branch began."""
    first = job(root)
    saved = {i: first.save(small_state(float(i)), iteration=i) for i in (10, 20, 30)}
    second = job(root)
    state = blanked(small_state())
    assert second.restore(state, at=20).iteration == 20
    assert_same(state, small_state(20.0))
    lower = second.save(small_state(25.0), iteration=25)
    assert newest(root) == (2, 25)
    assert tracker(root) == "25"
    begin = ckptlib.inspect(lower.url).manifest.begin
    assert (begin.parent, begin.attempt) == (saved[20].save_id, 2)
    after = second.save(small_state(30.0), iteration=30)
    assert ckptlib.inspect(after.url).manifest.begin.parent == lower.save_id
    third = job(root)
    assert third.restore(blanked(small_state())).save_id == after.save_id


def test_a_tracker_of_verified_checkpoints_is_left_to_whoever_verifies(root: str) -> None:
    job(root, tracker="verified").save(small_state(), iteration=10)
    assert not os.path.exists(os.path.join(root, roots.TRACKER))


def test_kinds_have_places_and_trackers_of_their_own(root: str) -> None:
    checkpointer = job(root)
    checkpointer.save(small_state(1.0), iteration=10)
    checkpointer.save(small_state(2.0), iteration=15, kind="non_persistent_global")
    checkpointer.save(small_state(3.0), iteration=12, kind="release")
    assert tracker(root) == "10"
    assert tracker(f"{root}/non_persistent") == "15"
    assert states(root) == {
        "iter_0000010": ["committed"],
        "non_persistent/iter_0000015": ["committed"],
        "release": ["committed"],
    }
    assert job(root).restore(blanked(small_state())).iteration == 15
    assert job(root).restore(blanked(small_state()), at=10).iteration == 10


# --- after the commit -------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def attempt_started(self, event: AttemptEvent) -> None:
        self.events.append(("attempt", event))

    def committed(self, event: CommitEvent) -> None:
        assert ckptlib.verify(event.url).ok  # told after reading back
        self.events.append(("commit", event))

    def close(self, timeout: float) -> None:
        self.events.append(("close", timeout))


class Broken(Listener):
    def attempt_started(self, event: AttemptEvent) -> None:
        raise ConnectionError("no database")

    committed = attempt_started  # type: ignore[assignment]

    def close(self, timeout: float) -> None:
        raise ConnectionError("no database")


def test_listeners_hear_of_the_attempt_and_of_every_commit(root: str) -> None:
    """W6."""
    job(root).save(small_state(), iteration=10)
    listener = Listener()
    with job(root, listeners=[listener]) as checkpointer:
        parent = checkpointer.restore(blanked(small_state())).save_id
        result = checkpointer.save(small_state(), iteration=20, metrics={"loss": 1.0})
    (_, older), (first, attempt), (second, event), (third, _) = listener.events
    assert older.manifest.begin.iteration == 10, "nobody had listened when it was committed"
    assert (first, second, third) == ("attempt", "commit", "close")
    assert (attempt.attempt, attempt.resumed_from, attempt.run) == (2, parent, "run")
    assert (event.url, event.root_url, event.root_id) == (result.url, root, attempt.root_id)
    assert event.manifest.begin.save_id == event.decision.save_id == result.save_id
    assert event.manifest.begin.metrics == {"loss": 1.0}
    assert event.decision.manifest_sha256 == event.manifest_sha256


def test_a_failing_listener_never_fails_the_training(root: str) -> None:
    """S4."""
    good = Listener()
    with job(root, listeners=[Broken(), good]) as checkpointer:
        checkpointer.restore({}, missing="start")
        checkpointer.save(small_state(), iteration=10)
    assert [name for name, _ in good.events] == ["attempt", "commit", "close"]
    assert newest(root) == (1, 10)


def test_a_failing_event_handler_never_fails_the_training(root: str) -> None:
    def broken(notice: Notice) -> None:
        raise ValueError(notice.name)

    first = job(root)
    with crash_at(commit, "try_commit"):
        first.save(small_state(), iteration=10)
    assert job(root, on_event=broken).restore(blanked(small_state())).iteration == 10


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "checkpoint.json", roots.TRACKER])
def test_an_export_that_cannot_be_written_never_fails_the_training_and_is_made_up_for(
    root: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W5, W6: after the decision the checkpoint exists."""
    checkpointer = job(root)
    put = PosixStorage.put

    def fail(self: PosixStorage, path: str, data: bytes) -> None:
        if os.path.basename(path) == name:
            raise OSError(5, "input/output error", path)
        put(self, path, data)

    monkeypatch.setattr(PosixStorage, "put", fail)
    result = checkpointer.save(small_state(7.0), iteration=10)
    assert newest(root) == (1, 10)
    state = blanked(small_state())
    ckptlib.load(state, result.url)
    assert_same(state, small_state(7.0))
    monkeypatch.undo()
    job(root)
    assert ckptlib.verify(result.url).ok
    assert os.path.exists(f"{result.url}/metadata.json")
    assert tracker(root) == "10"


# --- exact resume -----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)}


def run_steps(state: dict[str, Any], count: int) -> list[float]:
    """Data, noise and dropout all come from the global generators."""
    losses = []
    for _ in range(count):
        x = torch.randn(8, 4) + np.random.rand() + random.random()
        state["optimizer"].zero_grad()
        loss = (state["model"](x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def test_the_losses_after_a_resume_are_bitwise_those_of_an_uninterrupted_run(root: str) -> None:
    """On the same topology; with RNG, scheduler, moments and whatever happened in between."""
    state = training(seed=0)
    random.seed(0)
    np.random.seed(0)
    uninterrupted = job(root, topology=Topology())
    run_steps(state, 4)
    uninterrupted.save(state, iteration=4, progress={"consumed_samples": 32})
    losses = run_steps(state, 5)

    resumed = training(seed=99)
    run_steps(resumed, 2)
    random.seed(5)
    np.random.seed(5)
    restored = job(root, topology=Topology()).restore(resumed)
    assert (restored.iteration, restored.progress["consumed_samples"]) == (4, 32)
    assert run_steps(resumed, 5) == losses
    assert_same(resumed["optimizer"].state_dict(), state["optimizer"].state_dict())


# --- restore ----------------------------------------------------------------------------------------------------------


def test_a_run_without_a_checkpoint_is_an_error_unless_it_is_said_to_start(root: str) -> None:
    """Never silently random weights."""
    state = small_state(5.0)
    with pytest.raises(NoResumePointError, match=r'no checkpoint.*missing="start"'):
        job(root).restore(state)
    restored = job(root).restore(state, missing="start")
    assert (restored.found, restored.iteration, restored.url) == (False, 0, None)
    assert_same(state, small_state(5.0))
    with pytest.raises(StateError, match="missing='maybe'"):
        job(root).restore(state, missing="maybe")  # type: ignore[arg-type]


def test_a_given_iteration_is_exact_or_an_error(root: str) -> None:
    """R6: 0 is a value, nothing falls back, not even to start."""
    checkpointer = job(root)
    checkpointer.save(small_state(1.0), iteration=100)
    for at in (0, 50, 101):
        with pytest.raises(NoResumePointError, match=f"no committed checkpoint of iteration {at}"):
            job(root).restore(small_state(), at=at, missing="start")
    job(root).save(small_state(2.0), iteration=0)
    state = blanked(small_state())
    assert job(root).restore(state, at=0).iteration == 0
    assert_same(state, small_state(2.0))


def test_an_uncommitted_checkpoint_is_passed_over(root: str) -> None:
    """R1, C04."""
    checkpointer = job(root)
    checkpointer.save(small_state(1.0), iteration=10)
    with crash_at(commit, "publish_record"):
        checkpointer.save(small_state(2.0), iteration=20)
    assert newest(root) == (1, 10)
    assert job(root).restore(blanked(small_state())).iteration == 10


def test_the_rerun_state_of_another_topology_is_not_taken_for_ones_own(root: str) -> None:
    """C37: dropped with an event. Virtual stages move no rank: its streams go on."""
    torch.manual_seed(3)
    job(root, topology=Topology()).save(small_state(), iteration=10, rerun_state={"seen": 4})
    events: list[Notice] = []
    for same in (Topology(), None):  # one that is not given is plain data parallel
        restored = job(root, topology=same, on_event=events.append).restore(blanked(small_state()))
        assert restored.rerun_state == {"seen": 4}
    assert events == []
    other = job(root, topology=Topology(vpp=2), on_event=events.append)
    assert other.restore(blanked(small_state())).rerun_state is None
    assert [event.name for event in events] == ["rerun_state_dropped"]


def test_a_checkpoint_without_rng_state_leaves_the_generators_with_an_event(root: str) -> None:
    job(root).save(small_state(), iteration=10, contents=["model"])
    events: list[Notice] = []
    torch.manual_seed(11)
    before = torch.get_rng_state()
    job(root, on_event=events.append).restore(blanked(small_state()))
    assert torch.equal(torch.get_rng_state(), before)
    assert [event.name for event in events] == ["rng_absent"]
    job(root, on_event=events.append).restore(blanked(small_state()), contents=["model"])
    assert len(events) == 1  # not asked for
