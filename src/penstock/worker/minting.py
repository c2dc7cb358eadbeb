"""Asks the dispatcher for credentials of an attempt, and says what they do not hold.

A dispatcher that is away, that mints nothing now, or that does not know the token yet, is asked for
`MINT_SECONDS_MAX`; one that refuses is not asked again. One call of an attempt is under way at a
time, for the dispatcher mints no more.

What an attempt is granted may be more folders than one session can be for. Then it begins with
less, the first of these that fits, and always the same of them as long as it runs:

| credentials | for |
|---|---|
| all | everything that is granted |
| to write | the outputs and the scratch folder |
| scratch | the scratch folder |

`lacking` says in a sentence what is missing, and the work asks for that, some folders at a time, by
`task.credentials_for`. Nothing is kept here. Called by `handing` and `voice`, from the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.dispatcher.wire.credentials import CredentialsAnswer, CredentialsAsk
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, WorkFailed
from penstock.runtimes.base import Work
from penstock.worker.attempt import Attempt
from penstock.worker.backoff import Backoff
from penstock.worker.client import InternalClient

MINT_SECONDS_MAX: Final = 60.0
"""For how long credentials are asked for."""
WAIT_FIRST_SECONDS: Final = 1.0
WAIT_MOST_SECONDS: Final = 30.0
_UNPROVED: Final = frozenset({401, 403})
_NOT_GRANTED: Final = "token not granted"
_EXPIRED: Final = "token expired"
_TOO_MANY: Final = "too many folders"


class Minting:
    """Credentials of one attempt."""

    def __init__(
        self, attempt: Attempt, work: Work, client: InternalClient, clock: Clock, entropy: Entropy
    ) -> None:
        self._attempt = attempt
        self._work = work
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._ask: CredentialsAsk | None = None

    async def first(self) -> CredentialsAnswer:
        """Those that the work begins with: as much as fits."""
        *more, least = _asks(self._work)
        for self._ask in more:
            try:
                return await self._until_minted(self._ask)
            except DispatcherRefused as error:
                if error.kind != _TOO_MANY:
                    raise _failed(error) from error
        self._ask = least
        return await self._until_answered(least)

    async def again(self) -> CredentialsAnswer:
        """The same as those that the work began with, anew; asked for once."""
        return await self._minted(self._ask)

    async def some(self, locations: Sequence[str]) -> CredentialsAnswer:
        """Credentials for these folders, which are read or written by what the work has there."""
        return await self._until_answered(_ask_for(self._work, locations))

    def lacking(self, minted: CredentialsAnswer) -> str:
        """What the credentials that the work began with do not hold, as sentences."""
        read = _outside(_locations_read(self._work), minted.read)
        write = _outside((each.location for each in self._work.outputs.values()), minted.write)
        if not read and not write:
            return ""
        folders = "folder" if read + write == 1 else "folders"
        said = f"These credentials are not for {read + write:,} {folders} of the task"
        if self._ask is not None:
            return (
                f"{said}, for a policy of STS has no room for all of them. Ask for some of them at"
                " a time: task.credentials_for(LOCATION, ...)."
            )
        return (
            f"{said}, which its token does not grant: they are too many of one input, or not in"
            " the store. Declare the input with `read: all`, or compact its dataset."
        )

    async def _until_answered(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        try:
            return await self._until_minted(ask)
        except DispatcherRefused as error:
            raise _failed(error) from error

    async def _until_minted(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        backoff = Backoff(
            self._entropy, first_seconds=WAIT_FIRST_SECONDS, most_seconds=WAIT_MOST_SECONDS
        )
        until = self._clock.monotonic() + MINT_SECONDS_MAX
        while True:
            try:
                return await self._minted(ask)
            except DispatcherUnavailable as error:
                told = error.message
            except DispatcherRefused as error:
                if error.status not in _UNPROVED or error.kind == _NOT_GRANTED:
                    raise
                # A heartbeat may bring a token that is known, or newer.
                told = error.message
            if self._clock.monotonic() >= until:
                raise WorkFailed(
                    f"No credentials could be had for the task within {MINT_SECONDS_MAX:g} s:"
                    f" {told}"
                )
            await self._clock.sleep(backoff.next_seconds())

    async def _minted(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        async with self._attempt.minting:
            token = self._attempt.token
            try:
                return await self._client.credentials(token, ask)
            except DispatcherRefused as error:
                if error.status in _UNPROVED and error.kind not in {_NOT_GRANTED, _EXPIRED}:
                    self._attempt.doubt(token)
                raise


def _asks(work: Work) -> Iterator[CredentialsAsk | None]:
    """What an attempt asks for before it begins, until something fits."""
    yield None
    if work.scratch:
        scratch = [_folder(work.scratch)]
        yield CredentialsAsk(read=scratch)
        yield CredentialsAsk(read=scratch, write=scratch)


def _ask_for(work: Work, locations: Sequence[str]) -> CredentialsAsk:
    wanted = [_folder(each) for each in locations]
    scratch = _folder(work.scratch)
    outputs = tuple(_folder(each.location) for each in work.outputs.values())
    return CredentialsAsk(
        read=[each for each in wanted if not each.startswith(outputs)],
        write=[each for each in wanted if each.startswith((*outputs, scratch))],
    )


def _locations_read(work: Work) -> Iterator[str]:
    for given in work.inputs.values():
        if given.has_data:
            yield from (each.location for each in given.parts)


def _outside(locations: Iterable[str], folders: Sequence[str]) -> int:
    """How many of these are not in one of the folders, which are in their only spelling."""
    return sum(not _folder(each).startswith(tuple(folders)) for each in locations)


def _folder(location: str) -> str:
    return location if location.endswith("/") else f"{location}/"


def _failed(error: DispatcherRefused) -> WorkFailed:
    # Retried: a refusal may be about the dispatcher's settings, and no reason to end the task.
    return WorkFailed(f"No credentials are minted for the task: {error.message}", hint=error.hint)
