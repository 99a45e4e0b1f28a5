"""Choosing a resume point without a catalog, and reading what a checkpoint stores beside the state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ckptlib import roots
from ckptlib import storage as st
from ckptlib.errors import CkptError, NoResumePointError, VersionError
from ckptlib.events import Notice, NoticeHandler, ResumeChoice, emit
from ckptlib.layouts import legacy
from ckptlib.progress import observe
from ckptlib.rng import KEY as RNG_KEY
from ckptlib.rng import KEY_BY_RANK
from ckptlib.sharding import ShardedObject
from ckptlib.source import Source
from ckptlib.stored_rng import StoredStreams, stored_streams
from ckptlib.topology import Topology

__all__ = ["ResumeChoice", "StoredExtras", "choice_of", "is_bookkeeping", "newest_committed", "newest_verifying"]

RERUN_KEY = "rerun_state_machine_state"

OWN_KEYS = frozenset({"iteration", "checkpoint_version", "num_floating_point_operations_so_far", "progress", "args"})
"""What a `Checkpointer` saves beside the caller's parts."""

CONTENT_METADATA = "content_metadata"
"""What Megatron-LM and our integration of it write about the form of the state; no part of it."""

_BESIDE = frozenset({CONTENT_METADATA, RNG_KEY, KEY_BY_RANK, RERUN_KEY, legacy.RERUN})
"""What else stands beside the parts of a state at the top of a whole state dict."""

_OWN_PREFIXES = (
    "progress.",
    "args.",
    f"{RNG_KEY}/",
    f"{RNG_KEY}.",
    f"{KEY_BY_RANK}/",
    f"{KEY_BY_RANK}.",
    f"{RERUN_KEY}/",
    f"{RERUN_KEY}.",
    "common_state/",
)


def is_bookkeeping(key: str) -> bool:
    """Whether a stored key belongs to a `Checkpointer` or to Megatron's trainer, not to a part of the state."""
    return key in OWN_KEYS or key in _BESIDE or key.startswith(_OWN_PREFIXES)


def choice_of(found: roots.Found, reason: str) -> ResumeChoice:
    """A found checkpoint as a decision."""
    return ResumeChoice(found.url, found.iteration, None if found.save is None else found.save.save_id, reason)


def newest_committed(
    storage: st.Storage, root: str, at: int | None, on_event: NoticeHandler | None
) -> ResumeChoice | None:
    """The newest committed checkpoint of a root; None when there is none (of iteration `at`).

    Directories whose records are damaged cannot be told apart from uncommitted ones; each is reported.

    Raises:
        NoResumePointError: there are only broken ones, which must not look like none.
        VersionError: the newest was written by a newer ckptlib.
    """
    newest = roots.newest_committed(storage, root, at=at)
    broken = _broken(storage, root, at, newest, on_event)
    if newest is None and broken:
        raise _no_resume_point(storage, root, "no usable checkpoint", broken)
    return None if newest is None else choice_of(newest, "newest committed on storage")


def newest_verifying(
    storage: st.Storage,
    root: str,
    at: int | None,
    on_event: NoticeHandler | None,
    storage_options: Mapping[str, Any] | None = None,
    level: str = "auto",
) -> ResumeChoice | None:
    """The newest committed checkpoint whose bytes verify now: what to trust when nobody has verified anything.

    Args:
        level: of `verification.verify`.

    Returns:
        None when there is no committed checkpoint (of iteration `at`).

    Raises:
        NoResumePointError: there are some, broken ones included, and none verifies; with the reason for each.
        VersionError: the newest was written by a newer ckptlib.
    """
    usable = sorted(roots.usable(roots.scan(storage, root), at), key=lambda found: found.order, reverse=True)
    rejected = _broken(storage, root, at, usable[0] if usable else None, on_event)
    for found in usable:
        reason = damage_of(found, storage_options, level)
        if reason is None:
            return choice_of(found, "newest committed on storage; verified now")
        rejected.append((found.name, reason))
        emit(on_event, Notice("resume_candidate_rejected", f"{found.url}: {reason}"))
    if rejected:
        raise _no_resume_point(storage, root, "no committed checkpoint verifies", rejected)
    return None


def damage_of(found: roots.Found, storage_options: Mapping[str, Any] | None = None, level: str = "auto") -> str | None:
    """What is wrong with the bytes of a checkpoint, looked at now; None: nothing.

    Args:
        level: of `verification.verify`.
    """
    from ckptlib.verification import verify

    save_id = None if found.save is None else found.save.save_id
    try:
        report = verify(found.url, level=level, save_id=save_id, storage_options=storage_options)
    except CkptError as error:
        return str(error)
    return None if report.ok else "; ".join(report.problems)


def _broken(
    storage: st.Storage, root: str, at: int | None, newest: roots.Found | None, on_event: NoticeHandler | None
) -> list[tuple[str, str]]:
    """What may have been a checkpoint and cannot be used, name and reason; each is reported, and so is every LOCAL one.

    Raises:
        VersionError: one that a newer ckptlib wrote comes after `newest`: it is not broken, we are too old for it.
    """
    broken = []
    for found in roots.scan(storage, root).found:
        if at is None and found.state == "committed" and found.kind != "release" and found.only_on_request:
            text = f"{found.url}: every rank's own state (LOCAL), which is only used when its iteration is named"
            emit(on_event, Notice("resume_candidate_rejected", text))
            continue
        if found.state not in ("damaged", "foreign-incomplete") or found.kind == "release":
            continue
        if at not in (None, found.iteration):
            continue
        damage = None if found.save is None else found.save.damage
        if isinstance(damage, VersionError) and (newest is None or found.order > newest.order):
            raise damage
        broken.append((found.name, found.reason))
        emit(on_event, Notice("resume_candidate_rejected", f"{found.url}: {found.reason}"))
    return broken


def _no_resume_point(storage: st.Storage, root: str, what: str, rejected: list[tuple[str, str]]) -> NoResumePointError:
    text = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    return NoResumePointError(f"{storage.url(root)}: {what}: {text}", rejected=rejected)


class StoredExtras:
    """Reads what a checkpoint stores beside the caller's state; absent things are None."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def progress(self) -> Mapping[str, float]:
        """The numbers given to `save`; for a Megatron checkpoint, what its arguments say."""
        if self._source.manifest is not None:
            return dict(self._source.manifest.begin.progress)
        args = self._common.get("args")
        consumed = getattr(args, "consumed_train_samples", None)
        return {} if consumed is None else {"consumed_samples": consumed}

    def observed(self) -> Mapping[str, float]:
        """What the state said at the save (`ckptlib.progress.observe`); Megatron-LM's says where its scheduler was.

        Its consumed samples are in the arguments, and its trainer takes them from there after a load.
        """
        if self._source.manifest is not None:
            return self._source.manifest.begin.observed
        return observe({"opt_param_scheduler": self._common.get("opt_param_scheduler")})

    def value(self, key: str) -> Any:
        """A plain value at the top of the state."""
        return self._common.get(key)

    def rerun_state(self, world_size: int, rank: int) -> Any:
        """A rank's rerun state, saved by as many ranks."""
        cell = ShardedObject(RERUN_KEY, None, (world_size,), (rank,)).unique_key
        names = (name for name in (cell, f"{RERUN_KEY}.{rank}") if self._source.index.has_object(name))
        return next(map(self._source.read_object, names), None)

    def has_rerun_state(self) -> bool:
        """Whether any rank's is stored."""
        beginnings = (f"{RERUN_KEY}/shard_", f"{RERUN_KEY}.")
        return any(name.startswith(beginnings) for name in self._source.index.object_keys)

    def streams(self, now: Topology, rank: int) -> StoredStreams | None:
        """What the random streams of `rank` continue from; see `stored_rng.stored_streams`."""
        return stored_streams(self._source, now, rank)

    @functools.cached_property
    def _common(self) -> Mapping[str, Any]:
        return self._source.read_common()
