"""The records of one save: begin, what each rank wrote, the manifest, the decision. Pure.

Order of writing (DESIGN W2 to W4): `Begin`, then data, then one `RankRecord` per rank, then the item index and the
`Manifest`, then the `Decision`. A manifest is a function of the begin and rank records alone, so everybody who
decides the same save writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckptlib import records
from ckptlib.errors import RecordError, StateError, UnsupportedError
from ckptlib.figures import Figures, Times
from ckptlib.layouts import own_names
from ckptlib.topology import Topology

Kind = Literal["persistent", "non_persistent_global", "non_persistent_local", "release"]
SemanticType = Literal["LEGACY", "LOCAL", "GLOBAL", "TORCH_DCP"]
Format = Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "safetensors"]
IoMode = Literal["sync", "async"]
Outcome = Literal["commit", "abort"]
Role = Literal["data", "common", "index", "metadata", "begin"]

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class FileEntry:
    """One file of a save.

    Attributes:
        path: relative to the iteration directory.
        size: bytes.
        sha256: 64 lower-case hex digits, computed from memory while writing.
        role: what it is for.
        part_size: bytes per part digest; None when the file has no part digests.
        part_sha256: one digest per part.
    """

    path: str
    size: int
    sha256: str
    role: Role = "data"
    part_size: int | None = None
    part_sha256: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a record member; parts only where there are any."""
        value: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256, "role": self.role}
        if self.part_size is not None:
            value |= {"part_size": self.part_size, "part_sha256": list(self.part_sha256)}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> FileEntry:
        """Reads `to_json`; `where` names the record in errors."""
        return cls(
            path=records.relative_path(value["path"], where),
            size=value["size"],
            sha256=value["sha256"],
            role=value["role"],
            part_size=value.get("part_size"),
            part_sha256=tuple(value.get("part_sha256", ())),
        )


@dataclass(frozen=True)
class Piece:
    """Which piece a local checkpoint is, of a set that all ranks save together. All have the set's save id.

    Attributes:
        root_id: of the run's root (`roots.RootIdentity`).
        rank: whose state it is.
        world_size: number of pieces in the set.
        topology: of the job; None: not known.
    """

    root_id: str
    rank: int
    world_size: int
    topology: Topology | None = None

    def to_json(self) -> dict[str, Any]:
        """As a record member."""
        topology = None if self.topology is None else self.topology.to_json()
        return {"root_id": self.root_id, "rank": self.rank, "world_size": self.world_size, "topology": topology}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Piece:
        """Reads `to_json`."""
        topology = value["topology"]
        return cls(
            root_id=value["root_id"],
            rank=value["rank"],
            world_size=value["world_size"],
            topology=None if topology is None else Topology.from_json(topology),
        )


@dataclass(frozen=True)
class Begin:
    """What is fixed before any data is written (W2).

    Attributes:
        save_id: unique and sortable: (attempt, time) order.
        attempt: the run's attempt that saves; 0 for a bare save.
        attempt_id: unique id of that process lifetime.
        world_size: every rank in [0, world_size) must record.
        plan_digest: SHA-256 of the write plan; records of another plan never count.
        contents: names of the parts that are saved, sorted: model, optimizer, scheduler, rng, ...
        progress: consumed samples, lr, scheduler step, FLOPs: numbers a resume needs.
        observed: those that rank 0's state itself said; they are compared after a load (`ckptlib.progress`).
        metrics: user metrics; may hold non-finite values.
        parent: the save that this one continues: the attempt's previous save, or the one it resumed from.
        replaces: save ids in the same directory that this one supersedes when it commits.
        created_at: seconds since the epoch, UTC, by the writer's clock: shown, never decided on.
        piece: of a local checkpoint, which is a world of one by itself.
    """

    save_id: str
    run: str | None
    attempt: int
    attempt_id: str
    iteration: int
    world_size: int
    plan_digest: str
    kind: Kind = "persistent"
    semantic_type: SemanticType = "GLOBAL"
    format: Format = "torch_dist"
    io_mode: IoMode = "sync"
    topology: Topology | None = None
    contents: tuple[str, ...] = ()
    progress: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    parent: str | None = None
    replaces: tuple[str, ...] = ()
    created_at: float = 0.0
    piece: Piece | None = None

    def __post_init__(self) -> None:
        if type(self.iteration) is not int or self.iteration < 0:
            raise StateError(f"iteration {self.iteration!r}: expected a whole number, 0 or more")
        if self.kind not in KINDS:
            raise StateError(f"kind {self.kind!r}: expected one of {', '.join(KINDS)}")

    @property
    def since_parent(self) -> float | None:
        """Seconds from the begin of the save that this one continues from, by the clocks of both; shown only.

        Where that one is of an older attempt, the time between the two attempts is in it. None: it continues from none.
        """
        if self.parent is None or self.created_at <= 0:
            return None
        try:
            return max(0.0, self.created_at - int(self.parent.split("-")[1], 16) / 1000)
        except (IndexError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """As a record body."""
        return {
            "save_id": self.save_id,
            "run": self.run,
            "attempt": self.attempt,
            "attempt_id": self.attempt_id,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "plan_digest": self.plan_digest,
            "kind": self.kind,
            "semantic_type": self.semantic_type,
            "format": self.format,
            "io_mode": self.io_mode,
            "topology": None if self.topology is None else self.topology.to_json(),
            "contents": list(self.contents),
            "progress": {name: records.number_to_json(x) for name, x in self.progress.items()},
            "observed": {name: records.number_to_json(x) for name, x in self.observed.items()},
            "metrics": {name: records.number_to_json(x) for name, x in self.metrics.items()},
            "parent": self.parent,
            "replaces": list(self.replaces),
            "created_at": self.created_at,
            **({} if self.piece is None else {"piece": self.piece.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> Begin:
        """Reads `to_json`; `where` names the record in errors."""
        try:
            topology = value["topology"]
            return cls(
                save_id=value["save_id"],
                run=value["run"],
                attempt=value["attempt"],
                attempt_id=value["attempt_id"],
                iteration=value["iteration"],
                world_size=value["world_size"],
                plan_digest=value["plan_digest"],
                kind=value["kind"],
                semantic_type=value["semantic_type"],
                format=value["format"],
                io_mode=value["io_mode"],
                topology=None if topology is None else Topology.from_json(topology),
                contents=tuple(value["contents"]),
                progress={name: records.number_from_json(x) for name, x in value["progress"].items()},
                observed={name: records.number_from_json(x) for name, x in value["observed"].items()},
                metrics={name: records.number_from_json(x) for name, x in value["metrics"].items()},
                parent=value["parent"],
                replaces=tuple(value["replaces"]),
                created_at=value["created_at"],
                piece=Piece.from_json(value["piece"]) if value.get("piece") is not None else None,
            )
        except (KeyError, TypeError, AttributeError, StateError) as error:
            raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error

    def encode(self) -> bytes:
        """Bytes of ``begin.json``."""
        return records.encode("begin", self.to_json())

    @classmethod
    def decode(cls, data: bytes, where: str) -> Begin:
        """Reads ``begin.json``."""
        return cls.from_json(records.decode("begin", data, where), where)


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote, published after its data is durable (W2).

    Attributes:
        items: the index of the items in its files, as `ItemIndex.to_record` gives it.
        values_digest: SHA-256 of the rank's unsharded values, which must be equal on all ranks (W3).
        times: how long it took.
    """

    save_id: str
    rank: int
    world_size: int
    plan_digest: str
    files: tuple[FileEntry, ...]
    items: str
    values_digest: str
    times: Times = field(default_factory=Times)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(entry.size for entry in self.files)

    def encode(self) -> bytes:
        """Bytes of ``rank_<r>.json``."""
        return records.encode(
            "rank",
            {
                "save_id": self.save_id,
                "rank": self.rank,
                "world_size": self.world_size,
                "plan_digest": self.plan_digest,
                "files": [entry.to_json() for entry in self.files],
                "items": self.items,
                "values_digest": self.values_digest,
                "seconds": self.times.write,
                **{name: x for name in ("stall", "stage") if (x := getattr(self.times, name)) is not None},
            },
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> RankRecord:
        """Reads ``rank_<r>.json``."""
        value = records.decode("rank", data, where)
        try:
            return cls(
                save_id=value["save_id"],
                rank=value["rank"],
                world_size=value["world_size"],
                plan_digest=value["plan_digest"],
                files=tuple(FileEntry.from_json(entry, where) for entry in value["files"]),
                items=value["items"],
                values_digest=value["values_digest"],
                times=Times(value.get("stall"), value.get("stage"), value["seconds"]),
            )
        except (KeyError, TypeError) as error:
            raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error


@dataclass(frozen=True)
class Manifest:
    """What a save is: the begin record, its files, and the exports that are derived from them (W5).

    Attributes:
        begin: everything fixed before writing.
        files: every file of the save under its own (save-id) name.
        exports: ``name -> (size, sha256)`` of the files foreign readers see, except ``checkpoint.json`` (this
            manifest's own bytes) and ``integrity.json`` (derived from both lists).
        tensors, objects: how many there are, for people.
        figures: how long it took; None: written before that was recorded.
    """

    begin: Begin
    files: tuple[FileEntry, ...]
    exports: Mapping[str, tuple[int, str]]
    tensors: int = 0
    objects: int = 0
    figures: Figures | None = None

    @property
    def size(self) -> int:
        """Bytes of all files of the save (exports not counted)."""
        return sum(entry.size for entry in self.files)

    def files_of(self, role: Role) -> tuple[FileEntry, ...]:
        """The files with this role."""
        return tuple(entry for entry in self.files if entry.role == role)

    def _check_own_files(self, where: str) -> None:
        """Of whole state dicts: the ranks that a topology says wrote one are those whose file is named (W3).

        Numbers first: a manifest that speaks of ten million ranks must not keep anyone busy.
        """
        begin = self.begin
        if begin.format != "torch" and begin.semantic_type not in ("LOCAL", "LEGACY"):
            return
        topology = begin.topology or Topology(dp=begin.world_size)
        named = {entry.path for entry in self.files_of("data")}
        count = own_names.count(begin.semantic_type, topology, begin.world_size)
        if topology.world_size != begin.world_size or count != len(named):
            raise RecordError(
                f"{where}: {begin.semantic_type} of {begin.world_size} ranks, topology {topology}: {count} files of "
                f"whole state dicts are expected, and {len(named)} are named"
            )
        try:
            ranks = own_names.ranks(begin.semantic_type, topology, begin.world_size)
        except UnsupportedError as error:
            raise RecordError(f"{where}: {error}") from error
        for rank in ranks:
            name = own_names.own_file_name(rank, begin.save_id)
            if name not in named:
                raise RecordError(f"{where}: the file of rank {rank}, {name}, is not named")

    def encode(self) -> bytes:
        """Bytes of ``manifest.json`` and, the same, of ``checkpoint.json``."""
        return records.encode(
            "manifest",
            {
                **self.begin.to_json(),
                "files": [entry.to_json() for entry in self.files],
                "exports": {name: list(entry) for name, entry in self.exports.items()},
                "tensors": self.tensors,
                "objects": self.objects,
                **({} if self.figures is None else {"figures": self.figures.to_json()}),
            },
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Reads ``manifest.json`` or ``checkpoint.json``."""
        value = records.decode("manifest", data, where)
        begin = Begin.from_json(value, where)
        try:
            manifest = cls(
                begin=begin,
                files=tuple(FileEntry.from_json(entry, where) for entry in value["files"]),
                exports={name: (entry[0], entry[1]) for name, entry in value["exports"].items()},
                tensors=value["tensors"],
                objects=value["objects"],
                figures=None if value.get("figures") is None else Figures.from_json(value["figures"]),
            )
            manifest._check_own_files(where)
            return manifest
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error


@dataclass(frozen=True)
class Decision:
    """The one decision of a save, created exclusively (W4). A `commit` of it is what makes a checkpoint.

    Attributes:
        manifest_sha256: digest of the manifest's bytes; None for an abort.
        reason: why, for an abort.
        decider: unique id of who decided: compared after a lost response.
        decided_by: who that is, for people: ``coordinator``, ``settle``, ``adopt``, ``drain``, ``expire``.
    """

    save_id: str
    outcome: Outcome
    decider: str
    decided_by: str
    decided_at: float
    manifest_sha256: str | None = None
    reason: str | None = None

    def encode(self) -> bytes:
        """Bytes of ``decision.json``."""
        return records.encode(
            "decision",
            {
                "save_id": self.save_id,
                "outcome": self.outcome,
                "decider": self.decider,
                "decided_by": self.decided_by,
                "decided_at": self.decided_at,
                "manifest_sha256": self.manifest_sha256,
                "reason": self.reason,
            },
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Decision:
        """Reads ``decision.json``."""
        value = records.decode("decision", data, where)
        try:
            return cls(
                save_id=value["save_id"],
                outcome=value["outcome"],
                decider=value["decider"],
                decided_by=value["decided_by"],
                decided_at=value["decided_at"],
                manifest_sha256=value["manifest_sha256"],
                reason=value["reason"],
            )
        except KeyError as error:
            raise RecordError(f"{where}: member {error} is missing") from error
