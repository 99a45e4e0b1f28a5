"""Megatron-Core's ``torch_dist`` format, and the plain torch checkpoint it is made of: read, never trusted.

What a foreign ``.metadata`` lacks is found in the items themselves: each is a `torch.save` container, whose headers
say where the raw payload begins and what its CRC-32 is, and whose small pickle says how the tensor lies in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckptlib import archive
from ckptlib import storage as st
from ckptlib.errors import NotACheckpointError, RecordError, UnsupportedError
from ckptlib.formats.metadata import METADATA as METADATA
from ckptlib.formats.metadata import read_metadata, to_index
from ckptlib.formats.metadata_writer import encode_metadata
from ckptlib.index import UNKNOWN, ChunkItem, ItemIndex, Location
from ckptlib.safe_pickle import load_object, load_pickle
from ckptlib.safe_tensors import Storages
from ckptlib.sharding import names_cell

__all__ = [
    "check_optimizer_request",
    "encode_metadata",
    "file_ends",
    "locate_payload",
    "locate_payloads",
    "optimizer_form",
    "read_chunk",
    "read_common",
    "read_index",
]

COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
BATCH_ITEMS = 256
"""Items whose headers are read in one call: bounds the memory to a few MiB."""

FLAT_FORMS = ("dp_reshardable", "fully_sharded_model_space", "dp_zero_gather_scatter")
"""How Megatron-Core stores optimizer state other than in model space; these need conversion."""


def read_index(storage: st.Storage, path: str) -> ItemIndex:
    """The item index of a foreign checkpoint (torch_dist, torch_dcp, fsdp_dtensor). Payload offsets are unknown.

    Raises:
        NotACheckpointError: there is no ``.metadata``.
        UnsafePickleError, RecordError: it is hostile or damaged; nothing was executed.
    """
    return to_index(read_metadata(storage, path), storage.url(st.join(path, METADATA)))


def file_ends(index: ItemIndex) -> dict[str, int]:
    """How many bytes each data file must have at least."""
    ends = dict.fromkeys(index.files, 0)
    places = [*(item.location for item in index.chunk_items()), *(item.location for item in index.objects())]
    for place in places:
        ends[place.file] = max(ends[place.file], place.offset + place.length)
    return ends


def read_common(storage: st.Storage, path: str, index: ItemIndex | None = None) -> dict[str, Any]:
    """The unsharded part of a foreign checkpoint: ``common.pt`` (which wins, as in Megatron-Core), or its
    ``common_state`` object (0.19 and later), or the top-level plain values of a torch_dcp checkpoint.

    Args:
        index: the checkpoint's index, if it is at hand.

    Raises:
        NotACheckpointError: a torch_dist checkpoint has neither.
        UnsafePickleError, RecordError: hostile or damaged; nothing was executed.
    """
    try:
        data = storage.get(st.join(path, COMMON))
    except FileNotFoundError:
        data = None
    where = storage.url(st.join(path, COMMON))
    if data is not None:
        value = load_object(data, where)
    else:
        index = read_index(storage, path) if index is None else index
        if index.has_object(COMMON_KEY):
            where = f"{storage.url(path)}: {COMMON_KEY}"
            value = read_object(storage, path, index, COMMON_KEY)
        elif any(map(names_cell, index.object_keys)):
            raise NotACheckpointError(f"{storage.url(path)}: it has neither {COMMON} nor {COMMON_KEY}: not finished")
        else:
            return {key: read_object(storage, path, index, key) for key in index.object_keys if "." not in key}
    if not isinstance(value, dict):
        raise RecordError(f"{where}: the common state is a {type(value).__name__}, expected a dict")
    return value


def read_object(storage: st.Storage, path: str, index: ItemIndex, key: str) -> Any:
    """One stored object; a sharded one comes out of its list. `KeyError` when it is absent."""
    item = index.object(key)
    where = f"{storage.url(st.join(path, item.location.file))} ({key})"
    value = load_object(_read_item(storage, path, item.location), where)
    if not item.wrapped:
        return value
    if not isinstance(value, list) or len(value) != 1:
        raise RecordError(f"{where}: a sharded object must be a list of one, found a {type(value).__name__}")
    return value[0]


def locate_payload(storage: st.Storage, path: str, item: Location | ChunkItem) -> Location:
    """The location with the payload's place, length and CRC-32, read from the container. See `locate_payloads`."""
    return locate_payloads(storage, path, [item])[0]


def locate_payloads(storage: st.Storage, path: str, items: Sequence[Location | ChunkItem]) -> list[Location]:
    """Locations with the payloads' places, lengths and CRC-32s, read from the containers.

    Args:
        path: the iteration directory.
        items: locations, or whole chunk items: then dtype and shape are compared with the index as well.

    Returns:
        The locations, in the order of `items`.

    Raises:
        UnsafePickleError, RecordError: a container is hostile or damaged, or holds another tensor than the index says.
        UnsupportedError: a payload is not in row-major order (`read_chunk` reads it).
        OSError: the storage cannot be read.
    """
    found: list[Location | None] = [None] * len(items)
    by_file: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        by_file.setdefault(_location(item).file, []).append(i)
    for name, members in by_file.items():
        members.sort(key=lambda i: _location(items[i]).offset)
        for start in range(0, len(members), BATCH_ITEMS):
            batch = members[start : start + BATCH_ITEMS]
            for i, window in zip(batch, read_windows(storage, path, [_location(items[i]) for i in batch]), strict=True):
                where = f"{storage.url(st.join(path, name))} at byte {_location(items[i]).offset}"
                found[i] = payload_of(items[i], window, archive.parse(window, where), where)
    return [location for location in found if location is not None]


def read_windows(storage: st.Storage, path: str, locations: Sequence[Location]) -> list[archive.Window]:
    """The two ends of items that lie in one file. Raises like `locate_payloads`."""
    file = st.join(path, locations[0].file)
    extents = [archive.Extent(location.offset, location.length) for location in locations]
    return archive.read_windows(storage, file, extents, storage.url(file))


def read_chunk(storage: st.Storage, path: str, item: ChunkItem) -> torch.Tensor:
    """One whole stored chunk, however it lies in its storage (transposed, channels-last, a view of a larger one).

    Raises:
        UnsafePickleError, RecordError: hostile or damaged, or another tensor than the index says.
    """
    where = f"{storage.url(st.join(path, item.location.file))} ({item.key})"
    value = load_object(_read_item(storage, path, item.location), where)
    return _check_tensor(value, item, where).detach().contiguous()


def optimizer_form(index: ItemIndex, common: Mapping[str, Any]) -> str | None:
    """How a Megatron-Core checkpoint stores optimizer state, if that needs conversion before it can be used.

    Returns:
        One of `FLAT_FORMS`; None when the state is stored in model space (``fully_reshardable``, a plain optimizer),
        or there is none.
    """
    for form in _declared_forms(common):
        if form in FLAT_FORMS:
            return form
    if any(".gbuf_idx_" in key for key in index.keys):
        return "dp_reshardable"
    if any(".param_state/shard_" in key for key in index.object_keys):
        return "dp_zero_gather_scatter"
    return None


def check_optimizer_request(index: ItemIndex, common: Mapping[str, Any], keys: Iterable[str], url: str) -> None:
    """Refuses a request for optimizer state in model space from a checkpoint that does not store it so.

    Raises:
        UnsupportedError: names the form and the first such key.
    """
    wanted = next((key for key in keys if key.startswith("optimizer.state.")), None)
    form = optimizer_form(index, common) if wanted is not None else None
    if form is not None:
        raise UnsupportedError(f"{url}: {wanted!r} cannot be read: {conversion_note(form)}")


def conversion_note(form: str) -> str:
    """What a form of `FLAT_FORMS` is, for people."""
    what = {
        "dp_reshardable": "flat buffers per data-parallel group, without parameter names",
        "fully_sharded_model_space": "flattened pieces of parameters in reshaped tensors (Megatron-Core up to 0.15)",
        "dp_zero_gather_scatter": "one gathered object per data-parallel group (Megatron-Core up to 0.14)",
    }[form]
    return (
        f"its optimizer state is stored as {form}: {what}. It needs conversion to fully_reshardable before it is "
        "loaded: resume it with Megatron-LM at the TP and PP that wrote it and save with "
        "--dist-ckpt-optim-fully-reshardable, or with ckptlib.integrations.megatron. Weights alone load as they are"
    )


def _declared_forms(common: Mapping[str, Any]) -> Collection[str]:
    """What the checkpoint says of itself, in both places where Megatron-Core writes it."""
    forms = []
    content = common.get("content_metadata")
    if isinstance(content, dict):
        forms.append(content.get("distrib_optim_sharding_type"))
    optimizer = common.get("optimizer")
    if isinstance(optimizer, dict):
        parts = [optimizer, *(part for part in optimizer.values() if isinstance(part, dict))]
        forms += [part.get("param_state_sharding_type") for part in parts]
    return [form for form in forms if isinstance(form, str)]


def _location(item: Location | ChunkItem) -> Location:
    return item.location if isinstance(item, ChunkItem) else item


def _read_item(storage: st.Storage, path: str, location: Location) -> bytes:
    data = bytearray(location.length)
    storage.read_into(st.join(path, location.file), [(location.offset, memoryview(data))])
    return bytes(data)


def payload_of(item: Location | ChunkItem, window: archive.Window, layout: archive.Layout, where: str) -> Location:
    """The location of an item whose ends were read. Raises like `locate_payloads`."""
    tensor, key = tensor_of(item, window, layout, where)
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{where}: a tensor of shape {tuple(tensor.shape)} with stride {tensor.stride()}: its payload is not in "
            "row-major order, so parts of it cannot be read; it can be read whole (`read_chunk`)"
        )
    payload = layout.record(f"data/{key}", where)
    location = _location(item)
    skipped = int(tensor.storage_offset()) * tensor.element_size()
    length = tensor.numel() * tensor.element_size()
    return Location(
        location.file,
        location.offset,
        location.length,
        location.offset + payload.offset + skipped,
        length,
        payload.crc32 if length == payload.size else UNKNOWN,
    )


def tensor_of(
    item: Location | ChunkItem, window: archive.Window, layout: archive.Layout, where: str
) -> tuple[torch.Tensor, str]:
    """The tensor of an item without its content (on the meta device), and the name of its storage.

    Raises:
        UnsafePickleError, RecordError: hostile or damaged, or not the tensor that the index says.
    """
    record = layout.record("data.pkl", where)
    pickled = window.get(record.offset, record.size)
    if pickled is None:
        raise RecordError(f"{where}: a pickle of {record.size} bytes is not that of one tensor")
    archive.check_crc(pickled, record, where)
    storages = Storages(b"", layout, where, materialise=False)
    tensor = load_pickle(pickled, where, storages.load)
    if not isinstance(tensor, torch.Tensor) or len(storages.keys) != 1:
        raise RecordError(f"{where}: holds a {type(tensor).__name__}, expected one tensor")
    if isinstance(item, ChunkItem):
        _check_tensor(tensor, item, where)
    return tensor, storages.keys[0]


def _check_tensor(value: Any, item: ChunkItem, where: str) -> torch.Tensor:
    """The tensor of an item, if it is what the metadata says of it."""
    expected = f"{item.dtype} {item.box.shape}"
    if not isinstance(value, torch.Tensor):
        raise RecordError(f"{where}: tensor {item.key!r}: the item holds no tensor, {METADATA} says {expected}")
    found = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if found != expected:
        raise RecordError(f"{where}: tensor {item.key!r}: the item holds {found}, {METADATA} says {expected}")
    return value
