"""A real Megatron-Core training job on a CPU: GPT, DistributedDataParallel, optimizers, its own dist_checkpointing.

Runs in the judge's environment. Stand-ins take the place of what only a GPU has: entry points of `torch.cuda`, devices
named "cuda", and the type names by which Megatron-Core knows half precision. No file of it is changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the stand-ins: it looks for the compiler of Triton

from tests.megatron import stand_ins

stand_ins.install()
stand_ins.install_runtime()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

LAYERS, HIDDEN, FFN, VOCAB = 4, 16, 24, 32

FULLY_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class Layout:
    """How a job is cut, and which optimizer it has.

    Attributes:
        optimizer: ``distributed``, ``float16`` (whole main parameters on every rank) or ``fp32``.
        bucket: elements after which DDP begins a new bucket; None: one bucket.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    optimizer: str = "distributed"
    dtype: torch.dtype = torch.bfloat16
    tied: bool = False
    experts: int | None = None
    bucket: int | None = None


@dataclass
class Job:
    """One rank of a job. `steps` is how often it has stepped."""

    layout: Layout
    chunks: list[Any]
    ddp: list[Any]
    optimizer: Any
    scheduler: Any
    steps: int = field(default=0)

    def step(self) -> None:
        """One optimizer step with gradients that depend on the parameter and the step alone, not on the layout."""
        self.steps += 1
        scale = self.optimizer.get_loss_scale().item()
        for placed in self.placed():
            gradient = scale * local_pattern(placed, self.steps)
            if hasattr(placed.data, "main_grad"):
                placed.data.main_grad.copy_(gradient)
            else:
                placed.data.grad = gradient.to(placed.data.dtype)
        self.optimizer.step()
        self.scheduler.step(increment=8)

    def placed(self) -> Iterator[Any]:
        """Megatron-Core's `ShardedTensor` or factory of every parameter; `data` is the parameter."""
        for chunk in self.chunks:
            for placed in chunk.sharded_state_dict().values():
                if isinstance(placed.data, torch.nn.Parameter):
                    yield placed


def local_pattern(placed: Any, seed: int) -> torch.Tensor:
    """What a rank holds of a global tensor that is a function of its name and a number: the same on every layout."""
    pieces = placed.build() if hasattr(placed, "build") else [placed]
    parts = []
    for piece in pieces:
        numbers = torch.arange(math.prod(piece.global_shape)) * 31 + sum(map(ord, piece.key)) + 977 * seed
        whole = (numbers.remainder(509) / 509 - 0.5).reshape(piece.global_shape)
        shape = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
        place = tuple(slice(o, o + s) for o, s in zip(piece.global_offset, shape, strict=True))
        parts.append(whole[place].reshape(piece.local_shape))
    return placed.merge_fn(parts) if hasattr(placed, "merge_fn") else parts[0]


_groups: dict[tuple[Any, ...], dict[str, Any]] = {}


def use_groups(layout: Layout) -> None:
    """Makes the process groups of a layout the current ones. They are kept: each has threads, and none ever ends."""
    sizes = (layout.tp, layout.pp, layout.vpp, layout.ep)
    state = vars(parallel_state)
    if sizes not in _groups:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            expert_model_parallel_size=layout.ep,
            create_gloo_process_groups=False,
        )
        _groups[sizes] = {name: value for name, value in state.items() if name.startswith("_") and name[1:].isupper()}
    state.update(_groups[sizes])


def build(layout: Layout) -> Job:
    """A job whose weights are a function of their names; the process groups are its own from then on."""
    use_groups(layout)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_query_groups=2,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        num_moe_experts=layout.experts,
        moe_router_load_balancing_type="none",
        pipeline_dtype=layout.dtype,
        params_dtype=layout.dtype,
        bf16=layout.dtype == torch.bfloat16,
        fp16=layout.dtype == torch.float16,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    chunks = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=layout.experts, normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="rope",
            vp_stage=stage,
        ).to(layout.dtype)
        for stage in ([None] if layout.vpp is None else range(layout.vpp))
    ]
    distributed = layout.optimizer == "distributed"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.bucket is not None,
        bucket_size=layout.bucket,
    )
    job = Job(layout, chunks, [], None, None)
    for placed in job.placed():
        placed.data.data.copy_(local_pattern(placed, 0))
    job.ddp = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=layout.dtype == torch.bfloat16,
        fp16=layout.dtype == torch.float16,
        initial_loss_scale=1024.0,
        params_dtype=layout.dtype,
        use_distributed_optimizer=distributed,
    )
    job.optimizer = get_megatron_optimizer(optimizer_config, job.ddp, use_gloo_process_groups=False)
    job.scheduler = OptimizerParamScheduler(
        job.optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=800,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=800,
        wd_incr_style="constant",
    )
    return job


def trained(layout: Layout, steps: int = 2) -> Job:
    """A job that has stepped a few times."""
    job = build(layout)
    for _ in range(steps):
        job.step()
    return job


def megatron_save(job: Job, path: Path, metadata: Mapping[str, Any] = FULLY_RESHARDABLE) -> None:
    """As Megatron-LM saves: its own sharded state dicts, its own `dist_checkpointing.save`."""
    metadata = dict(metadata)
    if job.layout.optimizer != "distributed":
        metadata = {name: value for name, value in metadata.items() if not name.startswith("distrib_optim")}
    state = _sharded(job, is_loading=False, metadata=metadata)
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        {**state, "iteration": job.steps, "opt_param_scheduler": job.scheduler.state_dict()},
        str(path),
        content_metadata=metadata,
    )


def megatron_load(job: Job, path: Path, *, strict: str = "assume_ok_unexpected") -> dict[str, Any]:
    """As Megatron-LM loads: what to ask for comes from the checkpoint's `content_metadata`. Returns the common state.

    On a CPU its DistributedOptimizer can only be loaded after a step, as a torch Adam has no `step` before; and it
    gives all parameters one and the same `step`, which each then counts up.
    """
    metadata = dist_checkpointing.load_content_metadata(str(path))
    state = _sharded(job, is_loading=True, metadata=metadata)
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(path), strict=strict)
    for i, chunk in enumerate(job.chunks):
        chunk.load_state_dict(loaded["model" if len(job.chunks) == 1 else f"model{i}"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    for member in job.optimizer.chained_optimizers:
        for slots in member.optimizer.state.values():
            slots["step"] = slots["step"].clone()
    job.scheduler.num_steps = 0  # Megatron-Core's scheduler adds what it loads to what it has
    job.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    job.steps = int(loaded["iteration"])
    return loaded


def _sharded(job: Job, *, is_loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    parts = {
        "model" if len(job.chunks) == 1 else f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(job.chunks)
    }
    of_model = parts if len(job.chunks) > 1 else parts["model"]
    optimizer = job.optimizer.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
    return {**parts, "optimizer": optimizer}


def without_step(set_states: Callable[..., None]) -> Callable[..., None]:
    """Megatron-Core 0.19.2 cannot give a torch Adam its state: it looks for `step` among the loaded tensors."""

    @functools.wraps(set_states)
    def wrapped(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        set_states(self, parameter, {"step": None, **tensors})

    return wrapped


DistributedOptimizer._set_main_param_and_optimizer_states = without_step(
    DistributedOptimizer._set_main_param_and_optimizer_states
)


def owned_bytes(job: Job) -> int:
    """Bytes of main parameters and moments that this rank of a distributed optimizer owns."""
    members = job.optimizer.chained_optimizers
    ranges = itertools.chain.from_iterable(
        bucket["param_map"].values()
        for member in members
        for buffer in member.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
    )
    return sum(3 * 4 * (found["param"].end - found["param"].start) for found in ranges)
