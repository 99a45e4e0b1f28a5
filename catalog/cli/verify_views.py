"""What ``ckpt verify`` prints, and which exit code and next command follow from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalog.cli import text
from catalog.cli.columns import column, lines, state
from catalog.cli.exits import ExitCode
from catalog.cli.lookup import command
from catalog.cli.views import FILE_CLASSES, file_classes
from catalog.states import GRANTS

if TYPE_CHECKING:
    from ckptlib.verification import VerifyReport


@dataclass(frozen=True)
class Checked:
    """One checkpoint that was looked at.

    Attributes:
        run, iteration: None for a checkpoint that was given by its URL.
        verdict: the catalog's, afterwards; None without a catalog.
    """

    run: str | None
    iteration: int | None
    save_id: str | None
    url: str
    verdict: str | None
    report: VerifyReport

    @property
    def name(self) -> str:
        """As the command line takes it."""
        return self.url if self.run is None else f"{self.run}@{self.iteration}"

    @property
    def outcome(self) -> str:
        """What this verification says about the bytes: a corrupt file outweighs an unreadable one."""
        if self.report.ok:
            return "ok"
        if self.report.corrupt:
            return "corrupt"
        if self.report.unreadable:
            return "unreadable"
        return "unverifiable" if self.report.unverifiable else "incomplete"


@dataclass(frozen=True)
class SkippedView:
    """A checkpoint that was not verified now."""

    run: str = column("RUN", drop=1)
    iteration: int = column("ITER", justify="right")
    reason: str = column("REASON", prose=True)


@dataclass(frozen=True)
class FindingView:
    """A file with another verdict than ok. An extra one is no defect: tokenizers and sidecars are legitimate."""

    iteration: int | None = column("ITER", justify="right", optional=True)
    path: str = column("PATH")
    verdict: str = column("VERDICT", state)
    detail: str = column("DETAIL", prose=True)


@dataclass(frozen=True)
class CheckedView:
    """What the verification of one checkpoint found."""

    run: str | None = column("RUN", drop=1, optional=True)
    iteration: int | None = column("ITER", justify="right", optional=True)
    outcome: str = column("OUTCOME", state)
    verdict: str | None = column("VERDICT", state, optional=True)
    level: str = column("LEVEL", drop=4)
    files: Mapping[str, int] = column("FILES", file_classes)
    bytes_read: int = column("READ", text.size, justify="right", drop=2)
    seconds: float = column("SECONDS", text.seconds, justify="right", drop=3)
    save_id: str | None = column("SAVE ID", wide=True, drop=4)
    url: str = column("URL", wide=True, drop=5)

    @classmethod
    def of(cls, checked: Checked) -> CheckedView:
        """The view of a result."""
        return cls(
            run=checked.run,
            iteration=checked.iteration,
            outcome=checked.outcome,
            verdict=checked.verdict,
            level=checked.report.level,
            files=_counts([checked]),
            bytes_read=checked.report.bytes_read,
            seconds=checked.report.seconds,
            save_id=checked.save_id,
            url=checked.url,
        )


@dataclass(frozen=True)
class VerifyView:
    """The result of ``ckpt verify``; `level` is what was asked for, `next` the command to run next."""

    level: str = column("level")
    files: Mapping[str, int] = column("files", file_classes)
    checkpoints: tuple[CheckedView, ...] = column("checkpoints")
    findings: tuple[FindingView, ...] = column("findings", limit=40)
    defects: tuple[str, ...] = column("defects", lines)
    skipped: tuple[SkippedView, ...] = column("not verified now")
    next: str | None = None

    @classmethod
    def of(
        cls, level: str, done: Sequence[Checked], skipped: Sequence[SkippedView], next_command: str | None
    ) -> VerifyView:
        """The view of all results."""
        return cls(
            level=level,
            files=_counts(done),
            checkpoints=tuple(CheckedView.of(checked) for checked in done),
            findings=tuple(finding for checked in done for finding in _findings(checked)),
            defects=tuple(defect for checked in done for defect in checked.report.defects),
            skipped=tuple(skipped),
            next=next_command,
        )


def next_command(target: Sequence[str], done: Sequence[Checked], skipped: Sequence[SkippedView]) -> str | None:
    """What to run after this.

    Args:
        target: the words after ``ckpt verify`` that named what was verified.
    """
    runs = sorted({checked.run for checked in done if checked.run is not None})
    corrupt = _with("corrupt", done)
    if corrupt:
        return None if corrupt[0].run is None else command("resume", corrupt[0].run, "--explain")
    if skipped or any(checked.outcome not in ("ok", "unverifiable") for checked in done):
        return command("verify", *target)
    if any(
        checked.outcome == "unverifiable" or checked.report.level not in GRANTS or checked.verdict == "corrupt"
        for checked in done
    ):
        return command("verify", *target, "--level", "data")
    if len(runs) == 1:
        return command("resume", runs[0])
    return command("runs", "ls") if runs else None


def ending(done: Sequence[Checked], skipped: Sequence[SkippedView]) -> tuple[ExitCode, str]:
    """Exit code and reason."""
    corrupt = _with("corrupt", done)
    if corrupt:
        names = ", ".join(checked.name for checked in corrupt)
        return ExitCode.INTEGRITY_FAILURE, f"{text.count(len(corrupt), 'checkpoint')} corrupt: {names}"
    unsure = [checked for checked in done if checked.outcome != "ok"]
    if unsure or skipped:
        parts = [f"{checked.name} is {checked.outcome}{_why(checked)}" for checked in unsure]
        parts += [f"{skip.run}@{skip.iteration}: {skip.reason}" for skip in skipped]
        return ExitCode.PARTLY_DONE, f"not everything could be verified: {'; '.join(parts)}"
    return ExitCode.OK, ""


def _why(checked: Checked) -> str:
    """Why the store's word is not enough, in a few words."""
    details = {check.detail for check in checked.report.checks.values() if check.verdict == "unverifiable"}
    return f" ({'; '.join(sorted(details))})" if checked.outcome == "unverifiable" else ""


def _with(outcome: str, done: Iterable[Checked]) -> list[Checked]:
    return [checked for checked in done if checked.outcome == outcome]


def _counts(done: Iterable[Checked]) -> dict[str, int]:
    counts = Counter(verdict for checked in done for verdict in checked.report.files.values())
    return {name: counts[name] for name in FILE_CLASSES if counts[name]}


def _findings(checked: Checked) -> list[FindingView]:
    return [
        FindingView(checked.iteration, path, check.verdict, check.detail or "")
        for path, check in sorted(checked.report.checks.items())
        if check.verdict != "ok"
    ]
