"""Resolves secrets: from the references that a job names to their values, just before its work.

| reference | where this worker looks | what is allowed |
|---|---|---|
| `env:NAME` | its environment | not what begins with `PENSTOCK_` or `AWS_` |
| `file:NAME` | a file directly in `secrets_folder` | links may not lead out of that folder |
| `aws:ID`, `aws:ID#field` | AWS Secrets Manager | what begins with `secrets_prefix` |

The worker judges references itself, whatever the dispatcher has let pass: what a job may name is
the business of whoever runs the worker. A value is a text of 1 to 65,536 bytes of UTF-8; ends of
lines at the end of a file are not part of it. Of a field of a JSON document that is no text, its
JSON is the value.

A value goes into the work's `secrets` and, so that it can be redacted from failures, into the
`TaskAttempt`; both end with the attempt, and neither shows it. Nothing is written, so a crash
leaves nothing. A secret that is not available fails the attempt with one sentence: the job, the
secret's name, and where it was looked for, never a value. It is retried, for another worker or a
later time may have it, but not if the reference is wrong or forbidden. Nothing takes longer than
`LOOK_SECONDS_MAX`.

AWS Secrets Manager is asked in threads, once however many attempts want a secret at a time:
they share the answer, or the failure. Answers are cached for `REMEMBER_SECONDS`, in memory
alone, so a busy job costs a request a minute, and a rotated secret is used within a minute.
Failures are not cached. Whoever asked and is cancelled ends nothing for the others. Errors of
boto3 are mapped here; its message is repeated only where it is about a connection, for others
may have the answer in them.

Called by `executor`, from the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.dispatcher.dag.secrets import (
    SECRETS_MAX,
    SecretKind,
    SecretReference,
    secret_name,
    secret_reference,
)
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput, SecretUnavailable, WorkFailed
from penstock.kernel.text import shown

REMEMBER_SECONDS: Final = 60.0
REMEMBERED_MAX: Final = 1000
ASK_SECONDS_MAX: Final = 10.0
_READ_SECONDS_MAX: Final = 3.0
_WHERE: Final = "AWS Secrets Manager"
_SHOWN_MAX: Final = 300
_ABOUT_CONNECTIONS: Final = frozenset(
    {
        *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "SSLError"),
        *("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "ProxyConnectionError"),
    }
)


@dataclass(frozen=True, slots=True)
class _Kept:
    text: str = field(repr=False)
    until: float


class SecretCache:
    """Texts that are asked for by name, once at a time, and remembered for a while."""

    def __init__(self, ask: Callable[[str], Awaitable[str]], *, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._asking: dict[str, asyncio.Task[str]] = {}

    async def text(self, name: str) -> str:
        """The text of this name; whatever `ask` raises if it cannot be had."""
        kept = self._kept.get(name)
        if kept is not None and self._clock.monotonic() < kept.until:
            return kept.text
        asking = self._asking.get(name)
        if asking is None:
            # Not in a group: it is everybody's who waits, and outlives the one who began it.
            asking = asyncio.get_running_loop().create_task(self._answer(name))
            self._asking[name] = asking
            asking.add_done_callback(lambda ended: self._ended(name, ended))
        return await asyncio.shield(asking)

    async def _answer(self, name: str) -> str:
        text = await self._ask(name)
        if len(self._kept) >= REMEMBERED_MAX:
            self._kept.clear()
        kept = _Kept(text, self._clock.monotonic() + REMEMBER_SECONDS)
        self._kept[name] = kept
        asyncio.get_running_loop().call_later(REMEMBER_SECONDS, self._forget, name, kept)
        return text

    def _forget(self, name: str, kept: _Kept) -> None:
        if self._kept.get(name) is kept:
            del self._kept[name]

    def _ended(self, name: str, ended: asyncio.Task[str]) -> None:
        self._asking.pop(name, None)
        if not ended.cancelled():
            # Seen, also if nobody waits any more.
            ended.exception()


class AwsSecretStore:
    """The secrets of one region of AWS."""

    def __init__(self, aws: Aws, *, clock: Clock | None = None) -> None:
        self._aws = aws
        self._lock = threading.Lock()
        self._made: Any = None
        self._remembered = SecretCache(self._ask, clock=clock or SystemClock())

    async def text(self, name: str) -> str:
        """The text of a secret, at most a minute old."""
        return await self._remembered.text(name)

    async def _ask(self, name: str) -> str:
        try:
            async with asyncio.timeout(ASK_SECONDS_MAX):
                return await asyncio.to_thread(self._asked, name)
        except TimeoutError:
            why = f"cannot be had now: {_WHERE} did not answer within {ASK_SECONDS_MAX:g} s"
            raise SecretUnavailable(why) from None

    def _asked(self, name: str) -> str:
        """Ask. Blocks, within the bounds of the client."""
        try:
            client = self._client()
            answer = client.get_secret_value(SecretId=name)
        except InvalidInput as error:
            raise SecretUnavailable(_unasked(error)) from None
        except Exception as error:  # noqa: BLE001 - boto3 has no end of errors
            raise SecretUnavailable(self._why(name, error)) from None
        text = answer.get("SecretString")
        if not isinstance(text, str):
            raise SecretUnavailable(
                f"cannot be used: {name} in {_WHERE} is binary, and a secret is a text"
            )
        return text

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = aws_client(
                    "secretsmanager", aws=self._aws, read_seconds_max=_READ_SECONDS_MAX
                )
            return self._made

    def _why(self, name: str, error: Exception) -> str:
        region = self._made.meta.region_name if self._made is not None else "no region"
        code, kind = error_code(error), type(error).__name__
        match code:
            case "ResourceNotFoundException":
                return f"is not there: {_WHERE} has no secret {name} in {region}; make it"
            case "AccessDeniedException":
                return (
                    f"cannot be read: {_WHERE} in {region} does not let this worker have {name};"
                    " its role needs secretsmanager:GetSecretValue for it"
                )
            case "":
                said = f": {error}"[:_SHOWN_MAX] if kind in _ABOUT_CONNECTIONS else ""
                return f"cannot be had now: {_WHERE} did not answer ({kind}{said.rstrip('.')})"
        return f"cannot be had now: {_WHERE} in {region} answered {code}"


def _unasked(error: InvalidInput) -> str:
    """Why there is no client."""
    if type(error.__cause__).__name__ == "NoRegionError":
        return f"cannot be had: this worker knows no region for {_WHERE}; set AWS_REGION there"
    return f"cannot be had: this worker cannot ask {_WHERE}: {error.message.rstrip('.')}"


_log = logging.getLogger(__name__)

VALUE_BYTES_MAX: Final = 65_536
"""As of AWS Secrets Manager."""
_LINE_END_BYTES_MAX: Final = 64
LOOK_SECONDS_MAX: Final = 15.0
"""How long it may take to find all secrets of an attempt."""


class SecretStore(Protocol):
    """Where secrets are kept outside of this machine."""

    async def text(self, name: str) -> str:
        """The text of a secret; `SecretUnavailable` if it cannot be had."""
        ...


class SecretResolver:
    """Finds the secrets of attempts."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        folder: Path,
        prefix: str,
        vault: SecretStore | None,
        who: str = "worker",
    ) -> None:
        """`folder` has the files that jobs may name; `prefix` begins what they may of the vault.
        `who` is what this process calls itself where it lacks something."""
        self._environment = environment
        self._folder = folder
        self._prefix = prefix
        self._vault = vault
        self._who = who
        self._warned: set[Path] = set()

    async def text(self, reference: str) -> str:
        """The value at one place; `SecretUnavailable` if it cannot be had."""
        try:
            place = secret_reference(reference)
        except ValueError as error:
            raise SecretUnavailable(str(error), is_retried=False) from None
        return await self._value(place)

    async def values(self, references: Mapping[Any, Any], *, job: str) -> Mapping[str, str]:
        """The values of a job's secrets, by name; `WorkFailed` if one cannot be had."""
        if len(references) > SECRETS_MAX:
            raise WorkFailed(
                f"The job {job} has {len(references)} secrets; {SECRETS_MAX} are allowed.",
                is_retried=False,
            )
        places = {str(name): _place(name, text, job=job) for name, text in references.items()}
        # All at once, so that a slow one is waited for once.
        found = await asyncio.gather(
            *(self._value(place) for place in places.values()), return_exceptions=True
        )
        values: dict[str, str] = {}
        for (name, place), each in zip(places.items(), found, strict=True):
            match each:
                case str():
                    values[name] = each
                case SecretUnavailable():
                    raise WorkFailed(
                        f"The secret {name} of job {job} ({place}) {each.message}.",
                        is_retried=each.is_retried,
                    ) from None
                case _:
                    raise each
        return values

    async def _value(self, place: SecretReference) -> str:
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                return _checked(await self._text(place))
        except TimeoutError:
            why = f"cannot be had now: it was not found within {LOOK_SECONDS_MAX:g} s"
            raise SecretUnavailable(why) from None

    async def _text(self, place: SecretReference) -> str:
        match place.kind:
            case SecretKind.ENV:
                return self._variable(place.name)
            case SecretKind.FILE:
                return await asyncio.to_thread(self._file, place.name)
            case SecretKind.AWS:
                return await self._kept(place)

    def _variable(self, name: str) -> str:
        value = self._environment.get(name)
        if value is None:
            raise SecretUnavailable(
                f"is not there: this {self._who} has no variable {name} in its environment; set it"
                f" where the {self._who} is started"
            )
        return value

    def _file(self, name: str) -> str:
        """What a file of the folder says. Blocks."""
        path = self._folder / name
        try:
            real, folder = path.resolve(strict=True), self._folder.resolve(strict=True)
            if not real.is_relative_to(folder):
                raise SecretUnavailable(
                    f"is not allowed: {path} is a link that leads out of the folder of secrets",
                    is_retried=False,
                )
            # Without waiting: a named pipe would keep this thread.
            with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise SecretUnavailable(f"cannot be read: {path} is not a file")
                self._warn(path, mode=mode, around=folder.stat().st_mode)
                said = file.read(VALUE_BYTES_MAX + _LINE_END_BYTES_MAX + 1).rstrip(b"\r\n")
                return _sized(said).decode()
        except FileNotFoundError:
            why = f"is not there: this {self._who} has no file {path}; put it there"
            raise SecretUnavailable(why) from None
        except UnicodeDecodeError:
            raise SecretUnavailable(f"cannot be used: {path} is not UTF-8") from None
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise SecretUnavailable(f"cannot be read: {path}: {why}") from None

    def _warn(self, path: Path, *, mode: int, around: int) -> None:
        if mode & stat.S_IROTH and around & stat.S_IXOTH and path not in self._warned:
            self._warned.add(path)
            _log.warning("everybody on this machine can read a secret: chmod 600 %s", path)

    async def _kept(self, place: SecretReference) -> str:
        if not place.name.startswith(self._prefix):
            raise SecretUnavailable(
                f"is not allowed: of AWS Secrets Manager this {self._who} gives jobs what begins"
                f" with {self._prefix!r} (secrets_prefix)",
                is_retried=False,
            )
        if self._vault is None:
            raise SecretUnavailable(f"is not there: this {self._who} uses no AWS Secrets Manager")
        text = await self._vault.text(place.name)
        return _field(text, place.field) if place.field else text


def _place(name: object, text: object, *, job: str) -> SecretReference:
    """A reference, read as strictly as when the DAG was applied; it is not repeated if wrong."""
    try:
        if isinstance(name, str) and isinstance(text, str):
            secret_name(name)
            return secret_reference(text)
        why = "is not a text"
    except ValueError as error:
        why = str(error)
    raise WorkFailed(f"The secret {shown(str(name))} of job {job} {why}.", is_retried=False)


def _field(text: str, name: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise SecretUnavailable(f"is not there: what is kept is no JSON object with a field {name}")
    value = document.get(name)
    if value is None:
        raise SecretUnavailable(f"is not there: what is kept has no field {name}")
    return value if isinstance(value, str) else json.dumps(value)


def _checked(value: str) -> str:
    try:
        _sized(value.encode())
    except UnicodeEncodeError:
        raise SecretUnavailable("cannot be used: it is not UTF-8") from None
    return value


def _sized(value: bytes) -> bytes:
    if not value:
        raise SecretUnavailable("cannot be used: it is empty")
    if len(value) > VALUE_BYTES_MAX:
        raise SecretUnavailable(
            f"cannot be used: it has more than {VALUE_BYTES_MAX:,} bytes", is_retried=False
        )
    return value
