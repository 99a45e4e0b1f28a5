"""The smallest trainer with a `Checkpointer`: a few seconds, bit-deterministic, resumes by itself.

    python examples/tiny.py --root /tmp/tiny --steps 12 --save-every 4
    torchrun --nproc-per-node 2 examples/tiny.py --root /tmp/tiny

Kill it at any moment and start it again: it prints ``resumed from step N`` and ends with the same ``final.json``.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist

from ckptlib import Checkpointer, Topology


def train(root: str, steps: int, save_every: int) -> None:
    """Trains from the newest checkpoint below `root` to `steps` and writes ``<root>/final.json``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())  # other inputs and other dropout on each rank, the same initial weights
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    topology = Topology(dp=ranks)
    with Checkpointer(
        os.path.join(root, "run"), run="tiny", topology=topology, save_interval=save_every
    ) as checkpointer:
        start = checkpointer.restore(state, missing="start").iteration
        print(f"resumed from step {start}", flush=True)
        for iteration in range(start + 1, steps + 1):
            inputs = torch.randn(64, 16)  # from the RNG that the checkpoint restores
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, ranks)
            optimizer.step()
            scheduler.step()
            checkpointer.step(state, iteration=iteration, metrics={"loss": loss.item()})
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(os.path.join(root, "final.json"), "w") as file:
            json.dump({name: tensor.tolist() for name, tensor in model.state_dict().items()}, file)


def average_gradients(model: torch.nn.Module, ranks: int) -> None:
    """Data parallelism by hand: each rank has drawn other inputs."""
    if ranks > 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    options = parser.parse_args()
    os.makedirs(options.root, exist_ok=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train(options.root, options.steps, options.save_every)


if __name__ == "__main__":
    main()
