"""Which checkpoints may leave a first tier: older ones whose copies at the durable location are committed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ckptlib import commit, removal, roots
from ckptlib import storage as st

log = logging.getLogger("ckptlib")


def beyond(
    found: Sequence[roots.Found], keep: int, tracked: str | None, being_read: Collection[str]
) -> list[roots.Found]:
    """The committed persistent checkpoints that are older than the newest `keep` of them. Pure.

    Args:
        tracked: what the tracker says: what it names stays, or whoever follows it finds nothing.
        being_read: save ids that a restore has pinned.
    """
    committed = [each for each in found if each.kind == "persistent" and each.state == "committed"]
    older = sorted(committed, key=lambda each: each.order)[:-keep]
    return [
        each
        for each in older
        if each.save is not None and str(each.iteration) != tracked and each.save.save_id not in being_read
    ]


def trim(storage: st.Storage, root: str, durable: st.Storage, durable_root: str, keep: int) -> list[str]:
    """Removes from a first tier what `beyond` says and the durable location has.

    Returns:
        URLs of what was removed. What cannot be removed is logged, and tried again after the next upload.
    """
    found = roots.scan(storage, root).found
    tracked, being_read = roots.read_tracker(storage, root), removal.pinned_saves(storage, root)
    removed = []
    for each in beyond(found, keep, tracked, being_read):
        assert each.save is not None  # `beyond` has looked
        there = commit.read_save(durable, st.join(durable_root, each.name), each.save.save_id)
        if not there.committed:
            continue
        removal.remove_all(storage, [(each.path, each.save.save_id)])
        removed.append(each.url)
    return removed
