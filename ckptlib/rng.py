"""RNG state: python, numpy, torch, CUDA and named trackers, per rank.

Two grids are stored. ``rng_state`` is Megatron-Core's: a (pp, tp) grid whose cells are lists, so that Megatron finds
what it asks for. ``rng_state_by_rank`` holds every rank's own state, because ranks that shared one state would be
correlated after a resume. What a rank continues from on another topology is decided in `ckptlib.streams`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ckptlib.errors import RngStateError
from ckptlib.safe_objects import Foreign
from ckptlib.sharding import ShardedObject
from ckptlib.streams import DEFAULT, entry_of, seed_of
from ckptlib.topology import Topology

KEY = "rng_state"
KEY_BY_RANK = "rng_state_by_rank"

_TRACKER = "rng_tracker_states"
_PARTS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", _TRACKER)

State = Mapping[str, Any]
"""What `capture` returns: Megatron's names for the five parts."""

TrackerState = torch.Tensor | torch.Generator
_CUDA_STATE_BYTES = 16  # Philox: seed and offset, 8 bytes each (ATen, CUDAGeneratorImpl::get_state)


@runtime_checkable
class TrackerLike(Protocol):
    """Megatron-Core's and Transformer Engine's RNG trackers."""

    def get_states(self) -> Mapping[str, TrackerState]:
        """State by stream name."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Takes states back."""


@dataclass(frozen=True)
class RngTracker:
    """A named set of RNG streams outside the global ones, such as Megatron's CUDA RNG tracker; see `RngTracker.of`.

    Attributes:
        get: returns ``{name: state}``: uint8 tensors, or generators (the graphable form that CUDA graphs can capture).
        set: takes them back, in the form that this tracker uses.
        graphable: whether that form is the generator. None: it is what `get` returns, and tensors when that is empty.
    """

    get: Callable[[], Mapping[str, TrackerState]]
    set: Callable[[dict[str, Any]], None]
    graphable: bool | None = None

    @classmethod
    def of(cls, tracker: TrackerLike) -> RngTracker:
        """Megatron-Core's tracker (`tensor_parallel.get_cuda_rng_tracker()`), or Transformer Engine's."""
        # Megatron's own test (`is_graph_safe_cuda_rng_tracker`), without importing either.
        from_te = any(base.__name__ == "TECudaRNGStatesTracker" for base in type(tracker).__mro__)
        graphable = from_te or getattr(tracker, "use_cudagraphable_rng", None)
        return cls(tracker.get_states, tracker.set_states, graphable)


def capture(tracker: RngTracker | None = None) -> dict[str, Any]:
    """The state of this process, with Megatron's names for the five parts. Plain data only: generators become tensors.

    Raises:
        RngStateError: the tracker has no streams yet, or one in a form that cannot be stored.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()  # the legacy global generator, as Megatron does
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (name, np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        _TRACKER: {} if tracker is None else _tracker_tensors(tracker),
    }


def _tracker_tensors(tracker: RngTracker) -> dict[str, torch.Tensor]:
    states = tracker.get()
    if not states:
        raise RngStateError(
            "RNG state: the tracker has no streams, and a checkpoint without them could not be resumed. Seed it first "
            "(Megatron: model_parallel_cuda_manual_seed), or save without contents 'rng'."
        )
    return {name: _as_tensor(name, state) for name, state in states.items()}


def _as_tensor(name: str, state: object) -> torch.Tensor:
    match state:
        case torch.Generator():
            return state.get_state()
        case torch.Tensor():
            return state.detach().cpu().clone()  # the tracker goes on with its own
        case Foreign("torch._C", "Generator", _, (_, _, torch.Tensor() as stored)):  # of a device, from a pickle
            return stored
    raise RngStateError(f"RNG state: stream {name!r} is a {type(state).__name__}, expected a tensor or a Generator")


@dataclass(frozen=True)
class Continuation:
    """What the streams of a rank continue from.

    Attributes:
        default: the state whose python, numpy, torch and CUDA parts to take; None: they are seeded.
        tracker: by stored stream name: uint8 state; None: it is seeded.
        seed: the seed of a stream of this rank, by name (`streams.seed_of`).
    """

    default: State | None
    tracker: Mapping[str, torch.Tensor | None]
    seed: Callable[[str], int]


@dataclass(frozen=True)
class PreparedRng:
    """A restore that is proven to work and has changed nothing yet.

    Attributes:
        kept: names of the streams that continue exactly.
        seeded: name of each stream that does not -> its seed.
        dropped: stored streams that this process has no place for.
    """

    kept: tuple[str, ...]
    seeded: Mapping[str, int]
    dropped: tuple[str, ...]
    _default: State | None = None
    _states: dict[str, Any] = field(default_factory=dict)
    _tracker: RngTracker | None = None

    def apply(self) -> None:
        """Puts everything back."""
        if self._default is None:
            seed = self.seeded[DEFAULT]
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)  # seeds CUDA too
        else:
            random.setstate(_python_state(self._default))
            np.random.set_state(tuple(self._default["np_rng_state"]))
            torch.set_rng_state(self._default["torch_rng_state"])
            if "cuda" in self.seeded:
                torch.cuda.manual_seed(self.seeded["cuda"])
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(self._default["cuda_rng_state"])
        if self._tracker is not None:
            self._tracker.set(dict(self._states))


def prepare(plan: Continuation, tracker: RngTracker | None = None) -> PreparedRng:
    """Makes and tries everything that `PreparedRng.apply` will put back, on generators of its own.

    A tracker gets the streams it has, or, while it has none, those that are stored. One that is not stored is seeded.

    Raises:
        RngStateError: a part is missing or no state of its generator; or this process has a tracker and the checkpoint
            no tracker states (Megatron-Core refuses that too).
    """
    kept, seeded = [], {}
    if plan.default is None:
        seeded[DEFAULT] = plan.seed(DEFAULT)
    else:
        _prove(plan.default)
        kept.append(DEFAULT)
        if torch.cuda.is_available() and plan.default["cuda_rng_state"] is None:
            seeded["cuda"] = plan.seed(DEFAULT)  # saved without CUDA
    if tracker is None:
        return PreparedRng(tuple(kept), seeded, tuple(plan.tracker), plan.default)
    if not plan.tracker:
        raise RngStateError(
            "RNG state: the checkpoint has no tracker states, this process has a tracker. "
            "Restore without contents 'rng' to keep the tracker as it is."
        )
    running = tracker.get()
    like = _Form(running, plan.tracker, tracker.graphable)
    states: dict[str, Any] = {}
    for name in running or plan.tracker:
        stored = plan.tracker.get(name)
        if stored is None:
            seeded[name] = plan.seed(name)
            states[name] = like.seeded(name, seeded[name])
        else:
            kept.append(name)
            states[name] = like.filled(name, stored)
    dropped = tuple(name for name in plan.tracker if name not in states)
    return PreparedRng(tuple(kept), seeded, dropped, plan.default, states, tracker)


def restore(state: State, tracker: RngTracker | None = None) -> None:
    """Puts this process's own captured state back. Raises as `prepare`, before anything is changed."""
    prepare(Continuation(state, tracker_tensors(state), lambda name: _seed_alone(state, name)), tracker).apply()


def _seed_alone(state: State, stream: str) -> int:
    return seed_of(digest(state), stream, Topology(), 0)


def check_parts(state: State) -> None:
    """Raises:
    RngStateError: a part is missing; names it.
    """
    missing = [name for name in _PARTS if name not in state]
    if missing:
        raise RngStateError(f"RNG state: {', '.join(missing)} missing in the checkpoint")


def tracker_tensors(state: State) -> dict[str, torch.Tensor]:
    """The streams of a stored state, by name. Megatron-Core stores graphable ones as the generators they are.

    Raises:
        RngStateError: one is neither a state nor a generator; names it.
    """
    check_parts(state)
    return {name: _as_tensor(name, stored) for name, stored in state[_TRACKER].items()}


def digest(state: State) -> bytes:
    """SHA-256 over every part of a captured state: what a re-seed is derived from. 32 bytes.

    Each number and each part's name as ASCII text, each tensor and array as its bytes, each after its length.
    """
    total = hashlib.sha256()

    def add(value: Any) -> None:
        match value:
            case torch.Tensor():
                data = value.detach().cpu().contiguous().numpy().tobytes()
            case np.ndarray():
                data = np.ascontiguousarray(value).astype("<u4").tobytes()
            case Mapping():
                for name in sorted(value):
                    add(name)
                    add(value[name])
                return
            case list() | tuple():
                for item in value:
                    add(item)
                return
            case _:
                data = repr(value).encode()
        total.update(len(data).to_bytes(8, "little") + data)

    add({name: state[name] for name in _PARTS if name in state})
    return total.digest()


def _prove(state: State) -> None:
    check_parts(state)
    try:
        random.Random().setstate(_python_state(state))
        np.random.RandomState().set_state(tuple(state["np_rng_state"]))
        torch.Generator().set_state(state["torch_rng_state"])
        if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
            torch.Generator(device="cuda").set_state(state["cuda_rng_state"])
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise RngStateError(f"RNG state: a stored state does not fit its generator: {error}") from error


def _python_state(state: State) -> tuple[Any, ...]:
    version, internal, gauss_next = state["random_rng_state"]
    return version, tuple(internal), gauss_next


class _Form:
    """The form in which the running tracker keeps its streams; states are brought into it."""

    def __init__(
        self,
        running: Mapping[str, TrackerState],
        stored: Mapping[str, torch.Tensor | None],
        graphable: bool | None,
    ) -> None:
        samples = [*running.values()]
        generators = [state for state in samples if isinstance(state, torch.Generator)]
        self._graphable = bool(generators) if graphable is None else graphable
        self._device = generators[0].device if generators else "cuda" if torch.cuda.is_available() else "cpu"
        tensors = [state for state in (*samples, *stored.values()) if isinstance(state, torch.Tensor)]
        self._length = tensors[0].numel() if tensors and not generators else None

    def filled(self, name: str, state: torch.Tensor) -> TrackerState:
        """A stored state in this form."""
        if state.dtype != torch.uint8:
            raise RngStateError(f"RNG state: the stored stream {name!r} is no uint8 tensor")
        if not self._graphable:
            if self._length not in (None, state.numel()):
                raise RngStateError(
                    f"RNG state: stream {name!r} was saved with {state.numel()} bytes, the tracker here has "
                    f"{self._length}: it was saved on another kind of device. Restore without contents 'rng'."
                )
            return state.clone()
        generator = torch.Generator(device=self._device)
        try:
            generator.set_state(state)
        except RuntimeError as error:
            raise RngStateError(
                f"RNG state: stream {name!r} is no state of a generator on {self._device}: {error}. "
                "Restore without contents 'rng'."
            ) from error
        return generator

    def seeded(self, name: str, seed: int) -> TrackerState:
        """A fresh stream in this form."""
        if self._graphable:
            return torch.Generator(device=self._device).manual_seed(seed)
        if self._length == _CUDA_STATE_BYTES:  # needs no device
            return torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)
        state = torch.Generator().manual_seed(seed).get_state()
        if self._length not in (None, state.numel()):
            raise RngStateError(f"RNG state: stream {name!r} has {self._length} bytes: no known generator's to seed")
        return state


def sharded(
    state: State,
    rank: int,
    world_size: int,
    topology: Topology | None,
    all_states: Sequence[State] | None = None,
    *,
    every_rank: bool = False,
) -> dict[str, Any]:
    """The objects to save for this rank's state: its cell of both grids.

    Args:
        topology: None: plain data parallel, as when it does not fit the world size.
        every_rank: Megatron's cells list all DP x CP ranks (Megatron with ``data_parallel_random_init``, which then
            reads the entry of its DP rank), not the first alone.
        all_states: with `every_rank`, on rank 0, which writes all cells: the states of all ranks; None elsewhere.
    """
    own = ShardedObject(KEY_BY_RANK, dict(state), (world_size,), (rank,))
    if topology is None or topology.world_size != world_size:
        topology = Topology(dp=world_size)
    grid = (topology.pp, topology.tp)
    if every_rank:
        cells = {} if all_states is None else _full_cells(all_states, topology)
        grids = {f"{pp}.{tp}": ShardedObject(KEY, states, grid, (pp, tp)) for (pp, tp), states in cells.items()}
        return {KEY: grids, KEY_BY_RANK: own} if grids else {KEY_BY_RANK: own}
    at = topology.coordinates(rank)
    replica = entry_of(at, topology)
    return {KEY: ShardedObject(KEY, [dict(state)], grid, (at.pp, at.tp), replica), KEY_BY_RANK: own}


def cells_by_rank(states: Sequence[State], topology: Topology) -> list[list[dict[str, Any]]]:
    """For each rank the full list of its (pp, tp) cell: the states of all its data- and context-parallel ranks."""
    cells = _full_cells(states, topology)
    places = map(topology.coordinates, range(topology.world_size))
    return [cells[at.pp, at.tp] for at in places]


def _full_cells(states: Sequence[State], topology: Topology) -> dict[tuple[int, int], list[dict[str, Any]]]:
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for rank, state in enumerate(states):
        at = topology.coordinates(rank)
        cell = cells.setdefault((at.pp, at.tp), [{}] * (topology.dp * topology.cp))
        cell[entry_of(at, topology)] = dict(state)
    return cells
