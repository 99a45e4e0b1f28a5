"""The catalog: a database of every finalized checkpoint, which also answers "where do I resume?".

It is a view that can be rebuilt from storage (`ckpt scan ROOT --adopt`), and the queue of all background work.
A trainer plugs it in with ``Checkpointer(..., resolver=ResumeResolver(db), listeners=[Recorder(db)])``.
"""

from catalog.catalog import Catalog
from catalog.recorder import Recorder
from catalog.resolver import CatalogResolver, ResumeResolver

__all__ = ["Catalog", "CatalogResolver", "Recorder", "ResumeResolver"]
