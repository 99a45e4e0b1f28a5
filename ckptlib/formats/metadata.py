"""torch's ``.metadata``: the index of every checkpoint that `torch.distributed.checkpoint` or Megatron-Core reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.checkpoint import filesystem, metadata

from ckptlib import storage as st
from ckptlib.data_names import is_below
from ckptlib.errors import NotACheckpointError, RecordError, StateError, UnsupportedError
from ckptlib.index import ChunkItem, ItemIndex, Location, ObjectItem
from ckptlib.safe_pickle import load_metadata
from ckptlib.sharding import Box, names_cell

METADATA = ".metadata"


def read_metadata(storage: st.Storage, path: str) -> metadata.Metadata:
    """The metadata of the checkpoint at `path`.

    Raises:
        NotACheckpointError: there is none.
        UnsafePickleError, RecordError: hostile or damaged; nothing was executed.
    """
    where = st.join(path, METADATA)
    try:
        data = storage.get(where)
    except FileNotFoundError:
        raise NotACheckpointError(f"{storage.url(path)}: {METADATA} is missing: the save was not finished") from None
    return load_metadata(data, storage.url(where))


def to_index(value: metadata.Metadata, where: str) -> ItemIndex:
    """The items of a metadata object; where payloads begin is not recorded in it, and left unknown.

    Args:
        where: path of the metadata, for messages.

    Raises:
        RecordError: an item has no place, a place leaves the directory, or a chunk leaves its tensor.
        UnsupportedError: items are compressed or encrypted by a torch extension.
    """
    if not isinstance(value.storage_data, dict):
        raise RecordError(f"{where}: names no files; written by a storage backend that is not read here")
    places: dict[tuple[str, tuple[int, ...] | None], Location] = {}
    for key, info in value.storage_data.items():
        if not isinstance(key, metadata.MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise RecordError(f"{where}: an item has no place in a file")
        places[key.fqn, None if key.offset is None else tuple(key.offset)] = _place(key.fqn, info, where)
    chunks: list[ChunkItem] = []
    objects: list[ObjectItem] = []
    for key, entry in value.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            chunks += _chunks(key, entry, places, where)
        elif isinstance(entry, metadata.BytesStorageMetadata):
            objects.append(ObjectItem(key, names_cell(key), _find(places, key, None, where)))
        else:
            raise RecordError(f"{where}: {key!r} is neither a tensor nor bytes")
    try:
        return ItemIndex.build(chunks, objects)
    except StateError as error:
        raise RecordError(f"{where}: {error}") from error


def _chunks(
    key: str,
    entry: metadata.TensorStorageMetadata,
    places: dict[tuple[str, tuple[int, ...] | None], Location],
    where: str,
) -> Iterator[ChunkItem]:
    shape = tuple(entry.size)
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if not box.within(shape):
            raise RecordError(f"{where}: tensor {key!r}: chunk {box} leaves its shape {shape}")
        yield ChunkItem(key, dtype, shape, box, _find(places, key, box.offset, where))


def _find(
    places: dict[tuple[str, tuple[int, ...] | None], Location], key: str, offset: tuple[int, ...] | None, where: str
) -> Location:
    try:
        return places[key, offset]
    except KeyError:
        what = f"object {key!r}" if offset is None else f"tensor {key!r}, chunk at {offset}"
        raise RecordError(f"{where}: {what}: no file is named for it") from None


def _place(key: str, info: filesystem._StorageInfo, where: str) -> Location:
    if getattr(info, "transform_descriptors", None):
        raise UnsupportedError(
            f"{where}: {key!r} is stored with extensions {info.transform_descriptors}; not supported"
        )
    name = info.relative_path
    if not is_below(name):
        raise RecordError(f"{where}: {key!r} is said to lie in {name!r}, which is no file of this directory")
    return Location(name, info.offset, info.length)
