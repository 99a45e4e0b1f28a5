"""The whole system in a few minutes: train, damage, kill in the middle of a save, resume elsewhere.

Everything is real: a GPT trained by several processes, Prefect's server and flows, files on disk, SIGKILL. Each thing
that is claimed is checked; the exit status is 0 only if all of it happened. No process outlives the demo.

Usage: ``python examples/demo.py [--out DIRECTORY]``
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from plot import AttemptCurve, plot_losses, read_journal
from ranks import Ranks, RanksFailedError
from saves import SaveOnDisk, begun_saves, flip_byte
from stage import RUN, SAVE_INTERVAL, STEPS, DemoFailedError, Stage

from catalog.rows import CheckpointRow
from ckptlib import commit, storage
from ckptlib.errors import CkptError

RANKS = 4
"""Processes of the first attempt."""

FLIP_FROM, FLIP_LATEST = 30, 70
"""Iterations: the first checkpoint from FLIP_FROM on that is saved after the flows have verified another is damaged; on
a machine where training is so much faster that they have not by FLIP_LATEST, without waiting for them any longer."""

CONTINUITY = 1e-3
"""Nats: how far the losses of iterations that both attempts computed may differ. The cuts differ, so sums are added
up in another order: measured differences are below 1e-5; a lost optimizer state or wrong data gives 0.1 and more."""

MARKER = ".ckpt-demo"
"""Kept locked while a demo runs in a directory; only a directory that has it, or is empty, is emptied."""


class Story:
    """The acts, in order, and what they leave for the later ones."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.began = time.monotonic()
        self.told: set[SaveOnDisk] = set()
        self.damaged_shard = ""
        self.verdicts: dict[str, str] = {}

    def tell(self) -> None:
        """All of it.

        Raises:
            DemoFailedError: something did not happen.
        """
        stage = self.stage
        stage.step("A fresh catalog, and the flows that verify checkpoints in the background")
        stage.say(f"everything is written below {stage.out}")
        stage.ckpt("init")
        stage.say("starting Prefect's server and our flows (`ckpt flows serve`); the first start takes up to a minute")
        stage.start_flows()

        stage.step(f"Training a GPT on {RANKS} processes, TP=2 x DP=2, a checkpoint every {SAVE_INTERVAL} iterations")
        ranks = stage.start_training(RANKS, tp=2)
        damaged = self.train_until_damaged(ranks)
        killed = self.kill_in_the_middle_of_a_save(ranks, after=damaged)

        stage.step("The flows give their verdicts")
        self.adopt_what_is_missing()
        self.await_verdicts()
        self.check_damage_found(damaged)

        stage.step("Where would training resume?")
        chosen = self.newest_verified()
        explanation = stage.ckpt("resume", RUN, "--explain")
        stage.check(
            "corrupt" in explanation or chosen.iteration > damaged.iteration,
            "the explanation tells why the newer, corrupt one is passed over",
        )
        stage.check(
            stage.ckpt("resume", RUN, "--path-only").strip() == chosen.url,
            f"that is the newest verified checkpoint, iteration {chosen.iteration}",
        )

        stage.step("Training again on another topology, 2 processes, TP=1 x DP=2, to the end")
        self.train_to_the_end(stage.start_training(2, tp=1))
        curves = read_journal(stage.journal)
        self.check_resume(curves, chosen, damaged, killed)
        self.check_losses(curves)

        stage.step("What is there now")
        self.await_verdicts()
        plot = self.plot(curves, damaged, killed)
        stage.ckpt("ls", RUN)
        stage.ckpt("resume", RUN, "--explain")
        stage.say(f"loss plot: {plot}")

        stage.step("Ending everything")
        stage.stop_flows()
        stage.check(not stage.leftovers(), "no process of the demo is left")
        stage.console.print(f"\n[bold green]All of it happened, in {time.monotonic() - self.began:.0f} s.[/]")

    # --- first attempt ------------------------------------------------------------------------------------------------

    def train_until_damaged(self, ranks: Ranks) -> SaveOnDisk:
        """Watches training until a checkpoint is fit to be damaged, and flips a byte in one of its files.

        That is done once the file is written and its digest recorded, and before the commit: no verification can have
        read it yet. The commit does not read it either: its digest was computed while writing.
        """
        verified, look_again = 0, 0.0
        while True:
            self.require_running(ranks)
            if self.tell_commits() or time.monotonic() > look_again:
                verified = list(self.tell_verdicts().values()).count("verified")
                look_again = time.monotonic() + 0.5
            writing = self.undecided_saves()
            for save in writing:
                if save.iteration < (FLIP_FROM if verified else FLIP_LATEST) or save.recorded_shard() is None:
                    continue
                shard = save.recorded_shard() if ranks.freeze() else None
                offset = None if shard is None else flip_byte(shard)
                ranks.thaw()
                if shard is not None:
                    self.stage.step(f"Damage: one byte of the checkpoint of iteration {save.iteration}")
                    self.stage.say(f"flipped byte {offset:,} of {shard.name}, after it was written, before its commit")
                    self.stage.say(f"the flows have verified {verified} checkpoints so far, while training goes on")
                    self.damaged_shard = shard.name
                    return save
            time.sleep(0.001 if writing else 0.01)

    def kill_in_the_middle_of_a_save(self, ranks: Ranks, *, after: SaveOnDisk) -> SaveOnDisk:
        """Kills all ranks while they write a later checkpoint: begun, data on disk, not decided."""
        stage = self.stage
        while True:
            self.require_running(ranks)
            self.tell_commits()
            writing = self.undecided_saves()
            for save in writing:
                if save.iteration <= after.iteration or not save.unfinished(RANKS):
                    continue
                # Frozen first: what is seen from now on is what the kill leaves behind.
                if ranks.freeze() and save.unfinished(RANKS):
                    statuses = ranks.kill()
                    stage.step(f"SIGKILL to all trainers in the middle of the save of iteration {save.iteration}")
                    for path in save.files():
                        stage.say(f"left behind: {path.relative_to(stage.root)}  {path.stat().st_size:,} bytes")
                    stage.check(statuses == [-signal.SIGKILL] * RANKS, f"all {RANKS} processes were killed: {statuses}")
                    stage.check(not save.decided, "the save had begun and has no decision: there is no such checkpoint")
                    return save
                ranks.thaw()
            time.sleep(0.001 if writing else 0.01)

    def require_running(self, ranks: Ranks) -> None:
        """Raises DemoFailedError when training is over already."""
        if not ranks.running():
            raise DemoFailedError("training came to its end before it could be killed in the middle of a save")

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def tell_commits(self) -> list[SaveOnDisk]:
        """Says which checkpoints are new on disk, and returns them."""
        new = [save for save in begun_saves(self.stage.root) if save not in self.told and save.decided]
        for save in new:
            self.told.add(save)
            if self.decision(save) == "commit":
                self.stage.say(f"committed: iteration {save.iteration}{self.loss_at(save.iteration)}")
        return new

    def tell_verdicts(self) -> dict[str, str]:
        """Says which verdicts are new in the catalog, and returns all by save id."""
        for save_id, row in self.stage.rows().items():
            if row.verdict != self.verdicts.get(save_id, "unverified"):
                self.stage.say(f"verdict of the flows: iteration {row.iteration} is {row.verdict}")
            self.verdicts[save_id] = row.verdict
        return self.verdicts

    def await_verdicts(self) -> None:
        """Waits until no checkpoint is unverified."""
        self.stage.wait(
            lambda: "unverified" not in self.tell_verdicts().values(), "every checkpoint has a verdict", 240
        )

    def adopt_what_is_missing(self) -> None:
        """A commit whose record died with the trainer is on storage all the same: the catalog is taught it (S3)."""
        committed = {save.save_id for save in self.told if self.decision(save) == "commit"}
        if committed - self.stage.rows().keys():
            self.stage.say("a checkpoint was committed and not recorded before the kill; a scan finds it")
            self.stage.ckpt("scan", str(self.stage.root), "--adopt", "--yes")
        self.stage.check(committed == self.stage.rows().keys(), "the catalog knows every committed checkpoint")

    def check_damage_found(self, damaged: SaveOnDisk) -> None:
        """The flows found the flipped byte, in the right file, and nothing else wrong."""
        row = self.stage.rows()[damaged.save_id]
        self.stage.check(row.verdict == "corrupt", f"iteration {row.iteration} is marked corrupt")
        failed = self.stage.catalog.verifications(row.id)[-1].failed
        self.stage.check(
            set(failed) == {self.damaged_shard} and failed[self.damaged_shard]["verdict"] == "digest",
            f"and exactly the damaged file is named: {self.damaged_shard}, {failed[self.damaged_shard]['detail']}",
        )
        others = [verdict for save_id, verdict in self.verdicts.items() if save_id != damaged.save_id]
        self.stage.check(set(others) == {"verified"}, f"all {len(others)} other checkpoints are verified")

    def newest_verified(self) -> CheckpointRow:
        """What a restart must resume from."""
        verified = [row for row in self.stage.rows().values() if row.verdict == "verified"]
        return max(verified, key=lambda row: row.order)

    # --- second attempt -----------------------------------------------------------------------------------------------

    def train_to_the_end(self, ranks: Ranks) -> None:
        """Watches the second attempt until it has finished."""
        deadline = time.monotonic() + 600
        while ranks.running():
            self.tell_commits()
            if time.monotonic() > deadline:
                raise DemoFailedError(f"training did not finish; end of {ranks.log}:\n{ranks.tail()}")
            time.sleep(0.1)
        self.tell_commits()

    def check_resume(
        self, curves: list[AttemptCurve], chosen: CheckpointRow, damaged: SaveOnDisk, killed: SaveOnDisk
    ) -> None:
        """Training resumed from the newest verified checkpoint, on another topology, and finished."""
        check = self.stage.check
        check(len(curves) == 2, "there were two attempts")
        first, second = curves
        check(
            second.save_id == chosen.save_id and second.start == chosen.iteration,
            f"it resumed from iteration {second.start}, the newest verified checkpoint",
        )
        check(
            second.save_id not in (damaged.save_id, killed.save_id),
            f"not from the corrupt one ({damaged.iteration}), and not from the unfinished one ({killed.iteration})",
        )
        check(
            self.decision(killed) == "abort",
            f"the unfinished save of iteration {killed.iteration} was aborted for good",
        )
        check(
            (first.topology, second.topology) == ("TP=2 x DP=2", "TP=1 x DP=2"),
            f"the topology changed from {first.topology} to {second.topology}",
        )
        check(second.last == STEPS, f"training reached its last iteration, {STEPS}")

    def check_losses(self, curves: list[AttemptCurve]) -> None:
        """The loss goes down, and its curve continues across the kill."""
        first, second = curves
        twice = sorted(first.losses.keys() & second.losses.keys())
        worst = max((abs(first.losses[i] - second.losses[i]) for i in twice), default=float("inf"))
        self.stage.check(
            len(twice) >= SAVE_INTERVAL and worst <= CONTINUITY,
            f"iterations {twice[0]} to {twice[-1]} were computed by both attempts: their losses differ by at most "
            f"{worst:.1e} nats (tolerance {CONTINUITY:g})",
        )
        start = first.losses[1]
        end = sum(second.losses[i] for i in range(STEPS - 9, STEPS + 1)) / 10
        self.stage.check(end < start - 2.0, f"the loss went down from {start:.2f} to {end:.2f} nats per byte")

    def plot(self, curves: list[AttemptCurve], damaged: SaveOnDisk, killed: SaveOnDisk) -> Path:
        """Draws the losses of both attempts."""
        path = self.stage.out / "loss.png"
        plot_losses(
            curves,
            path,
            marks={
                f"checkpoint {damaged.iteration} damaged: found corrupt": damaged.iteration,
                f"SIGKILL in the middle of save {killed.iteration}": killed.iteration,
            },
            title="Training loss across a kill and a change of topology",
        )
        self.stage.check(path.stat().st_size > 10_000, "the loss plot is drawn")
        return path

    # --- looking ------------------------------------------------------------------------------------------------------

    def undecided_saves(self) -> list[SaveOnDisk]:
        """What is being written right now."""
        return [save for save in begun_saves(self.stage.root) if save not in self.told and not save.decided]

    def decision(self, save: SaveOnDisk) -> str | None:
        """`commit`, `abort`, or None while undecided."""
        store, path = storage.resolve(str(save.directory))
        decision = commit.read_decision(store, path, save.save_id)
        return None if decision is None else decision.outcome

    def loss_at(self, iteration: int) -> str:
        """For people: the loss of the latest attempt at this iteration."""
        curves = read_journal(self.stage.journal)
        return f", loss {curves[-1].losses[iteration]:.3f}" if curves and iteration in curves[-1].losses else ""


@contextlib.contextmanager
def fresh_directory(out: Path) -> Iterator[None]:
    """Empties the directory of an earlier demo, or makes it, and keeps other demos out of it.

    Raises:
        DemoFailedError: it holds something else, or another demo runs in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    marker = out / MARKER
    if not marker.exists() and any(out.iterdir()):
        raise DemoFailedError(f"{out} is not empty and not from an earlier demo; choose another with --out")
    with marker.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailedError(f"another demo runs in {out}; wait for it, or choose another with --out") from None
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != marker:
                path.unlink()
        yield


def _end(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Runs the demo; returns its exit status."""
    parser = argparse.ArgumentParser(description="Train, damage, kill in the middle of a save, resume elsewhere.")
    default = Path(__file__).resolve().parent.parent / "out" / "demo"
    parser.add_argument("--out", type=Path, default=default, help="directory, emptied first (default: %(default)s)")
    out: Path = parser.parse_args().out.absolute()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    try:
        with fresh_directory(out), Stage(out) as stage:
            Story(stage).tell()
    except (DemoFailedError, RanksFailedError, CkptError) as error:
        print(f"\ndemo FAILED: {error}\nWhat it wrote is in {out}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo interrupted; its processes have ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
