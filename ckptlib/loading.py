"""The choreography of a load: what each rank wants, what is refused, then filling (R3, R4).

Everything that can be refused is refused on all ranks before a tensor is touched: shapes, dtypes, coverage, keys,
objects that do not unpickle. What can still fail then is the reading itself; the error says which tensors had changed::

    all      flatten the state, name it as it is stored      gather which keys are requested
    rank 0   keys that nobody requested                      broadcast
    all      check, plan, read the objects                   agree
    rank 0   coverage                                        broadcast: nothing has been changed
    all      who reads what (`load_parallelism`)             collective on the caller's process group
    all      read into the tensors                           agree
    all      exchange (`load_parallelism`)                   collective, then agree
    all      objects, values, `load_state_dict`              agree
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ckptlib.coordination import Group, agree, lead
from ckptlib.errors import (
    CkptError,
    DisagreementError,
    IntegrityError,
    KeyMismatchError,
    LoadIncompleteError,
    TilingError,
)
from ckptlib.exchange import Exchange, check_member, needs_of
from ckptlib.fetch import Target, Traffic, fetch_all
from ckptlib.formats import torch_dist
from ckptlib.load_options import LoadOptions
from ckptlib.load_requests import Wanted, plan_leaves, target_of, wants
from ckptlib.overlap import wait_for_copies
from ckptlib.pieces import LocalPlan, PieceTable
from ckptlib.plan import RankPlan
from ckptlib.planning import Offer, PlanCache, Share
from ckptlib.read_plan import Int64s, ReadPlan
from ckptlib.source import Source
from ckptlib.state import ObjectLeaf, TensorLeaf, ValueLeaf
from ckptlib.ties import check_ties

log = logging.getLogger("ckptlib")


@dataclass
class LoadReport:
    """What a load did. Keys are those of the checkpoint.

    Attributes:
        missing: requested by this rank, not in the checkpoint: left as they were.
        unexpected: in the checkpoint, requested by no rank.
        cast: converted to the dtype of the state.
        bytes_needed: payload bytes of the requested boxes that are stored.
        bytes_read: payload bytes that this rank read from storage.
        bytes_received: payload bytes that this rank got from other ranks, which had read them.
        requests: contiguous ranges that were read for tensors.
        seconds: wall time.
    """

    url: str
    save_id: str | None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    requests: int = 0
    seconds: float = 0.0


class Request(NamedTuple):
    """What one rank tells rank 0 before a load.

    Attributes:
        keys: one bit per stored key: whether it is requested.
        idle: entries of the options that fit no key here; an error when they fit none anywhere.
        offer: the boxes that are requested, or digests of checks that found them right.
    """

    keys: bytes
    idle: tuple[str, ...]
    offer: Offer


class Prepared(Protocol):
    """One rank's load, in steps: `PreparedLoad`, or that of a rank's own file (`ckptlib.layouts.loading`)."""

    source: Source
    options: LoadOptions
    report: LoadReport
    changed: dict[str, None]

    def request(self, plans: PlanCache) -> Request: ...

    def unexpected(self, requests: Sequence[Request]) -> list[str]: ...

    def check(self, unexpected: list[str]) -> None: ...

    def fill(self, exchange: Exchange | None = None) -> None: ...

    def finish(self) -> None: ...

    def incomplete(self, error: Exception) -> LoadIncompleteError: ...


@dataclass
class PreparedLoad:
    """One rank's load, in steps; nothing is changed before `fill` (R4).

    Attributes:
        ignore: names stored keys that are not unexpected.
        present: the tensors that are stored, and their `targets`: the requests of `plan`.
        needs: for `load_parallelism`: see `exchange.needs_of`.
        padded: those whose stored shape is another one: what is not stored of them becomes zero.
    """

    source: Source
    wanted: Wanted
    options: LoadOptions
    ignore: Callable[[str], bool]
    report: LoadReport
    present: list[TensorLeaf] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    padded: list[TensorLeaf] = field(default_factory=list)
    plan: ReadPlan | None = None
    needs: Int64s | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)

    def request(self, plans: PlanCache) -> Request:
        """What this rank asks for."""
        keys = self.wanted.keys()
        bits = np.packbits(np.array([key in keys for key in self._stored_keys()], np.bool_)).tobytes()
        return Request(bits, self.wanted.idle, plans.offer(self.local))

    @functools.cached_property
    def local(self) -> LocalPlan:
        """The boxes that are requested. Ranks may want one tensor in several dtypes."""
        return LocalPlan(PieceTable.build([leaf.piece("") for leaf in self.wanted.flat.tensors]), {}, {})

    def unexpected(self, requests: Sequence[Request]) -> list[str]:
        """The stored keys that none of these ranks requests: a pipeline stage has no use for another's layers.

        Raises:
            KeyMismatchError: an entry of the options fits no key on any rank.
        """
        idle = set.intersection(*(set(request.idle) for request in requests))
        if idle:
            raise KeyMismatchError(f"{self.source.url}: {'; '.join(sorted(idle))}. Nothing was loaded.")
        keys = self._stored_keys()
        bits = np.zeros(-(-len(keys) // 8), np.uint8)
        for request in requests:
            bits |= np.frombuffer(request.keys, np.uint8)
        taken = np.unpackbits(bits, count=len(keys))
        return sorted(
            key
            for key, is_taken in zip(keys, taken, strict=True)
            if not is_taken and self.options.chosen(key) and not self.ignore(key)
        )

    def check(self, unexpected: list[str]) -> None:
        """Refuses what can be refused, plans, and reads the objects."""
        started = time.perf_counter()
        source, flat, report = self.source, self.wanted.flat, self.report
        report.unexpected = unexpected
        self._compare_keys()
        absent = set(report.missing)
        self.present = [leaf for leaf in flat.tensors if leaf.key not in absent]
        stored = [source.index.tensor(leaf.key) for leaf in self.present]
        check_ties(source.index, self.present, source.url)
        self.plan = plan_leaves(source, self.present, stored, self.options)
        self.targets = [target_of(leaf, info) for leaf, info in zip(self.present, stored, strict=True)]
        self.padded = [leaf for leaf, info in zip(self.present, stored, strict=True) if info.shape != leaf.global_shape]
        report.cast = sorted({target.key for target in self.targets if target.dtype != target.tensor.dtype})
        report.bytes_needed = _payload(self.plan, self.targets)
        if self.options.load_parallelism is not None:
            check_member(self.options.process_group)
            self.needs = needs_of(source.index, self.plan, self.targets)
        if self.options.verify is not None:
            verify_first(source, self.options.verify)
        keys = sorted(flat.object_keys() - absent)
        self.objects = {key: source.read_object(key) for key in keys}
        report.seconds += time.perf_counter() - started

    def fill(self, exchange: Exchange | None = None) -> None:
        """Reads into the tensors: what this rank needs, or its share of it.

        Raises:
            LoadIncompleteError: it failed after tensors had changed; names them.
            CkptError, OSError: it failed before.
        """
        started = time.perf_counter()
        assert self.plan is not None  # `check` comes first
        plan = self.plan if exchange is None else exchange.share()
        try:
            traffic = self._fill_tensors(plan)
        except (OSError, CkptError) as error:
            if not self.changed:
                raise
            raise self.incomplete(error) from error
        self.report.requests = traffic.requests
        self.report.bytes_read = traffic.bytes
        self.report.seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Puts objects and values into the state, and gives its parts what was loaded.

        Raises:
            LoadIncompleteError: a part does not take it.
        """
        started = time.perf_counter()
        try:
            leaves: list[ObjectLeaf | ValueLeaf] = [*self.wanted.flat.objects, *self.wanted.flat.values]
            for leaf in leaves:
                if leaf.key in self.objects:
                    leaf.assign(self.objects[leaf.key])
            for finish in self.wanted.flat.finishers:
                finish()
        except Exception as error:
            self.changed |= dict.fromkeys(leaf.key for leaf in self.present)
            raise self.incomplete(error) from error
        self.report.seconds += time.perf_counter() - started

    def incomplete(self, error: Exception) -> LoadIncompleteError:
        """What to raise when something failed and tensors had been changed."""
        keys = list(self.changed)
        failure = LoadIncompleteError(
            f"{self.source.url}: the load failed after {len(keys)} tensors had been changed ({_some(keys)}): "
            f"{type(error).__name__}: {error}. Load again, or from elsewhere.",
            changed=keys,
        )
        failure.exit_code = error.exit_code if isinstance(error, CkptError) else 1
        return failure

    def _fill_tensors(self, plan: ReadPlan) -> Traffic:
        """Zeroes the tensors that the stored ones do not fill, then reads."""
        for leaf in self.padded:
            self.changed[leaf.key] = None
            leaf.tensor.zero_()
        return fetch_all(self.source, plan, self.targets, self.changed.setdefault)

    def _compare_keys(self) -> None:
        report, url = self.report, self.source.url
        if not (report.missing or report.unexpected):
            return
        text = f"{url}: " + "; ".join(
            f"{len(keys)} {what} ({_some([self._described(key) for key in keys])})"
            for what, keys in (("missing in the checkpoint", report.missing), ("not requested", report.unexpected))
            if keys
        )
        note = _unmerged_optimizer(self.source, report.missing)
        if self.options.strict == "error":
            raise KeyMismatchError(
                f'{text}. {note or "Nothing was loaded."} strict="warn" or "return" loads what both sides have.',
                missing=report.missing,
                unexpected=report.unexpected,
            )
        if self.options.strict == "warn":
            log.warning("%s %s", text, note)

    def _described(self, key: str) -> str:
        return f"{key}, in the state {self.wanted.names[key]}" if key in self.wanted.names else key

    def _stored_keys(self) -> list[str]:
        return [*self.source.index.keys, *self.source.index.object_keys]


def prepare_load(
    state: dict[str, Any],
    source: Source,
    options: LoadOptions,
    ignore: Callable[[str], bool] = lambda key: False,
) -> PreparedLoad:
    """This rank's load from an opened checkpoint. `ignore` names stored keys that are not unexpected.

    Raises:
        StateError: the state cannot be filled; `rename` makes two names one; main parameters are wanted and the
            optimizer too, or none are stored.
        UnsupportedError: optimizer state is wanted that the checkpoint keeps in flat buffers.
    """
    wanted = wants(state, source, options)
    flat = wanted.flat
    report = LoadReport(source.url, source.save_id)
    report.missing = sorted(
        {leaf.key for leaf in flat.tensors if leaf.key not in source.index}
        | {key for key in flat.object_keys() if not source.has_object(key)}
    )
    return PreparedLoad(source, wanted, options, ignore, report)


def load_together(group: Group, prepare: Callable[[], Prepared], plans: PlanCache | None = None) -> LoadReport:
    """Prepares and checks on all ranks, then loads on all ranks: what one rank refuses changes nothing on any (R4).

    Args:
        plans: checks of earlier loads of this group, kept by the caller; None: nothing is kept.

    Raises:
        TilingError: the ranks together do not ask for each tensor exactly once.
        RankFailedError: another rank refused; nothing was changed.
        LoadIncompleteError: another rank failed after this one had been filled.
    """
    wait_for_copies()  # of what is about to be filled
    plans = PlanCache() if plans is None else plans
    prepared: Prepared | None = None

    def begin() -> Request:
        nonlocal prepared
        prepared = prepare()
        return prepared.request(plans)

    requests = agree(group, "keys", begin)
    assert prepared is not None  # else `agree` has raised
    ready: Prepared = prepared
    unexpected = lead(group, "unexpected", lambda: ready.unexpected(requests or []))
    agree(group, "check", lambda: ready.check(unexpected))
    exchange: Exchange | None = None
    if isinstance(ready, PreparedLoad):
        if ready.options.check_coverage:
            _check_coverage(group, ready, plans, [request.offer for request in requests or []])
        exchange = _plan_exchange(group, ready)
    try:
        agree(group, "load", lambda: ready.fill(exchange))
        if exchange is not None:
            agree(group, "exchange", lambda: _exchange(ready, exchange))
        agree(group, "finish", ready.finish)
    except LoadIncompleteError:
        raise
    except CkptError as error:  # another rank's: what had been done here before counts
        if ready.changed:
            raise ready.incomplete(error) from error
        raise
    return ready.report


def _check_coverage(group: Group, ready: PreparedLoad, plans: PlanCache, offers: Sequence[Offer]) -> None:
    """R4 across ranks: as for a save, main replicas tile every tensor. What was found right is not sent again."""

    def digest(offers: Sequence[Offer]) -> str | None:
        try:
            settled = plans.settle(offers)
        except (TilingError, DisagreementError) as error:
            raise type(error)(
                f"{ready.source.url}: what the ranks ask for together is not each tensor once: {error}. Nothing was "
                "loaded. Pass check_coverage=False to load parts of what a job would."
            ) from error
        return None if settled is None else settled[0].digest

    known = lead(group, "coverage", lambda: digest(offers))
    if known is None:
        offers = agree(group, "structure", lambda: Offer(ready.local)) or []
        known = lead(group, "coverage again", lambda: digest(offers))
    assert known is not None  # whole structures settle it
    plans.keep(ready.local, Share(known, RankPlan(), ()))


def _plan_exchange(group: Group, ready: PreparedLoad) -> Exchange | None:
    options = ready.options
    if options.load_parallelism is None or group.world_size == 1:
        return None
    assert ready.plan is not None and ready.needs is not None  # noqa: PT018 - checked before
    # Collectives follow: every rank must come here, or none.
    plan, targets = ready.plan, ready.targets
    opened = Exchange.open(options.process_group, ready.needs, plan, targets, group.timeout)
    agree(group, "share", opened.assign)
    return opened


def _exchange(ready: Prepared, exchange: Exchange) -> None:
    started = time.perf_counter()
    try:
        ready.report.bytes_received = exchange.run(ready.changed.setdefault)
    except Exception as error:
        raise ready.incomplete(error) from error
    ready.report.seconds += time.perf_counter() - started


def _payload(plan: ReadPlan, targets: Sequence[Target]) -> int:
    itemsizes = np.array([target.dtype.itemsize for target in targets], np.int64)
    return int((plan.volumes * itemsizes[plan.request]).sum())


def verify_first(source: Source, level: str) -> None:
    """Verifies a checkpoint before it is loaded.

    Raises:
        IntegrityError: something is not what was written.
    """
    from ckptlib.verification import verify as verify_checkpoint

    result = verify_checkpoint(source.url, level=level, save_id=source.save_id, storage_options=source.storage_options)
    if not result.ok:
        raise IntegrityError(f"{source.url}: verification failed, nothing was loaded: {'; '.join(result.problems)}")


def _unmerged_optimizer(source: Source, missing: Collection[str]) -> str:
    """Why optimizer state in model space cannot be had from a checkpoint that keeps it in flat buffers."""
    if source.manifest is not None or not any(key.startswith("optimizer.") for key in missing):
        return ""
    form = torch_dist.optimizer_form(source.index, source.read_common())
    return f"Nothing was loaded; {torch_dist.conversion_note(form)}." if form else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
