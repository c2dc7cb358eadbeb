"""The `s3://` side of `penstock.datasets.transfer`: a bucket, through the Rust client obstore.

`obstore` is imported here and nowhere else, and this module only when a bucket is used. The client
repeats a request that failed by itself; what it does not repeat, an answer that breaks off in the
middle, is repeated here, at most `TRIES_MAX` times. Its errors are mapped to ours here. It signs
with this machine's time, so a machine whose clock is wrong by minutes is refused by Amazon.

Large files go in ranges and parts of `CHUNK_BYTES`, `WINDOW` of them at once, so that a request
is short, can be repeated, and memory is bounded. Opened clients are kept for the life of the
process, one for each way to reach a bucket, and are made anew after a fork.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import obstore
from awscrt.auth import AwsCredentialsProvider
from obstore import exceptions
from obstore.store import S3Store

from penstock.datasets.folders import Chunk, Listed
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import BucketNotFound, NotFound, Refused, StoreError, Unavailable
from penstock.store.s3.config import S3Config, s3_config
from penstock.store.s3.signing import Credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

CHUNK_BYTES: Final = 8 * 1024 * 1024
WINDOW: Final = 4
TRIES_MAX: Final = 3
PAUSE_SECONDS: Final = 0.2
PARTS_MAX: Final = 9_000
_ASK_AGAIN_SECONDS: Final = 60.0
_REQUEST_SECONDS_MAX: Final = 60.0
_READ_BUFFER_BYTES: Final = 256 * 1024
_STATUS: Final = re.compile(r"status code: ([45]\d\d)")
_NO_PATH: Final = "Could not parse path"
_AGAIN: Final = ("408", "409", "429")

Answer = TypeVar("Answer")
Environment = tuple[tuple[str, str], ...]


class Bucket:
    """A bucket. A key is a whole key."""

    def __init__(self, name: str, client: S3Store) -> None:
        self._name = name
        self._client = client

    def chunks(self, key: str) -> Iterator[Chunk]:
        size, body = self._ask(key, lambda: self._small(key))
        if body is not None:
            yield body
            return
        step = CHUNK_BYTES * WINDOW
        for start in range(0, size, step):
            yield from self._ranges(key, start, min(size, start + step))

    def _small(self, key: str) -> tuple[int, memoryview | None]:
        """The size of an object, and the object if that is one request's."""
        answer = obstore.get(self._client, key)
        size: int = answer.meta["size"]
        return size, memoryview(answer.bytes()) if size <= CHUNK_BYTES else None

    def _ranges(self, key: str, start: int, end: int) -> list[memoryview]:
        starts = list(range(start, end, CHUNK_BYTES))
        ends = [min(end, each + CHUNK_BYTES) for each in starts]
        return self._ask(
            key,
            lambda: [
                memoryview(body)
                for body in obstore.get_ranges(
                    self._client, key, starts=starts, ends=ends, coalesce=0
                )
            ],
        )

    def send(self, path: Path, key: str) -> None:
        size = path.stat().st_size
        if size <= CHUNK_BYTES:
            self.write(key, path.read_bytes())
            return
        part = max(CHUNK_BYTES, -(-size // PARTS_MAX))
        self._ask(
            key,
            lambda: obstore.put(self._client, key, path, chunk_size=part, max_concurrency=WINDOW),
        )

    def write(self, key: str, body: bytes) -> None:
        self._ask(key, lambda: obstore.put(self._client, key, body, use_multipart=False))

    def settle(self, folder: str, keys: Sequence[str]) -> None:
        """What was answered is there."""

    def list(self, key: str) -> Iterator[Listed]:
        prefix = f"{key.rstrip('/')}/" if key else ""
        found = self._ask(
            key, lambda: list(obstore.list(self._client, prefix or None, chunk_size=1000))
        )
        for page in found:
            for each in page:
                yield Listed(each["path"].removeprefix(prefix), each["size"])

    def delete(self, keys: Iterable[str]) -> None:
        every = list(keys)
        for start in range(0, len(every), 1000):
            some = every[start : start + 1000]
            self._ask(some[0], partial(obstore.delete, self._client, some))

    def clear(self, key: str) -> None:
        prefix = f"{key.rstrip('/')}/"
        self.delete([prefix + each.name for each in self.list(key)])

    def open(self, key: str) -> BinaryIO:
        size = self._ask(key, lambda: obstore.head(self._client, key)["size"])
        return io.BufferedReader(_Ranges(self, key, size), _READ_BUFFER_BYTES)

    def range(self, key: str, *, start: int, end: int) -> memoryview:
        return self._ask(
            key,
            lambda: memoryview(obstore.get_range(self._client, key, start=start, end=end)),
        )

    def _ask(self, key: str, request: Callable[[], Answer]) -> Answer:
        pause = threading.Event()
        for tries in range(1, TRIES_MAX + 1):
            try:
                return request()
            except (exceptions.BaseError, OSError, ValueError) as error:
                problem = _mapped(error, bucket=self._name, key=key)
                if not isinstance(problem, Unavailable) or tries == TRIES_MAX:
                    raise problem from error
            pause.wait(PAUSE_SECONDS * 2**tries)
        raise AssertionError("the last try returns or raises")


class _Ranges(io.RawIOBase):
    """An object as a file that can be read anywhere in it."""

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self._bucket = bucket
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        body = self._bucket.range(self._key, start=self._at, end=end)
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)


_opened: dict[tuple[Any, ...], Bucket] = {}
_opening = threading.Lock()


def open_bucket(
    url: str,
    *,
    environment: Environment,
    credentials: Credentials | None,
    patience_seconds: float,
) -> Bucket:
    """The bucket of a URL without a prefix."""
    known = (os.getpid(), url, environment, credentials, patience_seconds)
    with _opening:
        if known not in _opened:
            config = s3_config(url, environment=dict(environment), credentials=credentials)
            _opened[known] = Bucket(config.bucket, _client(config, patience_seconds))
        return _opened[known]


def _client(config: S3Config, patience_seconds: float) -> S3Store:
    endpoint = config.endpoint
    scheme = "https" if endpoint.tls else "http"
    where = f"{scheme}://{endpoint.host_header}"
    options: ClientConfig = {
        "allow_http": not endpoint.tls,
        "timeout": timedelta(seconds=_REQUEST_SECONDS_MAX),
    }
    if endpoint.ca_bundle:
        options["root_certificate"] = Path(endpoint.ca_bundle).read_bytes()
    return S3Store(
        config.bucket,
        # All that the client would else take from the environment by rules of its own.
        config={
            "endpoint": where,
            "aws_endpoint_url_s3": where,
            "region": endpoint.region,
            "virtual_hosted_style_request": not config.path_style,
        },
        client_options=options,
        retry_config={
            "max_retries": 20,
            "retry_timeout": timedelta(seconds=patience_seconds),
            "backoff": {"max_backoff": timedelta(seconds=2)},
        },
        credential_provider=Provider(config.keyring.given),
    )


class Provider:
    """What a client signs with now. Called in threads of the client's own."""

    def __init__(self, given: Credentials | None) -> None:
        self._given = given
        self._chain: Any = None
        self._clock = SystemClock()

    def __call__(self) -> S3Credential:
        if self._given is not None:
            return _credential(self._given, expires_at=None)
        if self._chain is None:
            self._chain = AwsCredentialsProvider.new_default_chain()
        found = self._chain.get_credentials().result(timeout=_REQUEST_SECONDS_MAX)
        credentials = Credentials(found.access_key_id, found.secret_access_key, found.session_token)
        # The chain renews what expires; asked again often enough, it never gives what has.
        expires = datetime.fromtimestamp(self._clock.wall() + _ASK_AGAIN_SECONDS, UTC)
        return _credential(credentials, expires_at=expires)


def _credential(credentials: Credentials, *, expires_at: datetime | None) -> S3Credential:
    return {
        "access_key_id": credentials.access_key,
        "secret_access_key": credentials.secret_key,
        "token": credentials.session_token,
        "expires_at": expires_at,
    }


def _mapped(error: Exception, *, bucket: str, key: str) -> StoreError:
    where = f"s3://{bucket}/{key}"
    said = str(error).partition("\n")[0][:300].rstrip(". ")
    if "NoSuchBucket" in str(error):
        return BucketNotFound(f"There is no bucket {bucket!r}.", key=key, hint="Make it first.")
    if _NO_PATH in said:
        # The client sends no key that a server or a proxy may take for another one.
        return Refused(f"{where!r} is not a valid key.", key=key, hint="Rename it.")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"There is no object {where}.", key=key)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Refused(
            f"Access to {where} was denied: {said}.",
            key=key,
            hint="Check the credentials and what they allow.",
        )
    status = _STATUS.search(str(error))
    if status is not None and status[1].startswith("4") and status[1] not in _AGAIN:
        return StoreError(f"{where} was refused: {said}.", key=key)
    return Unavailable(
        f"{where} could not be reached: {said}.",
        key=key,
        hint="Check that the server runs and that the endpoint is right.",
    )
