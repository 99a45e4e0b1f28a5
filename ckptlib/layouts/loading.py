"""Loads a rank's own state from the file of its place (LOCAL, LEGACY): the same place of the same topology only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptlib import exported, rng
from ckptlib import storage as st
from ckptlib.coordination import Group
from ckptlib.errors import (
    CkptError,
    IntegrityError,
    KeyMismatchError,
    LoadIncompleteError,
    UnsupportedError,
)
from ckptlib.exchange import Exchange
from ckptlib.layouts import legacy
from ckptlib.layouts.filling import Filling
from ckptlib.layouts.own_names import own_file_name
from ckptlib.load_options import LoadOptions
from ckptlib.loading import LoadReport, Prepared, Request, prepare_load, verify_first
from ckptlib.manifest import Begin
from ckptlib.pieces import LocalPlan, PieceTable
from ckptlib.planning import Offer, PlanCache
from ckptlib.resume import RERUN_KEY
from ckptlib.source import Source
from ckptlib.stored_rng import StoredStreams, streams_of_entries, streams_of_rank
from ckptlib.ties import check_read_ties
from ckptlib.topology import Topology
from ckptlib.torch_file import TorchFile

log = logging.getLogger("ckptlib")


@dataclass(frozen=True)
class Place:
    """Who loads: a rank, among how many, and the topology of this job; None: that of the checkpoint, if it fits."""

    rank: int = 0
    world_size: int = 1
    topology: Topology | None = None

    @classmethod
    def of(cls, group: Group, topology: Topology | None) -> Place:
        """This process."""
        return cls(group.rank, group.world_size, topology)


def writer_of(begin: Begin, place: Place, where: str) -> int:
    """The rank whose file has the state of a place.

    Raises:
        UnsupportedError: no file has it; names both topologies.
    """
    saved = exported.topology_of(begin)
    fits = place.world_size == begin.world_size
    now = place.topology or (saved if fits else Topology(dp=place.world_size))
    if begin.semantic_type == "LEGACY":
        if legacy.same_places(saved, now):
            return legacy.writers(saved)[legacy.place_name(now, place.rank)]
        what = "the whole state dict of each (tp, pp, ep) place: only dp and cp may differ"
    else:
        if fits and now == saved:
            return place.rank
        what = "every rank's own state: nothing may differ"
    raise UnsupportedError(
        f"{where}: a {begin.semantic_type} checkpoint of {begin.world_size} ranks, topology {saved}; this job has "
        f"{place.world_size}, topology {now}. It holds {what}. It needs conversion; a GLOBAL checkpoint loads at any "
        "topology. Nothing was loaded."
    )


class OwnStored:
    """The opened file that has the state of a place.

    Attributes:
        begin: of the save.
        writer: the rank whose file it is.
        tree: what it holds; its tensors are not filled before `read`.
        bytes_read: of tensors.

    Raises:
        UnsupportedError: no file has the state of this place.
        IntegrityError: it is damaged, or anything but plain data.
    """

    def __init__(self, source: Source, place: Place) -> None:
        assert source.manifest is not None  # those of others are not read yet
        self.source = source
        self.begin = source.manifest.begin
        self.writer = writer_of(self.begin, place, source.url)
        name = own_file_name(self.writer, self.begin.save_id)
        sizes = {entry.path: entry.size for entry in source.manifest.files}
        self._file = TorchFile(source.storage, st.join(source.path, name), sizes[name])
        self.where = self._file.where
        self.bytes_read = 0
        tree = self._file.tree()
        if not isinstance(tree, Mapping):
            raise IntegrityError(f"{self.where}: a {type(tree).__name__}, expected a state dict")
        self.tree: Mapping[str, Any] = tree

    def read(self) -> None:
        """Reads the tensors, unless that is done.

        Raises:
            RecordError, OSError: the file is damaged, or cannot be read.
        """
        self.bytes_read += self._file.read()


class OwnLoad:
    """One rank's load from its own file, in the steps of `ckptlib.loading.load_together`.

    Args:
        ignore: names stored at the top that are not unexpected.

    Raises:
        UnsupportedError: the options speak of single keys.
        ShapeMismatchError, DtypeMismatchError, StateError: as `Filling.plan`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        stored: OwnStored,
        options: LoadOptions,
        ignore: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.source = source = stored.source
        self._stored = stored
        self.options = replace(options, check_coverage=False)
        self.changed: dict[str, None] = {}
        self.report = LoadReport(source.url, source.save_id)
        _check_options(options, source.url)
        self._filling = Filling.plan(state, stored.tree, stored.where)
        self._filling.unexpected = [
            key for key in self._filling.unexpected if key not in stored.tree or not ignore(key)
        ]

    def request(self, plans: PlanCache) -> Request:
        """Nothing that others must know."""
        return Request(b"", (), Offer(LocalPlan(PieceTable.build([]), {}, {})))

    def unexpected(self, requests: Sequence[Request]) -> list[str]:
        """None that ranks have together."""
        return []

    def check(self, unexpected: list[str]) -> None:
        """Compares the keys as `strict` says, verifies first where that is wanted, and reads."""
        started = time.perf_counter()
        report, filling = self.report, self._filling
        report.missing, report.unexpected = filling.missing, filling.unexpected
        if report.missing or report.unexpected:
            text = f"{self._stored.where}: missing {_some(report.missing)}; not requested {_some(report.unexpected)}"
            if self.options.strict == "error":
                raise KeyMismatchError(
                    f'{text}. Nothing was loaded. strict="warn" or "return" loads what both sides have.',
                    missing=report.missing,
                    unexpected=report.unexpected,
                )
            if self.options.strict == "warn":
                log.warning("%s", text)
        if self.options.verify is not None:
            verify_first(self.source, self.options.verify)
        report.bytes_needed = sum(target.numel() * target.element_size() for _, target, _ in filling.tensors)
        self._stored.read()
        check_read_ties(filling.tensors, self._stored.where)
        report.bytes_read = self._stored.bytes_read
        report.seconds += time.perf_counter() - started

    def fill(self, exchange: Exchange | None = None) -> None:
        """Copies the tensors: all have been read, so nothing can fail."""
        started = time.perf_counter()
        for key, target, source in self._filling.tensors:
            self.changed[key] = None
            target.copy_(source)
        self.report.seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Puts values into the state and gives its parts what was loaded.

        Raises:
            LoadIncompleteError: a part does not take it.
        """
        started = time.perf_counter()
        for name, put in self._filling.values:
            self.changed[name] = None
            try:
                put()
            except Exception as error:
                raise self.incomplete(error) from error
        self.report.seconds += time.perf_counter() - started

    def incomplete(self, error: Exception) -> LoadIncompleteError:
        """What to raise when something failed and the state had been changed."""
        keys = list(self.changed)
        failure = LoadIncompleteError(
            f"{self.source.url}: the load failed after {len(keys)} parts of the state had been changed "
            f"({_some(keys)}): {type(error).__name__}: {error}. Load again, or from elsewhere.",
            changed=keys,
        )
        failure.exit_code = error.exit_code if isinstance(error, CkptError) else 1
        return failure


class OwnExtras:
    """What a rank's own file stores beside the caller's state; see `ckptlib.resume.StoredExtras`."""

    def __init__(self, stored: OwnStored) -> None:
        self._stored = stored
        self._begin = stored.begin

    def progress(self) -> Mapping[str, float]:
        """The numbers given to `save`."""
        return dict(self._begin.progress)

    def observed(self) -> Mapping[str, float]:
        """What rank 0's state said at the save."""
        return self._begin.observed

    def value(self, key: str) -> Any:
        """A plain value at the top of the state."""
        return self._stored.tree.get(key)

    def rerun_state(self, world_size: int, rank: int) -> Any:
        """This rank's rerun state; of LEGACY that of the rank that wrote its place."""
        self._stored.read()
        return next((self._stored.tree[name] for name in (RERUN_KEY, legacy.RERUN) if name in self._stored.tree), None)

    def has_rerun_state(self) -> bool:
        """Whether one is stored here."""
        return self.rerun_state(0, 0) is not None

    def streams(self, now: Topology, rank: int) -> StoredStreams | None:
        """What `rank` continues from; None: no RNG state is stored here.

        Raises:
            RngStateError: what is stored is no RNG state.
        """
        entries, where = self.value(rng.KEY), self._stored.where
        if not entries:
            return None
        self._stored.read()
        if self._begin.semantic_type == "LOCAL":
            return streams_of_rank(entries[0], now, rank, where)
        return streams_of_entries(entries, now, rank, self._stored.writer, where)


def prepare(
    state: dict[str, Any],
    source: Source,
    options: LoadOptions,
    own: OwnStored | None,
    ignore: Callable[[str], bool] = lambda key: False,
) -> Prepared:
    """This rank's load from an opened checkpoint. `ignore` names keys that are not unexpected.

    Args:
        own: from `open_own`.

    Raises:
        UnsupportedError: the options ask for what the format cannot do.
        StateError: the state cannot be filled.
    """
    if own is not None:
        return OwnLoad(state, own, options, ignore)
    return prepare_load(state, source, options, ignore)


def open_own(source: Source, place: Place) -> OwnStored | None:
    """The file of a place, of a checkpoint that has whole state dicts; None: it has shards. Raises as `OwnStored`."""
    return OwnStored(source, place) if source.format == "torch" else None


def _check_options(options: LoadOptions, where: str) -> None:
    given = {
        "keys": options.keys is not None,
        "rename": options.rename is not None,
        "cast": bool(options.cast),
        "load_main_params": options.load_main_params,
        "load_parallelism": options.load_parallelism is not None,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise UnsupportedError(
            f"{where}: {', '.join(wrong)}: a whole state dict is loaded as it is, not tensor by tensor. Leave it "
            "out, or choose parts of the state with `contents`."
        )


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else "none"
