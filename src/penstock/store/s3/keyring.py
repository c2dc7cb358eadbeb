"""Where credentials come from: given, or found by the chain that every AWS tool follows.

The chain (environment, profile, web identity, container, instance) is that of Amazon's runtime,
awscrt, which also renews what expires. It is asked again every minute, which costs nothing while
its answer is good.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from awscrt.auth import AwsCredentialsProvider
from awscrt.exceptions import AwsCrtError

from penstock.kernel.clock import Clock
from penstock.store.s3.connection import NotSent
from penstock.store.s3.signing import Credentials

ASK_AGAIN_SECONDS: Final = 60.0
_CRT_ERRORS: Final = (AwsCrtError, OSError, ValueError, RuntimeError)


class NoCredentials(NotSent):
    """There is nothing to sign with."""


class Keyring:
    """The credentials to sign with now."""

    def __init__(
        self,
        given: Credentials | AwsCredentialsProvider | None,
        *,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._ask_again_seconds = ask_again_seconds
        self._given = given if isinstance(given, Credentials) else None
        self._chain = given if not isinstance(given, Credentials) else None
        self._found: Credentials | None = None
        self._found_at = 0.0

    @property
    def given(self) -> Credentials | None:
        """What it was given; None if it asks the chain."""
        return self._given

    async def credentials(self, clock: Clock, *, seconds: float) -> Credentials:
        """The credentials, looked for no longer than this."""
        if self._given is not None:
            return self._given
        if self._found is None or clock.monotonic() - self._found_at > self._ask_again_seconds:
            self._found = await self._look(seconds)
            self._found_at = clock.monotonic()
        return self._found

    async def _look(self, seconds: float) -> Credentials:
        chain = self._chain or AwsCredentialsProvider.new_default_chain()
        self._chain = chain
        try:
            async with asyncio.timeout(seconds):
                # The runtime cannot bear that its future is cancelled; ours may be.
                found: Any = await asyncio.shield(asyncio.wrap_future(chain.get_credentials()))
        except TimeoutError as error:
            raise NotSent("the credentials were not found in time") from error
        except _CRT_ERRORS as error:
            # What could be signed a moment ago can be signed again: a renewal failed in passing.
            said = str(getattr(error, "message", error)).rstrip(". ")
            if self._found is not None:
                raise NotSent(f"no new credentials: {said}") from error
            raise NoCredentials(said) from error
        return Credentials(found.access_key_id, found.secret_access_key, found.session_token)
