"""The tracker file follows the verdicts (W6): an exported view for readers such as Megatron, never the truth.

A trainer writes it after each commit, or leaves it to whoever verifies. Here it is moved in two cases only: it names
a checkpoint that turned out corrupt; or it names the newest verified one before this verdict (or nothing at all),
which is how it looks when it is left to us. What a person wrote into it, to roll a run back, is left alone.
"""

from __future__ import annotations

import logging

from catalog.catalog import Catalog
from catalog.rows import CheckpointRow
from ckptlib import roots
from ckptlib import storage as st

log = logging.getLogger("catalog")


def follow(catalog: Catalog, row: CheckpointRow) -> int | None:
    """Brings the tracker beside a checkpoint in line with its new verdict.

    Returns:
        The iteration that was written; None when the tracker was left as it is.

    Raises:
        OSError: the storage failed.
        CatalogError: the catalog cannot be read.
    """
    if row.kind not in ("persistent", "non_persistent_global") or row.verdict not in ("verified", "corrupt"):
        return None
    if row.root_id is None:  # not a root of ours
        return None
    storage, root = st.resolve(row.root_url)
    directory = root if row.kind == "persistent" else st.join(root, roots.NON_PERSISTENT)
    verified = [
        other
        for other in catalog.checkpoints(
            row.run, lifecycle="finalized", verdict="verified", branch="live", kind=row.kind
        )
        if other.root_url == row.root_url
    ]
    named = roots.read_tracker(storage, directory)
    if row.verdict == "corrupt":
        is_other = any(other.iteration == row.iteration for other in verified)
        if named != str(row.iteration) or is_other:
            return None
        if not verified:
            log.error("%s: names iteration %s, which is corrupt, and nothing is verified", directory, named)
            return None
    else:
        if not verified or verified[-1].id != row.id:
            return None
        before = str(verified[-2].iteration) if len(verified) > 1 else None
        if named is not None and named != before:
            return None
    iteration = verified[-1].iteration
    storage.put(st.join(directory, roots.TRACKER), str(iteration).encode())
    log.info("%s: tracker moved from %s to iteration %d", storage.url(directory), named, iteration)
    return iteration
