"""Finding what a name on the command line means in the catalog, with help when it means nothing."""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from typing import TYPE_CHECKING

import typer

from catalog.cli.selector import Selector, parse
from catalog.cli.text import printable

if TYPE_CHECKING:
    from catalog.catalog import Catalog
    from catalog.rows import CheckpointRow


def select(catalog: Catalog, name: str) -> Selector:
    """The run, or checkpoint, that `name` means. Its run exists.

    Raises:
        CatalogError: the catalog has no such run; names similar ones.
    """
    selector = parse(name, _runs(catalog))
    require_run(catalog, selector.run)
    return selector


def require_run(catalog: Catalog, run: str) -> None:
    """Raises: CatalogError: the catalog has no run of exactly this name."""
    from ckptlib.errors import CatalogError

    unknown = unknown_run(catalog, run)
    if unknown:
        raise CatalogError(unknown)


def unknown_run(catalog: Catalog, run: str) -> str:
    """Says that there is no such run, what it may be instead, or how to add one; empty when there is one."""
    runs = sorted(_runs(catalog))
    if run in runs:
        return ""
    similar = get_close_matches(run, runs, n=3, cutoff=0.5)
    if similar:
        hint = f"Did you mean {' or '.join(repr(other) for other in similar)}?"
    elif runs:
        hint = "See `ckpt runs ls`; to add what is on storage: ckpt scan ROOT --adopt"
    else:
        hint = "The catalog is empty; to add what is on storage: ckpt scan ROOT --adopt"
    return f"The catalog knows no run {run!r}. {hint}"


def checkpoint(catalog: Catalog, name: str, save_id: str | None = None) -> CheckpointRow:
    """The checkpoint that ``RUN@ITER`` means.

    Raises:
        CatalogError: there is no such run, or checkpoint.
        typer.BadParameter: it names a run without an iteration.
    """
    selector = select(catalog, name)
    if selector.iteration is None:
        raise typer.BadParameter(f"{name!r} names a run; a checkpoint is RUN@ITER. List them: {command('ls', name)}")
    return of_iteration(catalog, selector.run, selector.iteration, save_id)


def of_iteration(catalog: Catalog, run: str, iteration: int, save_id: str | None = None) -> CheckpointRow:
    """The checkpoint of an iteration. Of one that the catalog does not know yet the error says what storage knows.

    Raises:
        CatalogError: there is none.
    """
    from ckptlib.errors import CatalogError

    try:
        return catalog.checkpoint(run, iteration, save_id)
    except CatalogError as error:
        known = _on_storage(catalog, run, iteration, save_id)
        if known:
            raise CatalogError(f"{run}@{iteration}: {known}") from error
        raise


def _on_storage(catalog: Catalog, run: str, iteration: int, save_id: str | None) -> str:
    """What lies below the roots of a run for an iteration that the catalog does not know; empty: nothing is known."""
    from catalog.in_flight import beyond_the_catalog

    writing, unrecorded, _ = beyond_the_catalog(catalog, run)
    for one in writing[::-1]:
        if one.begin.iteration == iteration and save_id in (None, one.begin.save_id):
            how = f"is being written ({one.progress})" if one.alive else "was begun and gives no sign of life"
            return f"{how}, and is no checkpoint before it is committed. See {command('ls', run)}"
    for other in unrecorded[::-1]:
        if other.begin.iteration == iteration and save_id in (None, other.begin.save_id):
            return f"is committed and not recorded. To record it: {adoption(other.url)}"
    return ""


def adoption(url: str) -> str:
    """The command that records a checkpoint of ours, by its directory."""
    from ckptlib.roots import NON_PERSISTENT

    return command("scan", url.rpartition("/")[0].removesuffix(f"/{NON_PERSISTENT}"), "--adopt")


def command(*words: str) -> str:
    """A command line to copy, quoted for the shell."""
    return shlex.join(["ckpt", *(printable(word) for word in words)])


def _runs(catalog: Catalog) -> set[str]:
    return {location.run for location in catalog.locations()}
