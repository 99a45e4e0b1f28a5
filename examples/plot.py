"""The loss curve of a run over all its attempts, from the trainer's journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # writes files; needs no display

import matplotlib.pyplot as plt

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


@dataclass
class AttemptCurve:
    """What one attempt computed.

    Attributes:
        attempt: its number.
        start: iteration it resumed from; 0 when it started anew.
        topology: for people, as in ``TP=2 x DP=2``.
        save_id: what it resumed from; None when it started anew.
        losses: iteration to loss (nats per token).
    """

    attempt: int
    start: int
    topology: str
    save_id: str | None
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last iteration it finished."""
        return max(self.losses, default=self.start)


def read_journal(path: Path) -> list[AttemptCurve]:
    """The attempts of a run in the order they ran; a last line that a kill cut short is left out."""
    curves: dict[int, AttemptCurve] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        attempt = record["attempt"]
        if "event" in record:
            curves[attempt] = AttemptCurve(attempt, record["iteration"], record["topology"], record["save_id"])
        else:
            curves[attempt].losses[record["iteration"]] = record["loss"]
    return list(curves.values())


def plot_losses(curves: list[AttemptCurve], path: Path, *, marks: Mapping[str, int], title: str) -> None:
    """Draws every attempt's losses over the iterations.

    Where attempts overlap, the iterations that were computed twice lie on top of each other: the earlier one is drawn
    wide and pale below.

    Args:
        curves: from `read_journal`.
        path: PNG to write.
        marks: label to iteration: vertical lines.
        title: of the figure.
    """
    figure, axes = plt.subplots(figsize=(9.0, 5.0), dpi=120)
    for index, curve in enumerate(curves):
        redone = index + 1 < len(curves)
        axes.plot(
            list(curve.losses),
            list(curve.losses.values()),
            color=COLORS[index % len(COLORS)],
            linewidth=5.0 if redone else 1.6,
            alpha=0.45 if redone else 1.0,
            label=f"attempt {curve.attempt}: {curve.topology}, iterations {curve.start + 1} to {curve.last}",
        )
        if curve.start in (before := curves[index - 1].losses if index else {}):
            axes.plot(
                curve.start,
                before[curve.start],
                "o",
                color=COLORS[index % len(COLORS)],
                markersize=8,
                label=f"attempt {curve.attempt} resumed from iteration {curve.start}, now on {curve.topology}",
            )
    for index, (label, iteration) in enumerate(marks.items()):
        axes.axvline(
            iteration, color=("tab:red", "black", "gray")[index % 3], linestyle=("--", ":")[index % 2], label=label
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
