"""Revisions of the catalog's schema, applied by `ckpt db upgrade`.

`HEAD` is the newest revision, stated here so that opening a catalog needs neither Alembic nor a directory listing;
a test holds it equal to what Alembic finds.
"""

HEAD = "0001"
