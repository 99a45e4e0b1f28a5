"""The smallest trainer with a `Checkpointer`: one process, a few seconds, bit-deterministic, resumes by itself.

    python examples/tiny.py --root /tmp/tiny --steps 12 --save-every 4

Kill it at any moment and start it again: it prints ``resumed from step N`` and ends with the same ``final.json``.
"""

from __future__ import annotations

import argparse
import json
import os

import torch

from ckptlib import Checkpointer


def train(root: str, steps: int, save_every: int) -> None:
    """Trains from the newest checkpoint below `root` to `steps` and writes ``<root>/final.json``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Checkpointer(os.path.join(root, "run"), run="tiny", save_interval=save_every) as checkpointer:
        start = checkpointer.restore(state, missing="start").iteration
        print(f"resumed from step {start}", flush=True)
        for iteration in range(start + 1, steps + 1):
            inputs = torch.randn(64, 16)  # from the RNG that the checkpoint restores
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step(state, iteration=iteration, metrics={"loss": loss.item()})
    final = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    with open(os.path.join(root, "final.json"), "w") as file:
        json.dump(final, file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    options = parser.parse_args()
    os.makedirs(options.root, exist_ok=True)
    train(options.root, options.steps, options.save_every)


if __name__ == "__main__":
    main()
