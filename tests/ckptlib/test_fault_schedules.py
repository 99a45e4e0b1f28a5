"""Random faults under saves, commits, verifications, loads and removals, on S3 and on a disk.

Every operation is done right or fails with an error of ours, in time; whatever is committed verifies and holds what was
saved; what was saved is not lost; and nothing unfinished stays once somebody has looked for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, removal, roots, storage
from ckptlib.errors import CkptError
from tests.support.disk_faults import failing_disk
from tests.support.fault_proxy import FaultProxy
from tests.support.fault_schedules import disk_faults, request_faults
from tests.support.s3_server import S3Server
from tests.support.trees import assert_same, blanked

DEADLINE = 60.0
"""Seconds for one operation; most take a tenth of one."""

FEW_ON_S3, FEW_ON_DISK, MANY = 1, 6, 100


def schedules(few: int) -> list[Any]:
    return [pytest.param(seed, marks=() if seed < few else pytest.mark.deep) for seed in range(MANY)]


@dataclass
class Run:
    """A run on a storage that fails for a while.

    Attributes:
        options: of the storage while it fails; direct: of the same, later.
        failing: what makes it fail.
        large: tensors are of several parts.
        background: saves are written beside training; None: they are not.
        saved: iterations whose save returned; verified: those that were found to be as they were written.
        told: notices; errors: of operations that failed.
    """

    url: str
    options: dict[str, Any]
    direct: dict[str, Any]
    failing: Callable[[], AbstractContextManager[Any]]
    large: bool
    background: AsyncOptions | None = None
    saved: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    told: list[Any] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def state(self, iteration: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(iteration)
        size = 1_700_000 if self.large else 20_000
        weights = torch.randn(size, generator=generator)
        return {"model": {"w": weights, "b": torch.full((3,), float(iteration)), "steps": iteration}}

    def open(self, options: dict[str, Any]) -> Checkpointer:
        return Checkpointer(
            self.url,
            run="run",
            storage_options=options,
            timeout=20.0,
            settle_wait=1.0,
            on_event=self.told.append,
            io_mode="sync" if self.background is None else "async",
            background=self.background,
        )

    def place(self, iteration: int) -> str:
        return f"{self.url}/iter_{iteration:07d}"


def attempt(run: Run, work: Callable[[], Any]) -> Any:
    """What it returns; None: it failed with an error of ours, or of the system, as it may."""
    start = time.monotonic()
    try:
        return work()
    except (CkptError, OSError) as error:
        run.errors.append(error)
        return None
    finally:
        assert time.monotonic() - start < DEADLINE


def go_through(run: Run) -> None:
    with run.open(run.direct) as first:
        oldest = first.save(run.state(10), iteration=10).wait().save_id
    run.saved.add(10)
    with run.failing(), contextlib.ExitStack() as stack:
        checkpointer = attempt(run, lambda: run.open(run.options))
        if checkpointer is not None:
            stack.callback(lambda: attempt(run, checkpointer.close))
            for iteration in (20, 30):
                save(run, checkpointer, iteration)
                verify(run, iteration)
        load(run, 10)
        restore(run)
        if len(run.saved) > 1:
            remove(run, 10, oldest)
    judge(run)
    if 10 not in run.saved:
        finish_removal(run, 10, oldest)


def save(run: Run, checkpointer: Checkpointer, iteration: int) -> None:
    if attempt(run, lambda: checkpointer.save(run.state(iteration), iteration=iteration).wait(DEADLINE)) is not None:
        run.saved.add(iteration)


def verify(run: Run, iteration: int) -> None:
    report = attempt(run, lambda: ckptlib.verify(run.place(iteration), storage_options=run.options))
    if report is not None and report.ok:
        run.verified.add(iteration)


def load(run: Run, iteration: int) -> None:
    found = blanked(run.state(iteration))
    if attempt(run, lambda: ckptlib.load(found, run.place(iteration), storage_options=run.options)) is not None:
        assert_same(found, run.state(iteration))


def restore(run: Run) -> None:
    """R6: what was passed over was told of."""
    found = blanked(run.state(10))

    def work() -> Any:
        with run.open(run.options) as checkpointer:
            return checkpointer.restore(found)

    run.told.clear()
    restored = attempt(run, work)
    if restored is not None:
        assert_same(found, run.state(restored.iteration))
        assert restored.iteration >= max(run.saved) or run.told


def remove(run: Run, iteration: int, save_id: str) -> None:
    """D2."""
    run.saved.discard(iteration)
    store, path = storage.resolve(run.place(iteration), run.options)
    attempt(run, lambda: removal.remove_save(store, path, save_id))


def judge(run: Run) -> None:
    """When nothing fails any more."""
    nameless = [error for error in run.errors if run.url.removeprefix("s3://") not in str(error)]
    assert nameless == []
    store, root = storage.resolve(run.url, run.direct)
    found = blanked(run.state(10))
    with run.open(run.direct) as last:
        restored = last.restore(found)
    assert restored.iteration is not None
    assert restored.iteration >= max(run.saved)
    assert_same(found, run.state(restored.iteration))
    scanned = roots.scan(store, root).found
    committed = {save.iteration for save in scanned if save.state == "committed"}
    assert committed >= run.saved | run.verified
    for save in scanned:
        never_begun = save.save is not None and save.save.begin is None
        assert save.state in ("committed", "aborted", "deleted") or never_begun, save
        if save.state == "committed":
            report = ckptlib.verify(save.url, storage_options=run.direct)
            assert report.ok, report.problems
            content = blanked(run.state(save.iteration))
            ckptlib.load(content, save.url, storage_options=run.direct)
            assert_same(content, run.state(save.iteration))
    for left in store.unfinished(root):
        store.discard(left)
    assert list(store.unfinished(root)) == []


def finish_removal(run: Run, iteration: int, save_id: str) -> None:
    """D3: what was cut short is done by the next try, and a further one changes nothing."""
    store, path = storage.resolve(run.place(iteration), run.direct)
    for _ in range(2):
        removal.remove_save(store, path, save_id)
        assert store.list(path) == []


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3) as running:
        yield running


@pytest.mark.parametrize("seed", schedules(FEW_ON_S3))
def test_on_s3(s3: S3Server, s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every fourth with files of several parts; every fifth in the background, by a thread, which sees the patch."""
    monkeypatch.setattr("ckptlib.storage.s3_client.backoff", lambda attempt, *, busy: 0.0)
    options = {"part_size": 5 << 20, "timeout": 0.5, "attempts": 3}

    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        proxy.faults = request_faults(seed)
        try:
            yield
        finally:
            proxy.faults = []

    through, direct = s3.storage_options(endpoint=proxy.endpoint, **options), s3.storage_options(**options)
    background = AsyncOptions(worker="thread") if seed % 5 == 4 else None
    go_through(Run(s3_url, through, direct, failing, large=seed % 4 == 3, background=background))


@pytest.mark.parametrize("seed", schedules(FEW_ON_DISK))
def test_on_a_disk(tmp_path: Path, seed: int) -> None:
    root = str(tmp_path / "run")
    go_through(Run(root, {}, {}, lambda: failing_disk(root, disk_faults(seed)), large=False))
