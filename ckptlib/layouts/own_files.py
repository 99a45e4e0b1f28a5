"""One `torch.save` file per writer, of its whole own state (LOCAL, LEGACY)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ckptlib import storage as st
from ckptlib.errors import StateError
from ckptlib.layouts.own_names import own_file_name
from ckptlib.layouts.own_state import OwnState, capture
from ckptlib.packing import Package
from ckptlib.paused_gc import paused_gc
from ckptlib.pieces import LocalPlan, PieceTable
from ckptlib.plan import values_digest
from ckptlib.planning import Share
from ckptlib.state import Path, TensorLeaf, dotted, leaf_bytes
from ckptlib.torch_file import Skeleton, skeleton
from ckptlib.writer import RankFiles, file_entry, in_turn


@dataclass(frozen=True)
class OwnFile(Package):
    """A rank's own state in one file; None: this rank writes nothing."""

    skeleton: Skeleton | None = None

    is_sliceable: ClassVar[bool] = True

    def names(self, save_id: str, rank: int) -> list[str]:
        """See `Package.names`."""
        return [own_file_name(rank, save_id)]

    @property
    def other_nbytes(self) -> int:
        """Bytes of everything but the tensors."""
        return 0 if self.skeleton is None else sum(map(len, self.skeleton.segments))

    def write(self, storage: st.Storage, path: str, save_id: str, rank: int, wrote: Callable[[int], None]) -> RankFiles:
        """See `Package.write`."""
        if self.skeleton is None:
            return RankFiles((), (), ())
        name = own_file_name(rank, save_id)
        stream = storage.open_write(st.join(path, name), size=self.nbytes + self.other_nbytes)
        try:
            self.skeleton.write(stream, (leaf_bytes(leaf.tensor) for leaf in in_turn(self.tensors, stream)), wrote)
            written = stream.finish()
        except BaseException:
            stream.abort()
            raise
        return RankFiles((file_entry(name, written),), (), ())


@dataclass(frozen=True)
class OwnContent:
    """A package that depends on no other rank: there is nothing to plan, to tile or to agree on."""

    package: OwnFile
    parts: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return self.package.nbytes

    @property
    def unplanned_nbytes(self) -> int:
        """All of it."""
        return self.package.nbytes + self.package.other_nbytes

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """See `Content.tensors`."""
        return self.package.tensors

    def keep_values(self) -> None:
        """They are: the package was made with them."""

    def describe(self) -> LocalPlan:
        """Nothing."""
        return LocalPlan(PieceTable.build([]), {}, {})

    def pack(self, share: Share, value_digests: Mapping[str, str], *, leads: bool) -> Package:
        """The package. Its plain values are as they were when it was made."""
        return self.package


def own_content(tree: Mapping[str, Any] | None) -> OwnContent:
    """The content of a rank that writes its own state; of one that writes nothing: None.

    Raises:
        StateError: something in it cannot be saved.
        UnsupportedError: a part keeps what it has outside its state dict.
    """
    nothing = values_digest({}, ())
    if tree is None:
        return OwnContent(OwnFile((), nothing))
    with paused_gc():  # training waits for this: a quarter of the time, for thousands of tensors
        own = capture(tree)
    try:
        with paused_gc():
            form, order = _skeleton(own, own.tree, "state")
    except StateError:
        for path, value in _values((), own.tree):
            _skeleton(own, value, dotted(path))  # the first that cannot be saved is what the caller must know
        raise
    return OwnContent(OwnFile(tuple(own.tensors[storage] for storage in order), nothing, form), own.parts)


def _skeleton(own: OwnState, value: Any, where: str) -> tuple[Skeleton, list[int]]:
    form, order = skeleton(value, where)
    if any(storage not in own.tensors for storage in order):
        raise StateError(
            f"{where}: a tensor lies inside an object that is no dict, list or tuple. Turn that object into one of "
            "these."
        )
    return form, order


def _values(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """What is neither a container nor a tensor, and the keys of dicts."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name), name
            yield from _values((*path, name), inner)
    elif type(value) in (list, tuple):
        for i, inner in enumerate(value):
            yield from _values((*path, i), inner)
    elif not isinstance(value, torch.Tensor):
        yield path, value
