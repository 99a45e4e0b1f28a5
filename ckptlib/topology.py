"""Parallel topology of a training job and each rank's coordinates in it. Pure.

Rank order is Megatron-Core's default ``tp-cp-ep-dp-pp`` (`megatron.core.parallel_state`): tensor parallel varies
fastest, pipeline parallel slowest. Expert parallelism lives inside DP x CP and has no axis of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from ckptlib.errors import StateError


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands: one index per axis, each from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes. `dp` counts replicas of the model (without `cp`).

    Raises:
        StateError: a size is not a positive integer, or expert sizes do not fit into the others.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise StateError(f"topology: {field.name}={value!r}, expected a positive integer")
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise StateError(
                f"topology: ep*etp={self.ep * self.etp} does not divide tp*cp*dp={self.tp * self.cp * self.dp}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`.

        Raises:
            StateError: `rank` is not in [0, world_size).
        """
        if not 0 <= rank < self.world_size:
            raise StateError(f"topology {self}: rank {rank} is outside 0..{self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def replica(self, rank: int) -> int:
        """Number of the tensor-parallel group of a rank, from 0: ranks of one group see the same activations.

        Raises:
            StateError: `rank` is not in [0, world_size).
        """
        at = self.coordinates(rank)
        return (at.pp * self.dp + at.dp) * self.cp + at.cp

    def to_json(self) -> dict[str, int]:
        """All axes, also those of size 1."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Topology:
        """Reads `to_json`; unknown axes of a newer minor version are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: size for name, size in value.items() if name in known})  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Short form for people: axes of size 1 are left out, as in ``tp2-dp2``; a single rank is ``tp1``."""
        parts = [f"{name}{size}" for name, size in self.to_json().items() if size != 1]
        return "-".join(parts) or "tp1"
