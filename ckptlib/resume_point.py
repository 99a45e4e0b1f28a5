"""What a restore of a run begins from: the catalog's choice or storage's, or the ranks' own local checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptlib import removal, resume, roots
from ckptlib import storage as st
from ckptlib.coordination import Group, PieceGroup, lead
from ckptlib.errors import IntegrityError, NoResumePointError
from ckptlib.events import Notice, NoticeHandler, Resolver, emit
from ckptlib.load_options import LoadOptions
from ckptlib.local import Chosen, LocalTier
from ckptlib.planning import PlanCache
from ckptlib.restoring import Restored, RestoreRequest, restore_from


@dataclass(frozen=True)
class Found:
    """What there is to resume from.

    Attributes:
        choice: the run's; None: it has none.
        verify: the verification that the choice still needs before it may be trusted.
        local: the ranks' own set, newer than the choice, or why there is none.
    """

    choice: resume.ResumeChoice | None
    verify: str | None
    local: Chosen


@dataclass(frozen=True)
class ResumePoints:
    """Where an attempt looks.

    Attributes:
        resolver: who decides; None: storage.
        local: the ranks' own checkpoints; None: they keep none.
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

    def find(self, at: int | None, options: LoadOptions, drain: Callable[[], object]) -> Found:
        """The newest, or exactly iteration `at` (R6). Collective.

        Args:
            drain: waits for saves in flight, which may be the newest local set, and may remove older pieces.

        Raises:
            NoResumePointError: there are checkpoints, and none is eligible.
        """
        self.group.next_round()
        chosen, refused = lead(self.group, "resume", lambda: self._choose_or_refuse(at))
        choice, verify = chosen or (None, None)
        local = Chosen(None)
        if self.local is not None:
            drain()
            order = None if choice is None else roots.order_of(choice.save_id, choice.iteration)
            local = self.local.choose(self.group, at, order, parts_only=options.by_tensor)
            if local.set is None and local.reason and self.group.rank == 0:
                emit(self.on_event, Notice("local_checkpoints_unused", local.reason))
        if local.set is None and refused is not None:
            raise refused
        return Found(choice, verify, local)

    def restore(self, found: Found, request: RestoreRequest, state: dict[str, Any]) -> tuple[Restored, str | None]:
        """Restores from what was found; also the save that the attempt continues.

        Args:
            request: its `choice` is that of `found`, if there is one.

        Raises:
            CkptError: as `restore_from`.
        """
        if found.local.set is not None:
            return self._restore_local(found.local, request, state)
        with self._pinned(request.choice):
            restored = restore_from(request, state)
        return replace(restored, reason=f"{restored.reason}{found.local.beside}"), request.choice.save_id

    def _pinned(self, choice: resume.ResumeChoice) -> contextlib.AbstractContextManager[None]:
        """Keeps a non-persistent checkpoint from being removed while it is read: a save in flight may supersede it."""
        inside = self.storage.url(st.join(self.root, roots.NON_PERSISTENT)) + "/"
        if self.group.rank != 0 or choice.save_id is None or not choice.url.startswith(inside):
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

    def _choose_or_refuse(
        self, at: int | None
    ) -> tuple[tuple[resume.ResumeChoice, str | None] | None, NoResumePointError | None]:
        """As `_choose`; where there may be local checkpoints, its refusal is not the last word."""
        try:
            return self._choose(at), None
        except NoResumePointError as error:
            if self.local is None:
                raise
            return None, error

    def _choose(self, at: int | None) -> tuple[resume.ResumeChoice, str | None] | None:
        """The run's resume point, and the verification it still needs before it may be trusted."""
        if self.resolver is None:
            choice = resume.newest_committed(self.storage, self.root, at, self.on_event)
            return None if choice is None else (choice, None)
        try:
            choice = self.resolver.resolve(run=self.run, root_url=self.storage.url(self.root), at=at)
        except NoResumePointError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a catalog raises
            # S4: a dead catalog must not keep a job from resuming; what it would have told is checked here instead.
            emit(self.on_event, Notice("resolver_failed", f"{type(error).__name__}: {error}; asking storage"))
            choice = None
        if choice is not None:
            return choice, None
        level = "data" if getattr(self.resolver, "require", None) == "data" else "auto"
        verified = resume.newest_verifying(self.storage, self.root, at, self.on_event, self.storage_options, level)
        return None if verified is None else (verified, None)
