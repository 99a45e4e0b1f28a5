"""What settings of a bucket mean for checkpoints in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NOT_SET = frozenset(
    {
        "NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError", "NotImplemented", "501", "404",
        "MethodNotAllowed", "405", "NoSuchConfiguration", "InvalidRequest",
    }
)  # fmt: skip
"""Codes of stores that have no such setting, or none for this bucket."""

Notice = tuple[str, bool]
"""A sentence for people, and whether checkpoints are at risk."""


def notices(
    prefix: str, versioning: Mapping[str, Any], lifecycle: Mapping[str, Any], lock: Mapping[str, Any]
) -> list[Notice]:
    """What to know, from the answers of S3.

    Args:
        prefix: key of the directory that checkpoints shall be in.
        versioning, lifecycle, lock: answers of GetBucketVersioning, GetBucketLifecycleConfiguration and
            GetObjectLockConfiguration; empty: not set; with a member ``unknown``: it could not be asked for.
    """
    found: list[Notice] = []
    for name, answer in (("versioning", versioning), ("lifecycle rules", lifecycle), ("object lock", lock)):
        if "unknown" in answer:
            found.append((f"{name} of the bucket could not be read: {answer['unknown']}", False))
    if versioning.get("Status") == "Enabled":
        found.append(
            ("the bucket keeps old versions: a deleted checkpoint takes space until a rule expires them", False)
        )
    rule = lock.get("ObjectLockConfiguration", {})
    if rule.get("ObjectLockEnabled") == "Enabled":
        found.append(("the bucket has object lock: deletions may leave versions that nobody can remove yet", False))
    rules = [rule for rule in lifecycle.get("Rules", ()) if rule.get("Status") == "Enabled"]
    aborts = False
    for rule in rules:
        if not _overlaps(_prefix_of(rule), prefix):
            continue
        aborts = aborts or "AbortIncompleteMultipartUpload" in rule
        found.extend(_of_rule(rule))
    if not aborts:
        found.append(
            ("no lifecycle rule ends unfinished uploads: those of killed processes stay until a cleanup", False)
        )
    return found


def _of_rule(rule: Mapping[str, Any]) -> Iterator[Notice]:
    name = rule.get("ID", "")
    if expiration := {k: v for k, v in rule.get("Expiration", {}).items() if k in ("Days", "Date")}:
        when = ", ".join(f"{k.lower()} {v}" for k, v in expiration.items())
        yield f"lifecycle rule {name!r} deletes what is here ({when}): checkpoints vanish without a trace", True
    for transition in rule.get("Transitions", ()):
        kind = transition.get("StorageClass", "")
        if kind in ("GLACIER", "DEEP_ARCHIVE"):
            yield f"lifecycle rule {name!r} moves what is here to {kind}: a resume waits hours for it", True


def _prefix_of(rule: Mapping[str, Any]) -> str:
    condition = rule.get("Filter") or {}
    return str(condition.get("Prefix") or condition.get("And", {}).get("Prefix") or rule.get("Prefix") or "")


def _overlaps(one: str, other: str) -> bool:
    """Whether a rule for keys that begin with `one` can touch keys below the directory `other`."""
    directory = f"{other}/" if other else ""
    return directory.startswith(one) or one.startswith(directory)
