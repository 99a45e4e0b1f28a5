"""A process of the judge's environment: loads checkpoints with the real `megatron.core.dist_checkpointing`.

Reads requests, one JSON object a line, and answers each with one line. Several such processes form a gloo group when
the environment says so (RANK, WORLD_SIZE, JUDGE_RENDEZVOUS); then each gets its own request for the same load.
It knows nothing of ckptlib: whatever it can read, it reads because the files are what Megatron-Core expects.

Request::

    {"checkpoint": "<iteration directory>", "tensors_to": "<file>.safetensors",
     "tensors": [{"name", …the fields of judging.Piece}], "objects": [{"name", …the fields of judging.Cell}],
     "strict": "assume_ok_unexpected", "verify_integrity": true}

`tensors: null` loads every tensor whole (`load_plain_tensors`). Answer: `{"backend", "common", "objects"}`, or
`{"error"}` with what Megatron-Core raised.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from tests.megatron import stand_ins

stand_ins.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.core import maybe_load_config  # noqa: E402


def load(request: dict[str, Any]) -> dict[str, Any]:
    """Carries out one request."""
    checkpoint = request["checkpoint"]
    config = maybe_load_config(checkpoint)
    if request["tensors"] is None:
        everything = dist_checkpointing.load_plain_tensors(checkpoint)  # the common state lies in between
        tensors = {key: value for key, value in everything.items() if isinstance(value, torch.Tensor)}
        common = dist_checkpointing.load_common_state_dict(checkpoint)
        objects: dict[str, Any] = {}
    else:
        state: dict[str, dict[str, Any]] = {
            "judged tensors": {wanted["name"]: sharded_tensor(wanted) for wanted in request["tensors"]},
            "judged objects": {wanted["name"]: sharded_object(wanted) for wanted in request["objects"]},
        }
        common = dist_checkpointing.load(
            state, checkpoint, strict=request["strict"], verify_integrity=request["verify_integrity"]
        )
        tensors, objects = common.pop("judged tensors", {}), common.pop("judged objects", {})
    save_file({name: value.contiguous() for name, value in tensors.items()}, request["tensors_to"])
    return {"backend": config and config.sharded_backend, "common": common, "objects": objects}


def sharded_tensor(wanted: dict[str, Any]) -> ShardedTensor:
    """Megatron's own description of a rank's piece, with memory to load it into."""
    data = torch.empty(wanted["shape"], dtype=getattr(torch, wanted["dtype"]))
    return ShardedTensor.from_rank_offsets(
        wanted["key"],
        data,
        *(tuple(offset) for offset in wanted["rank_offsets"]),
        replica_id=tuple(wanted["replica_id"]),
        prepend_axis_num=wanted["prepend_axis_num"],
        allow_shape_mismatch=wanted["allow_shape_mismatch"],
    )


def sharded_object(wanted: dict[str, Any]) -> ShardedObject:
    """Megatron's own description of a cell of a grid of objects."""
    shape, offset, replica = (tuple(wanted[axes]) for axes in ("global_shape", "global_offset", "replica_id"))
    return ShardedObject(wanted["key"], None, shape, offset, replica)


def plain(value: Any) -> Any:
    """What JSON lacks: a Namespace becomes its dict, a tensor its list, anything else its repr."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return repr(value)


def main() -> None:
    """Serves until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Megatron prints must not mix with the answers
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['JUDGE_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    for line in sys.stdin:
        try:
            answer = load(json.loads(line))
        except (Exception, CheckpointException) as error:  # torch's own is a BaseException
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=plain) + "\n")


if __name__ == "__main__":
    main()
