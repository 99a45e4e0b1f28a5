"""The ``ckpt`` command: one verb per module, and the toolkit that plugged-in verbs share."""
