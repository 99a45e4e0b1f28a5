"""What a restore of a run begins from: the catalog's choice or storage's, or the ranks' own local checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptlib import commit, removal, resume, roots
from ckptlib import storage as st
from ckptlib.coordination import Group, PieceGroup, lead
from ckptlib.errors import IntegrityError, NoResumePointError
from ckptlib.events import Notice, NoticeHandler, Resolver, emit
from ckptlib.load_options import LoadOptions
from ckptlib.local import Chosen, LocalTier
from ckptlib.locations import Tier
from ckptlib.planning import PlanCache
from ckptlib.restoring import Restored, RestoreRequest, restore_from


@dataclass(frozen=True)
class Found:
    """What there is to resume from.

    Attributes:
        choice: the run's; None: it has none.
        verify: the verification that the choice still needs before it may be trusted.
        local: the ranks' own set, newer than the choice, or why there is none.
        on_first_tier: the choice is what the first tier holds.
    """

    choice: resume.ResumeChoice | None
    verify: str | None
    local: Chosen
    on_first_tier: bool = False


@dataclass(frozen=True)
class _Choice:
    """The run's resume point, the verification that it still needs before it may be trusted, and where it is."""

    choice: resume.ResumeChoice
    verify: str | None = None
    on_first_tier: bool = False
    by_resolver: bool = False


@dataclass(frozen=True)
class ResumePoints:
    """Where an attempt looks.

    Attributes:
        resolver: who decides; None: storage.
        local: the ranks' own checkpoints; None: they keep none.
        first: the first tier of what is at `root`; None: there is none.
    """

    storage: st.Storage
    root: str
    run: str
    attempt: int
    group: Group
    resolver: Resolver | None
    local: LocalTier | None
    on_event: NoticeHandler | None
    storage_options: Any = field(repr=False)
    first: Tier | None = None

    def find(self, at: int | None, options: LoadOptions, drain: Callable[[], object]) -> Found:
        """The newest, or exactly iteration `at` (R6). Collective.

        Args:
            drain: waits for saves in flight, which may be the newest local set, and may remove older pieces.

        Raises:
            NoResumePointError: there are checkpoints, and none is eligible.
        """
        self.group.next_round()
        chosen, refused = lead(self.group, "resume", lambda: self._choose_or_refuse(at))
        choice = None if chosen is None else chosen.choice
        local = Chosen(None)
        if self.local is not None:
            drain()
            order = None if choice is None else roots.order_of(choice.save_id, choice.iteration)
            local = self.local.choose(self.group, at, order, parts_only=options.by_tensor)
            if local.set is None and local.reason and self.group.rank == 0:
                emit(self.on_event, Notice("local_checkpoints_unused", local.reason))
        if local.set is None and refused is not None:
            raise refused
        if chosen is None:
            return Found(None, None, local)
        return Found(choice, chosen.verify, local, chosen.on_first_tier)

    def restore(self, found: Found, request: RestoreRequest, state: dict[str, Any]) -> tuple[Restored, str | None]:
        """Restores from what was found; also the save that the attempt continues.

        Args:
            request: its `choice` is that of `found`, if there is one.

        Raises:
            CkptError: as `restore_from`.
        """
        if found.local.set is not None:
            return self._restore_local(found.local, request, state)
        if found.on_first_tier and self.first is not None:
            request = replace(request, storage_options=self.first.options)
        with self._pinned(found, request.choice):
            restored = restore_from(request, state)
        return replace(restored, reason=f"{restored.reason}{found.local.beside}"), request.choice.save_id

    def _pinned(self, found: Found, choice: resume.ResumeChoice) -> contextlib.AbstractContextManager[None]:
        """Keeps a checkpoint from being removed while it is read: a non-persistent one, which a save in flight may
        supersede, and any on a first tier, from which an upload that ends may remove it."""
        if self.group.rank != 0 or choice.save_id is None:
            return contextlib.nullcontext()
        if found.on_first_tier and self.first is not None:
            return removal.pinned(self.first.storage, self.first.root, self.attempt, choice.save_id)
        if not choice.url.startswith(self.storage.url(st.join(self.root, roots.NON_PERSISTENT)) + "/"):
            return contextlib.nullcontext()
        return removal.pinned(self.storage, self.root, self.attempt, choice.save_id)

    def _restore_local(
        self, chosen: Chosen, request: RestoreRequest, state: dict[str, Any]
    ) -> tuple[Restored, str | None]:
        """Each rank from its own piece: to itself a world of one, and what one rank refuses changes nothing on any."""
        assert self.local is not None  # else there is no choice
        assert chosen.set is not None
        options = replace(request.options, verify=None, load_parallelism=None, process_group=None)
        piece = replace(
            request,
            choice=self.local.choice(chosen.set, chosen.reason),
            options=options,
            group=PieceGroup(self.group),
            plans=PlanCache(),
            topology=None,
            storage_options=None,
        )
        try:
            restored = restore_from(piece, state)
        except IntegrityError as error:
            self.local.pieces.suspect(chosen.set, str(error))
            raise
        return restored, self.local.pieces.parent_of(chosen.set)

    def _choose_or_refuse(self, at: int | None) -> tuple[_Choice | None, NoResumePointError | None]:
        """As `_choose`; where there may be others than the run's own, its refusal is not the last word."""
        chosen, refused = None, None
        by_resolver = False
        try:
            chosen = self._choose(at)
            by_resolver = chosen is not None and chosen.by_resolver
        except NoResumePointError as error:
            if self.local is None and self.first is None:
                raise
            refused = error
            by_resolver = self.resolver is not None
        if self.first is not None:
            near = None
            try:
                near = self._choose_near(self.first, at, None if chosen is None else chosen.choice, by_resolver)
            except OSError as error:
                if chosen is None:
                    raise
                text = f"{self.first.url}: {type(error).__name__}: {error}; resuming from what is durable"
                emit(self.on_event, Notice("first_tier_unread", text))
            if near is not None:
                return near, None
        if refused is not None and self.local is None:
            raise refused
        return chosen, refused

    def _choose_near(
        self, first: Tier, at: int | None, durable: resume.ResumeChoice | None, by_resolver: bool
    ) -> _Choice | None:
        """The newest on the first tier that is intact, if it is at least as new as the durable one.

        Args:
            by_resolver: whoever has chosen knows of all that is durable, and why not to take a newer one of these.

        Raises:
            OSError: a location could not be read.
        """
        least = (-1, -1, "")
        if durable is not None:
            least = (*roots.order_of(durable.save_id, durable.iteration), durable.save_id or "")
        usable = roots.usable(roots.scan(first.storage, first.root), at)
        for found in sorted(usable, key=lambda found: found.order, reverse=True):
            if found.order < least:
                break
            there = self._read_durable(found)
            if by_resolver and found.order[2] != least[2] and there is not None and there.committed:
                continue
            reason: str | None
            if there is not None and there.tombstoned:
                reason = f"deleted, or replaced, at {self.storage.url(self.root)}; nothing deleted returns"
            else:
                reason = resume.damage_of(found, first.options)
            if reason is None:
                return _Choice(resume.choice_of(found, "newest on the first tier; verified now"), on_first_tier=True)
            emit(self.on_event, Notice("resume_candidate_rejected", f"{found.url}: {reason}"))
        return None

    def _read_durable(self, found: roots.Found) -> commit.SaveState | None:
        """What the durable location says of a checkpoint of the first tier; None: that is of another tool."""
        if found.save is None:
            return None
        return commit.read_save(self.storage, st.join(self.root, found.name), found.save.save_id)

    def _choose(self, at: int | None) -> _Choice | None:
        """The run's resume point."""
        if self.resolver is None:
            choice = resume.newest_committed(self.storage, self.root, at, self.on_event)
            return None if choice is None else _Choice(choice)
        try:
            choice = self.resolver.resolve(run=self.run, root_url=self.storage.url(self.root), at=at)
        except NoResumePointError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a catalog raises
            # S4: a dead catalog must not keep a job from resuming; what it would have told is checked here instead.
            emit(self.on_event, Notice("resolver_failed", f"{type(error).__name__}: {error}; asking storage"))
            choice = None
        if choice is not None:
            return _Choice(choice, by_resolver=True)
        level = "data" if getattr(self.resolver, "require", None) == "data" else "auto"
        verified = resume.newest_verifying(self.storage, self.root, at, self.on_event, self.storage_options, level)
        return None if verified is None else _Choice(verified)
