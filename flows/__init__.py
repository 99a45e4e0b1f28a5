"""Background work on the catalog, scheduled and shown by Prefect (DESIGN S5).

The catalog is the queue. Everything here takes work from it by lease and finishes it by compare-and-set, so that
losing Prefect, its database, its events or any of its runs loses no work. The functions that do the work
(`flows.drain`) know nothing of Prefect; the flows are thin calls of them.
"""
