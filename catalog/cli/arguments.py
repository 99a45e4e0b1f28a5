"""Global options may stand anywhere on the command line: before the verb or after it. Pure.

The parser underneath reads options of the program only in front of the verb, yet people write ``ckpt ls -o json``.
`hoist` moves global options to the front. Their names are therefore reserved: no verb declares them for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

FLAGS = frozenset({"-q", "--quiet", "-v", "-vv", "--verbose", "-y", "--yes"})
"""Global options without a value."""

VALUED = frozenset({"--db", "-o", "--output"})
"""Global options with a value in the next argument; long ones also after ``=``, ``-o`` also attached."""

FORMATS = ("table", "json")
"""Values of ``--output``."""


def hoist(args: Sequence[str]) -> list[str]:
    """The same command line with its global options first. Nothing after ``--`` is an option.

    >>> hoist(["ls", "my run", "-o", "json"])
    ['-o', 'json', 'ls', 'my run']
    """
    front: list[str] = []
    rest: list[str] = []
    pending = iter(args)
    for arg in pending:
        if arg == "--":
            rest += [arg, *pending]
        elif arg in VALUED:
            front.append(arg)
            # A missing value is left for the parser, which names the option in its complaint.
            front += [value for value in [next(pending, None)] if value is not None]
        elif arg in FLAGS or _attached_value(arg) is not None:
            front.append(arg)
        else:
            rest.append(arg)
    return front + rest


def output_format(args: Sequence[str], environment: str | None) -> str:
    """The output format that a command line asks for: an error in parsing it is reported in that format too.

    What is no format counts as not said.

    Args:
        args: the command line, hoisted.
        environment: value of ``CKPT_OUTPUT``.
    """
    chosen = environment
    for position, arg in enumerate(args):
        if arg == "--":
            break
        if arg in ("-o", "--output") and position + 1 < len(args):
            wanted = args[position + 1]
        elif arg.startswith(("-o", "--output=")):
            wanted = _attached_value(arg) or ""
        else:
            continue
        chosen = wanted if wanted in FORMATS else chosen
    return chosen if chosen in FORMATS else "table"


def _attached_value(arg: str) -> str | None:
    """``json`` of ``-ojson`` or ``--output=json``; None for everything else."""
    if arg.startswith("-o") and len(arg) > 2:
        return arg[2:]
    name, equals, value = arg.partition("=")
    return value if equals and name.startswith("--") and name in VALUED else None
