"""What a load may be told: which keys, under which names, of which dtypes, how strictly, and by whom it is read.

Keys here are stored keys, and patterns are those of `fnmatch`: ``model.*``, ``*.weight``, ``layers.[0-3].*``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ckptlib.errors import DtypeMismatchError, StateError
from ckptlib.state import FlatState, ObjectLeaf, TensorLeaf, ValueLeaf, dtype_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Strict = Literal["error", "warn", "return"]
"""What missing and unexpected keys do: raise on either, be logged, only be reported."""

LoadParallelism = Literal["dp"]
"""``dp``: bytes that several ranks need are read by one of them, which sends them to the others."""

Rename = Mapping[str, str] | Callable[[str], str]
"""State key -> stored key; a mapping's entries are whole keys or what stands before a dot or slash in them."""


@dataclass(frozen=True)
class LoadOptions:
    """How a load is done; the same on every rank.

    Attributes:
        strict: what missing and unexpected keys do.
        verify: ``"data"`` checks the digest of every file before anything is read.
        keys: patterns of stored keys; what matches none of them is left as it is, and is neither missing nor
            unexpected. None: everything.
        rename: what the state's keys are called in the checkpoint. None: the same.
        cast: patterns of stored keys whose values may be converted to another dtype; True: all. Bytes are read as
            they are stored. Real from complex, and whole numbers from fractions, are refused even then.
        load_main_params: weights come from the optimizer's fp32 main parameters (`MAIN_PARAMS`) where those are stored.
        load_parallelism: None: every rank reads what it needs.
        process_group: whose ranks share reads, with collectives on it; None: the default group.
        check_coverage: what the ranks ask for together has to cover each tensor exactly once, by main replicas
            (Megatron-Core's ``validate_access_integrity``). False: to load parts of what a job would.

    Raises:
        StateError: a value that is none of these.
    """

    strict: Strict = "error"
    verify: str | None = None
    keys: Collection[str] | None = None
    rename: Rename | None = None
    cast: bool | Collection[str] = False
    load_main_params: bool = False
    load_parallelism: LoadParallelism | None = None
    process_group: ProcessGroup | None = None
    check_coverage: bool = True

    def __post_init__(self) -> None:
        if self.strict not in ("error", "warn", "return"):
            raise StateError(f"strict={self.strict!r}: expected 'error', 'warn' or 'return'")
        if self.load_parallelism not in (None, "dp"):
            raise StateError(f"load_parallelism={self.load_parallelism!r}: expected None or 'dp'")
        for name, patterns in (("keys", self.keys), ("cast", self.cast)):
            if isinstance(patterns, str):
                raise StateError(f"{name}={patterns!r}: expected a collection of patterns, got one string")
        if self.rename is not None and not (callable(self.rename) or isinstance(self.rename, Mapping)):
            raise StateError(f"rename={self.rename!r}: expected a mapping or a function from state key to stored key")

    @property
    def by_tensor(self) -> bool:
        """Whether single tensors are chosen or changed: what a whole state dict (LOCAL, LEGACY) cannot do."""
        return bool(self.keys is not None or self.rename is not None or self.cast or self.load_main_params)

    @property
    def renames(self) -> Renames:
        """`rename`, to be called."""
        return Renames(self.rename)

    def chosen(self, key: str) -> bool:
        """Whether `keys` admits a stored key."""
        return self.keys is None or any(map(_matcher(self.keys), _names_of(key)))

    def may_cast(self, key: str) -> bool:
        """Whether a stored key's values may be converted."""
        return self.cast if isinstance(self.cast, bool) else any(map(_matcher(self.cast), _names_of(key)))

    def unmatched(self, stored: Iterable[str], requested: Iterable[str]) -> list[str]:
        """Entries that say something about no key at all, for people.

        Args:
            stored: all keys of the checkpoint.
            requested: the stored names of what this rank wants.
        """
        names = [name for key in {*stored, *requested} for name in _names_of(key)]
        casts = () if isinstance(self.cast, bool) else self.cast
        return [
            f"{what}: the pattern {pattern!r} matches no key"
            for what, patterns in (("keys", self.keys or ()), ("cast", casts))
            for pattern in patterns
            if not any(map(_matcher((pattern,)), names))
        ]


MAIN_PARAMS = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(?P<key>.+)")
"""Where Megatron-Core (``fully_reshardable``, ``fully_sharded_model_space``) and our integration of it store fp32 main
parameters of a distributed optimizer."""


class Renames:
    """State key -> stored key, and back to which key that was.

    Args:
        rename: see `LoadOptions.rename`. In a mapping the longest entry that fits wins; ``""`` stands before every
            key, and as a value it takes the entry away.
    """

    def __init__(self, rename: Rename | None) -> None:
        self._rename = rename if rename is not None else {}
        self.used: set[str] = set()

    def __call__(self, key: str) -> str:
        """The stored name of a key.

        Raises:
            StateError: it would have none.
        """
        if not isinstance(self._rename, Mapping):
            stored = self._rename(key)
            return _checked(key, stored)
        for cut in _cuts(key):
            old = key[:cut]
            if old in self._rename:
                self.used.add(old)
                return _checked(key, _joined(self._rename[old], key[cut:]))
        return key

    @property
    def entries(self) -> Sequence[str]:
        """The entries of a mapping."""
        return [*self._rename] if isinstance(self._rename, Mapping) else []

    def candidates(self, prefix: str) -> set[str]:
        """Rests of state keys below ``prefix + "."`` that an entry names."""
        return {entry.removeprefix(prefix + ".") for entry in self.entries if entry.startswith(prefix + ".")}

    def apply(self, flat: FlatState) -> dict[str, str]:
        """Gives all leaves their stored names.

        Returns:
            Stored name -> the state's, for those that differ.

        Raises:
            StateError: two names of the state became one.
        """
        old_of: dict[str, str] = {}
        for leaf in leaves_of(flat):
            old, leaf.key = leaf.key, self(leaf.key)
            known = old_of.setdefault(leaf.key, old)
            if known != old:
                raise StateError(f"rename: {known!r} and {old!r} of the state would both be {leaf.key!r}")
        return {stored: old for stored, old in old_of.items() if stored != old}


def leaves_of(flat: FlatState) -> list[TensorLeaf | ObjectLeaf | ValueLeaf]:
    """Everything in a state that has a name on storage."""
    return [*flat.tensors, *flat.objects, *flat.values]


def check_cast(key: str, stored: str, wanted: str, url: str) -> None:
    """Refuses conversions that would lose what a number is: its fraction, its imaginary part, its high bits.

    Args:
        stored, wanted: names of dtypes.

    Raises:
        DtypeMismatchError: names the tensor and both dtypes.
    """
    from_, to = dtype_of(stored), dtype_of(wanted)
    packed = any("x2" in name or name.startswith(("q", "bits")) for name in (stored, wanted))
    if packed or _kind(from_) > _kind(to) or (_kind(from_) == _kind(to) == _INTEGER and not _holds(to, from_)):
        raise DtypeMismatchError(
            f"tensor {key!r}: {url} holds {stored}, the state wants {wanted}. cast does not convert these: values "
            "would be lost."
        )


_BOOL, _INTEGER, _FLOAT, _COMPLEX = range(4)


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex or dtype.is_floating_point:
        return _COMPLEX if dtype.is_complex else _FLOAT
    return _BOOL if dtype == torch.bool else _INTEGER


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    one, other = torch.iinfo(wide), torch.iinfo(narrow)
    return bool(one.min <= other.min and other.max <= one.max)


def _names_of(key: str) -> tuple[str, ...]:
    """What a pattern may match: the key, and for a cell of a grid of objects also the grid's name."""
    grid, shard, _ = key.partition("/shard_")
    return (key, grid) if shard else (key,)


def _matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _checked(key: str, stored: object) -> str:
    if not isinstance(stored, str) or not stored:
        raise StateError(f"rename: {key!r} would be {stored!r}; expected the name of a stored key")
    return stored


def _cuts(key: str) -> list[int]:
    """Where a key may be cut, the whole of it first and nothing last."""
    return [len(key), *(i for i in range(len(key) - 1, -1, -1) if key[i] in "./"), 0]


def _joined(new: str, rest: str) -> str:
    if not new:
        return rest.lstrip("./") or new
    return new + (rest if not rest or rest[0] in "./" else "." + rest)
