"""P29 (Megatron-Bridge#3267): the tracker records a later step, by a closure over state that goes on changing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckptlib
from ckptlib import Checkpointer
from ckptlib.events import CommitEvent
from tests.support.roots import tracker


class Trainer:
    """Its numbers change while a listener is told, as those of a running trainer do."""

    def __init__(self) -> None:
        self.progress = {"consumed_samples": 80, "lr": 0.1}
        self.metrics = {"loss": 2.0}
        self.events: list[CommitEvent] = []

    def attempt_started(self, event: Any) -> None:
        self.go_on()

    def committed(self, event: CommitEvent) -> None:
        self.go_on()
        self.events.append(event)

    def close(self, timeout: float) -> None:
        return

    def go_on(self) -> None:
        self.progress["consumed_samples"] += 8
        self.metrics["loss"] = 0.0


def test_p29_the_manifest_the_tracker_and_the_event_have_the_step_of_the_save(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    trainer = Trainer()
    checkpointer = Checkpointer(root, run="run", listeners=[trainer])
    state = {"model": {"w": torch.ones(2)}}
    result = checkpointer.save(state, iteration=10, progress=trainer.progress, metrics=trainer.metrics)
    trainer.go_on()
    state["model"]["w"].fill_(99.0)
    begin = ckptlib.inspect(result.url).manifest.begin
    assert (begin.iteration, begin.progress["consumed_samples"], begin.metrics["loss"]) == (10, 80, 2.0)
    assert tracker(root) == "10"
    (event,) = trainer.events
    assert event.manifest.begin.progress["consumed_samples"] == 80
    assert torch.equal(ckptlib.read(result.url)["model.w"], torch.ones(2))
