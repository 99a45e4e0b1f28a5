"""A client of a network filesystem that shows for a while what was there before."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest


class OldView:
    """The first looks at every file below a directory see what was there before: nothing, or less."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, suffix: str, times: int, size: int | None) -> None:
        self.left = times
        self._suffix = suffix
        self._size = size
        for name in ("stat", "open", "preadv"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self._open_file(builtins.open))

    def _shows_it(self, path: Any) -> bool:
        if str(path).endswith(self._suffix) and self.left > 0:
            self.left -= 1
            return True
        return False

    def _stat(self, stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if not self._shows_it(path):
                return stat(path, *args, **options)
            if self._size is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return os.stat_result([*stat(path)[:6], self._size, 0, 0, 0])

        return look

    def _open(self, open_: Callable[..., int]) -> Callable[..., int]:
        def look(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_ACCMODE == os.O_RDONLY and self._size is None and self._shows_it(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return open_(path, flags, *args, **options)

        return look

    def _open_file(self, open_: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode == "rb" and self._size is None and self._shows_it(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return open_(path, mode, *args, **options)

        return look

    def _preadv(self, preadv: Callable[..., int]) -> Callable[..., int]:
        def look(fd: int, buffers: Any, offset: int) -> int:
            if self._size is not None and self._shows_it(os.readlink(f"/proc/self/fd/{fd}")):
                return 0  # the end of the file, as far as is seen
            return preadv(fd, buffers, offset)

        return look
