"""What became of an attempt's saves, what follows from it, and what has been told of it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptlib import commit, removal, roots
from ckptlib.announcing import Announcer
from ckptlib.background_saves import BackgroundSaves, failure
from ckptlib.errors import BackgroundSaveError
from ckptlib.events import Notice, NoticeHandler, emit
from ckptlib.manifest import Begin, Decision
from ckptlib.metrics import MetricsHandler, SaveMetrics, report
from ckptlib.requests import Requests


class Ledger:
    """One rank's account of the saves of one attempt.

    Attributes:
        parent: the save that the next one continues: the last one that has begun and not failed, or what the attempt
            has resumed from.
        failed: failures of which no save has told.
    """

    def __init__(
        self,
        background: BackgroundSaves,
        requests: Requests,
        identity: roots.RootIdentity,
        announcer: Announcer,
        on_event: NoticeHandler | None,
        on_metrics: MetricsHandler | None,
    ) -> None:
        self.parent: str | None = None
        self.failed: list[BackgroundSaveError] = []
        self._told: set[str] = set()  # save ids of failures that all ranks have raised; some learn of them later
        self._background = background
        self._requests = requests
        self._identity = identity
        self._announcer = announcer
        self._on_event = on_event
        self._on_metrics = on_metrics
        self._leads = requests.group.rank == 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing has failed of which no call has told."""
        return not self.failed and not self._background.refused

    def has_begun(self, begin: Begin) -> None:
        """A save has begun."""
        self.parent = begin.save_id

    def raise_refusal(self) -> None:
        """Tells what kept an earlier save from being begun, after its call had returned: known on all ranks."""
        if self._background.refused:
            error = self._background.refused.pop(0)
            if isinstance(error, BackgroundSaveError):
                self.has_told(error)
            raise error

    def has_told(self, error: BackgroundSaveError) -> None:
        """All ranks have raised this."""
        self._told |= error.save_ids
        self.failed = [failed for failed in self.failed if not failed.save_ids & error.save_ids]

    def lost(self, error: BackgroundSaveError) -> None:
        """A save of this rank has failed, and the next one tells of it."""
        self.failed.append(error)
        emit(self._on_event, Notice("save_failed", str(error), {"iteration": error.iteration}))

    def settle_ended(self) -> None:
        """Looks after saves that have ended in the background."""
        for begin, outcome in self._background.take_ended():
            if outcome.error is not None:
                error = failure(begin, outcome)
                if begin.save_id not in self._told:
                    self.failed.append(error)
                if self.parent == begin.save_id:
                    self.parent = begin.parent
                emit(self._on_event, Notice("save_failed", str(error), {"iteration": begin.iteration}))
            elif outcome.decision is not None and begin.kind != "non_persistent_local":
                self.committed(begin, outcome.decision, by_worker=True, commit_seconds=outcome.commit_seconds)
                self.tell_of_left(outcome.left)

    def committed(
        self,
        begin: Begin,
        decision: Decision,
        *,
        by_worker: bool = False,
        commit_seconds: float | None = None,
        stall: float | None = None,
    ) -> None:
        """What follows a commit (W6), on rank 0.

        Args:
            by_worker: a worker committed it; it has moved the tracker and removed what it replaces.
            commit_seconds: from the last record to the decision and its exports.
            stall: seconds that the trainer waited, where the records do not know them.
        """
        if not self._leads:
            return
        path = self._requests.path(begin.iteration, begin.kind)
        attempt = self._requests.attempt
        event = self._announcer.committed(self._identity, attempt, path, begin, decision, by_worker=by_worker)
        if event is not None:
            report(self._on_metrics, SaveMetrics.of(event, commit=commit_seconds, stall=stall))
        if not by_worker:
            self.tell_of_left(removal.supersede(self._requests.storage, self._requests.root, begin))

    def tell_of_left(self, left: Sequence[str]) -> None:
        """Tells of older non-persistent checkpoints that could not be removed."""
        for text in left:
            emit(self._on_event, Notice("superseded_not_removed", text))

    def abort_in_flight(self, timeout: float) -> bool:
        """Decides what is undecided after `timeout` seconds (W4); whether all of it had been committed in time."""
        cancelled = self._background.cancel_copy()
        begins = self._background.not_ended()
        if cancelled and not begins:
            emit(
                self._on_event, Notice("save_drained", "a save had not begun: it never will", {"outcome": "not begun"})
            )
            return False
        of_others = [begin for begin in begins if begin.piece is None and not self._leads]
        outcomes = []
        for begin in begins:
            if begin in of_others:
                continue
            storage, path = self._requests.place(begin.iteration, begin.kind)
            reason = f"the job ended, and after {timeout:g} s the save was not complete"
            self._told.add(begin.save_id)
            try:
                decision = commit.decide_abort(storage, path, begin.save_id, reason=reason, decided_by="drain")
            except OSError as error:
                outcomes.append("undecided")
                text = f"iteration {begin.iteration}: undecided, the next attempt settles it: {error}"
            else:
                outcomes.append(decision.outcome)
                text = f"iteration {begin.iteration}: {decision.outcome}, decided by {decision.decided_by}"
            emit(self._on_event, Notice("save_drained", text, {"iteration": begin.iteration, "outcome": outcomes[-1]}))
        return not of_others and all(outcome == "commit" for outcome in outcomes)
