"""``ckpt verify``: read checkpoints back and compare them with what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import lookup
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode
from catalog.cli.verify_views import Checked, SkippedView, VerifyView, ending, next_command

if TYPE_CHECKING:
    from catalog.catalog import Catalog
    from catalog.rows import CheckpointRow, VerifyLease


class Level(StrEnum):
    """How much is looked at (V3)."""

    AUTO = "auto"
    LISTING = "listing"
    STORE = "store"
    STRUCTURE = "structure"
    DATA = "data"


@dataclass(frozen=True)
class Options:
    """How to verify."""

    level: str
    threads: int
    force: bool


def verify(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN[@ITER]]", help="A checkpoint, or all of a run that wait.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that wait, of every run.")] = False,
    url: Annotated[
        str | None, typer.Option(help="A checkpoint by its directory, without a catalog.", show_default=False)
    ] = None,
    level: Annotated[
        Level,
        typer.Option(
            help="Names and sizes; digests that the store keeps; structure; every byte. auto: the store's digests, "
            "and every byte that it does not vouch for."
        ),
    ] = Level.AUTO,
    threads: Annotated[int, typer.Option(help="Files that are read at the same time.", min=1, max=256)] = 2,
    force: Annotated[bool, typer.Option("--force", help="Also those that have a verdict already.")] = False,
) -> None:
    """Compare checkpoints with what was recorded, byte by byte unless the store vouches for them; record the verdict.

    RUN@ITER is verified whatever its verdict is; RUN and --all take those that wait for this level.
    Exit code 20: corrupt. 11: somebody else is verifying it. 3: not everything could be verified.
    """
    cli = Cli.of(ctx)
    if [target is not None, everything, url is not None].count(True) != 1:
        raise typer.BadParameter("give one of RUN, RUN@ITER, --all or --url")
    options = Options(level=level.value, threads=threads, force=force)
    skipped: list[SkippedView] = []
    if url is not None:
        done, words = [_verify_url(cli, url, options)], ["--url", url]
    else:
        words = ["--all"] if target is None else [target]
        with cli.catalog() as catalog:
            selector = None if target is None else lookup.select(catalog, target)
            if selector is not None and selector.iteration is not None:
                row = lookup.of_iteration(catalog, selector.run, selector.iteration)
                done = [_verify_one(cli, catalog, row, options)]
            else:
                done, skipped = _verify_waiting(cli, catalog, None if selector is None else selector.run, options)
    following = next_command(words, done, skipped)
    cli.output.document(VerifyView.of(options.level, done, skipped, following))
    advice = f"Next: {following}" if following else ""
    if not done and not skipped:
        advice = f"Nothing waits for verification. All of it again: {lookup.command('verify', *words, '--force')}"
    code, reason = ending(done, skipped)
    if code is not ExitCode.OK:
        raise Ended(code, reason, advice)
    if advice:
        cli.output.note(advice)


def _verify_url(cli: Cli, url: str, options: Options) -> Checked:
    import ckptlib

    with cli.output.progress(url) as advance:
        report = ckptlib.verify(url, level=options.level, threads=options.threads, progress=advance)
    return Checked(run=None, iteration=None, save_id=report.save_id, url=url, verdict=None, report=report)


def _verify_one(cli: Cli, catalog: Catalog, row: CheckpointRow, options: Options) -> Checked:
    """Verifies a checkpoint whatever its verdict is.

    Raises:
        LeaseHeldError: somebody else is at it.
    """
    from catalog.catalog import default_actor
    from catalog.verification import LEASE_SECONDS

    (lease,) = catalog.lease_unverified(owner=default_actor(), ttl=LEASE_SECONDS, checkpoint_id=row.id, force=True)
    return _verify_leased(cli, catalog, lease, options)


def _verify_waiting(
    cli: Cli, catalog: Catalog, run: str | None, options: Options
) -> tuple[list[Checked], list[SkippedView]]:
    """Verifies what waits, newest first; what cannot be verified now is reported and does not stop the rest."""
    from catalog.catalog import default_actor
    from catalog.verification import LEASE_SECONDS
    from ckptlib.errors import CkptError

    done: list[Checked] = []
    skipped: list[SkippedView] = []
    tried: set[int] = set()
    while leases := catalog.lease_unverified(
        owner=default_actor(), ttl=LEASE_SECONDS, level=options.level, run=run, force=options.force, exclude=tried
    ):
        lease = leases[0]
        tried.add(lease.checkpoint_id)
        try:
            done.append(_verify_leased(cli, catalog, lease, options))
        except (CkptError, OSError) as error:
            skipped.append(SkippedView(lease.run, lease.iteration, str(error)))
    skipped += _left(catalog, run, options.level, tried)
    return done[::-1], skipped


def _verify_leased(cli: Cli, catalog: Catalog, lease: VerifyLease, options: Options) -> Checked:
    from catalog.states import level_for
    from catalog.verification import verify_leased

    if level_for(options.level, lease.verdict) != options.level:
        cli.output.note(f"{lease.name} is corrupt: all of it is read, whatever the store says of it")
    with cli.output.progress(lease.name) as advance:
        report = verify_leased(catalog, lease, level=options.level, threads=options.threads, progress=advance)
    row = catalog.checkpoint_by_id(lease.checkpoint_id)
    return Checked(row.run, row.iteration, row.save_id, row.url, row.verdict, report)


def _left(catalog: Catalog, run: str | None, level: str, tried: set[int]) -> Iterator[SkippedView]:
    """What still waits, because others have it or because it could not be read before."""
    for row in catalog.waiting(run, level=level):
        if row.id in tried:
            continue
        if row.lease_owner is not None:
            reason = f"{row.lease_owner} is verifying it"
        elif row.retry_at is not None:
            reason = f"could not be read before, waits; now: {lookup.command('verify', row.name)}"
        else:
            reason = "was committed meanwhile"
        yield SkippedView(row.run, row.iteration, reason)
