"""The program around the verbs: plug-ins, global options anywhere, and how everything ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from catalog.cli.arguments import hoist, output_format
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode, explain
from catalog.cli.output import JsonOutput, Output, TableOutput

PLUGINS = "ckpt.commands"
"""Entry-point group of the verbs of other layers: name -> a `typer.Typer`, imported when it is called or listed."""


class Program(TyperGroup):
    """The root of the ``ckpt`` command tree."""

    _context: Any = None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs one command line and exits with its code. Every error ends here."""
        given = hoist(sys.argv[1:] if args is None else args)
        try:
            result = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:  # noqa: BLE001  whatever it is, it must end as an exit code and a message
            sys.exit(_report(error, self._output(given)))
        if result == ExitCode.CANCELLED:
            # The parser swallows Ctrl-C and returns its code.
            sys.exit(_report(KeyboardInterrupt(), self._output(given)))
        sys.exit(result if isinstance(result, int) else 0)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """As the base class; kept, because an error may need to know how to be reported."""
        self._context = super().make_context(info_name, args, parent, **extra)
        return self._context

    def _output(self, args: Sequence[str]) -> Output:
        """Where an error goes: as the global options say, also when they could not be parsed."""
        cli = self._context.find_object(Cli) if self._context is not None else None
        if isinstance(cli, Cli):
            return cli.output
        return JsonOutput() if output_format(args, os.environ.get("CKPT_OUTPUT")) == "json" else TableOutput()

    def list_commands(self, ctx: Any) -> list[str]:
        """Own verbs, then those of plug-ins."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._plugins if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """An own verb, or the plug-in of that name."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self._plugins:
            return own
        return _load(self._plugins[cmd_name])

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in sorted(entry_points(group=PLUGINS), key=lambda entry: entry.name)}


def _load(entry: EntryPoint) -> Any:
    """The command group of a plug-in. One that cannot be imported must not break the others, nor ``--help``."""
    command: Any
    try:
        command = get_group(entry.load())
    except ImportError as error:
        command = _unavailable(entry, str(error))
    command.name = entry.name
    return command


def _unavailable(entry: EntryPoint, reason: str) -> Any:
    """A command that takes everything and only says why it does not work."""
    plugin = typer.Typer(add_completion=False)

    @plugin.command(
        help=f"Not available: {reason}", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )
    def fail() -> None:
        raise Ended(ExitCode.ERROR, f"'ckpt {entry.name}' ({entry.value}) is not available: {reason}")

    return get_command(plugin)


def _report(error: BaseException, output: Output) -> int:
    """Writes why the program ends to standard error, and returns the exit code."""
    known = explain(error)
    if known is None:
        # A defect of the program: whoever reports it needs to know where.
        traceback.print_exception(error)
        known = ExitCode.ERROR, f"unexpected {type(error).__name__}: {error}. This is a defect; please report it."
    code, message = known
    if message:
        output.error(message, code)
    if isinstance(error, Ended) and error.advice:
        output.note(error.advice)
    return int(code)
