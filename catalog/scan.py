"""Comparing a root on storage with the catalog, and bringing the catalog in line (S3, W7, D4).

`plan_scan` looks and changes nothing; `apply` carries out what a plan says. Neither deletes anything, and what the
catalog does not own is only named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from catalog import foreign, in_flight
from catalog.catalog import Catalog
from catalog.entries import FOREIGN_PREFIX, NewCheckpoint, from_commit
from catalog.rows import CheckpointRow
from ckptlib import commit, exports, formats, roots
from ckptlib import storage as st
from ckptlib.errors import CatalogError, CkptError, NotACheckpointError, StaleWriteError
from ckptlib.events import AttemptEvent, CommitEvent

log = logging.getLogger("catalog")


@dataclass(frozen=True)
class Item:
    """One thing below the root, and what there is to say about it.

    Attributes:
        name: relative to the root.
        checkpoint_id: the catalog's, where it knows it.
    """

    name: str
    url: str
    iteration: int | None = None
    save_id: str | None = None
    size: int | None = None
    format: str | None = None
    reason: str = ""
    checkpoint_id: int | None = None


@dataclass(frozen=True)
class ScanPlan:
    """What a scan found, and what `apply` would do.

    Attributes:
        unavailable: why nothing can be said about what is gone, and nothing is adopted (D4); empty when all is well.
        moved_from: the URL under which the catalog knows this root, when it has another one now.
        attempts: to record, with the lineage.
        adopt: committed, or complete and foreign, and unknown to the catalog; in the order in which to record them.
        decide: complete and undecided; committed first, then adopted (W7).
        returned: missing in the catalog, and here again.
        reappeared: deleted in the catalog, and here again: reported, never revived.
        missing: finalized in the catalog, and not here.
        incomplete: begun and not complete, aborted, damaged, or foreign and unfinished: nobody's checkpoint.
        unmanaged: anything else below the root.
        known: how many checkpoints are here as the catalog says.
    """

    root_url: str
    run: str | None
    root_id: str | None
    unavailable: str = ""
    moved_from: str | None = None
    attempts: tuple[AttemptEvent, ...] = ()
    adopt: tuple[Item, ...] = ()
    decide: tuple[Item, ...] = ()
    returned: tuple[Item, ...] = ()
    reappeared: tuple[Item, ...] = ()
    missing: tuple[Item, ...] = ()
    incomplete: tuple[Item, ...] = ()
    unmanaged: tuple[Item, ...] = ()
    known: int = 0
    entries: tuple[NewCheckpoint, ...] = field(default=(), repr=False)

    @property
    def pending(self) -> bool:
        """Whether `apply` would change anything."""
        return bool(self.adopt or self.decide or self.returned or self.missing or self.attempts or self.moved_from)

    def to_json(self) -> dict[str, Any]:
        """For programs: everything but the full records of what would be adopted."""
        value = asdict(replace(self, entries=(), attempts=()))
        del value["entries"]
        value["attempts"] = [event.attempt for event in self.attempts]
        return value


@dataclass(frozen=True)
class ScanResult:
    """What `apply` did.

    Attributes:
        skipped: what it left, with the reason: it changed since the plan, or could not be decided.
    """

    adopted: tuple[CheckpointRow, ...] = ()
    decided: tuple[Item, ...] = ()
    returned: tuple[CheckpointRow, ...] = ()
    reappeared: tuple[CheckpointRow, ...] = ()
    missing: tuple[CheckpointRow, ...] = ()
    skipped: tuple[Item, ...] = ()


# ---------------------------------------------------------------- plan


def plan_scan(root_url: str, catalog: Catalog, *, run: str | None = None) -> ScanPlan:
    """Compares what is on storage with the catalog. Reads records and metadata, no tensors; changes nothing.

    Args:
        run: whose root it is, where it has no identity; by default what its checkpoints say, else its name.

    Raises:
        CatalogError: `run` is not the run that this root belongs to.
        OSError: the storage cannot be read.
    """
    storage, root = st.resolve(root_url)
    seen = roots.scan(storage, root)
    run = _whose(root, seen, run)
    plan = ScanPlan(
        root_url=storage.url(root), run=run, root_id=None if seen.identity is None else seen.identity.root_id
    )
    plan = replace(plan, unmanaged=tuple(Item(name, storage.url(st.join(root, name))) for name in seen.unmanaged))
    rows = {row.save_id: row for row in catalog.checkpoints(run)}
    plan = _locate(plan, catalog, seen)
    if not plan.unavailable:
        plan = _add_attempts(plan, catalog, seen)
        plan = _add_found(plan, storage, root, seen.found, rows)
        plan = _add_missing(plan, storage, root, seen.found, rows.values())
    return plan


def _whose(root: str, seen: roots.RootScan, asked: str | None) -> str:
    """The run that a root belongs to."""
    if seen.identity is not None:
        if asked not in (None, seen.identity.run):
            raise CatalogError(f"{root}: belongs to run {seen.identity.run!r}, not to {asked!r}")
        return seen.identity.run
    named = {found.save.begin.run for found in seen.found if found.save is not None and found.save.begin is not None}
    named.discard(None)
    return asked or (str(named.pop()) if len(named) == 1 else st.basename(root))


def _locate(plan: ScanPlan, catalog: Catalog, seen: roots.RootScan) -> ScanPlan:
    """Whether this is a root that the catalog knows, and whether it is where the catalog thinks."""
    locations = catalog.locations(plan.run)
    if plan.root_id is None:
        named = [place for place in locations if place.url == plan.root_url and place.root_id is not None]
        if named:
            return replace(
                plan,
                unavailable=f"{plan.root_url}: the catalog knows root {named[0].root_id} here, but there is no "
                ".ckpt/root.json. Is the storage mounted?",
            )
        if not seen.found and not seen.unmanaged:
            return replace(plan, unavailable=f"{plan.root_url}: nothing is there. Is the storage mounted?")
        return plan
    for place in locations:
        if place.root_id == plan.root_id and place.url != plan.root_url:
            if _identity_at(place.url) == plan.root_id:
                return replace(
                    plan,
                    unavailable=f"{plan.root_url}: a copy of {place.url}, which is still there. A copy is a second "
                    "location, not a second checkpoint; only one location per root is recorded.",
                )
            return replace(plan, moved_from=place.url)
        if place.url == plan.root_url and place.root_id not in (None, plan.root_id):
            log.warning("%s: holds root %s now, the catalog knew %s there", plan.root_url, plan.root_id, place.root_id)
    return plan


def _identity_at(url: str) -> str | None:
    """Who is at a URL; None also when that cannot be said."""
    try:
        storage, root = st.resolve(url)
        found = roots.read_identity(storage, root)
    except (OSError, ValueError, CkptError):
        return None
    return None if found is None else found.root_id


def _add_attempts(plan: ScanPlan, catalog: Catalog, seen: roots.RootScan) -> ScanPlan:
    if plan.root_id is None or plan.run is None:
        return plan
    known = {attempt.attempt_id for attempt in catalog.attempts(plan.run)}
    events = [
        AttemptEvent(
            run=plan.run,
            root_url=plan.root_url,
            root_id=plan.root_id,
            attempt=attempt.number,
            attempt_id=attempt.attempt_id,
            topology=attempt.topology,
            resumed_from=None,  # follows from the parents of its checkpoints
            host=attempt.host,
            pid=attempt.pid,
            started_at=attempt.started_at,
        )
        for attempt in seen.attempts
        if attempt.attempt_id not in known
    ]
    return replace(plan, attempts=tuple(events))


def _add_found(
    plan: ScanPlan, storage: st.Storage, root: str, found: Iterable[roots.Found], rows: dict[str, CheckpointRow]
) -> ScanPlan:
    """Sorts what is there into the plan's lists, in the order of the run."""
    lists: dict[str, list[Item]] = {
        name: [] for name in ("adopt", "decide", "returned", "reappeared", "incomplete", "unmanaged")
    }
    entries: list[NewCheckpoint] = []
    known = 0
    for one in sorted(found, key=lambda one: one.order):
        item = Item(
            one.name, one.url, one.iteration, one.save.save_id if one.save else None, None, one.format, one.reason
        )
        begin = None if one.save is None else one.save.begin
        if begin is not None and begin.run not in (None, plan.run):
            lists["unmanaged"].append(replace(item, reason=f"belongs to run {begin.run!r}"))
            continue
        if begin is not None and begin.piece is not None:
            reason = f"rank {begin.piece.rank}'s piece of a local checkpoint: of use to that rank alone"
            lists["unmanaged"].append(replace(item, reason=reason))
            continue
        if one.state == "undecided" and begin is not None:
            missing = commit.read_records(storage, one.path, begin).missing
            if missing:
                reason = f"{len(missing)} of {begin.world_size} ranks have not finished"
                writing = in_flight.look(storage, one.path, plan.run or "", begin)
                lists["incomplete"].append(replace(item, reason=f"{writing}; {reason}" if writing.alive else reason))
            else:
                lists["decide"].append(replace(item, reason="every rank finished, nobody decided"))
            continue
        if one.state not in ("committed", "foreign"):
            if one.state != "deleted":
                lists["incomplete"].append(replace(item, reason=one.reason or one.state))
            continue
        try:
            save_id = item.save_id or foreign.identity(storage, one.path, one.iteration)
            row = rows.get(save_id)
            if row is not None and row.lifecycle == "finalized":
                known += 1
                continue
            if one.save is None:
                entry = foreign.describe(storage, root, plan.root_id, plan.run or "", one)
            else:
                entry = _own_entry(plan, storage, one.path, one.save)
        except CkptError as error:
            lists["incomplete"].append(replace(item, reason=str(error)))
            continue
        item = replace(item, save_id=save_id, size=entry.size, format=entry.format, reason="")
        if row is None:
            lists["adopt"].append(item)
        else:
            back = {"missing": "returned", "deleting": "reappeared", "deleted": "reappeared"}.get(
                row.lifecycle, "adopt"
            )
            lists[back].append(replace(item, checkpoint_id=row.id, reason=f"is {row.lifecycle} in the catalog"))
        entries.append(entry)
    return replace(
        plan,
        adopt=tuple(lists["adopt"]),
        decide=tuple(lists["decide"]),
        returned=tuple(lists["returned"]),
        reappeared=tuple(lists["reappeared"]),
        incomplete=tuple(lists["incomplete"]),
        unmanaged=(*plan.unmanaged, *lists["unmanaged"]),
        known=known,
        entries=tuple(entries),
    )


def _own_entry(plan: ScanPlan, storage: st.Storage, path: str, save: commit.SaveState) -> NewCheckpoint:
    """What to record of a committed save of ours.

    Raises:
        CkptError: its records are damaged.
    """
    manifest = commit.read_manifest(storage, path, save)
    decision = save.decision
    if decision is None or decision.manifest_sha256 is None:
        raise NotACheckpointError(f"{storage.url(path)}: save {save.save_id} has no commit decision")
    event = CommitEvent(storage.url(path), plan.root_url, plan.root_id, manifest, decision.manifest_sha256, decision)
    return from_commit(event, run=plan.run, adopted=True)


def _add_missing(
    plan: ScanPlan,
    storage: st.Storage,
    root: str,
    found: Iterable[roots.Found],
    rows: Iterable[CheckpointRow],
) -> ScanPlan:
    """What the catalog has here and storage has not. Only where the root proves who it is (D4)."""
    if plan.root_id is None:
        return plan
    here = {one.save.save_id for one in found if one.save is not None and one.state in ("committed", "damaged")}
    missing = []
    for row in rows:
        if row.root_id != plan.root_id or row.lifecycle != "finalized" or row.save_id in here:
            continue
        reason = _why_missing(storage, st.join(root, row.path), row)
        if reason:
            url = storage.url(st.join(root, row.path))
            missing.append(Item(row.path, url, row.iteration, row.save_id, row.size, row.format, reason, row.id))
    return replace(plan, missing=tuple(missing))


def _why_missing(storage: st.Storage, path: str, row: CheckpointRow) -> str:
    """Why a recorded checkpoint is not there; empty when it is, or is damaged, which verification has to judge."""
    if row.save_id.startswith(FOREIGN_PREFIX):
        return "" if formats.sniff(storage, path) is not None else "there is no checkpoint in its directory"
    save = commit.read_save(storage, path, row.save_id)
    if save.committed or (save.damage is not None and not save.tombstoned):
        return ""
    return "a tombstone says it was deleted or replaced" if save.tombstoned else "its commit decision is gone"


# ---------------------------------------------------------------- apply


def apply(plan: ScanPlan, catalog: Catalog, *, actor: str | None = None) -> ScanResult:
    """Carries out a plan: decides, records, marks. Deletes nothing; twice changes nothing more.

    Raises:
        CatalogError: the root is unavailable; nothing was done.
        OSError: the storage failed while deciding a save.
    """
    if plan.unavailable or plan.run is None:
        raise CatalogError(plan.unavailable or f"{plan.root_url}: belongs to no run")
    storage, root = st.resolve(plan.root_url)
    catalog.register_root(plan.run, plan.root_url, plan.root_id, actor=actor)
    for event in plan.attempts:
        catalog.record_attempt(event, actor=actor)
    decided, entries, skipped = _decide(plan, storage, root)
    by_save = {entry.save_id: entry for entry in (*plan.entries, *entries)}
    adopted: dict[str, list[CheckpointRow]] = {"adopt": [], "returned": [], "reappeared": []}
    lists = {
        item.save_id: name
        for name, items in (("returned", plan.returned), ("reappeared", plan.reappeared))
        for item in items
    }
    # In the order of the run, so that the catalog's sequence and times follow it.
    for entry in sorted(by_save.values(), key=lambda entry: (entry.attempt, entry.iteration, entry.save_id)):
        if not entry.save_id.startswith(FOREIGN_PREFIX):
            _roll_forward(storage, st.join(root, entry.path))
        row = catalog.record_checkpoint(entry, actor=actor)
        adopted[lists.get(entry.save_id, "adopt")].append(row)
    missing = []
    for item in plan.missing:
        try:
            row = catalog.checkpoint_by_id(item.checkpoint_id or 0)
            if row.lifecycle == "finalized":
                reason = f"scan: {item.reason}"
                missing.append(catalog.mark_missing(row.id, reason=reason, actor=actor, version=row.version))
        except StaleWriteError as error:
            skipped.append(replace(item, reason=f"changed since the plan: {error}"))
    return ScanResult(
        adopted=tuple(adopted["adopt"]),
        decided=tuple(decided),
        returned=tuple(adopted["returned"]),
        reappeared=tuple(adopted["reappeared"]),
        missing=tuple(missing),
        skipped=tuple(skipped),
    )


def _decide(plan: ScanPlan, storage: st.Storage, root: str) -> tuple[list[Item], list[NewCheckpoint], list[Item]]:
    """Commits what is complete and undecided (W7): what was decided, what there is to record of it, what was not."""
    decided, entries, skipped = [], [], []
    for item in plan.decide:
        path = st.join(root, item.name)
        save = commit.read_save(storage, path, item.save_id or "")
        decision = save.decision
        if decision is None and save.begin is not None:
            decision = commit.try_commit(storage, path, save.begin, decided_by="adopt")
        if decision is None:
            skipped.append(replace(item, reason="is not complete any more"))
            continue
        reason = "committed" if decision.outcome == "commit" else f"aborted: {decision.reason}"
        decided.append(replace(item, reason=reason))
        save = commit.read_save(storage, path, save.save_id)
        if save.committed:
            entries.append(_own_entry(plan, storage, path, save))
    return decided, entries, skipped


def _roll_forward(storage: st.Storage, path: str) -> None:
    """Completes the exports of what is adopted (W5); a read-only storage is no reason not to record it."""
    try:
        exports.roll_forward(storage, path)
    except (OSError, CkptError) as error:
        log.warning("%s: its exports could not be completed: %s", storage.url(path), error)
