"""Runs the tiny example with repeatable names, so that a crash tool can compare one run's files with another's.

Save ids and temporary names are random by design; here they are counted, anew for each process but never twice in
one output folder (the number of files so far goes in), and clocks stand still.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import uuid

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")


def main() -> None:
    """Patches the sources of chance, then runs the example's own command line."""
    root = sys.argv[sys.argv.index("--root") + 1]
    # Not the attempts: a process that was killed before it created its attempt has left a temporary file too.
    earlier = sum(len(files) for _, _, files in os.walk(os.path.join(root, "run")))
    numbers = itertools.count()
    uuid.uuid4 = lambda: uuid.UUID(int=(next(numbers) << 96) + earlier)
    time.time = lambda: 1_800_000_000.0 + earlier
    sys.path.insert(0, EXAMPLES)
    import tiny

    tiny.main()


if __name__ == "__main__":
    main()
