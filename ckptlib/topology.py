"""Parallel topology of a training job and each rank's coordinates in it. Pure.

Rank order is Megatron-Core's default ``tp-cp-ep-dp-pp`` (`megatron.core.parallel_state`): tensor parallel varies
fastest, pipeline parallel slowest. The ranks of one pipeline stage are counted twice: as TP x CP x DP for the dense
layers, and as ETP x EP x expert DP, in that order, for the experts.
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
class ExpertCoordinates:
    """Where a rank stands among the experts; `dp` counts the copies of one expert's shard (expert data parallel)."""

    etp: int
    ep: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes. `dp` counts replicas of the model (without `cp`).

    `etp` is stated, not derived: Megatron-Core takes the tensor-parallel size where none is given.

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

    def rank_at(self, at: Coordinates) -> int:
        """Global rank of a place; the inverse of `coordinates`.

        Raises:
            StateError: there is no such place.
        """
        for name, index in asdict(at).items():
            if not 0 <= index < getattr(self, name):
                raise StateError(f"topology {self}: {name}={index} is outside 0..{getattr(self, name) - 1}")
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp * at.pp))

    @property
    def expert_dp(self) -> int:
        """Number of copies of each expert's shard: tp * cp * dp / (etp * ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Coordinates of global rank `rank` among the experts.

        Raises:
            StateError: `rank` is not in [0, world_size).
        """
        at = self.coordinates(rank)
        rest, etp = divmod(rank % (self.tp * self.cp * self.dp), self.etp)
        dp, ep = divmod(rest, self.ep)
        return ExpertCoordinates(etp=etp, ep=ep, dp=dp, pp=at.pp)

    def expert_rank_at(self, at: ExpertCoordinates) -> int:
        """Global rank of a place among the experts; the inverse of `expert_coordinates`.

        Raises:
            StateError: there is no such place.
        """
        sizes = {"etp": self.etp, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        for name, index in asdict(at).items():
            if not 0 <= index < sizes[name]:
                raise StateError(f"topology {self}: expert {name}={index} is outside 0..{sizes[name] - 1}")
        return at.etp + self.etp * (at.ep + self.ep * (at.dp + self.expert_dp * at.pp))

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
