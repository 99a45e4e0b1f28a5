"""Removal of whole checkpoints, and of non-persistent ones that a newer one takes the place of (D2, D3).

A removal is a tombstone, then what foreign readers look for, then data and records, then the directory. One that was
cut short is finished by whoever comes next (`settling`). The tombstone of a deletion is the root's and stays there: no
copy and no upload brings back what was deleted, and no restore takes it from a first tier.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptlib import commit, exported, exports, roots
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Begin, Kind, Manifest

log = logging.getLogger("ckptlib")

READERS = "readers"
"""``<root>/.ckpt/readers/<attempt>.<save_id>``: a restore of that attempt is reading that save."""

_PIN = re.compile(rf"\.?(?P<pin>(?P<attempt>\d+)\.(?P<save_id>{commit.SAVE_ID.pattern}))(\..*)?")
"""A pin, or a temporary file of one."""

_KIND: Kind = "non_persistent_global"
_EXPORTS = (
    exported.MARKER,
    exported.METADATA,
    exported.INTEGRITY,
    exported.COMMON,
)
"""In the order in which they go, beside those of LEGACY and `exported.CHECKPOINT`."""


def remove_save(storage: st.Storage, path: str, save_id: str, *, for_good: bool = True) -> None:
    """Removes one save of an iteration directory, and the directory when nothing else is in it. Idempotent.

    Args:
        for_good: it is deleted: the root remembers that when the directory has gone. False: it only makes room, or what
            was begun is finished. A directory outside any root has nobody to remember.

    Raises:
        IntegrityError: the records of another save are damaged, so nobody can tell whose the exports are.
    """
    save = commit.read_save(storage, path, save_id)
    root = commit.root_of(path)
    if for_good and roots.is_root(storage, root):
        storage.put(st.join(root, commit.CONTROL, commit.TOMBSTONES, save_id), b"")
    if not save.tombstoned:
        storage.put(st.join(path, commit.CONTROL, commit.TOMBSTONES, save_id), b"")
    if commit.current_save(storage, path) is None:
        _remove_exports(storage, path, save_id)
    storage.remove(_named_after(storage, path, save_id))
    exports.bury(storage, path, save_id)
    remove_if_empty(storage, path)


def _named_after(storage: st.Storage, path: str, save_id: str) -> Iterator[str]:
    """What carries the id of a save (W1), of an aborted one too: files, and directories after the files in them."""
    for entry in storage.list(path):
        if f".{save_id}." in entry.name:
            where = st.join(path, entry.name)
            if entry.is_dir:
                yield from (st.join(where, inner.name) for inner in storage.list(where) if f".{save_id}." in inner.name)
            yield where


def _remove_exports(storage: st.Storage, path: str, save_id: str) -> None:
    """Removes the exports, if they are of this save: of a removal that was cut short they may be of who came since.

    ``checkpoint.json`` says whose they are: it is written before the others (W5) and goes after them. Where it is
    damaged, nobody but this save can have written it.
    """
    where = st.join(path, exported.CHECKPOINT)
    data = st.get_or_none(storage, where)
    manifest = _manifest(storage, path, save_id)
    try:
        of = None if data is None else Manifest.decode(data, storage.url(where))
    except IntegrityError:
        of = manifest
    ours = data is not None and (of is None or of.begin.save_id == save_id)
    manifest = of if ours else manifest
    others = () if manifest is None else [name for name in manifest.exports if name not in _EXPORTS]
    if ours:
        storage.remove([st.join(path, name) for name in (*_EXPORTS, *others)])
    storage.remove(exports.leftovers(storage, path, (exported.CHECKPOINT, *_EXPORTS, *others)))
    storage.remove([st.parent(st.join(path, name)) for name in others])
    if ours:
        storage.remove([where])


def _manifest(storage: st.Storage, path: str, save_id: str) -> Manifest | None:
    where = st.join(commit.save_dir(path, save_id), commit.MANIFEST)
    data = st.get_or_none(storage, where)
    return None if data is None else Manifest.decode(data, storage.url(where))


def remove_if_empty(storage: st.Storage, path: str) -> None:
    """Removes an iteration directory in which only tombstones are left."""
    control = st.join(path, commit.CONTROL)
    tombstones = st.join(control, commit.TOMBSTONES)
    for directory, known in ((path, commit.CONTROL), (control, commit.TOMBSTONES)):
        if any(entry.name != known for entry in storage.list(directory)):
            return
    names = [entry.name for entry in storage.list(tombstones)]
    storage.remove([*(st.join(tombstones, name) for name in names), tombstones, control, path])


def remove_all(storage: st.Storage, saves: Iterable[tuple[str, str]]) -> None:
    """Makes room: each by its directory and save id. What fails is logged, and left for the next time."""
    for path, save_id in saves:
        try:
            remove_save(storage, path, save_id, for_good=False)
        except (OSError, IntegrityError) as error:
            log.warning("%s: save %s not removed: %s", storage.url(path), save_id, error)


# --- non-persistent checkpoints of all ranks --------------------------------------------------------------------------


def superseded(
    found: Sequence[roots.Found], newer: tuple[int, int, str], tracked: str | None, being_read: Collection[str]
) -> list[roots.Found]:
    """What a non-persistent checkpoint takes the place of, once it is committed: the older ones. Pure.

    Args:
        found: everything below the root.
        newer: (attempt, iteration, save id) of the one that was committed. What comes after it in that order stays.
        tracked: what the tracker says: what it names stays, or whoever follows it finds nothing.
        being_read: save ids that a restore has pinned.
    """
    return [
        each
        for each in found
        if each.kind == _KIND
        and each.save is not None
        and each.state in ("committed", "deleted")
        and each.order < newer
        and str(each.iteration) != tracked
        and each.save.save_id not in being_read
    ]


def supersede(storage: st.Storage, root: str, begin: Begin) -> list[str]:
    """Removes what a committed non-persistent checkpoint takes the place of. Never raises, whatever is wrong: the save
    has succeeded.

    One that nothing resumes from by itself (LOCAL) takes no other's place.

    Returns:
        What could not be removed, and why; the next one tries again.
    """
    left: list[str] = []
    if begin.kind != _KIND or begin.semantic_type == "LOCAL":
        return left
    try:
        directory = st.join(root, roots.NON_PERSISTENT)
        newer = (begin.attempt, begin.iteration, begin.save_id)
        tracked, being_read = roots.read_tracker(storage, directory), pinned_saves(storage, root)
        for old in superseded(roots.scan_non_persistent(storage, root), newer, tracked, being_read):
            try:
                assert old.save is not None  # `superseded` has looked
                remove_save(storage, old.path, old.save.save_id, for_good=False)
            except Exception as error:  # noqa: BLE001 - told, and left for the next one
                left.append(f"{old.url}: {error}")
    except Exception as error:  # noqa: BLE001 - told, and left for the next one
        left.append(f"{storage.url(root)}: {error}")
    for text in left:
        log.warning("superseded by iteration %d and not removed: %s", begin.iteration, text)
    return left


def supersede_by_newest(storage: st.Storage, root: str) -> list[str]:
    """`supersede`, by the newest non-persistent checkpoint: finishes what an older attempt did not come to.

    Before this attempt saves anything: a directory that is only being made looks like one of which all has gone.
    """
    try:
        remove_old_pins(storage, root)
    except OSError as error:
        log.warning("%s: pins of older attempts not removed: %s", storage.url(root), error)
    found = [each for each in roots.scan_non_persistent(storage, root) if each.state == "committed"]
    newest = max((each for each in found if not each.only_on_request), key=lambda each: each.order, default=None)
    if newest is None or newest.save is None or newest.save.begin is None:
        return []
    left = supersede(storage, root, newest.save.begin)
    directory = st.join(root, roots.NON_PERSISTENT)
    try:
        for entry in storage.list(directory):
            if entry.is_dir:  # a removal that was cut short at its very end
                remove_if_empty(storage, st.join(directory, entry.name))
    except OSError as error:
        left.append(f"{storage.url(directory)}: {error}")
    return left


# --- readers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pinned(storage: st.Storage, root: str, attempt: int, save_id: str) -> Iterator[None]:
    """Says that this attempt reads a save: it is not removed meanwhile. Ends with the block, or with the attempt.

    Whoever removes looks for pins before its tombstone; a reader that comes in between finds its files gone, and says
    so. Readers outside the run pin nothing.
    """
    where = _pin_path(root, attempt, save_id)
    try:
        storage.put(where, b"")
    except OSError as error:
        log.warning("%s: cannot be written, so what is read may be removed meanwhile: %s", storage.url(where), error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it counts no more than the attempt does
            storage.remove([where])


def _pin_path(root: str, attempt: int, save_id: str) -> str:
    return st.join(root, commit.CONTROL, READERS, f"{attempt}.{save_id}")


def pinned_saves(storage: st.Storage, root: str) -> set[str]:
    """Saves that are being read. Pins of older attempts do not count: those have ended (W8)."""
    pins = [pin for pin in _pins(storage, root) if pin.whole]
    newest = roots.newest_attempt(storage, root) if pins else 0
    return {pin.save_id for pin in pins if pin.attempt >= newest}


def remove_old_pins(storage: st.Storage, root: str) -> None:
    """Removes what readers of older attempts left when they were killed."""
    pins = _pins(storage, root)
    newest = roots.newest_attempt(storage, root) if pins else 0
    directory = st.join(root, commit.CONTROL, READERS)
    storage.remove([st.join(directory, pin.name) for pin in pins if pin.attempt < newest])


@dataclass(frozen=True)
class _Pin:
    """A file of a reader. `whole`: a pin, not what a writer that was killed, or is at it, has of one."""

    name: str
    attempt: int
    save_id: str
    whole: bool


def _pins(storage: st.Storage, root: str) -> list[_Pin]:
    """What readers have here. Names that are none of theirs (``.nfs0001``) are nobody's business."""
    found = []
    for entry in storage.list(st.join(root, commit.CONTROL, READERS)):
        match = _PIN.fullmatch(entry.name)
        if match is not None:
            found.append(_Pin(entry.name, int(match["attempt"]), match["save_id"], entry.name == match["pin"]))
    return found
