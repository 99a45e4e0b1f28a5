"""Holds the writer of a worker thread at a known place."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from ckptlib import writer


class Gate:
    """While `patched` is entered, nobody in this process writes the tensor of this name until `opened` is set."""

    def __init__(self, key: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = writer._write_tensor

        def gated(stream: Any, leaf: Any, *rest: Any) -> Any:
            if leaf.key == key:
                self.reached.set()
                assert self.opened.wait(60)
            return write(stream, leaf, *rest)

        self.patched = mock.patch.object(writer, "_write_tensor", gated)
