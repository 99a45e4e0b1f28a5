"""``ckpt flows``: the embedded set, its deployments, and runs by hand. Imports no Prefect until it is needed."""

# `column` declares a field, as dataclasses.field does.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from catalog.cli import lookup, text
from catalog.cli.columns import column, state
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode
from catalog.cli.output import Output
from catalog.cli.selector import parse
from flows.catalogue import DEPLOYMENTS, DeploymentSpec, find

if TYPE_CHECKING:
    from catalog.rows import VerifyLease
    from ckptlib.orphans import Orphan
    from ckptlib.verification import VerifyReport
    from flows.drain import Outcome, Summary
    from flows.requests import VerifyRequest
    from flows.settings import FlowsSettings

app = typer.Typer(help="Background work through Prefect: one command brings it all up.", no_args_is_help=True)
run_app = typer.Typer(help="Start a flow by hand.", no_args_is_help=True)
app.add_typer(run_app, name="run")


@dataclass(frozen=True)
class DeploymentView:
    """A line of ``ckpt flows ls``."""

    deployment: str = column("DEPLOYMENT")
    schedule_seconds: float | None = column("EVERY", lambda seconds: f"{seconds:g} s")
    wakes_on_commit: bool = column("ON COMMIT", lambda value: "yes" if value else "no")
    description: str = column("DESCRIPTION", drop=1)


@dataclass(frozen=True)
class OutcomeView:
    """What became of one checkpoint in ``ckpt flows run``."""

    checkpoint: str = column("CHECKPOINT")
    save_id: str = column("SAVE", drop=2)
    result: str = column("RESULT", state)
    bytes_read: int = column("READ", text.size, justify="right", drop=1)
    seconds: float = column("SECONDS", lambda value: f"{value:.1f}", justify="right", drop=3)
    detail: str = column("DETAIL")


@dataclass(frozen=True)
class OrphanView:
    """An unfinished upload, and what becomes of it in ``ckpt flows run cleanup``."""

    action: str = column("ACTION")
    path: str = column("UPLOAD")
    save_id: str = column("SAVE", drop=2)
    started_at: datetime = column("BEGAN", text.local_minute, drop=1)
    reason: str = column("REASON", prose=True)

    @classmethod
    def of(cls, orphans: Sequence[Orphan], action: str, left: Collection[str] = ()) -> list[OrphanView]:
        """The views of a part of a plan; of those in `left` it could not be done."""
        return [
            cls(
                "failed" if o.upload.path in left else action,
                o.upload.path,
                o.save_id,
                datetime.fromtimestamp(o.upload.started, UTC),
                o.reason,
            )
            for o in orphans
        ]


@dataclass(frozen=True)
class FlowRunView:
    """A flow run that was started through the API."""

    flow_run: str = column("flow run")
    state: str = column("state")
    message: str = column("message")
    url: str = column("url")
    id: str = column("id", wide=True)


_Here = Annotated[
    bool, typer.Option("--here", help="In this process, without Prefect, even if the flows are being served.")
]
_Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until a run started through the API has ended.")]


@app.command()
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address of Prefect's server; it has no password.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 0 is any free one.", min=0, max=65535)] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where Prefect's database, logs and state are kept.")] = None,
    ui: Annotated[bool | None, typer.Option("--ui/--no-ui", help="Serve Prefect's web pages too.")] = None,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="End when the process that started this one is gone.")
    ] = False,
) -> None:
    """Run Prefect's server and all flows until SIGTERM or Ctrl-C. Settings: CKPT_FLOWS_... (docs/flows.md)."""
    from catalog.database import database_url
    from flows import serve as embedded

    cli = Cli.of(ctx)
    given = {"host": host, "port": port, "state_dir": state_dir, "ui": ui}
    settings = _settings(**{name: value for name, value in given.items() if value is not None})
    cli.catalog().close()  # a missing catalog is said now, not by every flow run
    database = database_url(cli.db).render_as_string(hide_password=False)
    status = embedded.serve(
        settings, database=database, label=cli.database_name(), echo=typer.echo, exit_with_parent=exit_with_parent
    )
    raise typer.Exit(status)


@app.command("ls")
def ls(ctx: typer.Context) -> None:
    """List the deployments, and say where they are served."""
    from flows import state as serve_state

    cli = Cli.of(ctx)
    settings = _settings()
    rows = [
        DeploymentView(spec.name, spec.every(settings), spec.wakes_on_commit, spec.description) for spec in DEPLOYMENTS
    ]
    cli.output.rows(DeploymentView, rows)
    running = serve_state.running(settings.state_dir)
    if running is None:
        cli.output.note(f"Not served from {settings.state_dir}. Start: ckpt flows serve")
    else:
        cli.output.note(f"Served by process {running.pid}: PREFECT_API_URL={running.api_url}")


@run_app.command("verify-pending")
def run_verify_pending(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Only this run's checkpoints.")] = None,
    here: _Here = False,
    wait: _Wait = True,
) -> None:
    """Verify everything that waits: through the API if the flows are served, else in this process."""
    cli = Cli.of(ctx)
    settings = _settings()
    _require_run(cli, run)
    if not here and _submitted(cli, settings, find("verify-pending"), {"run": run}, wait=wait):
        return
    from flows.drain import drain, verify_one

    with cli.catalog() as catalog, ConsoleReporter(cli.output) as reporter:
        work = partial(verify_one, catalog, settings, reporter=reporter)
        # Nobody's event is waited for here: what is committed later is somebody else's.
        summary = drain(catalog, settings.model_copy(update={"linger": 0.0}), work, run=run)
    _conclude(cli, summary)


@run_app.command("verify")
def run_verify(
    ctx: typer.Context,
    checkpoint: Annotated[str, typer.Argument(metavar="RUN@ITER", help="Or the checkpoint's id in the catalog.")],
    save_id: Annotated[str | None, typer.Option(help="Which save, if an iteration was saved several times.")] = None,
    level: Annotated[str, typer.Option(help="auto, listing, store, structure or data.")] = "auto",
    here: _Here = False,
    wait: _Wait = True,
) -> None:
    """Verify one checkpoint again, whatever its verdict is."""
    from flows.drain import Summary, verify_one
    from flows.requests import lease_one

    cli = Cli.of(ctx)
    settings = _settings()
    with cli.catalog() as catalog:
        request = _request(checkpoint, [row.name for row in catalog.runs()], save_id=save_id, level=level)
        parameters = {"request": request.model_dump(mode="json", exclude_none=True)}
        if not here and _submitted(cli, settings, find("verify"), parameters, wait=wait):
            return
        lease = lease_one(catalog, settings, request)
        with ConsoleReporter(cli.output) as reporter:
            summary = Summary([verify_one(catalog, settings, lease, reporter, level=request.level)])
    _conclude(cli, summary)


@run_app.command("cleanup")
def run_cleanup(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Only this run's roots.")] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only show what would be discarded.")] = False,
    here: _Here = False,
    wait: _Wait = True,
) -> None:
    """Discard uploads to object stores that dead processes left unfinished (CKPT_FLOWS_ORPHAN_AGE)."""
    from catalog.cleanup import apply_cleanup, plan_cleanup

    cli = Cli.of(ctx)
    settings = _settings()
    _require_run(cli, run)
    parameters = {"run": run, "dry_run": dry_run}
    # A dry run shows the plan itself, not only how much it is.
    if not (here or dry_run) and _submitted(cli, settings, find("cleanup"), parameters, wait=wait):
        return
    with cli.catalog() as catalog:
        plan = plan_cleanup(catalog, older_than=settings.orphan_age, run=run)
    left = {} if dry_run else apply_cleanup(plan)
    cli.output.rows(OrphanView, [*OrphanView.of(plan.discard, "discard", left), *OrphanView.of(plan.keep, "keep")])
    cli.output.note(f"{plan}{' (nothing discarded: dry run)' if dry_run else ''}")
    if problems := [*plan.problems, *left.values()]:
        raise Ended(ExitCode.PARTLY_DONE, "; ".join(problems))


class ConsoleReporter:
    """A progress bar per checkpoint, on a terminal."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bars = ExitStack()
        self._advance: Any = None

    def __enter__(self) -> ConsoleReporter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.close()

    def begin(self, lease: VerifyLease) -> None:
        """Shows its bar."""
        self._advance = self._bars.enter_context(self._output.progress(lease.name))

    def progress(self, done: int, total: int) -> None:
        """Moves the bar."""
        self._advance(done, total)

    def end(self, outcome: Outcome, report: VerifyReport | None) -> None:
        """Removes the bar."""
        self._bars.close()


def _settings(**given: Any) -> FlowsSettings:
    """The settings; a wrong value in the environment is a usage error that names the variable's field."""
    from pydantic import ValidationError

    from flows.settings import FlowsSettings

    try:
        return FlowsSettings(**given)
    except ValidationError as error:
        raise typer.BadParameter(f"settings of the flows (CKPT_FLOWS_...): {_first(error)}") from error


def _require_run(cli: Cli, run: str | None) -> None:
    """Raises: CatalogError: the catalog has no run of this name."""
    if run is not None:
        with cli.catalog() as catalog:
            lookup.require_run(catalog, run)


def _request(checkpoint: str, runs: list[str], *, save_id: str | None, level: str) -> VerifyRequest:
    from pydantic import ValidationError

    from flows.requests import VerifyRequest

    values: dict[str, Any] = {"level": level}
    if checkpoint.isdecimal() and checkpoint not in runs:
        values["checkpoint_id"] = int(checkpoint)
    else:
        selector = parse(checkpoint, runs)
        values |= {"run": selector.run, "iteration": selector.iteration}
    if save_id is not None:
        values["save_id"] = save_id
    try:
        return VerifyRequest.model_validate(values)
    except ValidationError as error:
        raise typer.BadParameter(f"{checkpoint!r}: {_first(error)}") from error


def _first(error: Any) -> str:
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg']}" if where else str(detail["msg"])


def _submitted(
    cli: Cli, settings: FlowsSettings, spec: DeploymentSpec, parameters: dict[str, Any], *, wait: bool
) -> bool:
    """Runs the deployment through the API of the running set; False when none runs."""
    from flows import state as serve_state

    running = serve_state.running(settings.state_dir)
    if running is None:
        return False
    from flows.submit import submit

    done = submit(settings, running, spec.name, parameters, wait=wait)
    cli.output.document(FlowRunView(done.name, done.state, done.message, done.url, done.id))
    _end(done.state, done.message)
    if wait and done.state != "Completed":
        raise Ended(ExitCode.ERROR, f"flow run {done.name} ended as {done.state}: {done.message}")
    return True


def _conclude(cli: Cli, summary: Summary) -> None:
    views = [OutcomeView(o.name, o.save_id, o.result, o.bytes_read, o.seconds, o.detail) for o in summary.outcomes]
    cli.output.rows(OutcomeView, views)
    _end(summary.ending, str(summary))
    if not views:
        cli.output.note("Nothing is pending.")


def _end(ending: str, reason: str) -> None:
    """Ends as a run did, wherever it ran; returns where all is well."""
    from flows.drain import CORRUPT, PARTLY

    if ending == CORRUPT:
        raise Ended(ExitCode.INTEGRITY_FAILURE, reason)
    if ending == PARTLY:
        raise Ended(ExitCode.PARTLY_DONE, reason)
