"""Put in place before torch's own checkpoint tests run: `install` is called in each of their processes.

Two things, each asked for by the environment (scripts/torch-dcp-tests.py sets it):

- CKPT_STAND_IN=ours: `FileSystemWriter` and `FileSystemReader` are ours, also where `dcp.save(checkpoint_id=...)` picks
  them;
- CKPT_ON_CPU=1: tests that want several GPUs run on the CPU over gloo, and what they move to a GPU stays where it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def install() -> None:
    """Everything that the environment asks for. Modules of torch's tests are imported afterwards."""
    if os.environ.get("CKPT_ON_CPU"):
        _on_cpu()
    if os.environ.get("CKPT_STAND_IN") == "ours":
        _ours()


def _ours() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
    from torch_dcp_storage import Reader, Writer

    for module in (dcp, filesystem, _storage_utils, format_utils):
        vars(module).update(FileSystemWriter=Writer, FileSystemReader=Reader)


def _on_cpu() -> None:
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def needs_none(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for module in (common_distributed, common_dtensor):
        vars(module)["skip_if_lt_x_gpu"] = needs_none

    def stays(self: Any, *_: Any, **__: Any) -> Any:
        return self

    vars(torch.cuda)["set_device"] = lambda *_: None
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = stays  # type: ignore[method-assign]
    # "cpu:gloo,cuda:nccl" and the like: what there is for the CPU.
    init = torch.distributed.init_process_group

    def over_gloo(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend") or (args[0] if args else None)
        if isinstance(backend, str) and "gloo" in backend:
            kwargs["backend"], args = "gloo", args[1:]
        kwargs.pop("device_id", None)
        return init(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        members: Mapping[str, Any] = vars(module) if name.startswith("torch") else {}
        if members.get("init_process_group") is init:
            setattr(module, "init_process_group", over_gloo)  # noqa: B010
