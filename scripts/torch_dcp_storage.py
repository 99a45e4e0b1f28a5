"""Our storage under the names and with the arguments of torch's, for torch's own tests (see torch-dcp-tests.py)."""

from __future__ import annotations

import unittest
from typing import Any

from ckptlib.integrations.dcp import CkptReader, CkptWriter


class Writer(CkptWriter):
    """Takes what `FileSystemWriter` takes; how many files and threads there are is ours to decide."""

    def __init__(
        self, path: str, *, overwrite: bool = True, _extensions: Any = None, **_of_files_and_threads: Any
    ) -> None:
        if _extensions:
            raise unittest.SkipTest("not applicable: stream extensions of FileSystemWriter")
        super().__init__(path, on_exists="replace" if overwrite else "error")


class Reader(CkptReader):
    """Casts, as torch's planner does unless it is told not to."""

    def __init__(self, path: str, **_extensions: Any) -> None:
        super().__init__(path, cast=True)
