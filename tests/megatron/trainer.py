"""The ranks of real Megatron-Core training jobs: save and load with ckptlib and with Megatron-Core, and compare.

Usage, in the judge's environment: ``python -m tests.megatron.trainer FOLDER RANK WORLD``. Writes one verdict per check,
as JSON, to ``FOLDER/verdicts_<rank>.json``: what went wrong, or "". One launch serves all checks, as it takes seconds.

Everything is imported in `main`: Megatron-Core's writer starts a helper process that imports this module again.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tests.megatron.training import Job, Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "vpp2": {"pp": 2, "vpp": 2},
    "tied": {"pp": 2, "tied": True},
    "fp16": {"dtype": "float16"},
    "ep2": {"ep": 2, "experts": 2},
    "ep1": {"experts": 2},
    "float16": {"optimizer": "float16"},
    "fp32": {"optimizer": "fp32", "dtype": "float32"},
    "buckets": {"bucket": 500},
}
"""Jobs of two ranks. ``buckets`` has several buckets whose ends are padded."""


class Checks:
    """Each method is one check; `folder` is shared by the ranks. Jobs of one layout are trained and saved once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    # --- what is written ---

    def dp2_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("dp2")

    def tp2_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("tp2")

    def pp2_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("pp2")

    def vpp2_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("vpp2")

    def tied_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("tied")

    def fp16_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("fp16")

    def ep2_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("ep2")

    def float16_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("float16")

    def fp32_is_written_as_megatron_writes_it(self) -> None:
        self._same_as_megatron("fp32")

    def buckets_leave_no_trace(self) -> None:
        """Megatron-Core 0.19.2 itself writes wrong values here: it loses the padding between buckets."""
        self._save(self._trained("buckets"), "buckets")
        self._equal("buckets", "dp2")

    def each_rank_writes_the_bytes_it_owns(self) -> None:
        from ckptlib.state import flatten
        from tests.megatron.training import owned_bytes

        for name in ("dp2", "tp2", "vpp2", "buckets"):
            job = self._trained(name)
            leaves = flatten({"optimizer": self._state(job)["optimizer"]}).tensors
            assert sum(leaf.nbytes for leaf in leaves) == owned_bytes(job)
            parameters = sum(1 for _ in job.placed())
            assert len(leaves) <= 3 * (parameters + 4 * 4), "a range at a border is a few boxes, any other is one"

    def nothing_communicates(self) -> None:
        import torch

        from ckptlib.state import flatten

        job = self._trained("dp2")
        real = {name: getattr(torch.distributed, name) for name in dir(torch.distributed) if _is_collective(name)}
        assert "all_gather_into_tensor" in real
        try:
            for name in real:
                setattr(torch.distributed, name, _refuse(name))
            flatten(self._state(job))
        finally:
            for name, function in real.items():
                setattr(torch.distributed, name, function)

    # --- what is loaded ---

    def what_megatron_wrote_is_loaded_at_tp2(self) -> None:
        self._loads("dp2", by_megatron=True, into="tp2")

    def what_megatron_wrote_is_loaded_at_pp2(self) -> None:
        self._loads("tp2", by_megatron=True, into="pp2")

    def what_megatron_wrote_is_loaded_in_virtual_stages_and_buckets(self) -> None:
        self._loads("pp2", by_megatron=True, into="vpp2")
        self._loads("pp2", by_megatron=True, into="buckets")

    def what_megatron_wrote_is_loaded_with_experts(self) -> None:
        self._loads("ep2", by_megatron=True, into="ep2")

    def experts_move_between_one_optimizer_and_two(self) -> None:
        """Megatron-Core itself refuses it: without expert parallelism its chain has one optimizer, with it two."""
        self._same_as_megatron("ep1")
        for by_megatron in (True, False):
            self._loads("ep2", by_megatron=by_megatron, into="ep1")
            self._loads("ep1", by_megatron=by_megatron, into="ep2")

    def main_parameters_move_between_whole_and_distributed_optimizers(self) -> None:
        """Which Megatron-Core calls by two names."""
        from tests.megatron.training import build

        for source, into in (("float16", "dp2"), ("dp2", "float16")):
            for name in (source, f"{source}_by_megatron"):
                job = build(self._layout(into))
                self._restore(job, name)
                self._continues(job, into)

    def what_megatron_wrote_is_loaded_with_a_gradient_scaler(self) -> None:
        self._loads("fp16", by_megatron=True, into="fp16")

    def what_megatron_wrote_is_loaded_by_whole_optimizers(self) -> None:
        self._loads("float16", by_megatron=True, into="float16")
        self._loads("fp32", by_megatron=True, into="fp32")

    def what_we_wrote_is_loaded_anywhere(self) -> None:
        for source, into in (("dp2", "dp2"), ("vpp2", "tp2"), ("tp2", "dp2"), ("tied", "tied"), ("buckets", "pp2")):
            self._loads(source, by_megatron=False, into=into)

    def an_optimizer_that_has_stepped_is_filled_in_its_own_memory(self) -> None:
        import torch

        from tests.megatron.training import trained

        job = trained(self._layout("dp2"), steps=1)
        inner = job.optimizer.chained_optimizers[0].optimizer
        places = [value.data_ptr() for state in inner.state.values() for value in state.values()]
        job.scheduler.num_steps = 0  # Megatron-Core's scheduler adds what it loads to what it has
        self._restore(job, "dp2")
        assert places == [value.data_ptr() for state in inner.state.values() for value in state.values()]
        assert all(torch.equal(state["step"], torch.tensor(2.0)) for state in inner.state.values())
        self._continues(job, "dp2")

    def megatron_loads_what_we_wrote(self) -> None:
        for source, into in (("dp2", "tp2"), ("tp2", "pp2"), ("vpp2", "dp2")):
            self._megatron_loads(source, into)

    def megatron_loads_what_we_wrote_with_experts_and_a_scaler(self) -> None:
        self._megatron_loads("ep2", "ep2")
        self._megatron_loads("fp16", "fp16")

    def megatron_loads_what_we_wrote_for_whole_optimizers(self) -> None:
        self._megatron_loads("float16", "float16")

    def a_checkpointer_saves_and_restores_the_state(self) -> None:
        import ckptlib
        from tests.megatron.training import build, megatron_load, trained

        root = self._run("run")
        job = build(self._layout("tp2"))
        with ckptlib.Checkpointer(str(root), run="gpt", topology=ckptlib.Topology(tp=2)) as checkpointer:
            restored = checkpointer.restore(self._state(job))
        assert (restored.iteration, restored.progress["consumed_samples"]) == (2, 16)
        job.steps = restored.iteration
        self._continues(job, "dp2")
        loaded = megatron_load(trained(self._layout("pp2"), steps=1), root / "iter_0000002")
        assert loaded["args"].num_layers == 4

    def weights_alone_make_the_main_parameters_anew(self) -> None:
        import torch

        import ckptlib
        from tests.megatron.training import build

        root = self._run("weights")
        job = build(self._layout("tp2"))
        with ckptlib.Checkpointer(str(root), run="gpt", topology=ckptlib.Topology(tp=2)) as checkpointer:
            restored = checkpointer.restore(self._state(job), finetune=True)
        assert restored.iteration == 0
        (member,) = job.optimizer.chained_optimizers
        groups = zip(member.shard_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
        for weights, mains in groups:
            assert all(torch.equal(weight.float(), main) for weight, main in zip(weights, mains, strict=True))
        self._save(job, "finetuned")
        found, wanted = (ckptlib.read(str(self.folder / name)) for name in ("finetuned", "dp2"))
        assert all(torch.equal(found[key], wanted[key]) for key in wanted if not key.startswith("optimizer."))

    def an_optimizer_that_has_not_stepped_is_saved_and_stays_as_it_is(self) -> None:
        from tests.megatron.training import build

        job = build(self._layout("dp2"))
        self._save(job, "fresh")
        assert not job.optimizer.chained_optimizers[0].optimizer.state
        other = build(self._layout("tp2"))
        self._restore(other, "fresh")
        self._continues(other, "dp2", steps=3)

    def megatron_lm_loads_a_legacy_checkpoint_of_ours_at_dp2(self) -> None:
        self._megatron_lm_loads_legacy("float16")

    def megatron_lm_loads_a_legacy_checkpoint_of_ours_at_tp2(self) -> None:
        self._megatron_lm_loads_legacy("tp2")

    def megatron_lm_loads_a_legacy_checkpoint_of_ours_at_pp2(self) -> None:
        self._megatron_lm_loads_legacy("pp2")

    def a_legacy_checkpoint_is_loaded_by_us_where_it_was_saved(self) -> None:
        import ckptlib
        from tests.megatron.training import trained

        job = trained(self._layout("tp2", like="float16"), steps=1)
        with ckptlib.Checkpointer(str(self.folder / "legacy_tp2"), run="gpt", topology=ckptlib.Topology(tp=2)) as run:
            job.steps = run.restore(self._legacy_state(job), contents=["model", "optimizer"]).iteration
        self._continues(job, "float16")

    def optimizer_state_in_buckets_says_how_to_convert_it(self) -> None:
        import pytest

        import ckptlib
        from ckptlib.errors import KeyMismatchError
        from tests.megatron.training import build, megatron_save

        metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
        megatron_save(self._trained("dp2"), self.folder / "dpr", metadata)
        job = build(self._layout("tp2"))
        with pytest.raises(KeyMismatchError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable"):
            ckptlib.load(self._state(job), str(self.folder / "dpr"))
        assert not job.optimizer.chained_optimizers[0].optimizer.state, "nothing was changed"

    # --- with what ---

    def _same_as_megatron(self, name: str) -> None:
        from ckptlib.source import open_source

        job = self._trained(name)
        self._save(job, name)
        self._megatron_save(job, name)
        self._equal(name, f"{name}_by_megatron")
        ours, theirs = (open_source(str(self.folder / which)).read_common() for which in (name, f"{name}_by_megatron"))
        for part in ("optimizer", "opt_param_scheduler", "content_metadata", "iteration"):
            assert _plain(ours[part]) == _plain(theirs[part]), part

    def _loads(self, source: str, *, by_megatron: bool, into: str) -> None:
        """Loaded by us into a new job of another layout, which then goes on as the first would have."""
        from tests.megatron.training import build

        if by_megatron and not (self.folder / f"{source}_by_megatron").exists():
            raise AssertionError(f"{source} was not written")
        job = build(self._layout(into, like=source))
        self._restore(job, f"{source}_by_megatron" if by_megatron else source)
        self._continues(job, source)

    def _legacy_state(self, job: Job) -> dict[str, Any]:
        (model,) = job.chunks
        return {"model": model, "optimizer": job.optimizer, "opt_param_scheduler": job.scheduler}

    def _megatron_lm_loads_legacy(self, name: str) -> None:
        """Through the tracker, the directories and the loader of Megatron-LM's own training script."""
        import argparse

        import torch

        import ckptlib
        from tests.megatron.training import trained  # with the stand-ins that the next import needs

        from megatron.training import checkpointing  # isort: skip

        layout = self._layout(name, like="float16")
        job, root = trained(layout), self.folder / f"legacy_{name}"
        topology = ckptlib.Topology(tp=layout.tp, pp=layout.pp, dp=2 // (layout.tp * layout.pp))
        with ckptlib.Checkpointer(str(root), run="gpt", topology=topology, semantic_type="LEGACY") as checkpointer:
            args = argparse.Namespace(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)
            checkpointer.save(self._legacy_state(job), iteration=job.steps, args=args, progress={"flops": 5.0})
        torch.distributed.barrier()
        options = argparse.Namespace(
            non_persistent_global_ckpt_dir=None,
            non_persistent_ckpt_type=None,
            exit_on_missing_checkpoint=True,
            ckpt_format="torch",
            ckpt_step=None,
        )
        stored, path, release, kind = checkpointing._load_base_checkpoint(str(root), options)
        assert (kind.name, release) == ("LEGACY", False)
        assert path == checkpointing.get_checkpoint_name(str(root), job.steps)
        assert (stored["checkpoint_version"], stored["num_floating_point_operations_so_far"]) == (3.0, 5.0)
        assert stored["args"] == args
        other = trained(layout, steps=1)
        other.chunks[0].load_state_dict(stored["model"])
        other.optimizer.load_state_dict(stored["optimizer"])
        other.scheduler.num_steps = 0  # as in `megatron_load`
        other.scheduler.load_state_dict(stored["opt_param_scheduler"])
        other.steps = stored["iteration"]
        self._continues(other, "float16")

    def _run(self, name: str) -> Path:
        """The root of a run that a `Checkpointer` saved once, at iteration 2."""
        import argparse

        import ckptlib

        job = self._trained("dp2")
        root = self.folder / name
        with ckptlib.Checkpointer(str(root), run="gpt", topology=ckptlib.Topology(dp=2)) as checkpointer:
            args = argparse.Namespace(num_layers=4, hidden_size=16)
            checkpointer.save(self._state(job), iteration=job.steps, args=args, progress={"consumed_samples": 16})
        return root

    def _megatron_loads(self, source: str, into: str) -> None:
        from tests.megatron.training import megatron_load, trained

        job = trained(self._layout(into, like=source), steps=1)
        megatron_load(job, self.folder / source)
        self._continues(job, source)

    def _restore(self, job: Job, name: str) -> None:
        import ckptlib

        state = {**self._state(job), "iteration": None}
        report = ckptlib.load(state, str(self.folder / name))
        assert report.bytes_read <= 1.01 * report.bytes_needed
        job.steps = state["iteration"]

    def _continues(self, job: Job, source: str, *, steps: int = 1) -> None:
        """Every weight and every moment is bit for bit that of the job which was never interrupted."""
        from tests.megatron.training import trained, use_groups

        for _ in range(steps):
            job.step()
        assert job.steps == 3
        reference = f"{source}_after_step_3"
        if not (self.folder / reference).exists():
            self._save(trained(self._layout(source), steps=3), reference)
            use_groups(job.layout)
        self._save(job, f"after_{time.monotonic_ns() if self.rank == 0 else 0}")
        self._equal(self.last, reference)

    def _save(self, job: Job, name: str) -> None:
        import torch

        import ckptlib

        names = [name]
        torch.distributed.broadcast_object_list(names)
        self.last = names[0]
        ckptlib.save(
            {**self._state(job), "iteration": job.steps}, str(self.folder / self.last), iteration=job.steps, timeout=60
        )

    def _megatron_save(self, job: Job, name: str) -> None:
        from tests.megatron.training import megatron_save

        megatron_save(job, self.folder / f"{name}_by_megatron")

    def _state(self, job: Job) -> dict[str, Any]:
        from ckptlib.integrations.megatron import megatron_state

        return megatron_state(job.ddp, job.optimizer, job.scheduler)

    def _equal(self, one: str, other: str) -> None:
        import torch

        import ckptlib

        torch.distributed.barrier()
        found, wanted = (ckptlib.read(str(self.folder / name)) for name in (one, other))
        assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
        assert len(found) > 20
        different = [key for key in wanted if not _same_bits(found[key], wanted[key])]
        assert not different, f"{len(different)} of {len(wanted)} differ: {different[:4]}"

    def _trained(self, name: str) -> Job:
        from tests.megatron.training import trained

        return trained(self._layout(name))

    def _layout(self, name: str, like: str | None = None) -> Layout:
        """`like`: the layout whose model it is."""
        import torch

        from tests.megatron.training import Layout

        options = {**LAYOUTS[name]}
        for field in ("tied", "experts", "dtype", "optimizer"):
            if like is not None and field in LAYOUTS[like]:
                options[field] = LAYOUTS[like][field]
        if "dtype" in options:
            options["dtype"] = getattr(torch, options["dtype"])
        return Layout(**options)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one, other)


def _plain(value: Any) -> Any:
    """Comparable: tensors as lists."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _is_collective(name: str) -> bool:
    return name.startswith(
        ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", "reduce", "barrier")
    )


def _refuse(name: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called")

    return refuse


CHECKS = [name for name in vars(Checks) if not name.startswith("_")]


def main(folder: Path, rank: int, world: int) -> None:
    """Runs every check, one after the other, on this rank."""
    import torch

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    checks, verdicts, seconds = Checks(folder, rank), {}, {}
    for name in CHECKS:
        started = time.perf_counter()
        try:
            getattr(checks, name)()
            verdicts[name] = ""
        except Exception:
            verdicts[name] = traceback.format_exc()
        seconds[name] = round(time.perf_counter() - started, 2)
        torch.distributed.barrier()
        (folder / f"verdicts_{rank}.json").write_text(json.dumps(verdicts))
    print(seconds)  # in the log: what a slow run spent its time on


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
