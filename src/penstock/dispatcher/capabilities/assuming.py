"""STS: sessions of the role of tasks, each under a policy of its own.

One call, `sts:AssumeRole`, for the shortest time that STS knows. Its client blocks, so it is called
in threads of a pool of their own: `at_once_max` at a time, and no more than `waiting_max` wait for
one. Who asks is answered within `seconds_max`, however STS behaves; a thread that goes on after
that is done within its client's own bounds, and keeps its place until then. One session of a name
is asked for at a time, so no attempt ever has more than one of these places.

What would be wrong with every request like it is `CredentialsRefused`: a policy that STS does not
understand, or that is too large. Everything else is `CredentialsUnavailable`: ask again. That is no
answer, too many calls, and all that is about the dispatcher and not about who asks: its keys, its
clock, its region, whether it may assume the role. What people have to put right is told loudly in
the log, once until it is something else. STS's own words are not passed on, for they can have the
dispatcher's session token in them; its error code is.

Nothing is kept here, so a crash leaves nothing but a session that nobody knows the keys of.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.errors import CredentialsRefused, CredentialsUnavailable, InvalidInput

_log = logging.getLogger(__name__)

SESSION_SECONDS: Final = 900
"""The shortest that STS knows."""
_CONNECT_SECONDS_MAX: Final = 2.0
_READ_SECONDS_MAX: Final = 3.0
_TRIES_MAX: Final = 2
_PASSING: Final = frozenset(
    {
        *("Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"),
        *("RequestLimitExceeded", "RequestThrottled", "SlowDown", "ServiceUnavailable"),
        *("InternalFailure", "InternalError", "IDPCommunicationError", "STSNotReady"),
    }
)
"""What is over soon by itself."""
_FINAL: Final = frozenset(
    {
        *("MalformedPolicyDocument", "MalformedPolicyDocumentException"),
        *("ValidationError", "ValidationException", "InvalidParameterValue"),
    }
)
_TOO_LARGE: Final = frozenset({"PackedPolicyTooLarge", "PackedPolicyTooLargeException"})
_NOT_TRUSTED: Final = (
    "Check the dispatcher's own credentials and clock, and the role's ARN and trust policy:"
    " docs/iam.md has one that serves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Credentials that STS has made. No repr has the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is asked of STS at a time, and for how long an answer is waited for."""

    at_once_max: int = 8
    waiting_max: int = 32
    seconds_max: float = 8.0


class Assuming(Protocol):
    """Whoever makes sessions of a role."""

    async def assume(self, *, role: str, name: str, policy: str) -> Session:
        """A session of this name that is allowed what the role and the policy both allow."""
        ...

    def close(self) -> None:
        """Wait for nothing any more."""
        ...


class StsSessions:
    """Asks STS."""

    def __init__(self, aws: Aws, *, bounds: Bounds | None = None, client: Any = None) -> None:
        self._aws = aws
        self._bounds = bounds or Bounds()
        self._client = client
        self._connecting = threading.Lock()
        self._counting = threading.Lock()
        self._count = 0
        self._names: set[str] = set()
        """The sessions that are being asked for."""
        self._told = ""
        """What the log was told last; empty since STS has answered well."""
        self._pool = ThreadPoolExecutor(self._bounds.at_once_max, thread_name_prefix="penstock-sts")

    async def assume(self, *, role: str, name: str, policy: str) -> Session:
        bounds = self._bounds
        with self._counting:
            if name in self._names:
                raise CredentialsUnavailable(
                    "Other credentials of this attempt are being made.",
                    hint="Ask for one after the other.",
                )
            if self._count >= bounds.at_once_max + bounds.waiting_max:
                raise CredentialsUnavailable(
                    "The dispatcher asks STS for as many credentials at a time as it may."
                )
            self._count += 1
            self._names.add(name)
        asked = self._pool.submit(self._ask, role=role, name=name, policy=policy)
        asked.add_done_callback(partial(self._done, name))
        try:
            async with asyncio.timeout(bounds.seconds_max):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise CredentialsUnavailable(
                f"STS did not answer within {bounds.seconds_max:g} s."
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, name: str, _: Future[Session]) -> None:
        """In the thread that has done it, or where it was cancelled before it began."""
        with self._counting:
            self._count -= 1
            self._names.discard(name)

    def _ask(self, *, role: str, name: str, policy: str) -> Session:
        try:
            answer = self._connected().assume_role(
                RoleArn=role,
                RoleSessionName=name,
                Policy=policy,
                DurationSeconds=SESSION_SECONDS,
            )
        except (CredentialsRefused, CredentialsUnavailable):
            raise
        except Exception as error:
            found = _judged(error, role)
            if found is None:
                raise
            self._tell(found)
            # Not `from error`: its words may be shown with it.
            raise found from None
        self._told = ""
        made = answer["Credentials"]
        return Session(
            access_key=made["AccessKeyId"],
            secret_key=made["SecretAccessKey"],
            session_token=made["SessionToken"],
            expires_at=made["Expiration"],
        )

    def _tell(self, found: CredentialsRefused | CredentialsUnavailable) -> None:
        """Tell the log of what somebody has to put right: no task gets credentials meanwhile."""
        if isinstance(found, CredentialsUnavailable) and found.hint and found.message != self._told:
            self._told = found.message
            _log.error("no task gets credentials: %s %s", found.message, found.hint)

    def _connected(self) -> Any:
        """The client, made when it is first needed; threads may share it."""
        with self._connecting:
            if self._client is None:
                try:
                    self._client = aws_client(
                        "sts",
                        aws=self._aws,
                        connect_seconds_max=_CONNECT_SECONDS_MAX,
                        read_seconds_max=_READ_SECONDS_MAX,
                        tries_max=_TRIES_MAX,
                        connections_max=self._bounds.at_once_max,
                    )
                except InvalidInput as error:
                    found = CredentialsUnavailable(error.message, hint=error.hint)
                    self._tell(found)
                    raise found from None
            return self._client


def _judged(error: Exception, role: str) -> CredentialsRefused | CredentialsUnavailable | None:
    """What an error of the client is to who asks; None for one that is a mistake of ours."""
    code = error_code(error)
    if code in _TOO_LARGE:
        return CredentialsRefused(
            "STS cannot pack the policy of so many folders.",
            kind="too many folders",
            hint="Ask for fewer of them at a time with `read` and `write`.",
        )
    if code:
        if code in _FINAL:
            return CredentialsRefused(f"STS makes no session of {role}: {code}.")
        if code in _PASSING or _status(error) >= 500 or _status(error) == 429:
            return CredentialsUnavailable(f"STS cannot serve now ({code}).")
        return CredentialsUnavailable(
            f"STS makes no session of {role} now: {code}.", hint=_NOT_TRUSTED
        )
    kinds = importlib.import_module("botocore.exceptions")
    if isinstance(error, kinds.ParamValidationError):
        return CredentialsRefused(
            f"STS cannot have been meant with the role {role!r}.", hint=_NOT_TRUSTED
        )
    if isinstance(error, kinds.NoCredentialsError | kinds.PartialCredentialsError):
        return CredentialsUnavailable(
            "The dispatcher has no credentials of its own to ask STS with.",
            hint="Give it a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if isinstance(error, kinds.BotoCoreError | OSError):
        return CredentialsUnavailable(f"STS does not answer ({type(error).__name__}).")
    return None


def _status(error: Exception) -> int:
    answer = getattr(error, "response", None)
    said = answer.get("ResponseMetadata") if isinstance(answer, dict) else None
    status = said.get("HTTPStatusCode") if isinstance(said, dict) else None
    return status if isinstance(status, int) else 0
