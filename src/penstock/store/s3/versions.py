"""Buckets that keep former versions.

Whether one does, and how to remove every version below a prefix: the doctor leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.store.s3.answers import former_versions_of, keeps_versions, not_s3
from penstock.store.s3.bucket import Bucket

PAGES_MAX: Final = 10_000


async def is_versioned(bucket: Bucket) -> bool:
    """Whether the bucket keeps former versions; no, if we may not ask."""
    response = await bucket.ask("GET", None, query=[("versioning", "")])
    return response.status == 200 and keeps_versions(response.body)


async def purge(bucket: Bucket, prefix: str) -> None:
    """Remove every version and every delete marker below a prefix."""
    root = bucket.config.root
    marks: Iterable[tuple[str, str]] = ()
    for _ in range(PAGES_MAX):
        query = [("encoding-type", "url"), ("prefix", root + prefix), ("versions", ""), *marks]
        response = await bucket.ask("GET", None, query=query)
        if response.status != 200:
            raise bucket.error(response, "")
        found = former_versions_of(response.body)
        if found is None:
            raise not_s3(bucket.asked(""), "a list of versions that is not whole")
        for key, version in found.versions:
            which = [("versionId", version)]
            deleted = await bucket.ask("DELETE", key[len(root) :], query=which, writes=True)
            if deleted.status not in (200, 204, 404):
                raise bucket.error(deleted, key[len(root) :], writes=True)
        if found.next_key is None:
            return
        marks = [("key-marker", found.next_key), ("version-id-marker", found.next_version)]
