"""Secrets of AWS Secrets Manager, asked for in threads and remembered for a minute at most.

A secret is asked for once, however many attempts want it at a time: they share the answer, or the
failure. What was answered is remembered for `REMEMBER_SECONDS`, in memory alone, so that a busy job
costs a request a minute, and a secret that is rotated is used within a minute. Failures are not
remembered: the next attempt asks again. Whoever asked and is cancelled ends nothing for the others.

Errors of boto3 are mapped here. Its words are repeated only where they are about a connection: what
it says of an answer that it does not understand has that answer in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput, SecretUnavailable

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


class Remembered:
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


class AwsVault:
    """The secrets of one region of AWS."""

    def __init__(self, aws: Aws, *, clock: Clock | None = None) -> None:
        self._aws = aws
        self._lock = threading.Lock()
        self._made: Any = None
        self._remembered = Remembered(self._ask, clock=clock or SystemClock())

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
