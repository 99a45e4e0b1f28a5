"""The facade a trainer holds: one per process, on every rank.

Construction is the start of an *attempt* (W8): the attempt file is created, what older attempts left undecided is
settled, and only then may `restore` choose a resume point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ckptlib import removal, resume, rng, roots
from ckptlib import storage as st
from ckptlib.announcing import Announcer
from ckptlib.async_options import AsyncOptions
from ckptlib.async_save import failed_save, run_async_save
from ckptlib.background_saves import BackgroundSaves, Target
from ckptlib.combinations import FORMAT_OF, check
from ckptlib.coordination import Group, SoloGroup, StoreGroup, agree, lead, new_group
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    CoordinationError,
    NoResumePointError,
    RankTimeoutError,
    SaveLimitError,
    StagingError,
    StateError,
    UnsupportedError,
)
from ckptlib.events import CommitEvent, CommitListener, Notice, NoticeHandler, Resolver, emit
from ckptlib.held import HeldClock, holds
from ckptlib.layouts.contents import check_topology
from ckptlib.ledger import Ledger
from ckptlib.load_options import LoadOptions, LoadParallelism, Rename, Strict
from ckptlib.local import LocalOptions, LocalTier
from ckptlib.local_pieces import Pieces
from ckptlib.local_sets import World
from ckptlib.locations import Locations, Opened, Tier, check_reach, durable_tier
from ckptlib.manifest import Begin, Format, IoMode, Kind, SemanticType
from ckptlib.metrics import MetricsHandler
from ckptlib.planning import PlanCache
from ckptlib.progress import check_names
from ckptlib.requests import Asked, Requests
from ckptlib.restoring import Restored, RestoreRequest
from ckptlib.resume_point import ResumePoints
from ckptlib.saving import SaveRequest, SaveResult, plan_together, run_save
from ckptlib.staging import layout
from ckptlib.topology import Topology
from ckptlib.upload_options import UploadOptions
from ckptlib.uploads import Uploads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TrackerMode = Literal["committed", "verified"]

_NO_ROOM = "no earlier save ended within {:g} s (timeout): the storage is slower than saves come. Save less often."


class Checkpointer:
    """Saves and restores one run.

    Args:
        root: the run's directory; one run per root.
        run: its name; any printable text.
        topology: parallel sizes; their product must be the world size. None: unknown.
        resolver: who decides what to resume from (`catalog.ResumeResolver`: the newest verified). None: the newest
            committed on storage.
        listeners: told of attempts and commits, on rank 0 (`catalog.Recorder`).
        save_interval: `step` saves when the iteration is a multiple of it.
        contents: names of the state's parts to save, plus ``rng``; None: everything.
        tracker: ``committed``: this process moves the tracker file after each commit; ``verified``: whoever verifies
            does, so that a reader of the tracker never sees an unverified checkpoint.
        rng_tracker: RNG streams beside the global ones; Megatron-Core's and Transformer Engine's trackers as they are.
        data_parallel_random_init: as Megatron-Core's: its readers find the RNG state of every data-parallel rank in
            ``rng_state``, not of the first alone. Rank 0 collects and writes them. Every rank's own state is stored
            with or without.
        single_writer: vouches that nobody else writes to this root, for storages without exclusive creation.
        timeout: seconds that a rank waits for another.
        settle_wait: seconds that construction waits, at most, for saves of older attempts that are still being written
            by workers that outlived their trainer; less than `timeout`, half of it by default. One that nobody writes
            is not waited for.
        semantic_type: what a checkpoint means (docs/combinations.md).
        format: None: the one that goes with it.
        io_mode: ``sync``: `save` returns when the checkpoint exists; ``async``: when the state may change.
        background: how asynchronous saves are written; None: a worker process, one save in flight.
        local: where each rank keeps checkpoints of its own (``kind="non_persistent_local"``); None: nowhere.
        upload: where checkpoints are uploaded in the background once they are committed at `root`, which is then the
            run's first tier: a fast directory that all ranks see. Listeners hear of what is uploaded, and a restore
            takes the newest of both. None: `root` is the durable location.
        on_event: called with each `Notice`.
        on_metrics: called with the numbers of each committed save, on rank 0 (`SaveMetrics`); they are logged too.
        storage_options: see `ckptlib.storage.resolve`.

    Raises:
        StorageUnavailableError: the root belongs to another run.
        ExclusiveCreateError: W4.
        StateError: the topology does not fit the world size, or the run name is unusable.
        UnsupportedError: the combination of semantic type, format and io mode is impossible, or impossible here: a
            worker process cannot reach the storage, a LEGACY layout cannot hold the topology.
        StorageError: a rank's local root cannot be used.
        StorageUnavailableError: `root` is no first tier of the durable location, or a rank does not see it.
    """

    def __init__(
        self,
        root: str,
        *,
        run: str,
        topology: Topology | None = None,
        resolver: Resolver | None = None,
        listeners: Sequence[CommitListener] = (),
        save_interval: int | None = None,
        contents: Collection[str] | None = None,
        tracker: TrackerMode = "committed",
        rng_tracker: rng.RngTracker | rng.TrackerLike | None = None,
        data_parallel_random_init: bool = False,
        single_writer: bool = False,
        timeout: float = 600.0,
        settle_wait: float | None = None,
        semantic_type: SemanticType = "GLOBAL",
        format: Format | None = None,
        io_mode: IoMode = "sync",
        background: AsyncOptions | None = None,
        local: LocalOptions | None = None,
        upload: UploadOptions | None = None,
        on_event: NoticeHandler | None = None,
        on_metrics: MetricsHandler | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        roots.check_run_name(run)
        if save_interval is not None and save_interval < 1:
            raise StateError(f"save_interval {save_interval}: expected at least 1 iteration")
        if tracker not in ("committed", "verified"):
            raise StateError(f"tracker {tracker!r}: expected 'committed' or 'verified'")
        settle_wait = timeout / 2 if settle_wait is None else settle_wait
        if not 0 <= settle_wait < timeout:
            raise StateError(f"settle_wait {settle_wait:g} s: expected less than the {timeout:g} s that ranks wait")
        self.run = run
        self.topology = topology
        self._group: Group = new_group(timeout=timeout)
        self._drains: Group = new_group(timeout=timeout)  # its own: a save may wait for its ranks just then
        if topology is not None and topology.world_size != self._group.world_size:
            raise StateError(
                f"topology {topology} has {topology.world_size} ranks, torch.distributed has {self._group.world_size}"
            )
        self._storage, self._root = st.resolve(root, storage_options, single_writer=single_writer)
        self._storage_options = storage_options
        moves_tracker = tracker == "committed"
        heard = listeners if self._group.rank == 0 else ()
        first = Tier(self._storage, self._root, storage_options)
        background = background or AsyncOptions()
        self._places = Locations(first, None if upload is None else durable_tier(upload), on_event)
        if self._places.durable is not None:
            check_reach(first, self._places.durable, background.worker)
        here = heard if self._places.durable is None else ()
        self._announcer = Announcer(self._storage, self._root, here, moves_tracker=moves_tracker)
        self._public = self._announcer  # whom listeners hear
        if self._places.durable is not None:
            self._public = Announcer(self._places.home.storage, self._places.home.root, heard, moves_tracker=False)
        self._save_interval = save_interval
        self._contents = contents
        self._rng_tracker = rng.RngTracker.of(rng_tracker) if isinstance(rng_tracker, rng.TrackerLike) else rng_tracker
        self._on_event = on_event
        self._held = HeldClock()
        self._timeout = timeout
        self._semantic_type: SemanticType = semantic_type
        self._format: Format = FORMAT_OF.get(semantic_type, "torch_dist") if format is None else format
        self._io_mode: IoMode = io_mode
        target = Target(self.root, storage_options, single_writer, moves_tracker)
        abandon = self._group.abandon if isinstance(self._group, StoreGroup) else None
        self._background = BackgroundSaves(background, target, on_event, abandon, self._held)
        self._check_combination(self._semantic_type, self._format, io_mode, self._storage)
        self._plans = PlanCache()
        self._local_plans = PlanCache()
        self._closed = False
        st.require_exclusive(self._storage, root, single_writer=single_writer)
        self._group.next_round()
        events: list[CommitEvent] = []
        left: list[str] = []

        def begin() -> tuple[Opened, list[Begin]]:
            opened = self._places.open(run, topology, tracker)
            lacking, standing = self._places.settle(opened, settle_wait, upload)
            events.extend(self._public.events_of(opened.durable, standing))
            left.extend(removal.supersede_by_newest(self._storage, self._root))
            return opened, lacking

        opened, lacking = lead(self._group, "open", begin)
        self._identity, self._home, self._attempt = opened.first, opened.durable, opened.attempt
        self._uploads: Uploads | None = None
        if upload is not None:
            agree(self._group, "first tier", lambda: self._places.check_first(opened, self._group.rank))
            self._uploads = self._open_uploads(upload, opened, moves_tracker)
            self._background.launched = self._uploads.submit
        self._local = None if local is None else self._open_local(local, settle_wait)
        self._requests = Requests(
            self._storage,
            self._root,
            run,
            self._group,
            topology,
            self._attempt,
            self._rng_tracker,
            data_parallel_random_init,
            self._local,
            self._places.newest_attempt,
        )
        self._ledger = Ledger(self._background, self._requests, self._identity, self._announcer, on_event, on_metrics)
        home = self._places.home
        self._points = ResumePoints(
            home.storage,
            home.root,
            run,
            self.attempt,
            self._group,
            resolver,
            self._local,
            on_event,
            home.options,
            None if upload is None else first,
        )
        if self._uploads is not None:
            for each in lacking:
                self._uploads.submit(each)
        for event in events:
            self._public.tell_of_commit(event)
        for text in left:
            emit(on_event, Notice("superseded_not_removed", text))

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return self._attempt.number

    @property
    def stalled(self) -> float:
        """Seconds that `save`, `wait_staged`, `prepare`, `drain`, `close` and `SaveResult.wait` have held this rank.

        A throughput is measured without what it grew by meanwhile.
        """
        return self._held.seconds

    @property
    def root(self) -> str:
        """The run's directory; with uploads, on the first tier."""
        return self._storage.url(self._root)

    @property
    def uploading(self) -> tuple[int, ...]:
        """Iterations whose upload has not ended on this rank, in the order in which they are uploaded."""
        return () if self._uploads is None else tuple(begin.iteration for begin in self._uploads.in_flight())

    # --- restore ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        *,
        missing: Literal["error", "start"] = "error",
        at: int | None = None,
        contents: Collection[str] | None = None,
        strict: Strict = "error",
        verify: str | None = None,
        allow_changed: Collection[str] = (),
        finetune: bool = False,
        args: Any = None,
        keys: Collection[str] | None = None,
        rename: Rename | None = None,
        cast: bool | Collection[str] = False,
        load_main_params: bool = False,
        load_parallelism: LoadParallelism | None = None,
        process_group: ProcessGroup | None = None,
        check_coverage: bool = True,
    ) -> Restored:
        """Fills `state` from the resume point. Collective.

        Args:
            missing: when the run has no checkpoint at all: ``error`` raises, ``start`` returns ``found=False``.
                Candidates that are not eligible always raise: never silently random weights.
            at: exactly this iteration (R6); a local checkpoint may serve it.
            contents: parts of `state` to restore, plus ``rng``; None: everything.
            strict, verify, keys, rename, cast, load_main_params, load_parallelism, process_group, check_coverage: as
                for `ckptlib.load`.
            finetune: weights only, for a training of its own: iteration 0, no optimizer, RNG or progress. A part that
                is left out, also by `contents`, and has ``reload_model_params()`` (Megatron-Core's optimizers) then
                makes its fp32 main parameters from the weights.
            args: this job's arguments: layers, hidden size, heads and vocabulary are compared with the recorded ones
                before anything is read.
            allow_changed: numbers that may differ from those recorded after the load, because they were changed on
                purpose: ``lr``, ``scheduler_step``, ``consumed_samples``; told with a notice.

        Raises:
            NoResumePointError: nothing to resume from.
            ArgsMismatchError: the checkpoint is of another architecture.
            ProgressError: the restored state is not where the checkpoint was; the state has been filled.
            CkptError: as `ckptlib.load`.
        """
        self._check_open()
        if missing not in ("error", "start"):
            raise StateError(f"missing={missing!r}: expected 'error' or 'start'")
        check_names(allow_changed)
        options = LoadOptions(
            strict=strict,
            verify=verify,
            keys=keys,
            rename=rename,
            cast=cast,
            load_main_params=load_main_params,
            load_parallelism=load_parallelism,
            process_group=process_group,
            check_coverage=check_coverage,
        )
        self.wait_staged()
        found = self._points.find(at, options, lambda: self._background.drain(self._timeout))
        if found.choice is None and found.local.set is None:
            if at is not None:
                raise NoResumePointError(f"{self.root}: no committed checkpoint of iteration {at}{found.local.beside}")
            if missing == "error":
                raise NoResumePointError(
                    f'{self.root}: no checkpoint. Pass missing="start" to begin a new run from its initial state.'
                )
            self._announce()
            return Restored(found=False, reason=f"the run has no checkpoint{found.local.beside}")
        request = RestoreRequest(
            choice=found.choice or resume.ResumeChoice("", 0, None, ""),
            contents=contents,
            options=replace(options, verify=verify or found.verify),
            finetune=finetune,
            args=args,
            allow_changed=allow_changed,
            group=self._group,
            plans=self._plans,
            topology=self.topology,
            rng_tracker=self._rng_tracker,
            on_event=self._on_event,
            storage_options=self._storage_options,
        )
        restored, self._ledger.parent = self._points.restore(found, request, state)
        self._announce()
        return restored

    # --- save ---------------------------------------------------------------------------------------------------------

    def step(self, state: dict[str, Any], *, iteration: int, **options: Any) -> SaveResult | None:
        """Saves when the interval says so; call it at the end of every iteration. `options` are those of `save`."""
        self.poll()  # a commit is told of at the next step, not at the next save
        if self._save_interval is None or iteration % self._save_interval:
            return None
        return self.save(state, iteration=iteration, **options)

    @holds
    def save(
        self,
        state: dict[str, Any],
        *,
        iteration: int,
        progress: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        args: Any = None,
        rerun_state: Any = None,
        kind: Kind = "persistent",
        contents: Collection[str] | None = None,
        on_exists: Literal["error", "replace"] = "error",
        semantic_type: SemanticType | None = None,
        io_mode: IoMode | None = None,
    ) -> SaveResult:
        """Saves and commits. Collective; returns when the checkpoint exists, asynchronously when `state` may change.

        Saves become checkpoints in the order of the calls: a synchronous one first waits for those in flight.

        Args:
            state: parts by name; see `ckptlib.save`.
            kind: ``persistent``; ``non_persistent_global``: takes the place of the older ones of its kind;
                ``non_persistent_local``: each rank's own, on its host (`LocalOptions`); ``release``.
            progress: numbers that a resume needs: ``consumed_samples``, ``lr``, ``flops``, ... What is not given is
                taken from the state (`ckptlib.progress.observe`): lr, scheduler step, consumed samples.
            metrics: numbers that a person or a retention policy wants; may be NaN.
            args: plain arguments, recorded with the checkpoint.
            rerun_state: this rank's rerun state; dropped on a resume with another topology.
            contents: parts of `state` to save, plus ``rng``; None: those given at construction.
            semantic_type: None: that given at construction; its format goes with it.
            io_mode: None: that given at construction.

        Returns:
            The save. Of an asynchronous one, `SaveResult.wait` tells when it is done; one that was skipped, because as
            many as allowed were in flight, is also a notice.

        Raises:
            BackgroundSaveError: earlier asynchronous saves failed; told once, on every rank; this one is not made. With
                overlapped staging a failure that only other ranks know of is told one call later, and so is what kept
                the save before from being begun.
            SaveLimitError: as many saves are in flight as may be.
            CkptError: see `ckptlib.saving.run_save`. An older checkpoint is never touched by a failed save.
        """
        self._check_open()
        mode = self._io_mode if io_mode is None else io_mode
        meaning = self._semantic_type if semantic_type is None else semantic_type
        format_: Format = self._format if semantic_type is None else FORMAT_OF.get(semantic_type, self._format)
        local = self._local if kind == "non_persistent_local" else None
        if local is not None:
            if semantic_type not in (None, "LOCAL"):
                raise UnsupportedError(f"kind {kind!r} is every rank's own state (LOCAL), not {semantic_type}")
            meaning, format_ = "LOCAL", "torch"
        self._check_combination(meaning, format_, mode, self._storage if local is None else local.pieces.storage)
        self.wait_staged()
        self._ledger.raise_refusal()
        chosen = self._contents if contents is None else contents
        request = self._requests.maker(
            Asked(
                state=state,
                contents=chosen,
                progress=progress,
                metrics=metrics,
                args=args,
                rerun_state=rerun_state,
                iteration=iteration,
                kind=kind,
                semantic_type=meaning,
                format=format_,
                io_mode=mode,
                on_exists=on_exists,
            )
        )

        def prepare() -> SaveRequest:
            wait = local is not None and self._background.options.at_limit == "wait"
            if wait and not self._background.wait_for_room(self._timeout):
                raise SaveLimitError(_NO_ROOM.format(self._timeout))
            if mode == "sync" and not self._background.drain(self._timeout):
                raise SaveLimitError(_NO_ROOM.format(self._timeout))
            self.poll()
            if self._background.writes(iteration, kind):
                if on_exists != "replace":
                    raise CheckpointExistsError(f"{self.root}: iteration {iteration} is still being written (W9)")
                if not self._background.drain(self._timeout):  # it is known only then what there is to replace
                    raise SaveLimitError(_NO_ROOM.format(self._timeout))
            return request(self._ledger.parent, self._ledger.failed)

        try:
            return self._save(prepare, mode, iteration, kind, local)
        except BackgroundSaveError as error:
            self._ledger.has_told(error)
            raise

    def _save(
        self, prepare: Callable[[], SaveRequest], mode: IoMode, iteration: int, kind: Kind, local: LocalTier | None
    ) -> SaveResult:
        if local is not None:
            return self._save_local(local, prepare, mode, iteration)
        if mode == "async":
            pending = run_async_save(
                self._group, prepare, self._plans, self._background, self._timeout, self._ledger.has_begun
            )
            if pending is None:
                return self._skipped(self._storage.url(self._requests.path(iteration, kind)), iteration)
            return self._held.result(pending)
        result, decision, begin = run_save(self._group, prepare, self._plans)
        self._ledger.committed(begin, decision, commit_seconds=result.phases["commit"], stall=result.seconds)
        self._ledger.has_begun(begin)
        if self._uploads is not None:
            self._uploads.submit(begin)
        return result

    def _save_local(
        self, local: LocalTier, prepare: Callable[[], SaveRequest], mode: IoMode, iteration: int
    ) -> SaveResult:
        """One exchange, then each rank by itself: what fails in the background is told at the next save, as ever."""
        may_wait = mode == "sync" or self._background.options.at_limit == "wait"
        request = local.plan(self._group, prepare, (lambda: True) if may_wait else self._background.has_room)
        if request is None and self._background.options.at_limit == "error":
            raise SaveLimitError(f"{self._background.options.max_in_flight} saves are in flight on some rank")
        if request is None:
            return self._skipped(local.pieces.path(iteration), iteration)
        mine: SaveRequest = request
        if mode == "sync":
            saved: list[SaveResult] = []
            agree(
                self._group,
                "local write",
                lambda: saved.append(run_save(SoloGroup(), lambda: mine, self._local_plans)[0]),
            )
            return saved[0]
        try:
            pending = run_async_save(SoloGroup(), lambda: mine, self._local_plans, self._background, self._timeout)
        except (OSError, StagingError) as error:  # the others go on
            lost = failed_save(mine, error)
            self._ledger.lost(lost.error)
            return lost
        assert pending is not None  # there was room
        return self._held.result(pending)

    def _skipped(self, url: str, iteration: int) -> SaveResult:
        self.poll()
        text = f"{url}: not saved: {self._background.options.max_in_flight} saves are in flight"
        emit(self._on_event, Notice("save_skipped", text, {"iteration": iteration}))
        return SaveResult(url, iteration, "", 0, 0, 0.0, skipped=True)

    @holds
    def prepare(
        self,
        state: dict[str, Any] | int,
        *,
        progress: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        args: Any = None,
        rerun_state: Any = None,
        contents: Collection[str] | None = None,
    ) -> None:
        """Makes ready for asynchronous saves: plans, starts the worker, and makes warm memory of this rank's share.

        Collective with a state: the plan says who writes what, and the first save of the same finds it. What else is
        given is what `save` will be given; its contents do not matter. An optimizer that has not stepped has no moments
        yet: prepare after the first step, or give bytes.

        Args:
            state: as for `save`; or the bytes of this rank's share, then nothing is planned and nobody is waited for.

        Raises:
            StagingError: there is not so much memory.
            CkptError: as `save`.
        """
        self._check_open()
        self.wait_staged()
        if isinstance(state, int):
            self._background.prepare(state + state // 16 + 2**20)  # alignment
            return
        request = self._requests.maker(
            Asked(
                state=state,
                contents=self._contents if contents is None else contents,
                progress=progress,
                metrics=metrics,
                args=args,
                rerun_state=rerun_state,
                iteration=0,
                kind="persistent",
                semantic_type=self._semantic_type,
                format=self._format,
                io_mode="async",
            )
        )
        begun = plan_together(self._group, lambda: request(self._ledger.parent, ()), self._plans)
        self._background.prepare(layout(begun.pack(self._group.rank).tensors)[1])

    def poll(self) -> None:
        """Looks after saves and uploads that have ended in the background: tells listeners.

        Waits for nobody. Rank 0 reads back the records of what was committed, to tell of it. What is durable at the
        other location is an `uploaded` notice there, what could not be uploaded an `upload_failed` one.
        """
        self._check_open()
        self._ledger.settle_ended()
        if self._uploads is not None:
            self._uploads.settle_ended()

    @holds
    def wait_staged(self, timeout: float | None = None) -> bool:
        """Waits for an overlapped copy (`AsyncOptions.staging`): the state may change when this returns True.

        Called by itself before an optimizer's step, before anything is loaded, and by the next save. Whoever changes
        parameters in another way calls it before that.
        """
        return self._background.wait_staged(timeout)

    @holds
    def drain(self, timeout: float = 30.0, *, at_deadline: Literal["abort", "leave"] = "abort") -> bool:
        """Waits for saves in flight and their uploads, for what is left of a grace period, and has listeners hand over
        what they hold.

        At the deadline rank 0 decides `abort` for what is not committed (W4), and each rank for its local pieces: the
        resume point before stands, and nobody can commit it later. What became of each save is a `save_drained` notice
        where it was decided. Collective, unless it leaves.

        Args:
            timeout: seconds; a tenth of it, at most 2 s, is kept for the decision.
            at_deadline: ``leave``: a worker process goes on, also after the end of this process.

        What is committed and not uploaded then is an `upload_unfinished` notice; a worker process goes on with it.

        Returns:
            Whether everything is committed, and uploaded where that was asked for, and nothing has failed: the same on
            all ranks, except where one does not answer in time. With ``leave``, whether this rank has nothing in flight
            any more.
        """
        deadline = time.monotonic() + timeout
        until = deadline - min(2.0, timeout / 10)
        staged = self.wait_staged(timeout)
        ended = staged and self._background.drain(max(0.0, until - time.monotonic()))
        uploaded = self._wait_uploaded(until)
        if not self._closed:
            self.poll()
        if at_deadline == "abort":
            if not ended:
                ended = self._ledger.abort_in_flight(timeout) and staged
            ended = self._all_ended(ended and uploaded and self._ledger.is_clean, deadline)
        self._public.drain(max(0.0, deadline - time.monotonic()))
        return ended and uploaded

    def _wait_uploaded(self, until: float) -> bool:
        """Whether all that was to be uploaded is durable, at this time of the monotonic clock at the latest."""
        if self._uploads is None:
            return True
        ended = self._uploads.wait(max(0.0, until - time.monotonic()))
        self._uploads.settle_ended()
        if not ended:
            self._uploads.tell_unfinished()
        return ended and self._uploads.is_clean

    def _all_ended(self, ended: bool, deadline: float) -> bool:
        """Whether it has ended on all ranks, as far as they say so within what is left, or a second."""
        group = self._drains
        if group.world_size == 1:
            return ended
        group.timeout = max(1.0, deadline - time.monotonic())
        try:
            group.next_round()
            answers = agree(group, "drained", lambda: ended)
            return lead(group, "all drained", lambda: all(answers or []))
        except (RankTimeoutError, CoordinationError) as error:
            emit(self._on_event, Notice("drain_unanswered", str(error)))
            return False

    @holds
    def close(self, timeout: float = 30.0) -> None:
        """Ends this attempt's use of the checkpointer; safe to call twice.

        Saves in flight and their uploads are given `timeout` seconds; then a worker process goes on by itself.

        Raises:
            BackgroundSaveError: one of the last saves failed.
            CkptError: what kept an overlapped save from being begun.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        self.wait_staged(timeout)
        self._background.drain(max(0.0, deadline - time.monotonic()))
        self._wait_uploaded(deadline)
        self._background.close(max(0.0, deadline - time.monotonic()))
        self.poll()
        self._closed = True
        self._public.drain(max(0.0, deadline - time.monotonic()))
        self._ledger.raise_refusal()
        if self._ledger.failed:
            raise self._ledger.failed.pop(0)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- internals ----------------------------------------------------------------------------------------------------

    def _open_uploads(self, options: UploadOptions, opened: Opened, moves_tracker: bool) -> Uploads:
        shop = self._background.shop
        return Uploads(
            options,
            self._places.first,
            self._places.home,
            self._group.rank,
            self._group.world_size,
            opened,
            self._public,
            moves_tracker=moves_tracker,
            commit_timeout=self._background.options.commit_timeout,
            heartbeat=self._background.options.heartbeat,
            hand_over=shop.upload,
            number=shop.number_job,
            wait_for=shop.wait_for,
            on_event=self._on_event,
        )

    def _open_local(self, options: LocalOptions, settle_wait: float) -> LocalTier:
        home = self._places.home
        world = World(self._home.root_id, self._group.world_size, self.topology)
        known = lead(self._group, "attempts", lambda: roots.read_attempts(home.storage, home.root))
        attempts = {each.number: each.attempt_id for each in known}
        pieces = Pieces(options.root, home.url, world, self._group.rank, self.attempt, attempts, self._on_event)
        agree(self._group, "local", lambda: pieces.take_over(self.run, settle_wait))
        return LocalTier(options, world, pieces, self.attempt, self._places.newest_attempt)

    def _announce(self) -> None:
        self._public.announce(self._home, self._attempt, self.run, self.topology, self._ledger.parent)

    def _check_combination(
        self, semantic_type: SemanticType, format: Format, io_mode: IoMode, storage: st.Storage
    ) -> None:
        worker = self._background.options.worker
        check(semantic_type, format, io_mode, storage=storage.capabilities, worker=worker)
        check_topology(semantic_type, self.topology, self._group.world_size)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this Checkpointer is closed")
