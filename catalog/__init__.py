"""The catalog: a database of every finalized checkpoint, which also answers "where do I resume?".

It is a view that can be rebuilt from storage (`ckpt scan ROOT --adopt`), and the queue of all background work.
A trainer plugs it in with ``Checkpointer(..., resolver=ResumeResolver(db), listeners=[Recorder(db)])``.

Names are imported when they are first used, so that the pure modules here cost nothing but themselves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catalog.catalog import Catalog
    from catalog.recorder import Recorder
    from catalog.resolver import CatalogResolver, ResumeResolver

__all__ = ["Catalog", "CatalogResolver", "Recorder", "ResumeResolver"]

_HOMES = {"Catalog": "catalog", "CatalogResolver": "resolver", "Recorder": "recorder", "ResumeResolver": "resolver"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
