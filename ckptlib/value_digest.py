"""Digests of plain values, by which ranks are compared (W3)."""

from __future__ import annotations

import hashlib
import io
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ckptlib.errors import StateError
from ckptlib.safe_objects import Foreign
from ckptlib.state import leaf_bytes

RANK_ATTRIBUTES = frozenset({"rank", "local_rank"})
"""Attributes of an argparse Namespace that differ between ranks by nature; they do not count as disagreement."""


def value_digest(value: Any, where: str = "value") -> str:
    """SHA-256 of a plain value by its structure: equal values give equal digests, whatever shares memory in them.

    What cannot be saved has a digest too (of its type): it is the writer who refuses it.

    Raises:
        StateError: it is too deep, or a tensor in it has no plain bytes; names `where`.
    """
    digest = hashlib.sha256()
    try:
        for piece in _digest_pieces(value):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    except RecursionError as error:
        raise StateError(f"{where}: cannot be saved: it contains itself, or is nested too deeply") from error
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise StateError(f"{where}: cannot be saved: {error}") from error
    return digest.hexdigest()


def _digest_pieces(value: Any) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    match value:
        case Mapping():
            yield str(len(value)).encode()
            for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
                yield from _digest_pieces(key)
                yield from _digest_pieces(value[key])
        case Namespace():
            yield from _digest_pieces({k: v for k, v in vars(value).items() if k not in RANK_ATTRIBUTES})
        case list() | tuple():
            yield str(len(value)).encode()
            for item in value:
                yield from _digest_pieces(item)
        case set() | frozenset():
            yield str(len(value)).encode()
            yield from sorted(b"".join(_digest_pieces(item)) for item in value)
        case np.ndarray():
            yield f"{value.dtype} {value.shape}".encode()
            yield np.ascontiguousarray(value).tobytes()
        case torch.Tensor():
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            yield bytes(leaf_bytes(value))
        case bytes() | bytearray():
            yield bytes(value)
        case io.BytesIO():
            yield value.getvalue()
        case SimpleNamespace() | Foreign():
            yield from _digest_pieces(vars(value))
        case _ if repr(value) == object.__repr__(value) or (callable(value) and not isinstance(value, type)):
            return  # its text has an address in it, and no rank can save it anyway: the writer says so
        case _:
            yield repr(value).encode()
