"""What a save took and for how long it held training: in its records, in the log, for metrics, and for throughput."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, SaveMetrics
from ckptlib.async_options import AsyncOptions
from ckptlib.figures import Figures, Times
from ckptlib.held import HeldClock
from ckptlib.manifest import Begin, Manifest
from ckptlib.sharding import Box
from tests.support.gates import Gate
from tests.support.ranks import run_ranks

STATE = {"w": {"a": torch.zeros(1000, dtype=torch.uint8), "b": torch.zeros(1 << 20, dtype=torch.uint8)}}


def test_the_manifest_has_the_longest_times_and_the_extremes_of_the_ranks() -> None:
    ranks = [(100, Times(0.5, 0.25, 2.0)), (300, Times(0.75, 0.125, 3.0)), (0, Times(None, None, 0.0))]
    assert Figures.of(ranks) == Figures(0.75, 0.25, 3.0, rank_bytes=(0, 300), rank_rates=(50.0, 100.0))
    assert Figures.of([(0, Times())]) == Figures(None, None, 0.0, (0, 0), None)
    assert Figures.of([]) is None


def test_a_manifest_from_before_figures_is_read_and_stays_as_it_is() -> None:
    manifest = Manifest(Begin("000001-0-0", "run", 1, "a", 10, 2, "0" * 64), (), {})
    assert b"figures" not in manifest.encode()
    assert Manifest.decode(manifest.encode(), "m").figures is None


def test_the_time_since_the_save_before_follows_from_its_id() -> None:
    begin = Begin("000001-0-0", "run", 1, "a", 10, 1, "plan", created_at=1000.5)
    assert begin.since_parent is None
    assert replace(begin, parent="000001-0000000f4240-00000000").since_parent == 0.5  # 1,000,000 ms
    assert replace(begin, parent="000001-00000fffffff-00000000").since_parent == 0.0, "a clock that jumped back"
    assert replace(begin, parent="foreign").since_parent is None


def manifest_of(url: str) -> Manifest:
    manifest = ckptlib.inspect(url).manifest
    assert manifest is not None
    return manifest


def test_a_synchronous_save_tells_what_it_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[SaveMetrics] = []
    with (
        caplog.at_level(logging.INFO, "ckptlib"),
        Checkpointer(str(tmp_path), run="run", on_metrics=told.append) as job,
    ):
        results = [job.save(STATE, iteration=iteration) for iteration in (1, 2)]
        stalled = job.stalled
    figures = manifest_of(results[1].url).figures
    assert figures is not None
    assert figures.stage is None
    assert figures.stall is not None
    assert 0 < figures.write <= figures.stall <= results[1].seconds <= stalled
    first, second = told
    assert (first.since_last, second.iteration, second.bytes) == (None, 2, manifest_of(results[1].url).size)
    assert second.since_last is not None
    assert second.stall == results[1].seconds
    assert second.commit == results[1].phases["commit"]
    lines = [record for record in caplog.records if record.getMessage().startswith("saved iteration=2 ")]
    (line,) = lines
    assert f" bytes={second.bytes} rank_GBps=" in line.getMessage()
    assert line.ckpt["save_id"] == results[1].save_id  # type: ignore[attr-defined]
    json.dumps(line.ckpt)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_an_asynchronous_save_tells_what_it_took_when_it_is_committed(tmp_path: Path, kind: Any) -> None:
    told: list[SaveMetrics] = []
    options = AsyncOptions(worker=kind)
    with Checkpointer(str(tmp_path), run="run", io_mode="async", background=options, on_metrics=told.append) as job:
        job.save(STATE, iteration=1)
        assert job.drain(60)
    (metrics,) = told
    assert metrics.stage is not None
    assert metrics.stall is not None
    assert metrics.stage <= metrics.stall <= job.stalled
    assert metrics.commit is not None
    named = {(sample.name, sample.labels.get("phase")): sample.value for sample in metrics.samples()}
    assert named == {
        ("ckpt_save_seconds", "stage"): metrics.stage,
        ("ckpt_save_seconds", "write"): metrics.write,
        ("ckpt_save_seconds", "commit"): metrics.commit,
        ("ckpt_blocked_seconds", None): metrics.stall,
        ("ckpt_bytes_written_total", None): metrics.bytes,
        ("ckpt_commit_lag_seconds", None): metrics.lag,
    }


def test_a_metrics_handler_that_fails_fails_nothing(tmp_path: Path) -> None:
    def refuse(metrics: SaveMetrics) -> None:
        raise RuntimeError("no network")

    with Checkpointer(str(tmp_path), run="run", on_metrics=refuse) as job:
        assert ckptlib.inspect(job.save(STATE, iteration=1).url).committed


def ranks_of_unequal_size(rank: int, root: str) -> int:
    rows = torch.zeros(1000 * (1 + 2 * rank), 100)
    offset = 0 if rank == 0 else 1000
    with Checkpointer(root, run="run") as job:
        tensor = ckptlib.ShardedTensor("w", rows, (4000, 100), Box((offset, 0), tuple(rows.shape)))
        job.save({"w": tensor}, iteration=1)
    return rows.numel() * 4


def test_bytes_and_rates_are_of_every_rank(tmp_path: Path) -> None:
    least, most = run_ranks(2, ranks_of_unequal_size, str(tmp_path))
    figures = manifest_of(f"{tmp_path}/iter_0000001").figures
    assert figures is not None
    assert least <= figures.rank_bytes[0] < least + 100_000 < most <= figures.rank_bytes[1] < most + 100_000
    assert figures.rank_rates is not None
    assert 0 < figures.rank_rates[0] <= figures.rank_rates[1]


def test_time_that_was_held_counts_once_and_when_it_is_waited_for(tmp_path: Path) -> None:
    gate = Gate("w.b")
    with (
        gate.patched,
        Checkpointer(str(tmp_path), run="run", io_mode="async", background=AsyncOptions(worker="thread")) as job,
    ):
        pending = job.save(STATE, iteration=1)
        before = job.stalled
        assert before >= pending.seconds
        time.sleep(0.05)  # training
        assert job.stalled == before
        with pytest.raises(TimeoutError):
            pending.wait(0.05)
        assert before + 0.05 <= job.stalled < before + 30
        gate.opened.set()
        assert pending.wait(60).files == 1


def test_blocks_inside_each_other_count_once_and_those_of_threads_each(tmp_path: Path) -> None:
    clock = HeldClock()
    started = time.perf_counter()
    with clock, clock:
        time.sleep(0.02)
        assert clock.seconds == 0
    assert 0.02 <= clock.seconds <= time.perf_counter() - started
    once = clock.seconds

    def hold() -> None:
        with clock:
            time.sleep(0.02)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.seconds >= once + 0.04
