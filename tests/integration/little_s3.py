"""A little S3 in memory, as a script for `ScriptedServer`: right, or wrong in chosen ways.

It knows no signatures, and serves one request after the other, so that a test can say what a
server does that ignores a condition, gives opaque ETags, or answers a list in some form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import quote_plus, unquote
from xml.sax.saxutils import escape

from tests.integration.scripted import MODIFIED, Call, error_xml, message

_META = "x-amz-meta-"


@dataclass
class Stored:
    body: bytes
    etag: str
    metadata: dict[str, str]


@dataclass
class LittleS3:
    """One bucket. `ignores` names conditions that are not minded: create, swap, copy, delete."""

    bucket: str = "bucket"
    ignores: Collection[str] = ()
    opaque: bool = False
    """ETags that are new with every write, as S3 gives for objects encrypted with KMS."""
    encoded: bool = True
    namespace: str = ""
    objects: dict[str, Stored] = field(default_factory=dict)
    _writes: int = 0

    async def __call__(self, call: Call) -> None:
        await call.read()
        bucket, _, key = call.path.removeprefix("/").partition("/")
        if bucket != self.bucket:
            answer = message(404, error_xml("NoSuchBucket"))
        elif key:
            answer = self._object(call, key)
        else:
            answer = self._list(call) if call.method == "GET" else message(200)
        if call.method == "HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        await call.write(answer)

    def _object(self, call: Call, key: str) -> bytes:
        found = self.objects.get(key)
        match call.method:
            case "PUT" if "x-amz-copy-source" in call.headers:
                return self._copy(call, key, found)
            case "PUT":
                return self._put(call, key, found)
            case "DELETE":
                if not self._holds(call, found, "delete"):
                    return _refused()
                self.objects.pop(key, None)
                return message(204)
        if found is None:
            return message(404, error_xml("NoSuchKey"))
        if call.headers.get("if-none-match") == f'"{found.etag}"':
            return message(304, length=None)
        named = {f"{_META}{name}": value for name, value in found.metadata.items()}
        return message(
            200, found.body, ETag=f'"{found.etag}"', Last_Modified=MODIFIED, length=-1, **named
        )

    def _put(self, call: Call, key: str, found: Stored | None) -> bytes:
        creates = call.headers.get("if-none-match") == "*"
        if creates and found is not None and "create" not in self.ignores:
            return _refused()
        if not self._holds(call, found, "swap"):
            return _refused()
        stored = self._write(key, call.body or b"", call)
        return message(200, ETag=f'"{stored.etag}"')

    def _copy(self, call: Call, key: str, found: Stored | None) -> bytes:
        source = unquote(call.headers["x-amz-copy-source"]).removeprefix(f"/{self.bucket}/")
        origin = self.objects.get(source)
        if origin is None:
            return message(404, error_xml("NoSuchKey"))
        wanted = call.headers.get("x-amz-copy-source-if-match", f'"{origin.etag}"')
        if wanted != f'"{origin.etag}"' or not self._holds(call, found, "copy"):
            return _refused()
        etag = self._write(key, origin.body, call).etag
        result = f"<CopyObjectResult><ETag>&quot;{etag}&quot;</ETag></CopyObjectResult>"
        return message(200, result.encode())

    def _holds(self, call: Call, found: Stored | None, what: str) -> bool:
        wanted = call.headers.get("if-match")
        if wanted is None or what in self.ignores:
            return True
        return found is not None and wanted == f'"{found.etag}"'

    def _write(self, key: str, body: bytes, call: Call) -> Stored:
        self._writes += 1
        etag = f"{self._writes:032x}-9" if self.opaque else hashlib.md5(body).hexdigest()
        metadata = {
            name.removeprefix(_META): value
            for name, value in call.headers.items()
            if name.startswith(_META)
        }
        self.objects[key] = Stored(body, etag, metadata)
        return self.objects[key]

    def _list(self, call: Call) -> bytes:
        prefix = call.query.get("prefix", "")
        rows = "".join(
            f"<Contents><Key>{quote_plus(key) if self.encoded else escape(key)}</Key>"
            f"<LastModified>2026-11-07T08:49:37.000Z</LastModified>"
            f"<ETag>&quot;{stored.etag}&quot;</ETag><Size>{len(stored.body)}</Size></Contents>"
            for key, stored in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        kind = "<EncodingType>url</EncodingType>" if self.encoded else ""
        return message(
            200,
            f"<?xml version='1.0' encoding='UTF-8'?>\n<ListBucketResult{self.namespace}>{kind}"
            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode(),
        )


def _refused() -> bytes:
    return message(412, error_xml("PreconditionFailed"))
