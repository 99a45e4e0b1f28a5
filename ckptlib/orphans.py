"""Uploads that dead processes left unfinished: which may go (W8), and their removal.

An object store keeps what was sent of a file until somebody completes the upload or ends it; whoever was killed does
neither, and it takes space without being seen. Only uploads are ours whose name carries a save id (W1), or is that of
an export of the save that is committed there. What may still be written stays.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckptlib import beats, commit, exported, roots
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Begin

log = logging.getLogger("ckptlib")

Standing = Literal["committed", "exporting", "aborted", "deleted", "undecided", "damaged", "gone"]
"""What storage says of a save. ``gone``: no record of it is left; ``begin.json`` comes before any of its files (W2).
``exporting``: it is committed, and the upload is of one of its exports, which anybody may be rolling forward (W5)."""

_DIRECTORY = rf"(?P<directory>(?:{roots.NON_PERSISTENT}/)?(?:iter_\d{{7,}}|{roots.RELEASE}))"
_NAME = re.compile(
    rf"{_DIRECTORY}/"
    rf"(?:\.ckpt/(?P<record>{commit.SAVE_ID.pattern})/[^/]+|(?:[^/]+/)*[^/]*\.(?P<file>{commit.SAVE_ID.pattern})\.[^/]+)"
)
"""A file of a save, below the root: a record, or any other, which has the save id in its name."""
_OTHER = re.compile(rf"{_DIRECTORY}/(?P<name>.+)")


@dataclass(frozen=True)
class Orphan:
    """An unfinished upload of one of our saves, and why it may go, or why it stays."""

    upload: st.Unfinished
    save_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.upload.path}: {self.reason}"


@dataclass(frozen=True)
class OrphanPlan:
    """What to do about the unfinished uploads below a root.

    Attributes:
        url: the root.
        discard: may go.
        keep: belong to saves of ours that may still be written.
        foreign: how many are not ours; nobody here touches them.
    """

    url: str
    discard: tuple[Orphan, ...] = ()
    keep: tuple[Orphan, ...] = ()
    foreign: int = 0


@dataclass(frozen=True)
class Facts:
    """What a decision about one upload is made on.

    Attributes:
        attempt: of the save; 0: outside any.
        age: seconds since the upload began, by the store's clock and ours.
        silent: seconds since the save's last sign of life, by the writer's clock and ours; None: it gave none.
    """

    attempt: int
    standing: Standing
    age: float
    silent: float | None = None


Judgement = tuple[bool, str]
"""Whether an upload may go, and why."""


# --- pure -------------------------------------------------------------------------------------------------------------


def at_start(facts: Facts, attempt: int) -> Judgement:
    """Whether a new attempt, which has settled the older ones' saves, discards an upload."""
    if facts.standing in ("committed", "aborted", "deleted"):
        return True, f"its save is {facts.standing}"
    if facts.standing == "gone" and 0 < facts.attempt < attempt:
        return True, f"nothing else is left of its save, which was of attempt {facts.attempt}"
    return False, f"its save is {facts.standing}"


def by_age(facts: Facts, older_than: float) -> Judgement:
    """Whether an upload is discarded by whoever knows of no attempt that begins.

    Args:
        older_than: seconds; longer than any save takes, and than clocks differ.
    """
    if facts.standing in ("committed", "aborted", "deleted"):
        return True, f"its save is {facts.standing}"
    if facts.age <= older_than:
        return False, f"its save is {facts.standing}, and it began {facts.age / 3600:.1f} h ago"
    if facts.silent is not None and facts.silent <= older_than:
        return False, f"its save gave a sign of life {facts.silent / 3600:.1f} h ago"
    return True, f"its save is {facts.standing}, and it began {facts.age / 3600:.1f} h ago without a sign of life since"


def owner(root: str, path: str) -> tuple[str, str] | None:
    """Iteration directory and save id of a file below a root; None: it is no file of a save."""
    found = _NAME.fullmatch(path.removeprefix(f"{root}/")) if path.startswith(f"{root}/") else None
    return None if found is None else (st.join(root, found["directory"]), found["record"] or found["file"])


# --- on storage -------------------------------------------------------------------------------------------------------


def plan_at_start(
    storage: st.Storage, root: str, attempt: int, takes: Callable[[Begin | None], bool] = lambda begin: True
) -> OrphanPlan:
    """What an attempt discards when it begins, once it has settled the saves of older ones.

    Args:
        takes: whose uploads to look at, by the begin record of their save; None: it has none.
    """
    return _plan(storage, root, lambda facts: at_start(facts, attempt), takes)


def plan_by_age(storage: st.Storage, root: str, *, older_than: float, now: float | None = None) -> OrphanPlan:
    """What may be discarded at any time: see `by_age`.

    Args:
        now: seconds since the epoch; None: by this machine's clock.
    """
    return _plan(storage, root, lambda facts: by_age(facts, older_than), lambda begin: True, now)


def apply(storage: st.Storage, plan: OrphanPlan) -> dict[str, OSError]:
    """Discards what a plan says; what is gone already is fine.

    Returns:
        Why others are still there, by path.
    """
    failures: dict[str, OSError] = {}
    for orphan in plan.discard:
        try:
            storage.discard(orphan.upload)
        except OSError as error:
            failures[orphan.upload.path] = error
            log.warning("%s: an unfinished upload was not discarded: %s", storage.url(orphan.upload.path), error)
        else:
            log.info("%s: an unfinished upload was discarded: %s", storage.url(orphan.upload.path), orphan.reason)
    return failures


def _plan(
    storage: st.Storage,
    root: str,
    judge: Callable[[Facts], Judgement],
    takes: Callable[[Begin | None], bool],
    now: float | None = None,
) -> OrphanPlan:
    # First the uploads, then their saves: one that has an upload has a begin record, unless it was removed meanwhile.
    uploads = storage.unfinished(root)
    now = time.time() if now is None else now
    saves = _Saves(storage, root)
    discard: list[Orphan] = []
    keep: list[Orphan] = []
    for upload in uploads:
        save = saves.of(upload.path)
        if save is None or not takes(save.begin):
            continue
        silent = None if save.seen_at is None else max(0.0, now - save.seen_at)
        goes, reason = judge(Facts(save.attempt, save.standing, now - upload.started, silent))
        (discard if goes else keep).append(Orphan(upload, save.save_id, reason))
    return OrphanPlan(storage.url(root), tuple(discard), tuple(keep), len(uploads) - len(discard) - len(keep))


@dataclass(frozen=True)
class _Save:
    """A save that an upload belongs to.

    Attributes:
        seen_at: of an undecided one its last sign of life, in seconds since the epoch by the writer's clock.
    """

    save_id: str
    begin: Begin | None
    standing: Standing
    seen_at: float | None = None

    @property
    def attempt(self) -> int:
        return int(self.save_id.partition("-")[0])


class _Saves:
    """The saves below a root, each looked at once."""

    def __init__(self, storage: st.Storage, root: str) -> None:
        self._storage = storage
        self._root = root
        self._known: dict[tuple[str, str], _Save] = {}
        self._current: dict[str, commit.SaveState | None] = {}

    def of(self, path: str) -> _Save | None:
        """The save that a file belongs to; None: it is not ours."""
        of = owner(self._root, path)
        if of is None:
            return self._exporting(path)
        if of not in self._known:
            self._known[of] = self._look(*of)
        return self._known[of]

    def _look(self, directory: str, save_id: str) -> _Save:
        save = commit.read_save(self._storage, directory, save_id)
        if save.tombstoned:
            return _Save(save_id, save.begin, "deleted")
        if save.damage is not None:
            return _Save(save_id, save.begin, "damaged")
        if save.decision is not None:
            return _Save(save_id, save.begin, "committed" if save.decision.outcome == "commit" else "aborted")
        if save.begin is None:
            return _Save(save_id, None, "gone")
        signs = beats.read_beats(self._storage, directory, save.begin)
        return _Save(save_id, save.begin, "undecided", max((beat.at for beat in signs.values()), default=None))

    def _exporting(self, path: str) -> _Save | None:
        """The save whose export has this name."""
        found = _OTHER.fullmatch(path.removeprefix(f"{self._root}/"))
        if found is None:
            return None
        directory = st.join(self._root, found["directory"])
        if directory not in self._current:
            try:
                self._current[directory] = commit.current_save(self._storage, directory)
            except IntegrityError:  # nobody can tell whose the exports are
                self._current[directory] = None
        save = self._current[directory]
        if save is None or save.begin is None or found["name"] not in exported.names(save.begin):
            return None
        return _Save(save.save_id, save.begin, "exporting")
