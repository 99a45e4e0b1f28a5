"""Uploads to an S3 server that somebody began and left."""

from __future__ import annotations

import itertools
import time
from typing import Any

from ckptlib import commit, storage
from ckptlib.manifest import Begin
from ckptlib.storage import Storage, join
from tests.support.s3_server import S3Server


class Uploads:
    """A root in a bucket in which saves have begun and uploads are unfinished."""

    def __init__(self, server: S3Server, url: str, client: Any) -> None:
        self.store: Storage
        self.store, self.root = storage.resolve(url, server.storage_options())
        self.url = url
        self._client = client
        self._clock = itertools.count(1)

    def begin(self, attempt: int, iteration: int = 100) -> Begin:
        """A save that began."""
        save_id = commit.new_save_id(attempt, now=float(next(self._clock)))
        begin = Begin(save_id, "run", attempt, f"attempt-{attempt}", iteration, 1, "0" * 64, created_at=time.time())
        commit.begin_save(self.store, self.directory(iteration), begin)
        return begin

    def abort(self, begin: Begin) -> None:
        """Decides so."""
        path = self.directory(begin.iteration)
        commit.decide_abort(self.store, path, begin.save_id, reason="test", decided_by="test")

    def directory(self, iteration: int = 100) -> str:
        return join(self.root, f"iter_{iteration:07d}")

    def upload(self, path: str) -> str:
        """Begins one, with a part, and leaves it."""
        bucket, _, key = path.partition("/")
        place = {"Bucket": bucket, "Key": key}
        upload = self._client.create_multipart_upload(**place)["UploadId"]
        self._client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"part")
        return path

    def upload_of(self, save_id: str, iteration: int = 100) -> str:
        """One of a save's data file."""
        return self.upload(join(self.directory(iteration), f"__0_0.{save_id}.distcp"))

    def left(self) -> set[str]:
        """Paths of those that are unfinished now."""
        return {upload.path for upload in self.store.unfinished(self.root)}
