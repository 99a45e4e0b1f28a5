"""The tracker file follows the verdicts (W6): an exported view for readers such as Megatron, never the truth.

Who moves it is the run's choice, recorded with its newest attempt: the trainer after each commit (``committed``), or
whoever verifies (``verified``), so that a reader never loads what nobody has read back. In both, a tracker that names
a checkpoint which turned out corrupt moves to the newest verified one.
"""

from __future__ import annotations

import logging

from catalog.catalog import Catalog
from catalog.rows import CheckpointRow
from ckptlib import roots
from ckptlib import storage as st

log = logging.getLogger("catalog")


def follow(catalog: Catalog, row: CheckpointRow) -> bool:
    """Brings the tracker beside a checkpoint in line with its new verdict.

    Returns:
        Whether the tracker was moved.

    Raises:
        OSError: the storage failed.
        CkptError: the catalog, or the root's attempts, cannot be read.
    """
    if row.kind not in roots.TRACKED_KINDS or row.root_id is None:
        return False
    storage, root = st.resolve(row.root_url)
    mode = roots.tracker_mode(storage, root)
    directory = root if row.kind == "persistent" else st.join(root, roots.NON_PERSISTENT)
    if row.verdict == "corrupt":
        good = _verified(catalog, row)
        # A newer save in the same directory may be what the tracker means.
        if roots.read_tracker(storage, directory) != str(row.iteration) or row.iteration in good:
            return False
        if not good and mode != "verified":
            # Without a tracker, Megatron would start from random weights and say nothing.
            log.error(
                "%s: the tracker names iteration %d, which is corrupt; nothing is verified", row.root_url, row.iteration
            )
            return False
    elif row.verdict != "verified" or mode != "verified":
        return False
    moved = False
    while True:
        good = _verified(catalog, row)
        newest = good[-1] if good else None
        named = roots.read_tracker(storage, directory)
        if named == (None if newest is None else str(newest)):
            return moved
        # Again, until nothing changed: another worker may have verified a newer one and written before us.
        roots.put_tracker(storage, root, newest, row.kind)
        moved = True
        log.info("%s: the tracker moved from iteration %s to %s", storage.url(directory), named, newest)


def _verified(catalog: Catalog, row: CheckpointRow) -> list[int]:
    """Iterations of the verified checkpoints of the same kind in the same root, on the live branch, in order."""
    rows = catalog.checkpoints(row.run, lifecycle="finalized", verdict="verified", branch="live", kind=row.kind)
    return [other.iteration for other in rows if other.root_id == row.root_id]
