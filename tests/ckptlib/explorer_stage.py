"""The stage on which the explorer's actors play: the real code, with its clocks, ids and messages made deterministic.

Nothing of the protocol is replaced. What is, is what would be different in the next run: the clock, random ids, host
and process id, the way from a URL to the storage, the store that ranks talk through, and threads that read side by
side. Records are parsed once for the same bytes, which is only faster.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import ckptlib
from ckptlib import (
    Checkpointer,
    checkpointer,
    commit,
    exports,
    fetch,
    packing,
    reader,
    records,
    roots,
    saving,
    settling,
)
from ckptlib.coordination import SoloGroup
from ckptlib.errors import RankTimeoutError
from tests.ckptlib.explorer import MESSAGE, TIMEOUT, Player
from tests.ckptlib.support.recording import READING, Disk, RecordingStorage, Step

ROOT = "/run"
RUN = "run"
SCHEME = "recording://"
URL = SCHEME + ROOT


COLLAPSED = {
    commit: (
        *("list_saves", "read_save", "current_save", "read_decision", "read_records", "read_manifest", "_tombstones"),
        *("try_commit", "decide_abort", "_write_manifest", "publish_record", "write_common"),
    ),
    exports: ("export_changes", "_roll_forward_once", "roll_forward", "bury", "_remove_records"),
    roots: (
        *("scan", "scan_directory", "newest_attempt", "read_identity", "read_tracker", "tracker_mode"),
        *("open_root", "start_attempt", "put_tracker", "write_tracker"),
    ),
    settling: ("settle",),
    saving: ("_begin", "_write", "_commit", "_abort"),
}
"""Functions that leave nothing in their process but what they return or raise, and whose `repr` tells it all."""


def _message(value: Any) -> bytes:
    """Bytes that tell what a value is, and not which of its parts happen to be one object: replays make new ones."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()


class ModelGroup:
    """`ckptlib.coordination.Group` over messages that are steps.

    Rank 0 may find at any time that the others have taken too long. A rank other than 0 just waits: one that gives up
    waiting does nothing more, exactly like one that has crashed.
    """

    def __init__(self, perform: Callable[[Step], Any], job: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._perform = perform
        self._job = job
        self._round = 0

    def next_round(self) -> None:
        """Names may repeat after it."""
        self._round += 1

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """One step."""
        if self.rank != 0:
            self._perform(Step("report", self._path(name, self.rank), _message(value)))
            return None
        others = tuple(self._path(name, rank) for rank in range(1, self.world_size))
        answer = self._perform(Step("gather", others[0], others))
        if answer is TIMEOUT:
            raise RankTimeoutError(f"{name}: no answer in time", ranks=[1])
        return [value, *map(pickle.loads, answer)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """One step."""
        if self.rank == 0:
            self._perform(Step("send", self._path(name, 0), _message(value)))
            return value
        return pickle.loads(self._perform(Step("receive", self._path(name, 0))))

    def scatter(self, name: str, values: Sequence[Any] | None = None) -> Any:
        """One step: what a rank is sent may lie beside what the others are."""
        return self.broadcast(name, values)[self.rank]

    def _path(self, name: str, rank: int) -> str:
        return f"{MESSAGE}{self._job}/{self._round}/{name}/{rank}"


class Theatre:
    """The stage: one actor plays at a time.

    Attributes:
        place: (iteration directory, save id) while the actor is exporting that save and has changed something.
    """

    def __init__(self) -> None:
        self.place: tuple[str, str] | None = None
        self._player: Player = _Nobody()
        self._name = ""
        self._ids = 0
        self._group: Any = SoloGroup()
        self._exporting: tuple[str, str] | None = None

    # --- for programs ------------------------------------------------------------------------------------------------

    def note(self, name: str, value: Any = None) -> None:
        """Says where the program is."""
        self._player.note(name, value)

    def storage(self) -> RecordingStorage:
        """The disk, step by step."""
        return RecordingStorage(self._step)

    def join(self, job: str, rank: int, world_size: int) -> None:
        """Makes the program one rank of a job."""
        self._group = SoloGroup() if world_size == 1 else ModelGroup(self._step, job, rank, world_size)

    def values(self, path: str, save_id: str | None = None) -> tuple[float, ...]:
        """The two rows of the tensor of `weights`, as our own reader reads them."""
        state = weights(0, 1, -1.0)
        with mock.patch.object(self, "_group", SoloGroup()):
            reader.load(state, SCHEME + path, save_id=save_id)
        return rows(state)

    @property
    def memory(self) -> Any:
        """See `explorer.Stage`."""
        return self._ids, self._exporting, self.place

    @memory.setter
    def memory(self, memory: Any) -> None:
        self._ids, self._exporting, self.place = memory

    # --- for the engine and the judge --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self) -> Iterator[Theatre]:
        """Patches what is not deterministic for as long as actors play."""
        ids = SimpleNamespace(uuid4=lambda: self._new_id())
        clock = SimpleNamespace(
            time=lambda: 1e9, monotonic=lambda: 0.0, perf_counter=lambda: 0.0, sleep=lambda seconds: None
        )
        handler = _Trouble(self)
        log = logging.getLogger("ckptlib")
        with contextlib.ExitStack() as stack:
            for module in (commit, roots):
                stack.enter_context(mock.patch.object(module, "uuid", ids))
            for module in (commit, packing, roots, saving):
                stack.enter_context(mock.patch.object(module, "time", clock))
            stack.enter_context(mock.patch.object(roots, "os", SimpleNamespace(getpid=lambda: 1)))
            stack.enter_context(mock.patch.object(roots, "socket", SimpleNamespace(gethostname=lambda: "host")))
            stack.enter_context(mock.patch("ckptlib.storage.resolve", self._resolve))
            stack.enter_context(mock.patch.object(records, "decode", functools.cache(records.decode)))
            stack.enter_context(mock.patch.object(fetch, "ThreadPoolExecutor", _OneThread))
            stack.enter_context(mock.patch.object(saving, "Pulse", mock.Mock()))  # a thread, which nothing here is for
            for module in (checkpointer, reader):
                stack.enter_context(mock.patch.object(module, "new_group", self._new_group))
            stack.enter_context(mock.patch.object(exports, "export_plan", self._watch_export(exports.export_plan)))
            stack.enter_context(mock.patch.object(exports, "roll_forward", self._end_export(exports.roll_forward)))
            for module, names in COLLAPSED.items():
                for name in names:
                    stack.enter_context(mock.patch.object(module, name, self._collapse(name, getattr(module, name))))
            propagate, log.propagate = log.propagate, False
            log.addHandler(handler)
            try:
                yield self
            finally:
                log.removeHandler(handler)
                log.propagate = propagate

    @contextlib.contextmanager
    def playing(self, name: str, player: Player) -> Iterator[None]:
        """See `explorer.Stage`."""
        saved = self.__dict__.copy()
        self._player, self._name = player, name
        self._ids, self._group, self._exporting, self.place = 0, SoloGroup(), None, None
        try:
            yield
        finally:
            self.__dict__.update(saved)

    @contextlib.contextmanager
    def looking_at(self, disk: Disk) -> Iterator[RecordingStorage]:
        """Our own readers see this disk; nobody may change it."""
        with self.playing("judge", _Onlooker(disk)):
            yield self.storage()

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _new_group(self, **_: Any) -> Any:
        return self._group

    def _new_id(self) -> uuid.UUID:
        self._ids += 1
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{self._name}/{self._ids}")

    def _resolve(self, url: str, *args: Any, **kwargs: Any) -> tuple[RecordingStorage, str]:
        return self.storage(), url.removeprefix(SCHEME)

    def _step(self, step: Step) -> Any:
        result = self._player.perform(step)
        if self._exporting is not None and step.kind in ("put", "remove"):
            self.place = self._exporting
        return result

    def _collapse(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def collapsed(*args: Any, **kwargs: Any) -> Any:
            return self._player.call(name, lambda: function(*args, **kwargs))

        return collapsed

    def _watch_export(self, export_plan: Callable[..., Any]) -> Callable[..., Any]:
        def watched(storage: Any, path: str, save: commit.SaveState) -> Any:
            plan = export_plan(storage, path, save)
            self._exporting = (path, save.save_id)
            return plan

        return watched

    def _end_export(self, roll_forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return roll_forward(*args, **kwargs)
            finally:
                self._exporting = self.place = None

        return watched


class _Trouble(logging.Handler):
    """What the code only logs is a note: the judge reads it."""

    def __init__(self, theatre: Theatre) -> None:
        super().__init__(logging.ERROR)
        self._theatre = theatre

    def emit(self, record: logging.LogRecord) -> None:
        """Errors, with the exception behind them."""
        error = record.exc_info[1] if record.exc_info else None
        self._theatre.note("trouble", f"{record.getMessage()}: {type(error).__name__}: {error}")


class _OneThread(Executor):
    """Does at once what is submitted: an actor takes one step at a time, in one order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


class _Nobody:
    """The player when no actor plays."""

    def perform(self, step: Step) -> Any:
        raise AssertionError(f"no actor is playing: {step}")

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        return function()

    def note(self, name: str, value: Any) -> None:
        raise AssertionError(f"no actor is playing: {name}")


class _Onlooker(_Nobody):
    """Sees a disk, changes nothing, says nothing."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def perform(self, step: Step) -> Any:
        assert step.kind in READING, step
        return self._disk.apply(step)[0]


# --- programs ---------------------------------------------------------------------------------------------------------


def weights(rank: int, world_size: int, tag: float) -> dict[str, Any]:
    """A state of one tensor of two rows, cut into `world_size` parts, filled with `tag`."""
    data = torch.full((2 // world_size, 1), tag)
    return {"model": {"w": ckptlib.ShardedTensor.from_rank_offsets("w", data, (0, rank, world_size))}}


def rows(state: dict[str, Any]) -> tuple[float, ...]:
    """The rows of `weights`."""
    return tuple(state["model"]["w"].data.flatten().tolist())


class Job:
    """For programs: one rank's `Checkpointer`, and what the judge must know of it."""

    def __init__(self, theatre: Theatre, job: str, rank: int = 0, world_size: int = 1) -> None:
        theatre.join(job, rank, world_size)
        self._theatre = theatre
        self._rank, self._world_size = rank, world_size
        self._checkpointer = Checkpointer(URL, run=RUN, contents=["model"])
        if rank == 0:
            theatre.note("opened", self._checkpointer.attempt)

    def resume(self, at: int | None = None) -> None:
        """Restores, and says from what."""
        state = weights(self._rank, self._world_size, -1.0)
        restored = self._checkpointer.restore(state, missing="start" if at is None else "error", at=at)
        if self._rank == 0:
            self._theatre.note("resumed", (restored.save_id, rows(state) if restored.found else (), at))

    def save(self, iteration: int, tag: float, **options: Any) -> None:
        """Saves weights filled with `tag`; the manifest says so too."""
        state = weights(self._rank, self._world_size, tag)
        self._checkpointer.save(state, iteration=iteration, metrics={"tag": tag}, **options)


def adopt(theatre: Theatre) -> None:
    """What ``ckpt scan --adopt`` does on storage (W7): commits what is complete, rolls forward what it adopted."""
    storage = theatre.storage()
    for found in roots.scan(storage, ROOT).found:
        save = found.save
        if found.state != "undecided" or save is None or save.begin is None:
            continue
        if commit.read_records(storage, found.path, save.begin).missing:
            continue
        decision = commit.try_commit(storage, found.path, save.begin, decided_by="adopt")
        if decision is not None and decision.outcome == "commit":
            exports.roll_forward(storage, found.path)
