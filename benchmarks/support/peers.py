"""Other libraries' asynchronous saves, for benchmarks that are asked to measure them in the same run.

They are no dependency of the project and are looked for only when asked. Into a directory of their own, beside the
torch that is there:

    .venv/bin/pip install --no-deps --target out/peers torch-checkpointing==0.1.1 moonclip==0.3.1
    PYTHONPATH=out/peers .venv/bin/python benchmarks/save_async.py --peers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Save = Callable[[int], Callable[[], Any]]
"""Begins the save of a round and returns when the caller may go on; what it returns waits for the end."""


def peers(folder: str, model: Mapping[str, torch.Tensor]) -> tuple[dict[str, Save], Callable[[], None]]:
    """What is installed of them, by name, and what ends them all."""
    saves: dict[str, Save] = {}
    ends: list[Callable[[], None]] = []
    for find in (_torch_checkpointing, _moonclip):
        try:
            found, end = find(folder, model)
        except ImportError as missing:
            print(f"not measured: {missing}; see benchmarks/support/peers.py")
            continue
        saves |= found
        ends.append(end)
    return saves, lambda: [end() for end in ends] and None


def _torch_checkpointing(folder: str, model: Mapping[str, torch.Tensor]) -> tuple[dict[str, Save], Callable[[], None]]:
    """Its settings for machines without CUDA; without O_DIRECT, which not every filesystem has."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def manager(beside: bool) -> Any:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=beside)
        return CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()

    managers = {
        "torch_checkpointing": manager(beside=False),
        "torch_checkpointing, *": manager(beside=True),
    }

    def save_with(name: str) -> Save:
        def save(round_: int) -> Callable[[], Any]:
            future = managers[name].save(f"{folder}/peers/{name}/{round_}", {"model": dict(model)})
            return future.result

        return save

    return {name: save_with(name) for name in managers}, lambda: [one.close() for one in managers.values()] and None


def _moonclip(folder: str, model: Mapping[str, torch.Tensor]) -> tuple[dict[str, Save], Callable[[], None]]:
    from moonclip import CheckpointManager

    class Model:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return dict(model)

    manager = CheckpointManager(f"{folder}/peers/moonclip", world_size=1, rank=0)

    def save(round_: int) -> Callable[[], Any]:
        manager.save(step=round_, model=Model())
        return manager.flush

    return {"moonclip": save}, manager.flush
