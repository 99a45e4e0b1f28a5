"""What a store says of a file by itself, compared with what was recorded (V3, level ``store``). Pure.

A store that computed digests over the bytes that it keeps proves as much as reading them back through the same store
would, but for what happened to them since: that is the store's own care, and level ``data`` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptlib.storage import Vouched
from ckptlib.storage.s3_parts import composite

Outcome = Literal["ok", "digest", "unknown"]

NO_DIGEST_RECORDED = "no digest of it was recorded, so there is nothing to compare with"
NO_DIGEST_KEPT = "the store keeps no SHA-256 of it (uploaded or copied by another tool?)"
NO_PARTS_RECORDED = "the store keeps a digest of its parts, and none of its parts were recorded"
BAD_PARTS = "the recorded part digests do not fit its recorded size"
OTHER_PARTS = "the store has it in other parts than it was written in (copied by another tool?)"


@dataclass(frozen=True)
class Judged:
    """What follows from a store's word. ``unknown``: nothing; `detail` says why, for people."""

    outcome: Outcome
    detail: str = ""


def fits(size: int, part_size: int | None, part_sha256: Sequence[str]) -> bool:
    """Whether so many parts can be of a file of this size: all but the last have `part_size` bytes, or more."""
    return part_size is not None and part_size > 0 and (len(part_sha256) - 1) * part_size < max(1, size)


def no_word(keeper: str) -> str:
    """Why nothing is known of the files of a storage that vouches for none.

    Args:
        keeper: the storage's name (`Capabilities.name`).
    """
    return f"{keeper} storage keeps no digests of its own, or was not seen to reject a wrong one"


def judge(
    vouched: Vouched, sha256: str | None, part_size: int | None = None, part_sha256: Sequence[str] = ()
) -> Judged:
    """Compares a store's word about a file of the right size with what was recorded of it.

    Args:
        sha256: of the whole file; None: not recorded.
        part_size, part_sha256: of its parts; none: not recorded.

    Returns:
        ``digest`` of a file in parts only as far as these are as long as recorded: see `same_parts`.
    """
    if sha256 is None:
        return Judged("unknown", NO_DIGEST_RECORDED)
    if vouched.sha256 is not None:
        if vouched.sha256 == sha256:
            return Judged("ok")
        return Judged("digest", "its bytes are not those recorded, says the store's own SHA-256")
    if vouched.composite is None:
        return Judged("unknown", NO_DIGEST_KEPT)
    if not part_sha256:
        return Judged("unknown", NO_PARTS_RECORDED)
    if not fits(vouched.size, part_size, part_sha256):
        return Judged("unknown", BAD_PARTS)
    if vouched.parts not in (None, len(part_sha256)):
        return Judged("unknown", OTHER_PARTS)
    if vouched.composite == composite(part_sha256):
        return Judged("ok")
    return Judged("digest", "its parts are not those recorded, says the store's own SHA-256 over them")


def same_parts(first: int | None, size: int, part_size: int | None) -> bool:
    """Whether the parts that a store has of a file of `size` bytes, as many as recorded, are as long as these.

    Others have other digests, and the bytes may be right: whoever reads them knows.

    Args:
        first: bytes of the first one; None: the store does not say.
        part_size: recorded.
    """
    return first is not None and part_size is not None and first == min(size, part_size)
