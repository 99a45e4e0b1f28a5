"""Copies of objects inside a store, whose digest stays that of their source."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from ckptlib.storage import s3_parts
from ckptlib.storage.s3_errors import code_of
from ckptlib.storage.s3_upload import Target

COPY_BYTES = 1024 * 1024 * 1024
"""Larger objects are copied in parts, of this size if they have none of their own."""


def copy_object(source: Target, target: Target) -> None:
    """Copies an object; one that was written in parts in the same parts, because its digest is over those of the parts.

    Raises:
        OSError: as `s3_errors.translate` says.
    """
    head = source.call("look", "head_object")
    size: int = head["ContentLength"]
    if size <= COPY_BYTES and "-" not in head["ETag"]:
        target.call("copy", "copy_object", CopySource=_place(source), ChecksumAlgorithm="SHA256")
        return
    first = source.call("look", "head_object", PartNumber=1)
    part_size = first["ContentLength"] if first.get("PartsCount") else COPY_BYTES
    upload = target.call("copy", "create_multipart_upload", ChecksumAlgorithm="SHA256")["UploadId"]
    bounds = s3_parts.bounds(size, part_size, target.connection.options.max_parts)
    threads = target.connection.threads
    futures = [
        threads.submit(_copy_part, source, target, upload, number, *part) for number, part in enumerate(bounds, 1)
    ]
    try:
        parts = {"Parts": [future.result() for future in futures]}
        target.call("completion of a copy", "complete_multipart_upload", UploadId=upload, MultipartUpload=parts)
    except BaseException as error:
        # The answer to a completion that took place may have been lost; its repetition finds no upload.
        if code_of(error) == "NoSuchUpload" and target.call("look", "head_object")["ContentLength"] == size:
            return
        for future in futures:
            future.cancel()
        wait(futures)  # one that arrives after the end of the upload would stay as an orphan
        target.end(upload)
        raise


def _copy_part(source: Target, target: Target, upload: str, number: int, start: int, stop: int) -> dict[str, Any]:
    answer = target.call(
        f"copy, part {number}",
        "upload_part_copy",
        UploadId=upload,
        PartNumber=number,
        CopySource=_place(source),
        CopySourceRange=f"bytes={start}-{stop - 1}",
    )["CopyPartResult"]
    digest = answer.get("ChecksumSHA256")
    return {"PartNumber": number, "ETag": answer["ETag"], **({"ChecksumSHA256": digest} if digest else {})}


def _place(source: Target) -> dict[str, str]:
    return {"Bucket": source.bucket, "Key": source.key}
