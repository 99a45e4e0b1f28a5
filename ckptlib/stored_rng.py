"""The RNG states that a checkpoint holds, and what each stream of a rank continues from among them.

Ours have every rank's own state (`rng.KEY_BY_RANK`); Megatron-Core's ``torch_dist`` a (pp, tp) grid of lists; its
``torch_dcp`` one list, flattened into the state's keys. The decisions are in `ckptlib.streams`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptlib import rng, streams
from ckptlib.errors import RngStateError
from ckptlib.sharding import ShardedObject
from ckptlib.source import Source
from ckptlib.topology import Topology

_CELL = re.compile(re.escape(rng.KEY) + r"/shard_(\d+)\.(\d+)_(\d+)\.(\d+)")
_FLAT = re.compile(re.escape(rng.KEY) + r"\.(\d+)\.(\w+)(?:\.(.+))?")  # ours alone; fsdp_dtensor names a place first


@dataclass(frozen=True)
class StoredStreams:
    """What a rank continues from.

    Attributes:
        changed: from which topology to which, for people; None: every rank stands where it stood.
        shared: one stored state serves several data-parallel ranks, as its trainer kept it.
    """

    continuation: rng.Continuation
    changed: str | None = None
    shared: bool = False


def stored_streams(source: Source, now: Topology, rank: int) -> StoredStreams | None:
    """What `rank` of topology `now` continues from; None: the checkpoint has no RNG state.

    Raises:
        RngStateError: what is stored is no RNG state.
        IntegrityError: damaged.
    """
    manifest = source.manifest
    if manifest is not None:
        begin = manifest.begin
        saved = begin.topology
        if saved is None or saved.world_size != begin.world_size:
            saved = Topology(dp=begin.world_size)
        by_rank = _ByRank(source, saved)
        if by_rank.exists():
            return by_rank.streams(now, rank)
    grid = _Grid(source)
    return grid.streams(now, rank) if grid.exists() else None


def streams_of_rank(state: Any, now: Topology, rank: int, where: str) -> StoredStreams:
    """What a rank continues from that has its own state: all of it.

    Raises:
        RngStateError: it is no RNG state.
    """
    own = _checked(state, where)
    plan = rng.Continuation(
        default=own,
        tracker=dict(rng.tracker_tensors(own)),
        seed=lambda stream: streams.seed_of(rng.digest(own), stream, now, rank),
    )
    return StoredStreams(plan)


def streams_of_entries(entries: Sequence[Any], now: Topology, rank: int, writer: int, where: str) -> StoredStreams:
    """What a rank continues from among the entries of Megatron's list for its (tp, pp, ep) place.

    Args:
        writer: the rank that wrote them; of one entry, the rank whose state it is.

    Raises:
        RngStateError: they are no RNG states.
    """
    states = [_checked(entry, where) for entry in entries]

    def origin(stream: str) -> Mapping[str, Any] | None:
        if len(states) > 1:
            cell = streams.cell_of(stream, (now.pp, now.tp), len(states), now, rank)
            return None if cell is None else states[cell.entry]
        other_expert = stream == streams.EXPERT_PARALLEL and (
            streams.place_of(stream, now, writer) != streams.place_of(stream, now, rank)
        )
        return None if other_expert else states[0]

    plan = rng.Continuation(
        default=origin(streams.DEFAULT),
        tracker=_tracker(states[0], origin),
        seed=lambda stream: streams.seed_of(rng.digest(states[0]), stream, now, rank),
    )
    return StoredStreams(plan, shared=len(states) == 1 and now.dp * now.cp > 1)


class _ByRank:
    def __init__(self, source: Source, saved: Topology) -> None:
        self._source = source
        self._saved = saved

    def exists(self) -> bool:
        return self._key(0) is not None

    def streams(self, now: Topology, rank: int) -> StoredStreams:
        @functools.cache
        def state(of: int) -> Mapping[str, Any]:
            key = self._key(of)
            if key is None:
                raise RngStateError(f"{self._source.url}: the RNG state of rank {of} is missing")
            return _checked(self._source.read_object(key), f"{self._source.url} ({key})")

        def origin(stream: str) -> Mapping[str, Any] | None:
            of = streams.continues_from(stream, self._saved, now, rank)
            return None if of is None else state(of)

        default = origin(streams.DEFAULT)
        plan = rng.Continuation(
            default=default,
            tracker=_tracker(state(0) if default is None else default, origin),
            seed=lambda stream: streams.seed_of(rng.digest(state(0)), stream, now, rank),
        )
        same = streams.same_places(self._saved, now)
        return StoredStreams(plan, None if same else f"{self._saved} -> {now}")

    def _key(self, rank: int) -> str | None:
        """Where a rank's state is: in a grid, or under its number (TORCH_DCP)."""
        cell = ShardedObject(rng.KEY_BY_RANK, None, (self._saved.world_size,), (rank,)).unique_key
        names = (cell, f"{rng.KEY_BY_RANK}.{rank}")
        return next((name for name in names if self._source.index.has_object(name)), None)


class _Grid:
    """Megatron-Core's: lists of entries at (pp, tp)."""

    def __init__(self, source: Source) -> None:
        self._source = source
        cells = [match for key in source.index.object_keys_below(f"{rng.KEY}/") if (match := _CELL.fullmatch(key))]
        self._grid = (int(cells[0][3]), int(cells[0][4])) if cells else None
        self._flat = None if cells else self._read_flat()

    def exists(self) -> bool:
        return self._grid is not None or bool(self._flat)

    def streams(self, now: Topology, rank: int) -> StoredStreams:
        grid = self._grid or (1, 1)
        at = now.coordinates(rank)
        entries = functools.cache(self._entries)
        same_grid = grid == (now.pp, now.tp)
        mine = entries(at.pp, at.tp) if same_grid else []

        def state(stream: str) -> Mapping[str, Any] | None:
            cell = streams.cell_of(stream, grid, len(mine), now, rank)
            return None if cell is None else mine[cell.entry]

        first = entries(0, 0)[0]
        plan = rng.Continuation(
            default=state(streams.DEFAULT),
            tracker=_tracker(mine[0] if mine else first, state),
            seed=lambda stream: streams.seed_of(rng.digest(first), stream, now, rank),
        )
        changed = None if same_grid else f"a (pp, tp) grid of {grid[0]} x {grid[1]} -> {now}"
        return StoredStreams(plan, changed, shared=len(mine) == 1 and now.dp * now.cp > 1)

    def _entries(self, pp: int, tp: int) -> list[Mapping[str, Any]]:
        if self._flat is not None:
            return self._flat
        key = ShardedObject(rng.KEY, None, self._grid or (1, 1), (pp, tp)).unique_key
        where = f"{self._source.url} ({key})"
        if not self._source.index.has_object(key):
            raise RngStateError(f"{where}: RNG state: this cell of the grid is missing")
        value = self._source.read_object(key)
        if not isinstance(value, list) or not value:
            raise RngStateError(f"{where}: RNG state: expected a list of states, found {type(value).__name__}")
        return [_checked(entry, where) for entry in value]

    def _read_flat(self) -> list[Mapping[str, Any]]:
        index = self._source.index
        entries: dict[int, dict[str, Any]] = {}

        def put(match: re.Match[str], value: Any) -> None:
            entry = entries.setdefault(int(match[1]), {"rng_tracker_states": {}})
            if match[3] is None:
                entry[match[2]] = value
            else:
                entry[match[2]][match[3]] = value

        prefix = f"{rng.KEY}."
        for key in index.object_keys_below(prefix):
            if match := _FLAT.fullmatch(key):
                put(match, self._source.read_object(key))
        for key in index.keys_below(prefix):
            if match := _FLAT.fullmatch(key):
                put(match, self._source.read_chunk(index.chunk_item(index.tensor(key), index.chunks(key), 0)))
        return [_checked(entry, self._source.url) for _, entry in sorted(entries.items())]


def _tracker(
    names: Mapping[str, Any], origin: Callable[[str], Mapping[str, Any] | None]
) -> dict[str, torch.Tensor | None]:
    """The state of each stream that `names` has, from the state that it continues from."""
    return {
        name: None if (state := origin(name)) is None else rng.tracker_tensors(state).get(name)
        for name in rng.tracker_tensors(names)
    }


def _checked(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RngStateError(f"{where}: RNG state: expected a dict of its parts, found {type(value).__name__}")
    rng.check_parts(value)
    return value
