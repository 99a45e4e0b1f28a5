"""Whether items are what the index says: every tensor tiled exactly once, every container and pickle in order."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from isal import isal_zlib

from ckptlib import archive
from ckptlib import storage as st
from ckptlib.errors import CkptError, RecordError, StateError, UnsupportedError
from ckptlib.formats import torch_dist
from ckptlib.index import UNKNOWN, ChunkItem, ItemIndex, Location, ObjectItem
from ckptlib.safe_pickle import check_object
from ckptlib.tiling import check_tiling
from ckptlib.verify_files import Sealed


@dataclass
class ItemFindings:
    """What the items of a checkpoint are like.

    Attributes:
        damage: file -> what is wrong with the first bad item in it.
        contradictions: what the index cannot mean: two items in one place.
        sealed: file -> the records in it that carry a CRC-32, in order.
    """

    damage: dict[str, str] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    sealed: dict[str, list[Sealed]] = field(default_factory=lambda: defaultdict(list))


def tiling_defects(index: ItemIndex) -> Iterator[str]:
    """Tensors that the stored chunks do not cover exactly once."""
    with contextlib.suppress(StateError):
        index.check_tilings()
        return
    for info in index.tensors():  # all that are wrong, not the first
        chunks = index.chunks(info.key)
        try:
            check_tiling(info.key, info.shape, [chunks.box(i) for i in range(len(chunks))])
        except StateError as error:
            yield str(error)


def check_items(
    storage: st.Storage, path: str, index: ItemIndex, files: Collection[str], *, tensors: bool = True
) -> ItemFindings:
    """Parses items: containers, pickles, and whether they hold what the index says. Payloads of tensors are not read.

    Args:
        path: the iteration directory.
        files: only items in these are looked at.
        tensors: tensors too, not only objects.

    Raises:
        OSError: the storage cannot be read.
    """
    found = ItemFindings()
    by_file: dict[str, list[ChunkItem | ObjectItem]] = defaultdict(list)
    for item in index.objects():
        by_file[item.location.file].append(item)
    if tensors:
        for chunk in index.chunk_items():
            by_file[chunk.location.file].append(chunk)
    for name in sorted(set(files) & by_file.keys()):
        items = sorted(by_file[name], key=lambda item: item.location.offset)
        clash = _overlap(items)
        if clash is not None:
            found.contradictions.append(f"{name}: {clash}")
            continue
        try:
            _check_file(storage, path, items, found.sealed[name])
        except (OSError, UnsupportedError):  # says nothing about the bytes
            raise
        except CkptError as error:
            found.damage[name] = str(error)
    return found


def _overlap(items: list[ChunkItem | ObjectItem]) -> str | None:
    for one, two in itertools.pairwise(items):
        if two.location.offset < one.location.offset + one.location.length:
            return f"{one.key!r} and {two.key!r} are both said to be at byte {two.location.offset}"
    return None


def _check_file(storage: st.Storage, path: str, items: list[ChunkItem | ObjectItem], sealed: list[Sealed]) -> None:
    for start in range(0, len(items), torch_dist.BATCH_ITEMS):
        batch = items[start : start + torch_dist.BATCH_ITEMS]
        windows = torch_dist.read_windows(storage, path, [item.location for item in batch])
        for item, window in zip(batch, windows, strict=True):
            where = f"{item.key!r} at byte {item.location.offset}"
            layout = _check_item(storage, path, item, window, where)
            at = item.location.offset
            sealed += [Sealed(at + r.offset, r.size, r.crc32, f"{where}, {r.name}") for r in layout.records.values()]


def _check_item(
    storage: st.Storage, path: str, item: ChunkItem | ObjectItem, window: archive.Window, where: str
) -> archive.Layout:
    if isinstance(item, ObjectItem):
        data = bytearray(item.location.length)
        storage.read_into(st.join(path, item.location.file), [(item.location.offset, memoryview(data))])
        if item.location.crc32 not in (UNKNOWN, isal_zlib.crc32(data)):
            raise RecordError(f"{where}: its CRC-32 is not the one in the index")
        return check_object(bytes(data), where)
    layout = archive.parse(window, where)
    torch_dist.tensor_of(item, window, layout, where)
    if item.location.payload_offset != UNKNOWN:
        _compare(item.location, torch_dist.payload_of(item, window, layout, where), where)
    return layout


def _compare(recorded: Location, found: Location, where: str) -> None:
    if recorded != found:
        raise RecordError(f"{where}: its container says {found}, the index says {recorded}")
