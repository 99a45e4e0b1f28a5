"""The write, settle, adopt and roll-forward protocol in every order, with a crash at every operation (W1 to W9, R1).

What "exhaustive" means is said in `explorer`; who takes part, in `explorer_scenarios`; what must hold, in
`explorer_judge`. In short: the real `Checkpointer` (open, settle, restore, save, trackers), the real steps of an
adoption and the real readers run over a disk in memory on which every operation is a step; each of them may be delayed
before every step, for a while or for ever, which is a crash before or after every operation.

* In ``make test`` schedules have a few preemptions at most (one that could go on stands back for another, for a while
  or for good), except for the smaller scenarios, which are exhaustive here too.
* In ``make test-deep`` there is no limit: all schedules of two ranks and two attempts. Where that is out of reach, with
  four actors or three attempts, the limit is three preemptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from ckptlib import commit, exports, roots, saving, settling
from tests.ckptlib import explorer_scenarios as scenarios
from tests.ckptlib.explorer import Violation
from tests.ckptlib.explorer_scenarios import Scenario
from tests.ckptlib.support.recording import RecordingStorage

EXHAUSTIVE = None


@pytest.mark.parametrize(
    ("scenario", "preemptions"),
    [
        pytest.param(scenarios.TAKEOVER, 2, id="takeover"),
        pytest.param(scenarios.ROLLBACK, 1, id="rollback"),
        pytest.param(scenarios.ADOPTION, EXHAUSTIVE, id="adoption"),
        pytest.param(scenarios.ADOPTED_TAKEOVER, 1, id="adopted takeover"),
        pytest.param(scenarios.REPLACEMENT, 1, id="replacement"),
        pytest.param(scenarios.WATCHED_REPLACEMENT, EXHAUSTIVE, id="watched replacement"),
        pytest.param(scenarios.ADOPTED_REPLACEMENT, 2, id="adopted replacement"),
        pytest.param(scenarios.REPLACED_WHILE_ADOPTED, 1, id="replaced while adopted"),
        pytest.param(scenarios.SIMULTANEOUS_START, 1, id="simultaneous start"),
    ],
)
def test_no_schedule_breaks_a_rule(scenario: Scenario, preemptions: int | None) -> None:
    seen = scenarios.run(scenario, preemptions=preemptions)
    assert seen.states > 1000
    assert seen.recoveries > 20


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("scenario", "preemptions"),
    [
        pytest.param(scenarios.TAKEOVER, EXHAUSTIVE, id="takeover"),
        pytest.param(scenarios.ROLLBACK, EXHAUSTIVE, id="rollback"),
        pytest.param(scenarios.ADOPTED_TAKEOVER, 3, id="adopted takeover"),
        pytest.param(scenarios.REPLACEMENT, EXHAUSTIVE, id="replacement"),
        pytest.param(scenarios.ADOPTED_REPLACEMENT, EXHAUSTIVE, id="adopted replacement"),
        pytest.param(scenarios.REPLACED_WHILE_ADOPTED, EXHAUSTIVE, id="replaced while adopted"),
        pytest.param(scenarios.SIMULTANEOUS_START, EXHAUSTIVE, id="simultaneous start"),
        pytest.param(scenarios.THREE_ATTEMPTS, 2, id="three attempts"),
    ],
)
def test_no_schedule_at_all_breaks_a_rule(scenario: Scenario, preemptions: int | None) -> None:
    scenarios.run(scenario, preemptions=preemptions)


# --- what is planted is found -----------------------------------------------------------------------------------------

Mutant = Callable[[], AbstractContextManager[Any]]


def decides_without_exclusion() -> AbstractContextManager[Any]:
    """A second decision takes the place of the first."""
    create = RecordingStorage.create

    def careless(self: RecordingStorage, path: str, data: bytes) -> None:
        (self.put if path.endswith(commit.DECISION) else lambda *args: create(self, *args))(path, data)

    return mock.patch.object(RecordingStorage, "create", careless)


def saves_without_a_fence() -> AbstractContextManager[Any]:
    """A save does not look for a newer attempt."""
    begin = saving._begin
    return mock.patch.object(
        saving, "_begin", lambda request, *rest: begin(dataclasses.replace(request, newest_attempt=None), *rest)
    )


@contextlib.contextmanager
def settles_before_it_is_an_attempt() -> Iterator[None]:
    """The attempt file comes after settling: a save can begin in between, unseen and unfenced."""
    start, settle = roots.start_attempt, settling.settle

    def start_late(storage: Any, root: str, *rest: Any) -> Any:
        settle(storage, root, roots.newest_attempt(storage, root) + 1)
        return start(storage, root, *rest)

    with mock.patch.object(roots, "start_attempt", start_late), forgets_to_settle():
        yield


def forgets_to_settle() -> AbstractContextManager[Any]:
    """An attempt chooses its resume point while the one before may still commit."""

    def nothing(*_: Any, **__: Any) -> list[str]:
        return []

    return mock.patch.object(settling, "settle", nothing)


def writes_the_marker_first() -> AbstractContextManager[Any]:
    """metadata.json comes before the files that it vouches for."""
    plan = exports.export_plan
    return mock.patch.object(exports, "export_plan", lambda *args: [plan(*args)[-1], *plan(*args)[:-1]])


def never_looks_back() -> AbstractContextManager[Any]:
    """An exporter that was overtaken leaves its last write where it is."""
    once = exports._roll_forward_once
    return mock.patch.object(exports, "_roll_forward_once", lambda *args: (once(*args)[0], True, frozenset()))


def buries_before_it_commits() -> AbstractContextManager[Any]:
    """A replacement removes the old save before the new one is committed."""
    try_commit = commit.try_commit

    def bury_first(storage: Any, path: str, begin: Any, **options: Any) -> Any:
        for save_id in begin.replaces:
            exports.bury(storage, path, save_id)
        return try_commit(storage, path, begin, **options)

    return mock.patch.object(commit, "try_commit", bury_first)


@pytest.mark.parametrize(
    ("mutant", "scenario", "preemptions", "complaint"),
    [
        (decides_without_exclusion, scenarios.ADOPTION, 2, "decided twice"),
        (saves_without_a_fence, scenarios.TAKEOVER, 1, "after attempt 2 had settled"),
        (settles_before_it_is_an_attempt, scenarios.TAKEOVER, 2, "after attempt 2 had settled"),
        (forgets_to_settle, scenarios.TAKEOVER, 1, "after attempt 2 had settled"),
        (writes_the_marker_first, scenarios.TAKEOVER, 0, "not those of any one save"),
        (never_looks_back, scenarios.TAKEOVER, 2, "not those of any one save"),
        (buries_before_it_commits, scenarios.WATCHED_REPLACEMENT, 0, "no committed save says it replaces it"),
    ],
)
def test_a_broken_rule_is_found(mutant: Mutant, scenario: Scenario, preemptions: int, complaint: str) -> None:
    with mutant(), pytest.raises(Violation, match=complaint) as found:
        scenarios.run(scenario, preemptions=preemptions)
    assert found.value.trace
