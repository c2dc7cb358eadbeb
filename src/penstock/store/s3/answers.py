"""What S3's answers mean: statuses and error codes to Penstock's errors, XML to pages.

The one place that knows the differences between servers:
- A swap of a missing key is 404 on some servers and 412 on others; both are `VersionConflict`.
- 409 is a conflict with a request in flight: nothing was done, and trying again is right.
- 503 with the code `SlowDown` was not carried out; any other 5xx may have been.
- A copy, or a list, may answer 200 with an error in the body.
- What an answer lacks that S3 always sends was written by somebody in between, a proxy or a
  portal. Such an answer proves nothing, neither that an object is missing nor that it was
  written: it is `Unavailable`, and for a write `OutcomeUnknown`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from penstock.kernel.errors import (
    BucketNotFound,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Throttled,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import Entry, Version
from penstock.store.s3.connection import Response
from penstock.store.s3.transport import epoch_of

_THROTTLING: Final = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "TooManyRequests",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "Throttling",
}
_NOT_CARRIED_OUT: Final = {"RequestTimeout", "OperationAborted", "ConditionalRequestConflict"}
_WRONG_KEYS: Final = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "InvalidClientTokenId",
    "AuthorizationHeaderMalformed",
    "InvalidSecurity",
}
_EXPIRED: Final = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_KEY_HINT: Final = "Check the access key, the secret and, for temporary ones, the session token."
_SAID_MAX: Final = 200
_RETRY_AFTER_SECONDS_MAX: Final = 3600.0


@dataclass(frozen=True, slots=True)
class RequestSubject:
    """What a request was about. `key` is empty if it was the bucket itself."""

    bucket: str
    region: str
    key: str
    writes: bool = False


def error_of(response: Response, asked: RequestSubject) -> StoreError:
    """The error that this answer stands for. Preconditions (412) are the caller's to name."""
    error = _Error.of(response)
    elsewhere = _region_of(response, error)
    match response.status:
        case 404 if error.code == "NoSuchBucket" or not asked.key:
            return bucket_not_found(asked.bucket)
        case 404 if error.code or not response.body:
            return NotFound(f"There is no object {asked.key!r}.", key=asked.key)
        case 412:
            return VersionConflict(
                f"The object {asked.key!r} is not there in the version named.", key=asked.key
            )
        case 400 | 301 | 307 | 308 if elsewhere and elsewhere != asked.region:
            return _elsewhere(elsewhere, asked)
        case 301 | 302 | 303 | 307 | 308:
            return StoreError(
                f"The server sends requests for bucket {asked.bucket!r} elsewhere ({error.said}).",
                key=asked.key,
                hint="Check the endpoint, http or https, and the region.",
            )
        case 400 | 401 | 403 if error.code in _WRONG_KEYS | _EXPIRED:
            return _wrong_credentials(error, asked)
        case 401 | 403:
            return _refusal(error, asked)
        case 501:
            return Unsupported(f"The store cannot do what is asked ({error.said}).", key=asked.key)
    return _failure(response, error, asked)


def _failure(response: Response, error: _Error, asked: RequestSubject) -> StoreError:
    status, key = response.status, asked.key
    if status == 429 or error.code in _THROTTLING or error.code.endswith("ThrottlingException"):
        return Throttled(
            f"The store asked to slow down ({error.said}).",
            key=key,
            retry_after_seconds=_retry_after(response),
        )
    if status in (408, 409) or error.code in _NOT_CARRIED_OUT:
        return Unavailable(f"The store could not do it just now ({error.said}).", key=key)
    if 400 <= status < 500 and status != 404:
        what = f"{key!r}" if key else f"bucket {asked.bucket!r}"
        return StoreError(f"The store refused a request for {what} ({error.said}).", key=key)
    if status < 500:
        return not_s3(asked, error.said)
    if asked.writes:
        return OutcomeUnknown(f"The store failed in a write to {key!r} ({error.said}).", key=key)
    return Unavailable(f"The store failed ({error.said}).", key=key)


def not_s3(asked: RequestSubject, what: str) -> StoreError:
    """The error for an answer that S3 would not give."""
    lost = OutcomeUnknown if asked.writes else Unavailable
    return lost(
        f"What answered for bucket {asked.bucket!r} does not answer like S3 ({what}).",
        key=asked.key,
        hint="Check the endpoint, and what is between here and there.",
    )


def bucket_not_found(bucket: str) -> BucketNotFound:
    return BucketNotFound(
        f"The bucket {bucket!r} does not exist.",
        hint="Create it, or check its name, the endpoint and the region.",
    )


def _wrong_credentials(error: _Error, asked: RequestSubject) -> Refused:
    if error.code in _EXPIRED:
        return Refused(
            f"The credentials for bucket {asked.bucket!r} have expired ({error.said}).",
            key=asked.key,
            hint="Get new temporary credentials.",
        )
    return Refused(
        f"The credentials for bucket {asked.bucket!r} are wrong ({error.said}).",
        key=asked.key,
        hint=_KEY_HINT,
    )


def _refusal(error: _Error, asked: RequestSubject) -> Refused:
    if error.code == "RequestTimeTooSkewed":
        return Refused(
            f"This machine's clock is too far from the store's ({error.said}).",
            key=asked.key,
            hint="Set the clock; the store's answers have no date to go by.",
        )
    what = f"{asked.key!r} in bucket {asked.bucket!r}" if asked.key else f"bucket {asked.bucket!r}"
    return Refused(
        f"The credentials do not allow this request to {what} ({error.said}).",
        key=asked.key,
        hint="Penstock needs s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there.",
    )


def _elsewhere(region: str, asked: RequestSubject) -> Refused:
    return Refused(
        f"The bucket {asked.bucket!r} is in another region, {region}.",
        key=asked.key,
        hint=f"Set AWS_REGION={region}, or add ?region={region} to the URL.",
    )


def _region_of(response: Response, error: _Error) -> str:
    return response.headers.get("x-amz-bucket-region", "") or error.region


def _retry_after(response: Response) -> float:
    """The seconds of a `Retry-After`, which is a number or a date."""
    after = response.headers.get("retry-after", "").strip()
    if after.isascii() and after.isdecimal():
        seconds = float(after)
    else:
        until, since = epoch_of(after), epoch_of(response.headers.get("date", ""))
        seconds = until - since if until is not None and since is not None else 0.0
    return min(max(seconds, 0.0), _RETRY_AFTER_SECONDS_MAX)


def unmasked(response: Response) -> Response:
    """The answer, or the failure that it hides behind its 200."""
    code = _Error.of(response).code
    if not code:
        return response
    statuses = {"PreconditionFailed": 412, "NoSuchKey": 404, "NoSuchBucket": 404}
    status = statuses.get(code, 403 if code == "AccessDenied" else 500)
    return Response(status=status, headers=response.headers, body=response.body)


@dataclass(frozen=True, slots=True)
class S3Listing:
    """One page as the server sent it, keys whole."""

    entries: tuple[Entry, ...]
    folders: tuple[str, ...]
    token: str | None


def listing_of(body: bytes) -> S3Listing | None:
    """A ListObjectsV2 answer; None if it is not a whole one."""
    root = _xml(body)
    if root is None or _name(root) != "ListBucketResult":
        return None
    page = _texts(root)
    encoded = page.get("EncodingType") == "url"
    try:
        entries = tuple(_entry(_texts(row), encoded=encoded) for row in _named(root, "Contents"))
        folders = tuple(
            _plain(_texts(row)["Prefix"], encoded=encoded) for row in _named(root, "CommonPrefixes")
        )
        token = page["NextContinuationToken"] if page.get("IsTruncated") == "true" else None
    except (KeyError, ValueError, OverflowError):
        return None
    return None if token == "" else S3Listing(entries, folders, token)


def _entry(row: dict[str, str], *, encoded: bool) -> Entry:
    modified = datetime.fromisoformat(row["LastModified"].strip())
    return Entry(
        key=_plain(row["Key"], encoded=encoded),
        version=version_of(row.get("ETag", "")),
        size=int(row["Size"]),
        modified=(modified if modified.tzinfo else modified.replace(tzinfo=UTC)).timestamp(),
    )


def _plain(text: str, *, encoded: bool) -> str:
    return unquote_plus(text, errors="strict") if encoded else text


def copied_version(body: bytes) -> Version | None:
    """The version in a CopyObject answer; None if it is not a whole one."""
    root = _xml(body)
    if root is None or _name(root) != "CopyObjectResult":
        return None
    return version_of(_texts(root).get("ETag", "")) or None


@dataclass(frozen=True, slots=True)
class FormerVersions:
    """One page of versions and delete markers: (whole key, version id), and where it goes on."""

    versions: tuple[tuple[str, str], ...]
    next_key: str | None
    next_version: str


def former_versions_of(body: bytes) -> FormerVersions | None:
    """A ListObjectVersions answer; None if it is not a whole one."""
    root = _xml(body)
    if root is None or _name(root) != "ListVersionsResult":
        return None
    page = _texts(root)
    encoded = page.get("EncodingType") == "url"
    rows = [_texts(row) for kind in ("Version", "DeleteMarker") for row in _named(root, kind)]
    try:
        versions = tuple((_plain(row["Key"], encoded=encoded), row["VersionId"]) for row in rows)
    except (KeyError, ValueError):
        return None
    more = page.get("IsTruncated") == "true"
    if more and not page.get("NextKeyMarker"):
        return None
    return FormerVersions(
        versions,
        _plain(page.get("NextKeyMarker", ""), encoded=encoded) if more else None,
        page.get("NextVersionIdMarker", ""),
    )


def keeps_versions(body: bytes) -> bool:
    """Whether a GetBucketVersioning answer says that former versions are kept."""
    root = _xml(body)
    return root is not None and _texts(root).get("Status", "") in ("Enabled", "Suspended")


def version_of(etag: str) -> Version:
    """An ETag without the quotes that some answers have and others do not."""
    return Version(etag.strip().removeprefix("W/").strip('"'))


@dataclass(frozen=True, slots=True)
class _Error:
    """What an S3 error says; all empty if the body is something else."""

    code: str
    region: str
    said: str
    """The status, the code and the message, as they go into a sentence."""

    @classmethod
    def of(cls, response: Response) -> _Error:
        root = _xml(response.body)
        if root is not None and _name(root) == "ErrorResponse":
            root = next(_named(root, "Error"), None)
        found = _texts(root) if root is not None and _name(root) == "Error" else {}
        code = found.get("Code", "").strip()
        text = " ".join(found.get("Message", "").split())[:_SAID_MAX].rstrip(". ")
        status = f"{response.status} {code}".strip()
        return cls(
            code=code,
            region=found.get("Region", "").strip(),
            said=f"{status}: {text}" if text else status,
        )


def _xml(body: bytes) -> ET.Element | None:
    text = body.strip()
    if not text.startswith(b"<"):
        return None
    try:
        return ET.fromstring(text)
    except (ET.ParseError, ValueError, LookupError):
        return None  # Not well-formed, cut off, or in an encoding that nobody knows.


def _name(element: ET.Element) -> str:
    """The tag without its namespace, which some servers send and others do not."""
    return element.tag.rpartition("}")[2]


def _texts(element: ET.Element) -> dict[str, str]:
    return {_name(child): child.text or "" for child in element}


def _named(element: ET.Element, name: str) -> Iterator[ET.Element]:
    return (child for child in element if _name(child) == name)
