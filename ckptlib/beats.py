"""Signs of life of a save that is being written: who still works on it, and how far they are.

A rank's writer refreshes ``beat_<rank>.json`` in the save's control directory: a counter, and bytes. Whoever settles an
older attempt's save (W8) sees by the counters who is alive, by its own clock: clocks of hosts are never compared. For
people the bytes make ``writing 63 %``. Nothing else follows from a beat, and nothing fails for want of one.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptlib import commit, records
from ckptlib import storage as st
from ckptlib.errors import CkptError, RecordError
from ckptlib.manifest import Begin

log = logging.getLogger("ckptlib")

HEARTBEAT = 2.0
"""Seconds between two beats of a rank, where there are few ranks."""

PUTS_PER_SECOND = 100
"""Beats of all ranks together, at most: a directory server has other things to do."""

STILL = 3
"""A rank whose counter did not move for so many of its intervals is not alive."""

FIRST = 15.0
"""Seconds from the moment a save is handed over to its first beat, at most."""

START = 60.0
"""Seconds that a process may take to start, on a busy host: it imports torch."""


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        counter: grows with every beat; nothing else says that somebody is alive.
        written: payload bytes that were handed to the storage; they may not be durable yet.
        total: payload bytes that this rank has to write.
        interval: seconds until the next beat.
        machine: one boot of one machine (or container), as `this_machine`; empty: unknown.
        started: when that process began, in its machine's own units: a process id may be used again.
        at: seconds since the epoch by the writer's clock: shown, never decided on.
    """

    save_id: str
    rank: int
    counter: int
    written: int
    total: int
    interval: float
    host: str
    machine: str
    pid: int
    started: int
    at: float

    def encode(self) -> bytes:
        """Bytes of ``beat_<rank>.json``."""
        return records.encode("beat", asdict(self))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Beat:
        """Reads `encode`.

        Raises:
            RecordError: it is damaged, or says what cannot be.
        """
        value = records.decode("beat", data, where)
        try:
            beat = cls(**{name: value[name] for name in cls.__dataclass_fields__})
            if not 0 < beat.interval < math.inf or min(beat.written, beat.total, beat.pid) < 0:
                raise RecordError(f"{where}: says what cannot be: {beat}")
        except (KeyError, TypeError) as error:
            raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error
        return beat


# --- pure -------------------------------------------------------------------------------------------------------------


def interval_of(world_size: int, base: float = HEARTBEAT) -> float:
    """Seconds between two beats of a rank: `base`, or more where all ranks together would beat too often."""
    return max(base, world_size / PUTS_PER_SECOND)


def first_after(rank: int, world_size: int, base: float = HEARTBEAT) -> float:
    """Seconds until a rank's first beat: at once, unless all at once were too many. Rank 0 never waits."""
    return rank / PUTS_PER_SECOND if interval_of(world_size, base) > base else 0.0


class Watch:
    """Judges by looks at the beats of ranks who of them is alive. Times are the caller's own, of one clock.

    Args:
        first: seconds that a rank is given for its first beat, at least.
    """

    def __init__(self, first: float = 0.0) -> None:
        self._first = first
        self._moved: dict[int, tuple[int | None, float]] = {}  # rank -> counter, and when it was first seen

    def lost(self, missing: Iterable[int], beats: Mapping[int, Beat], now: float) -> tuple[int, ...]:
        """Those of the `missing` ranks that stood still for too long, those that have no beat included.

        A save of which one part will never be written is never complete, however busy the others are.

        Args:
            beats: the ones that there are now, by rank.
            now: seconds, by a clock that does not jump.
        """
        slowest = max((beat.interval for beat in beats.values()), default=0.0)
        found = []
        for rank in missing:
            beat = beats.get(rank)
            counter = None if beat is None else beat.counter
            if rank not in self._moved or self._moved[rank][0] != counter:
                self._moved[rank] = counter, now
            patience = max(self._first, STILL * slowest) if beat is None else STILL * beat.interval
            if not patience or now - self._moved[rank][1] > patience:
                found.append(rank)
        return tuple(found)


@dataclass(frozen=True)
class InFlight:
    """How far a save is, over all ranks.

    Attributes:
        written, total: bytes. Ranks of which nothing is known yet are taken to write as much as the others.
        recorded: ranks whose part is durable and recorded.
        seen_at: the latest beat, in seconds since the epoch by the writer's clock; None: there was none.
        interval: seconds between two beats of a rank.
    """

    written: int
    total: int
    recorded: int
    world_size: int
    seen_at: float | None
    interval: float = HEARTBEAT

    @property
    def fraction(self) -> float:
        """Of the bytes; 1 only when every rank has recorded its part."""
        if self.recorded == self.world_size:
            return 1.0
        return min(0.99, self.written / self.total) if self.total else 0.0

    def __str__(self) -> str:
        return f"{math.floor(100 * self.fraction)} %"


def in_flight(begin: Begin, missing: Iterable[int], beats: Mapping[int, Beat]) -> InFlight:
    """How far a save is.

    Args:
        missing: ranks without a record. The others count in full.
        beats: the last ones, by rank.
    """
    lacking = set(missing)
    known = sum(beat.total for beat in beats.values())
    written = sum(min(beat.written, beat.total) if rank in lacking else beat.total for rank, beat in beats.items())
    others = [rank for rank in range(begin.world_size) if rank not in beats] if len(beats) < begin.world_size else []
    mean = known / len(beats) if beats else 0.0
    return InFlight(
        written=written + round(mean * sum(rank not in lacking for rank in others)),
        total=known + round(mean * len(others)),
        recorded=begin.world_size - len(lacking),
        world_size=begin.world_size,
        seen_at=max((beat.at for beat in beats.values()), default=None),
        interval=max((beat.interval for beat in beats.values()), default=HEARTBEAT),
    )


# --- on storage -------------------------------------------------------------------------------------------------------


def read_beats(storage: st.Storage, path: str, begin: Begin, ranks: Iterable[int] | None = None) -> dict[int, Beat]:
    """The beats that there are, by rank: one listing, and one small file each. Damaged ones are as good as none.

    Args:
        ranks: only of these.
    """
    directory = commit.save_dir(path, begin.save_id)
    present = {entry.name for entry in storage.list(directory)}
    found = {}
    for rank in range(begin.world_size) if ranks is None else ranks:
        if commit.beat_name(rank) not in present:
            continue
        where = st.join(directory, commit.beat_name(rank))
        data = st.get_or_none(storage, where)
        try:
            beat = None if data is None else Beat.decode(data, storage.url(where))
        except CkptError as error:
            log.debug("beat does not count: %s", error)
            continue
        if beat is not None and (beat.save_id, beat.rank) == (begin.save_id, rank):
            found[rank] = beat
    return found


def look(storage: st.Storage, path: str, begin: Begin) -> InFlight:
    """How far a save is that has begun and is not decided."""
    return in_flight(begin, commit.progress(storage, path, begin).missing, read_beats(storage, path, begin))


class Pulse:
    """Beats for one rank's part of one save until it is stopped, in a thread of its own.

    Nothing waits for it: a storage that does not answer, or refuses, costs the save nothing but a line in the log.

    Args:
        total: payload bytes that will be written.
        base: see `interval_of`.
        at_once: whether the first beat comes with the start; else a save that is short makes none.
    """

    def __init__(
        self,
        storage: st.Storage,
        path: str,
        begin: Begin,
        rank: int,
        total: int,
        base: float = HEARTBEAT,
        *,
        at_once: bool = True,
    ) -> None:
        self._storage = storage
        self._where = st.join(commit.save_dir(path, begin.save_id), commit.beat_name(rank))
        self._save_id, self._rank, self._total = begin.save_id, rank, total
        self._interval = interval_of(begin.world_size, base)
        self._delay = first_after(rank, begin.world_size, base) if at_once else self._interval
        self._written = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"ckptlib-beat-{begin.iteration}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # as many threads as there may be
            log.warning("save %s: no signs of life of rank %d: %s", begin.save_id, rank, error)

    def wrote(self, nbytes: int) -> None:
        """Counts payload bytes; for the one thread that writes."""
        self._written += nbytes

    def stop(self, timeout: float = 5.0) -> None:
        """Ends it; safe to call twice. Its last beat stays until the records of the save are removed.

        Args:
            timeout: seconds that it waits for a beat on its way, which must not come after the records are removed.
        """
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _beat(self) -> None:
        counter, told = 0, False
        delay = self._delay
        while not self._stopped.wait(delay):
            counter, delay = counter + 1, self._interval
            try:
                self._storage.put(self._where, self._now(counter).encode(), durable=False)
            except Exception as error:  # noqa: BLE001 - whatever a storage raises
                if not told:
                    log.warning("save %s: no sign of life of rank %d: %s", self._save_id, self._rank, error)
                told = True

    def _now(self, counter: int) -> Beat:
        return _beat_of(os.getpid(), self._save_id, self._rank, counter, self._written, self._total, self._interval)


def announce(storage: st.Storage, path: str, begin: Begin, rank: int, total: int, pid: int) -> None:
    """A beat for a process that has been handed a part and is only starting: its own ones take this one's place.

    As with all beats nothing fails for want of it.
    """
    beat = _beat_of(pid, begin.save_id, rank, 0, 0, total, START / STILL)
    try:
        storage.put(st.join(commit.save_dir(path, begin.save_id), commit.beat_name(rank)), beat.encode(), durable=False)
    except Exception as error:  # noqa: BLE001 - whatever a storage raises
        log.warning("save %s: no sign of life of rank %d: %s", begin.save_id, rank, error)


def _beat_of(pid: int, save_id: str, rank: int, counter: int, written: int, total: int, interval: float) -> Beat:
    return Beat(
        save_id=save_id,
        rank=rank,
        counter=counter,
        written=written,
        total=total,
        interval=interval,
        host=socket.gethostname(),
        machine=this_machine(),
        pid=pid,
        started=_started(pid) or 0,
        at=time.time(),
    )


# --- processes of this machine ----------------------------------------------------------------------------------------


@functools.cache
def this_machine() -> str:
    """One boot of this machine, and which process ids mean what on it; empty where the kernel does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_dead(beat: Beat) -> bool:
    """Whether the process behind a beat was one of this machine and has ended. False: it lives, or nobody can tell."""
    if not beat.machine or beat.machine != this_machine():
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # somebody else's, which may be hidden from us
        return False
    return _started(beat.pid) != beat.started


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None: there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(fields[18])
