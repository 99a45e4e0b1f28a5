"""``ckpt doctor``: what is wrong with the places that checkpoints are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from catalog.cli import text
from catalog.cli.columns import column, state
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode

app = typer.Typer(help="Find out what is wrong.", no_args_is_help=True)


@dataclass(frozen=True)
class FindingView:
    """One promise that a storage must keep, or a remark. `outcome`: ok, limited, unsafe, failed."""

    outcome: str = column("RESULT", state)
    promise: str = column("PROMISE", prose=True)
    detail: str = column("FOUND", prose=True, optional=True)


@dataclass(frozen=True)
class StorageView:
    """What was found out about a storage. Rates: bytes per second, of one stream."""

    url: str = column("url")
    storage: str = column("storage")
    write_rate: float | None = column("writes, with digests", lambda rate: f"{text.size(int(rate))}/s")
    read_rate: float | None = column("reads, in ranges", lambda rate: f"{text.size(int(rate))}/s")
    left: tuple[str, ...] = column("could not be removed")
    findings: tuple[FindingView, ...] = column("findings", limit=200)


@app.command("storage")
def storage(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(help="Where checkpoints shall go: a path or a URL.")],
    size: Annotated[int, typer.Option(min=1, help="MiB of the file whose writing and reading is timed.")] = 64,
) -> None:
    """Try whether a storage keeps the promises that checkpoints rely on.

    Writes small files, and one that is timed, below a name of its own in URL, and removes them again.
    """
    from ckptlib.storage.examination import examine

    cli = Cli.of(ctx)
    with cli.output.busy(f"examining {url}"):
        found = examine(url, size=size * 1024 * 1024)
    cli.output.document(
        StorageView(
            url=found.url,
            storage=found.storage,
            write_rate=found.write_rate,
            read_rate=found.read_rate,
            left=found.left,
            findings=tuple(FindingView(f.outcome, f.promise, f.detail) for f in found.findings),
        )
    )
    if unsafe := found.count("unsafe"):
        raise Ended(ExitCode.ERROR, f"{unsafe} findings put checkpoints at risk")
    if failed := found.count("failed"):
        raise Ended(ExitCode.PARTLY_DONE, f"{failed} promises could not be tried")
    if found.left:
        raise Ended(ExitCode.PARTLY_DONE, "not everything that was written could be removed")
