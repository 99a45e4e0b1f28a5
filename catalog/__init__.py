"""The catalog: a database of every finalized checkpoint, which also answers "where do I resume?".

It is a view that can be rebuilt from storage (`ckpt scan ROOT --adopt`), and the queue of all background work.
"""

from catalog.catalog import Catalog

__all__ = ["Catalog"]
