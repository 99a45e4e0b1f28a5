"""What a new attempt does with what an older one left (W7, W8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptlib import Checkpointer, commit
from ckptlib.events import AttemptEvent, CommitEvent


class Listener:
    def __init__(self) -> None:
        self.commits: list[tuple[int, int]] = []

    def attempt_started(self, event: AttemptEvent) -> None:
        pass

    def committed(self, event: CommitEvent) -> None:
        self.commits.append((event.manifest.begin.attempt, event.manifest.begin.iteration))

    def close(self, timeout: float) -> None:
        pass


def _die(*args: object, **kwargs: object) -> None:
    raise OSError("killed")


def test_a_complete_save_of_a_dead_attempt_is_committed_and_listeners_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.arange(4.0)}}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "try_commit", _die)
        patch.setattr(commit, "decide_abort", _die)  # as after a SIGKILL: nobody tidies up
        with pytest.raises(OSError, match="killed"):
            Checkpointer(str(tmp_path), run="r").save(state, iteration=5)
    listener = Listener()
    with Checkpointer(str(tmp_path), run="r", listeners=[listener]) as checkpointer:
        assert listener.commits == [(1, 5)]
        restored = {"model": {"w": torch.zeros(4)}}
        assert checkpointer.restore(restored).iteration == 5
    assert restored["model"]["w"].tolist() == [0, 1, 2, 3]
