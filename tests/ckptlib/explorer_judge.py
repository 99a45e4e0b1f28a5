"""What must hold in every state of an exploration, and after a recovery from it.

The judge reads disks on its own, or through our own readers; it shares no code with what it judges where that code
decides something.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptlib import commit
from ckptlib.errors import CkptError
from ckptlib.manifest import Manifest
from tests.ckptlib.explorer import Actor, Explorer, Notes, State, Violation
from tests.ckptlib.explorer_stage import ROOT, Theatre
from tests.ckptlib.support.recording import Disk

EXPORTS = ("checkpoint.json", "common.pt", "integrity.json", ".metadata", "metadata.json")
_OF_A_SAVE = re.compile(r"(.+)/\.ckpt/(\d{6}-[^/]+)(?:/(.+))?")
_TOMBSTONE = re.compile(r"(.+)/\.ckpt/tombstones/([^/]+)")
_ITERATION = re.compile(r"iter_(\d{7})")


@dataclass(frozen=True)
class Save:
    """One save on a disk, as its files say."""

    path: str
    save_id: str
    begin: dict[str, Any] | None
    decision: bytes | None
    buried: bool

    @property
    def outcome(self) -> str | None:
        """``commit``, ``abort``, or None."""
        return None if self.decision is None else _parsed(self.decision)["outcome"]

    @property
    def committed(self) -> bool:
        """R1."""
        return self.outcome == "commit" and not self.buried

    @property
    def attempt(self) -> int:
        """By its name: the order of saves does not depend on what could be damaged."""
        return int(self.save_id.partition("-")[0])

    @property
    def order(self) -> tuple[int, int, str]:
        """(attempt, iteration, save id)."""
        match = _ITERATION.search(self.path)
        return (self.attempt, int(match[1]) if match else 0, self.save_id)


def saves_on(disk: Disk) -> dict[tuple[str, str], Save]:
    """Every save that left a trace, and every tombstone."""
    found = disk.seen.get("saves")
    if found is None:
        found = disk.seen["saves"] = _saves_on(disk)
    return found


def _saves_on(disk: Disk) -> dict[tuple[str, str], Save]:
    inside: dict[tuple[str, str], dict[str, bytes]] = {}
    buried = set()
    for name, content in disk.files.items():
        if match := _TOMBSTONE.fullmatch(name):
            buried.add((match[1], match[2]))
        elif match := _OF_A_SAVE.fullmatch(name):
            files = inside.setdefault((match[1], match[2]), {})
            if content is not None and match[3]:
                files[match[3]] = content
    saves = {}
    for key in inside.keys() | buried:
        files = inside.get(key, {})
        begin = _parsed(files["begin.json"]) if "begin.json" in files else None
        saves[key] = Save(key[0], key[1], begin, files.get("decision.json"), key in buried)
    return saves


@functools.cache
def _parsed(record: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(record)
    return value


def newest(saves: Sequence[Save]) -> Save | None:
    """The one that a reader should get: by (attempt, iteration, save id)."""
    return max((save for save in saves if save.committed), key=lambda save: save.order, default=None)


MayFail = Callable[[Exception, Disk], bool] | None
"""Whether an actor may end with this error, given the disk; None: it may not fail."""


class ProtocolJudge:
    """The rules of W1 to W9 and R1, for `Explorer`.

    Args:
        theatre: lends its eyes: our own readers, on any disk.
        may_fail: for each actor.
        names: of the actors.
    """

    def __init__(self, theatre: Theatre, may_fail: Sequence[MayFail], names: Sequence[str]) -> None:
        self._theatre = theatre
        self._may_fail = may_fail
        self._names = names
        self._readable: dict[frozenset[tuple[str, bytes | None]], str | None] = {}

    # --- one step ----------------------------------------------------------------------------------------------------

    def changed(self, before: Disk, after: Disk) -> None:
        """W4: one decision, for ever. R1: what was committed is readable until it was replaced.

        Behind a tombstone nothing counts any more: somebody who was about to decide may still do so.
        """
        old, new = saves_on(before), saves_on(after)
        for key, save in new.items():
            earlier = old.get(key)
            if earlier is not None and earlier.decision not in (None, save.decision) and not earlier.buried:
                if save.decision is None:
                    raise Violation(f"W4: the decision of save {save.save_id} vanished before a tombstone said so")
                raise Violation(f"W4: save {save.save_id} was decided twice: {earlier.outcome}, {save.outcome}")
            if save.committed:
                self._check_readable(after, save)
        for key, save in old.items():
            now = new.get(key)
            if save.buried and (now is None or not now.buried):
                raise Violation(f"D2: the tombstone of save {save.save_id} is gone")
            if save.committed and (now is None or not now.committed):
                self._check_replaced(after, save)

    def _check_replaced(self, disk: Disk, save: Save) -> None:
        others = [other for other in saves_on(disk).values() if other.path == save.path]
        by = newest(others)
        if by is None or by.order < save.order or save.save_id not in (by.begin or {}).get("replaces", ()):
            raise Violation(f"R1: committed save {save.save_id} is gone, and no committed save says it replaces it")

    def _check_readable(self, disk: Disk, save: Save) -> None:
        mine = frozenset((name, content) for name, content in disk.files.items() if save.save_id in name)
        if mine not in self._readable:
            self._readable[mine] = self._why_unreadable(disk, save)
        problem = self._readable[mine]
        if problem:
            raise Violation(f"R1: save {save.save_id} is committed and cannot be read: {problem}")

    def _why_unreadable(self, disk: Disk, save: Save) -> str | None:
        with self._theatre.looking_at(disk) as storage:
            try:
                state = commit.read_save(storage, save.path, save.save_id)
                manifest = commit.read_manifest(storage, save.path, state)
                for entry in manifest.files:
                    content = disk.file(f"{save.path}/{entry.path}")
                    if content is None or hashlib.sha256(content).hexdigest() != entry.sha256:
                        return f"{entry.path} {'is missing' if content is None else 'is not what was recorded'}"
                values = self._theatre.values(save.path, save.save_id)
            except (CkptError, OSError) as error:
                return f"{type(error).__name__}: {error}"
        if values != (manifest.begin.metrics["tag"],) * 2:
            return f"it was saved from {manifest.begin.metrics['tag']} and holds {values}"
        return None

    # --- one state ---------------------------------------------------------------------------------------------------

    def moved(self, state: State, actor: int, before: State) -> None:
        """W8: fencing. W5, W9: the exports. How actors end, and what they chose."""
        disk = state[0]
        if disk is not before[0]:
            self._check_fence(state, before)
        self._check_exports(state)
        node = state[actor]
        for name, value in node.notes[len(before[actor].notes) :]:
            if name == "resumed":
                self._check_resume(disk, node.noted("opened"), *value)
            elif name == "read":
                self._check_read(disk, value)
            elif name == "chosen" and not value:
                raise Violation("R1: a reader found nothing committed, where there always was something")
            elif name == "trouble":
                raise Violation(f"{self._names[actor - 1]}: {value}")
        if node.step is None and isinstance(node.result, Exception):
            may_fail = self._may_fail[actor - 1]
            if may_fail is None or not may_fail(node.result, disk):
                raise Violation(f"{self._names[actor - 1]} ended with {type(node.result).__name__}: {node.result}")

    def _check_fence(self, state: State, before: State) -> None:
        settled = max((_noted(node.notes, "opened") or 0 for node in state[1:-1]), default=0)
        old = saves_on(before[0])
        for key, save in saves_on(state[0]).items():
            if save.committed and save.attempt < settled and (key not in old or not old[key].committed):
                raise Violation(
                    f"W8: save {save.save_id} was committed after attempt {settled} had settled what was before it"
                )

    def _check_resume(
        self, disk: Disk, attempt: int, save_id: str | None, values: tuple[float, ...], at: int | None
    ) -> None:
        """A whole committed save; for the newest attempt, which nobody overtakes any more, the newest one."""
        saves = [save for save in saves_on(disk).values() if at in (None, save.order[1])]
        best = newest(saves)
        chosen = next((save for save in saves if save.save_id == save_id), None)
        overtaken = any(int(name.partition(".")[0]) > attempt for name in disk.children(f"{ROOT}/.ckpt/attempts"))
        if not overtaken and chosen != best:
            raise Violation(f"R2: resumed from {save_id}, the newest committed is {best and best.save_id}")
        if chosen is not None and (not chosen.committed or set(values) != {(chosen.begin or {})["metrics"]["tag"]}):
            raise Violation(f"R2: resumed from {save_id}, which is {chosen.outcome}, with the values {values}")

    def _check_read(self, disk: Disk, values: tuple[float, ...]) -> None:
        """One save's values, and not those of one that was never committed."""
        saves = saves_on(disk).values()
        never = {save.begin["metrics"]["tag"] for save in saves if save.begin is not None and save.outcome != "commit"}
        if len(set(values)) != 1 or values[0] in never:
            raise Violation(f"R1, W9: a reader got {values}")

    def _check_exports(self, state: State) -> None:
        """Whenever ``metadata.json`` is there, the exports are those of one committed save.

        Unless somebody is in the middle of changing them who began when another save was the current one: it has
        been overtaken, and mends it before it ends, or the next roll-forward does.
        """
        disk = state[0]
        for path, problem in mixed_exports(disk).items():
            current = newest([save for save in saves_on(disk).values() if save.path == path])
            busy = [node.place for node in state[1:-1] if node.place is not None and node.place[0] == path]
            overtaken = [target for _, target in busy if current is None or target != current.save_id]
            if not busy or (len(busy) == 1 and not overtaken):
                raise Violation(f"W5, W9: {path}: {problem}, and {'nobody' if not busy else 'one actor'} is exporting")


def _noted(notes: Notes, name: str) -> Any:
    return next((value for key, value in reversed(notes) if key == name), None)


def exports_of(disk: Disk, save: Save) -> dict[str, bytes]:
    """What the exports of a committed save must be, derived without `exports.export_plan` (W5)."""
    directory = f"{save.path}/.ckpt/{save.save_id}"
    manifest = disk.file(f"{directory}/manifest.json") or b""
    exports = {
        "checkpoint.json": manifest,
        ".metadata": disk.file(f"{directory}/metadata") or b"",
        "metadata.json": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}',
    }
    common = disk.file(f"{directory}/common.pt")
    if common is not None:
        exports["common.pt"] = common
    data = {entry.path: entry.sha256 for entry in Manifest.decode(manifest, directory).files if "/" not in entry.path}
    digests = data | {name: hashlib.sha256(content).hexdigest() for name, content in exports.items()}
    integrity = {"algorithm": "sha256", "files": dict(sorted(digests.items()))}
    return exports | {"integrity.json": json.dumps(integrity, indent=2).encode()}


def mixed_exports(disk: Disk) -> dict[str, str]:
    """Directories whose ``metadata.json`` says that a foreign reader may read, and whose other exports disagree."""
    found: dict[str, str] | None = disk.seen.get("mixed")
    if found is None:
        found = disk.seen["mixed"] = {
            path: problem for path in _directories(disk) if (problem := _why_mixed(disk, path)) is not None
        }
    return found


def _directories(disk: Disk) -> list[str]:
    return sorted({path for path, _ in saves_on(disk)})


def _why_mixed(disk: Disk, path: str) -> str | None:
    present = {name: content for name in EXPORTS if (content := disk.file(f"{path}/{name}")) is not None}
    if "metadata.json" not in present:
        return None
    for save in saves_on(disk).values():
        whole = disk.file(f"{path}/.ckpt/{save.save_id}/manifest.json") is not None  # it is not being buried just now
        if save.path == path and save.outcome == "commit" and whole and present == exports_of(disk, save):
            return None if not save.buried else f"the exports are those of {save.save_id}, which was replaced"
    return "the exports are not those of any one save"


# --- recovery ---------------------------------------------------------------------------------------------------------


def check_recovery(explorer: Explorer, recovery: Actor, disk: Disk) -> None:
    """All actors are gone; a new attempt starts on what they left, and resumes.

    Raises:
        Violation: it fails, resumes from anything but the newest committed save, loses one, or leaves an undecided
            save, an export or a tracker that is not right.
    """
    before = saves_on(disk)
    after, node = explorer.solo(recovery, disk)
    if node.step is not None or isinstance(node.result, Exception):
        raise Violation(f"recovery ended with {node.result!r} at {node.step}")
    saves = saves_on(after)
    best = newest(list(saves.values()))
    resumed = node.noted("resumed")
    if resumed[0] != (None if best is None else best.save_id):
        raise Violation(f"R2: recovery resumed from {resumed[0]}, the newest committed is {best and best.save_id}")
    if best is not None and set(resumed[1]) != {(best.begin or {})["metrics"]["tag"]}:
        raise Violation(f"R2: recovery resumed from {resumed[0]} with the values {resumed[1]}")
    for key, save in before.items():
        if save.committed and not saves[key].committed:
            raise Violation(f"R1: recovery lost committed save {save.save_id}")
        if save.outcome == "abort" and saves[key].outcome not in ("abort", None):
            raise Violation(f"W4: recovery revived aborted save {save.save_id}")
    for save in saves.values():
        if save.begin is not None and save.decision is None and not save.buried:
            raise Violation(f"W8: recovery left save {save.save_id} undecided")
        left = [name for name in after.files if save.save_id in name and "/tombstones/" not in name]
        if save.buried and left:
            raise Violation(f"D3: recovery did not finish removing save {save.save_id}: {left}")
    for path in _directories(after):
        current = newest([save for save in saves.values() if save.path == path])
        if current is not None:
            expected = exports_of(after, current)
            wrong = [name for name in EXPORTS if after.file(f"{path}/{name}") != expected.get(name)]
            if wrong:
                raise Violation(f"W5: after recovery {path}: {', '.join(wrong)} are not those of {current.save_id}")
            left = [name for name in after.children(f"{path}/.ckpt/{current.save_id}") if name.startswith("rank_")]
            if left:
                raise Violation(f"W2: after recovery {path}: records {left} are still there")
    tracker = after.file(f"{ROOT}/latest_checkpointed_iteration.txt")
    if tracker != (None if best is None else str(best.order[1]).encode()):
        raise Violation(f"W6: after recovery the tracker says {tracker!r}, the newest committed is {best}")
