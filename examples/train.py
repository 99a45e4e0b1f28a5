"""Trains a small GPT on the sources of Python's standard library, with checkpoints that it resumes from by itself.

Alone, or under torchrun with gloo::

    python examples/train.py --root /tmp/gpt --steps 100
    torchrun --standalone --nproc-per-node 4 examples/train.py --root /tmp/gpt --steps 100 --tp 2

Start the same command again, also with another number of processes or another ``--tp``, and it goes on where the newest
checkpoint ends. With ``--catalog`` every checkpoint is recorded there, and the catalog decides what to resume from:
the newest one that was verified.

The lines that concern checkpoints are `open_checkpointer`, one `restore` before the loop and one `step` in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from data import VOCAB, Batches, standard_library
from gpt import GPT, GPTConfig, tensor_parallel
from parallel import Parallel, average_gradients, local_part, parallel
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from ckptlib import Checkpointer, Restored
from ckptlib.events import Notice, NoticeHandler


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run; each is a command-line option of the same name."""

    root: str  # where the run's checkpoints live: a directory or any fsspec URL
    run_name: str = "gpt-demo"  # not `--run`, which torchrun would take for an option of its own
    steps: int = 100  # iterations in total, those before a resume included
    tp: int = 1  # tensor-parallel size; the other ranks are replicas (DP)
    save_interval: int = 10  # iterations between checkpoints
    catalog: str | None = None  # database of the catalog (path or URL)
    notify: str | None = None  # API address of a Prefect server, told of every commit
    journal: str | None = None  # JSON lines: one per iteration, one per resume
    result: str | None = None  # JSON file written at the end: equal for equal training
    global_batch: int = 16  # samples per iteration over all replicas
    context: int = 128  # tokens per sample
    width: int = 128  # of the residual stream
    layers: int = 4  # transformer blocks
    heads: int = 4  # attention heads per block
    dropout: float = 0.0  # probability
    lr: float = 2e-3  # peak learning rate
    warmup: int = 10  # iterations until the peak
    seed: int = 1234  # of weights, data order and dropout
    text_bytes: int = 1_000_000  # size of the training text


def train(config: TrainConfig) -> list[float]:
    """Trains up to `config.steps` iterations and returns the losses of those that this call computed."""
    torch.set_num_threads(1)
    with parallel(config.tp) as place:
        model, optimizer, scheduler = build(config, place)
        batches = Batches(
            standard_library(config.text_bytes),
            context=config.context,
            global_batch=config.global_batch,
            seed=config.seed,
        )
        journal = Journal(config, place)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        flops_per_iteration = 6.0 * parameter_count(config) * config.global_batch * config.context

        notices: list[Notice] = []
        with open_checkpointer(config, place, notices.append) as checkpointer:
            restored = checkpointer.restore(state, missing="start")
            journal.resumed(restored, checkpointer.attempt)
            consumed = int(restored.progress.get("consumed_samples", 0))
            if any(notice.name == "rng_reseeded" for notice in notices):
                seed_dropout(config, place, consumed)
            losses = []
            for iteration in range(restored.iteration + 1, config.steps + 1):
                lr = float(scheduler.get_last_lr()[0])
                loss = train_step(model, optimizer, batches, consumed, place)
                scheduler.step()
                consumed += config.global_batch
                losses.append(loss)
                journal.iteration(iteration, loss, lr, checkpointer)
                saved = checkpointer.step(
                    state,
                    iteration=iteration,
                    progress={"consumed_samples": consumed, "lr": lr, "flops": flops_per_iteration * iteration},
                    metrics={"train_loss": loss},
                )
                if saved is not None:
                    journal.saved(iteration, saved.seconds)
        journal.finished(config.steps, model, optimizer)
        return losses


def open_checkpointer(config: TrainConfig, place: Parallel, on_event: NoticeHandler) -> Checkpointer:
    """The checkpointer of this run; with a catalog, it records there and asks it where to resume."""
    plugged: dict[str, Any] = {}
    if config.catalog is not None:
        # Imported here: without a catalog, the trainer needs no database library.
        from catalog import Recorder, ResumeResolver

        recorder = Recorder(config.catalog, notify_url=config.notify)
        plugged = {"resolver": ResumeResolver(config.catalog), "listeners": [recorder]}
    return Checkpointer(
        config.root,
        run=config.run_name,
        topology=place.topology,
        save_interval=config.save_interval,
        on_event=on_event,
        **plugged,
    )


def seed_dropout(config: TrainConfig, place: Parallel, consumed: int) -> None:
    """Ranks of one replica must drop the same elements, replicas others: the seed knows the replica, not the rank.

    Also after a resume on another topology, where no saved random state fits and each rank was given its own.
    """
    torch.manual_seed(config.seed + 1 + place.dp_rank + consumed * place.topology.dp)


def build(config: TrainConfig, place: Parallel) -> tuple[GPT, torch.optim.AdamW, LambdaLR]:
    """Model, optimizer and schedule, as they are before the first iteration; equal on every rank before the cut."""
    torch.manual_seed(config.seed)
    model = GPT(
        GPTConfig(
            vocab=VOCAB,
            context=config.context,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            dropout=config.dropout,
        )
    )
    if place.tp_mesh is not None:
        tensor_parallel(model, place.tp_mesh)
    seed_dropout(config, place, 0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(0.9, 0.95),
    )
    return model, optimizer, LambdaLR(optimizer, schedule(config.warmup, config.steps))


def schedule(warmup: int, steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batches: Batches, consumed: int, place: Parallel) -> float:
    """One iteration; returns the loss of the global batch in nats per token."""
    inputs, targets = batches.at(consumed, rank=place.dp_rank, ranks=place.topology.dp)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    mean = average_gradients(model, loss, place)
    optimizer.step()
    return mean


def parameter_count(config: TrainConfig) -> int:
    """Parameters of the whole model, without biases and norms (the usual approximation for FLOPs)."""
    return 12 * config.layers * config.width**2 + 2 * VOCAB * config.width


class Journal:
    """What rank 0 tells: progress to people, losses to a file of JSON lines, the final state to a result file."""

    def __init__(self, config: TrainConfig, place: Parallel) -> None:
        self._config = config
        self._topology = f"TP={place.topology.tp} x DP={place.topology.dp}"
        self._speaks = place.rank == 0
        self._began = time.monotonic()
        self._first = 0

    def resumed(self, restored: Restored, attempt: int) -> None:
        """Says where training starts."""
        self._began = time.monotonic()
        self._first = restored.iteration
        if restored.found:
            self._say(f"resumed from step {restored.iteration}: {restored.url} ({restored.reason})")
        else:
            self._say("starting from step 0: the run has no checkpoint yet")
        self._append(
            {
                "event": "resumed" if restored.found else "started",
                "attempt": attempt,
                "iteration": restored.iteration,
                "topology": self._topology,
                "url": restored.url,
                "save_id": restored.save_id,
                "reason": restored.reason,
            }
        )

    def iteration(self, iteration: int, loss: float, lr: float, checkpointer: Checkpointer) -> None:
        """Records one iteration. The throughput is training's own: the time that saves held it is left out."""
        self._append({"iteration": iteration, "loss": loss, "lr": lr, "attempt": checkpointer.attempt})
        if iteration % self._config.save_interval == 0:
            seconds = time.monotonic() - self._began
            trained = seconds - checkpointer.stalled
            tokens = (iteration - self._first) * self._config.global_batch * self._config.context
            rate = tokens / trained if trained > 0 else 0.0
            self._say(f"iteration {iteration:4d}  loss {loss:.4f}  lr {lr:.2e}  {seconds:.1f} s  {rate:.0f} tokens/s")

    def saved(self, iteration: int, seconds: float) -> None:
        """Says that a checkpoint exists."""
        self._say(f"saved iteration {iteration} in {seconds:.2f} s")

    def finished(self, steps: int, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        """Writes the result: nothing in it depends on time, place or how often training was interrupted."""
        self._say(f"finished at step {steps}")
        if self._config.result is None or not self._speaks:
            return
        digest = hashlib.sha256()
        for parameter in model.parameters():
            moments = optimizer.state[parameter]
            for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
                digest.update(local_part(tensor).contiguous().numpy().tobytes())
        result = {"steps": steps, "lr": optimizer.param_groups[0]["lr"], "sha256": digest.hexdigest()}
        Path(self._config.result).write_text(json.dumps(result) + "\n")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)

    def _append(self, record: dict[str, Any]) -> None:
        if not self._speaks or self._config.journal is None:
            return
        # One write per line: a reader, or a kill, never sees half of two records mixed.
        with open(self._config.journal, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The command line: one option per field of `TrainConfig`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = {"int": int, "float": float}
    for field in fields(TrainConfig):
        kind = kinds.get(str(field.type), str)
        required = field.name == "root"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            required=required,
            default=None if required else field.default,
            help=None if required else f"default: {field.default}",
        )
    return TrainConfig(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    train(parse())
