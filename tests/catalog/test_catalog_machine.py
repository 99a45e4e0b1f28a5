"""Any sequence of records, leases, expiries, verdicts and holds: the catalog against a model of what it promises."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from catalog import Catalog
from catalog.resume import Found
from catalog.rows import VerifyLease
from catalog.states import State, transition
from ckptlib.errors import CatalogError, LeaseHeldError, StaleWriteError, TransitionError
from tests.catalog.samples import CORRUPT, GOOD, UNREADABLE, UNVERIFIABLE, Clock, Report, commit, empty_catalog

TTL = 60.0
REPORTS = {"good": GOOD, "corrupt": CORRUPT, "unreadable": UNREADABLE, "unverifiable": UNVERIFIABLE}


@dataclass
class Known:
    """What the model knows of one checkpoint."""

    iteration: int
    state: State = field(default_factory=State)
    level: str | None = None
    token: str | None = None
    expires: float = 0.0
    holds: set[int] = field(default_factory=set)
    waits_until: float = -1.0
    failures: int = 0

    def waits_for(self, level: str) -> bool:
        """Whether a verification at this level can add to what is known."""
        if self.state.verdict == "verified":
            return level == "data" != self.level
        return self.state.verdict == "unverified" or (self.state.verdict == "unverifiable" and level != "store")


class CatalogMachine(RuleBasedStateMachine):
    """One run, a few checkpoints, several workers whose leases run out."""

    leases: Bundle[VerifyLease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="catalog-machine-"))
        self.clock = Clock()
        self.catalog = Catalog(empty_catalog(self.directory), clock=self.clock)
        self.model: dict[int, Known] = {}
        self.versions: dict[int, int] = {}
        # The model's own time. The real one passes as well: the steps of `wait` never add up to nearly an expiry.
        self.now = 0.0

    def teardown(self) -> None:
        self.catalog.close()
        shutil.rmtree(self.directory)

    @rule(iteration=st.integers(0, 3))
    def record(self, iteration: int) -> None:
        row = self.catalog.record(commit(iteration))
        known = self.model.setdefault(row.id, Known(iteration))
        if known.state.lifecycle == "missing":
            known.state = transition(known.state, lifecycle="finalized")

    @rule(target=leases, force=st.booleans(), level=st.sampled_from(["store", "auto", "data"]))
    def take(self, force: bool, level: str) -> VerifyLease | None:
        free = {
            id
            for id, known in self.model.items()
            if known.state.lifecycle == "finalized"
            and (known.token is None or known.expires < self.now)
            and (force or (known.waits_for(level) and known.waits_until < self.now))
        }
        taken = self.catalog.lease_unverified(owner="worker", ttl=TTL, level=level, force=force)
        assert [lease.checkpoint_id for lease in taken] == sorted(free, reverse=True)[:1], "the newest that waits"
        for lease in taken:
            self.model[lease.checkpoint_id].token = lease.token
            self.model[lease.checkpoint_id].expires = self.now + TTL
            return lease
        return None

    @rule(seconds=st.sampled_from([25.5, 61.0, 100_000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.now += seconds

    def _attempt(self, lease: VerifyLease, succeeded: bool) -> bool:
        """Whether the lease still counts; checks that the catalog said so, too."""
        held = self.model[lease.checkpoint_id].token == lease.token
        assert succeeded == held
        return held

    @rule(lease=leases)
    def renew(self, lease: VerifyLease | None) -> None:
        if lease is None:
            return
        try:
            self.catalog.renew(lease, TTL)
        except (LeaseHeldError, StaleWriteError):
            self._attempt(lease, False)
        else:
            self._attempt(lease, True)
            self.model[lease.checkpoint_id].expires = self.now + TTL

    @rule(lease=leases, result=st.sampled_from(sorted(REPORTS)), level=st.sampled_from(["store", "data"]))
    def finish(self, lease: VerifyLease | None, result: str, level: str) -> None:
        if lease is None:
            return
        report: Report = REPORTS[result]
        try:
            row = self.catalog.finish_verification(lease, report, level=level)
        except (LeaseHeldError, StaleWriteError):
            self._attempt(lease, False)
            return
        assert self._attempt(lease, True)
        known = self.model[row.id]
        known.token = None
        if result == "unreadable":
            known.failures += 1
            known.waits_until = self.now + min(60.0 * 2 ** (known.failures - 1), 6 * 3600)
            return
        known.failures, known.waits_until = 0, -1.0
        if result == "corrupt":
            known.state = State("finalized", "corrupt")
        elif result == "unverifiable":
            if known.state.verdict == "unverified":
                known.state = State("finalized", "unverifiable")
        elif known.state.verdict != "suspect" and (level == "data" or known.state.verdict != "corrupt"):
            known.level = "data" if known.state.verdict == "verified" and known.level == "data" else level
            known.state = State("finalized", "verified")

    @rule(lease=leases)
    def release(self, lease: VerifyLease | None) -> None:
        if lease is None:
            return
        try:
            self.catalog.release(lease, reason="test")
        except (LeaseHeldError, StaleWriteError):
            self._attempt(lease, False)
        else:
            assert self._attempt(lease, True)
            self.model[lease.checkpoint_id].token = None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), move=st.sampled_from(["missing", "finalized", "deleting", "deleted", "suspect", "corrupt"]))
    def change(self, data: st.DataObject, move: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))
        known = self.model[id]
        change = {"verdict" if move in ("suspect", "corrupt") else "lifecycle": move}
        try:
            expected = transition(known.state, **change)  # type: ignore[arg-type]
        except TransitionError:
            with pytest.raises(TransitionError):
                self.catalog.change(id, reason="test", **change)  # type: ignore[arg-type]
            return
        self.catalog.change(id, reason="test", **change)  # type: ignore[arg-type]
        known.state = expected
        if expected.lifecycle != "finalized":
            known.token = None

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))
        try:
            hold = self.catalog.hold(id, owner="me", reason="test")
        except CatalogError:
            assert self.model[id].state.lifecycle in ("deleting", "deleted")
        else:
            self.model[id].holds.add(hold.id)

    @invariant()
    def rows_are_what_the_model_says(self) -> None:
        rows = self.catalog.checkpoints("run")
        assert {row.id: row.state for row in rows} == {id: known.state for id, known in self.model.items()}
        for row in rows:
            assert {hold.id for hold in self.catalog.holds(row.id)} == self.model[row.id].holds
            if row.verdict == "verified":
                assert row.verified_level == self.model[row.id].level
            assert row.version >= self.versions.get(row.id, 0), "versions only grow"
            self.versions[row.id] = row.version

    @invariant()
    def every_fact_follows_from_the_events(self) -> None:
        """S1: no change without its event."""
        for id, known in self.model.items():
            events = self.catalog.events(checkpoint_id=id)
            state = {"lifecycle": None, "verdict": "unverified"}
            for event in events:
                for fact in state:
                    if fact in event.data and isinstance(event.data[fact], list):
                        before, after = event.data[fact]
                        assert before == state[fact]
                        state[fact] = after
            assert (state["lifecycle"], state["verdict"]) == (known.state.lifecycle, known.state.verdict)

    @invariant()
    def the_resume_point_is_the_newest_verified(self) -> None:
        good = [known for known in self.model.values() if known.state == State("finalized", "verified")]
        result = self.catalog.resume_point("run")
        assert (result.row.iteration if isinstance(result, Found) else None) == _newest(good)
        strict = self.catalog.resume_point("run", require="data")
        read_back = [known for known in good if known.level == "data"]
        assert (strict.row.iteration if isinstance(strict, Found) else None) == _newest(read_back)


def _newest(known: list[Known]) -> int | None:
    return max((each.iteration for each in known), default=None)


TestCatalogMachine = CatalogMachine.TestCase
# Each step is a few transactions: fewer examples than a pure property has.
TestCatalogMachine.settings = settings(max_examples=max(12, settings().max_examples // 10), stateful_step_count=25)
