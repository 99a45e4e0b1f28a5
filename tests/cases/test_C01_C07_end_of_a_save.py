"""Everything that says "saved" comes from the end of an asynchronous save; one that failed has left no state.

C01 (KempnerForge#102, composer#3376): `latest`, the catalog's row and the event come when the save has only begun.
C07 (maxtext#5260): a step that failed counts as saved, and later saves at or below it are skipped.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from catalog import Catalog, Recorder
from ckptlib import AsyncOptions, Checkpointer, background
from ckptlib.errors import BackgroundSaveError
from tests.catalog.samples import empty_catalog
from tests.support.roots import newest, states, tracker
from tests.support.workers import workers_stopped


def state(fill: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((8,), fill)}}


def saved(url: str) -> tuple[list[int], int]:
    """Iterations of the catalog's rows, and the number of events that say so."""
    with Catalog(url) as catalog:
        rows = [row.iteration for row in catalog.checkpoints("run")]
        return rows, [event.kind for event in catalog.events("run")].count("saved")


def test_c01_tracker_row_and_event_wait_for_the_end_of_an_asynchronous_save(tmp_path: Path) -> None:
    url, root = empty_catalog(tmp_path), str(tmp_path / "run")
    with Checkpointer(root, run="run", io_mode="async", listeners=[Recorder(url)]) as job:
        job.save(state(1), iteration=100).wait(60)
        assert job.drain(60)
        with workers_stopped():
            pending = job.save(state(2), iteration=200)
            job.poll()
            with pytest.raises(TimeoutError, match="still being written"):
                pending.wait(0.1)
            assert newest(root) == (1, 100)
            assert tracker(root) == "100"
            assert saved(url) == ([100], 1)
            assert not Path(root, "iter_0000200/metadata.json").exists()
            assert states(root)["iter_0000200"] == ["undecided"]
        pending.wait(60)
        assert job.drain(60)
        assert newest(root) == (1, 200)
        assert tracker(root) == "200"
        assert saved(url) == ([100, 200], 2)


def test_c07_an_asynchronous_save_that_failed_bars_no_later_one(tmp_path: Path) -> None:
    url, root = empty_catalog(tmp_path), str(tmp_path / "run")
    thread = AsyncOptions(worker="thread")
    job = Checkpointer(root, run="run", io_mode="async", background=thread, listeners=[Recorder(url)])
    for iteration in (1600, 1800):
        job.save(state(iteration), iteration=iteration).wait(60)
    with mock.patch.object(background.commit, "try_commit", side_effect=OSError("the disk is gone")):
        job.save(state(1820), iteration=1820)
        with pytest.raises(BackgroundSaveError, match=r"1820.*the disk is gone"):
            job.close()
    assert newest(root) == (1, 1800)
    assert saved(url) == ([1600, 1800], 2)
    with Checkpointer(root, run="run", io_mode="async", background=thread, listeners=[Recorder(url)]) as job:
        target = state(0)
        assert job.restore(target, at=1600).iteration == 1600
        for iteration in (1620, 1800, 1820):
            job.save(state(iteration + 1), iteration=iteration).wait(60)
    assert newest(root) == (2, 1820)
    with Catalog(url) as catalog:
        rows = [(row.attempt, row.iteration) for row in catalog.checkpoints("run")]
    assert rows == [(1, 1600), (1, 1800), (2, 1620), (2, 1800), (2, 1820)]


def test_c07_the_iteration_that_failed_can_be_saved_again_by_the_same_attempt(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    thread = AsyncOptions(worker="thread")
    with Checkpointer(root, run="run", io_mode="async", background=thread) as job:
        with mock.patch.object(background.commit, "try_commit", side_effect=OSError("the disk is gone")):
            failing = job.save(state(1), iteration=5)
            with pytest.raises(BackgroundSaveError):
                failing.wait(60)
        with pytest.raises(BackgroundSaveError):
            job.save(state(2), iteration=5)
        job.save(state(2), iteration=5).wait(60)
    assert states(root) == {"iter_0000005": ["aborted", "committed"]}
