"""How ranks agree: small messages over the job's key-value store, never a collective.

Messages go through the store that `torch.distributed` was initialised with (a TCPStore under torchrun), so a save
shares no process group with the training loop: nothing can interleave with a user's barrier, and no message
touches a GPU. Every wait has a deadline and names the ranks that did not answer.
"""

from __future__ import annotations

import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not in __all__

from ckptlib.errors import CkptError, CoordinationError, RankFailedError, RankTimeoutError

T = TypeVar("T")

MAX_PAUSE = 0.5
"""Seconds between two looks at most. A pause is a twentieth of the wait so far: a short wait ends in time, a long one
is no load on the store. `Store.wait` would do the same, but it logs a warning on every rank for each interval."""


class Group(Protocol):
    """The ranks that save together. `timeout`: seconds that one waits for another."""

    rank: int
    world_size: int
    timeout: float

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Collects one value from each rank, in order; the list on rank 0, None elsewhere."""

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""

    def scatter(self, name: str, values: Sequence[Any] | None = None) -> Any:
        """Gives each rank its own of rank 0's values, one per rank."""

    def next_round(self) -> None:
        """Begins a new operation: names may repeat after it. Every rank calls it once per operation."""


class SoloGroup:
    """One process, no `torch.distributed`."""

    rank = 0
    world_size = 1
    timeout = 0.0  # there is nobody to wait for

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """A list of one."""
        return [value]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """The value itself."""
        return value

    def scatter(self, name: str, values: Sequence[Any] | None = None) -> Any:
        """The only value."""
        assert values is not None
        return values[0]

    def next_round(self) -> None:
        """Nothing to separate."""


class PieceGroup(SoloGroup):
    """One rank of a job whose ranks each save or load something of their own, and fail together.

    To what happens in it, it is a world of one; only `agree`, `lead` and `hand_out` let no rank go on while another
    has failed.

    Args:
        job: the ranks.
    """

    def __init__(self, job: Group) -> None:
        self.job = job
        self.timeout = job.timeout

    def next_round(self) -> None:
        """Begins a new operation of the job."""
        self.job.next_round()


class StoreGroup:
    """Ranks that share a `torch.distributed.Store`.

    Args:
        store: the store; keys are put under `prefix`.
        timeout: seconds that any wait may take.
        prefix: separates users of the same store; equal on all ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout: float, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = PrefixStore(prefix, store)
        self.timeout = timeout
        self._round = 0
        self._reached = 0  # a round that everybody who reads this rank's messages has begun
        self._keys: list[tuple[int, str]] = []
        self._abandoned = False

    def abandon(self) -> None:
        """Ends what another thread waits for: its ranks are gone, or of no interest any more."""
        self._abandoned = True

    def next_round(self) -> None:
        """Begins a new operation and drops those messages of this rank that everybody has read, or will never read.

        Who has begun operation n has left those before. Of the others rank 0 learns it from a gather, and only rank 0
        reads what they gather. An operation that only rank 0 speaks in proves nothing: a late rank may still be
        waiting for its first message when rank 0 is three operations ahead.
        """
        old = [key for round_, key in self._keys if round_ < self._reached]
        self._keys = [entry for entry in self._keys if entry[0] >= self._reached]
        for key in old:
            try:
                self._store.delete_key(key)
            except RuntimeError:  # a store without deletion (FileStore prefix): the keys are tiny
                break
        self._round += 1

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """See `Group`.

        Raises:
            RankTimeoutError: names the ranks that did not send in time.
        """
        if self.rank != 0:
            self._set(f"{name}/{self.rank}", value)
            return None
        values = {0: value}
        started = time.monotonic()
        for rank in range(1, self.world_size):  # one key is looked at, however many ranks are late
            while not self._check(f"{name}/{rank}"):
                if not _pause(started, self.timeout):
                    self._blame(
                        name, [late for late in range(rank, self.world_size) if not self._check(f"{name}/{late}")]
                    )
                    break  # it came at the last moment
            values[rank] = self._get(f"{name}/{rank}")
        self._reached = self._round
        return [values[rank] for rank in range(self.world_size)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """See `Group`.

        Raises:
            RankTimeoutError: rank 0 did not send in time.
        """
        if self.rank == 0:
            self._set(name, value)
            return value
        return self._await(name, name)

    def scatter(self, name: str, values: Sequence[Any] | None = None) -> Any:
        """See `Group`. Raises as `broadcast`."""
        if self.rank != 0:
            return self._await(f"{name}/{self.rank}", name)
        assert values is not None
        for rank in range(1, self.world_size):
            self._set(f"{name}/{rank}", values[rank])
        return values[0]

    def _await(self, key: str, name: str) -> Any:
        # Rank 0 may itself wait one whole timeout for others before it can answer.
        started = time.monotonic()
        while not self._check(key):
            if not _pause(started, 2 * self.timeout):
                raise RankTimeoutError(
                    f"{name}: no answer from rank 0 within {2 * self.timeout:g} s. It died or hangs.", ranks=[0]
                )
        self._reached = self._round
        return self._get(key)

    def _blame(self, name: str, late: Sequence[int]) -> None:
        if late:
            raise RankTimeoutError(
                f"{name}: no answer from rank {', '.join(map(str, late))} within {self.timeout:g} s. "
                "It died, hangs, or does not take part in this operation.",
                ranks=late,
            )

    def _set(self, name: str, value: Any) -> None:
        key = f"{self._round}/{name}"
        self._keys.append((self._round, key))
        payload = pickle.dumps(value)
        self._guard(lambda: self._store.set(key, payload))  # type: ignore[arg-type]  # takes bytes too

    def _get(self, name: str) -> Any:
        # Trusted: the store is the job's own, as trusted as its process group.
        return pickle.loads(self._guard(lambda: self._store.get(f"{self._round}/{name}")))  # noqa: S301

    def _check(self, name: str) -> bool:
        if self._abandoned:
            raise CoordinationError("given up: this process has begun anew")
        return self._guard(lambda: self._store.check([f"{self._round}/{name}"]))

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
            raise CoordinationError(_LOST.format(error)) from error


def _pause(started: float, timeout: float) -> bool:
    """Sleeps a little; False, at once, when the time is over."""
    waited = time.monotonic() - started
    if waited >= timeout:
        return False
    time.sleep(min(max(waited / 20, 0.0005), MAX_PAUSE, timeout - waited))
    return True


_LOST = "the job's store is gone ({}): the process that hosts it (rank 0, or the launcher's agent) died"


def new_group(*, timeout: float, name: str | None = None) -> Group:
    """All ranks of the initialised default process group, else this process alone.

    Args:
        name: equal on all ranks; groups of the same name and store are one and keep their message rounds.
            None: a fresh name, by the number of groups made so far over this store, which is equal on all ranks of
            one program, also when one of them was replaced and the process group was made anew.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SoloGroup()
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if name is None:
        number = next(_group_numbers.setdefault(store, itertools.count()))
        return StoreGroup(store, rank, world_size, timeout=timeout, prefix=f"ckptlib/{number}")
    known = _groups.get(name)
    if known is None or known[0] is not store:
        known = _groups[name] = (store, StoreGroup(store, rank, world_size, timeout=timeout, prefix=f"ckptlib/{name}"))
    known[1].timeout = timeout
    return known[1]


_group_numbers: weakref.WeakKeyDictionary[Store, itertools.count[int]] = weakref.WeakKeyDictionary()
_groups: dict[str, tuple[Store, StoreGroup]] = {}


def agree(group: Group, name: str, work: Callable[[], T]) -> list[T] | None:
    """Every rank does its part; if any fails, all fail, each with every failed rank's cause.

    Returns:
        The results of all ranks on rank 0, None elsewhere.

    Raises:
        RankFailedError: on every rank, when a rank failed (the failed rank raises its own error).
        RankTimeoutError: on every rank, when a rank did not answer; names it.
    """
    if isinstance(group, PieceGroup):
        own: list[T] = []
        agree(group.job, name, lambda: own.append(work()))
        return own
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001 - it is raised again, once the others know
        error = caught
    answer = (result, None if error is None else f"{type(error).__name__}: {error}")
    verdict: Any = None
    if group.rank == 0:
        verdict = _judge(group, name, answer)
    else:
        group.gather(name, answer)
    outcome = group.broadcast(f"{name}/verdict", None if verdict is None else verdict[1])
    if error is not None:
        raise error
    if outcome is not None:
        raise outcome
    if group.rank != 0:
        return None
    return [result for result, _ in verdict[0]]


def _judge(group: Group, name: str, answer: Any) -> tuple[Sequence[Any], CkptError | None]:
    try:
        answers = group.gather(name, answer)
    except RankTimeoutError as timeout:
        return [], timeout
    assert answers is not None
    causes = {rank: cause for rank, (_, cause) in enumerate(answers) if cause is not None}
    if not causes:
        return answers, None
    text = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
    return [], RankFailedError(f"{name} failed on {len(causes)} of {group.world_size} ranks: {text}", causes=causes)


def lead(group: Group, name: str, work: Callable[[], T]) -> T:
    """Rank 0 works, all get its result or its error."""
    if isinstance(group, PieceGroup):
        return (agree(group, name, work) or [])[0]
    if group.rank == 0:
        try:
            result = work()
        except Exception as error:
            group.broadcast(name, (None, _portable(error)))
            raise
        group.broadcast(name, (result, None))
        return result
    received, failure = group.broadcast(name)
    if failure is not None:
        raise failure
    return cast(T, received)


def hand_out(group: Group, name: str, work: Callable[[], Sequence[T]]) -> T:
    """Rank 0 works; each rank gets its own of the results, or rank 0's error."""
    if isinstance(group, PieceGroup):
        return (agree(group, name, work) or [])[0][0]
    if group.rank == 0:
        try:
            results = work()
        except Exception as error:
            group.scatter(name, [(None, _portable(error))] * group.world_size)
            raise
        return cast(T, group.scatter(name, [(result, None) for result in results])[0])
    received, failure = group.scatter(name)
    if failure is not None:
        raise failure
    return cast(T, received)


def _portable(error: Exception) -> Exception:
    """An error that survives pickling: our own as they are, others by their text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - an error that cannot travel is told by its text
        return RankFailedError(f"rank 0: {type(error).__name__}: {error}", causes={0: str(error)})
    return error
