"""What a copy of one save to another location would do, or why that location must not get it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptlib.errors import CopyRefusedError
from ckptlib.manifest import FileEntry, Manifest

Standing = Literal["absent", "begun", "committed", "aborted", "deleted"]
"""What a location says of a save."""


@dataclass(frozen=True)
class RootFacts:
    """Of the root around a save.

    Attributes:
        run: None: the directory has no identity.
        lineage: see `roots.RootIdentity`.
        attempts: attempt id by number.
    """

    run: str | None = None
    lineage: str | None = None
    attempts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """Of the place that is to get the copy.

    Attributes:
        url: the iteration directory there.
        standing: what it says of the save.
        reason: of an abort.
        newer: the newest committed save there that comes after this one; None: there is none.
        foreign: the format of a checkpoint of another tool that is there; None: there is none.
        sizes: bytes of the files of the save that are there, by path.
    """

    url: str
    root: RootFacts = field(default_factory=RootFacts)
    standing: Standing = "absent"
    reason: str = ""
    newer: str | None = None
    foreign: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyPlan:
    """What a copy does, in this order: the root and its attempts, the files, the decision.

    Attributes:
        source, target: URLs of the iteration directories.
        files: all files of the save.
        there: paths of those that the target has with the right size; what they hold is looked at before they count.
        copy_of: the lineage that a new root at the target gets; None: none is made.
        attempts: numbers of the attempts that are made known at the target.
        committed: the target has the whole save; a copy then only looks after exports.
    """

    source: str
    target: str
    save_id: str
    iteration: int
    run: str | None
    files: tuple[FileEntry, ...]
    there: frozenset[str] = frozenset()
    copy_of: str | None = None
    attempts: tuple[int, ...] = ()
    committed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def to_send(self) -> tuple[FileEntry, ...]:
        """The files that the target lacks."""
        return () if self.committed else tuple(entry for entry in self.files if entry.path not in self.there)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "save_id": self.save_id,
            "iteration": self.iteration,
            "run": self.run,
            "makes_root": self.copy_of is not None,
            "attempts": list(self.attempts),
            "committed": self.committed,
            "bytes": self.nbytes,
            "send": {entry.path: entry.size for entry in self.to_send},
            "there": sorted(self.there),
        }

    def __str__(self) -> str:
        head = f"copy save {self.save_id} (iteration {self.iteration}) from {self.source} to {self.target}"
        if self.committed:
            return f"{head}: it is there"
        lacking = sum(entry.size for entry in self.to_send)
        lines = [f"{head}: {len(self.to_send)} of {len(self.files)} files, {lacking} of {self.nbytes} bytes"]
        if self.copy_of is not None:
            lines.append(f"  makes the root there known as a copy of root {self.copy_of}")
        if self.attempts:
            lines.append(f"  makes attempt {', '.join(map(str, self.attempts))} known there")
        lines += [f"  {entry.path}  {entry.size}" for entry in self.to_send]
        return "\n".join(lines)


def plan(source: str, manifest: Manifest, root: RootFacts, target: TargetFacts) -> CopyPlan:
    """What is to be done.

    Args:
        source: URL of the iteration directory.
        root: around the source.

    Raises:
        CopyRefusedError: the target must not get it.
    """
    begin = manifest.begin
    _refuse_another_run(begin.run, root, target)
    _refuse_by_standing(begin.save_id, target)
    attempts = _attempts(begin.attempt, begin.attempt_id, root, target)
    committed = target.standing == "committed"
    there = {entry.path for entry in manifest.files if target.sizes.get(entry.path) == entry.size}
    return CopyPlan(
        source=source,
        target=target.url,
        save_id=begin.save_id,
        iteration=begin.iteration,
        run=begin.run,
        files=manifest.files,
        there=frozenset(there),
        copy_of=root.lineage if target.root.run is None and not committed else None,
        attempts=() if committed else attempts,
        committed=committed,
    )


def _refuse_another_run(run: str | None, root: RootFacts, target: TargetFacts) -> None:
    own = root.run or run
    if target.root.run is None:
        return
    if target.root.run != own:
        raise CopyRefusedError(
            f"{target.url}: the root there belongs to run {target.root.run!r}, this save to {own!r}. Give each run a "
            "root of its own."
        )
    if root.lineage is not None and target.root.lineage != root.lineage:
        raise CopyRefusedError(
            f"{target.url}: the root there has run {own!r} too, and is no location of the root that this save is in: "
            "it began by itself, so its attempts and ours have the same numbers and are others. Copy to a root of "
            "another place."
        )


def _refuse_by_standing(save_id: str, target: TargetFacts) -> None:
    if target.standing == "deleted":
        raise CopyRefusedError(f"{target.url}: save {save_id} was deleted there; nothing deleted returns")
    if target.standing == "aborted":
        raise CopyRefusedError(
            f"{target.url}: save {save_id} was aborted there ({target.reason}), which no later copy changes. Copy it "
            "to another place."
        )
    if target.standing == "committed":
        return
    if target.newer is not None:
        raise CopyRefusedError(
            f"{target.url}: holds save {target.newer}, which comes after {save_id}: nobody would read the copy"
        )
    if target.foreign is not None:
        raise CopyRefusedError(f"{target.url}: holds a checkpoint ({target.foreign}) that another tool wrote")


def _attempts(attempt: int, attempt_id: str, root: RootFacts, target: TargetFacts) -> tuple[int, ...]:
    """Those up to the save's own that the target does not know: what resumes from the copy comes after them."""
    ours = {number: id_ for number, id_ in root.attempts.items() if number <= attempt}
    for number, theirs in target.root.attempts.items():
        if ours.get(number, theirs) != theirs or (number == attempt and theirs != attempt_id):
            raise CopyRefusedError(
                f"{target.url}: attempt {number} of the root there is another process than attempt {number} of this "
                "one: both have been trained from since they parted. Copy to a root of another place."
            )
    return tuple(sorted(ours.keys() - target.root.attempts.keys()))
