"""Comparing states bit by bit, and making copies whose every tensor holds something else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ckptlib.sharding import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ckptlib.state import leaf_bytes


def assert_same(found: Any, wanted: Any, path: str = "state") -> None:
    """Same structure, types, dtypes, shapes and bits; NaN equals itself."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert bytes(leaf_bytes(found)) == bytes(leaf_bytes(wanted)), f"{path}: {found} is not {wanted}"
    elif isinstance(wanted, ShardedTensor):
        assert (found.key, found.box, found.global_shape) == (wanted.key, wanted.box, wanted.global_shape), path
        assert_same(found.data, wanted.data, f"{path} ({wanted.key} {wanted.box})")
    elif isinstance(wanted, ShardedObject):
        assert found.unique_key == wanted.unique_key, path
        assert_same(found.data, wanted.data, f"{path} ({wanted.unique_key})")
    elif isinstance(wanted, LocalNonpersistentObject):
        assert found.obj == wanted.obj, path
    elif isinstance(wanted, Mapping):
        assert {*found} == {*wanted}, path
        for name in wanted:
            assert_same(found[name], wanted[name], f"{path}.{name}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted), path
        assert len(found) == len(wanted), path
        for i, (one, two) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, two, f"{path}.{i}")
    else:
        assert type(found) is type(wanted), path
        assert found == wanted or (found != found and wanted != wanted), f"{path}: {found!r} is not {wanted!r}"


def blanked(state: Any) -> Any:
    """The same structure with other contents: what a job has before it loads."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state).fill_(1) if state.numel() else torch.empty_like(state)
    if isinstance(state, ShardedTensor | ShardedObject):
        other = copy.copy(state)
        other.data = blanked(state.data)
        return other
    if isinstance(state, LocalNonpersistentObject):
        return LocalNonpersistentObject(state.obj)
    if isinstance(state, Mapping):
        return {name: blanked(value) for name, value in state.items()} if state else {}
    if isinstance(state, list | tuple) and any(isinstance(x, torch.Tensor | ShardedTensor | Mapping) for x in state):
        return type(state)(blanked(value) for value in state)
    return None
