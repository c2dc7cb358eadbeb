"""What running work says to the dispatcher: how far it is, events, and what it needs.

Progress goes with the next heartbeat. Events are sent until they are heard, however long that
takes: an event has the source's own id, so the same one twice is one. Only a refusal of the attempt
ends this, and the attempt with it. A token that has expired, because no heartbeat was answered for
a while, is no such refusal: the next heartbeat brings another. Credentials for some of the work's
folders are asked for as `worker.minting` says. Called by runtimes, from the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.dispatcher.wire.events import EventAsk, EventResult, TaskEventsAsk
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, WorkFailed
from penstock.runtimes.base import News, Work, progress_fault
from penstock.runtimes.handed import TaskCredentials
from penstock.worker.attempt import Attempt, Interruption
from penstock.worker.backoff import Backoff
from penstock.worker.client import InternalClient
from penstock.worker.minting import Minting

_log = logging.getLogger(__name__)

EVENTS_MAX: Final = 1000
"""How many events one call may have."""
_OVER: Final = frozenset({404, 409})
_UNPROVED: Final = frozenset({401, 403})
_EXPIRED: Final = "token expired"
_UNPROVED_MAX: Final = 20
"""How often events are refused for their token before the work is told; about two minutes."""
_ASKS: Final = msgspec.json.Decoder(TaskEventsAsk)


class AttemptVoice:
    """The voice of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        work: Work,
        client: InternalClient,
        *,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._attempt = attempt
        self._work = work
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._is_warned = False
        """Whether the log says already that this attempt reports what cannot be passed on."""

    def progress(self, said: Mapping[str, Any]) -> None:
        """Remember it for the next heartbeat."""
        try:
            why = progress_fault(said)
        except TypeError as error:
            why = f"{error}."
        if not why:
            # A copy: whoever has said it may go on to change it.
            encoded = msgspec.json.encode(said)
            self._attempt.progress = msgspec.json.decode(encoded, type=dict[str, Any])
        elif not self._is_warned:
            self._is_warned = True
            _log.warning("%s: its progress is not passed on: %s", self._attempt, why)

    def timed(self, *, is_running: bool) -> None:
        """Have the time limit of the attempt begin anew, or wait."""
        self._attempt.time(is_running=is_running)

    async def emit(self, news: Sequence[News]) -> str:
        """Send events; returns why the source is to pause, or nothing."""
        paused = ""
        for first in range(0, len(news), EVENTS_MAX):
            ask = self._ask(news[first : first + EVENTS_MAX])
            for result in await self._until_heard(ask):
                if result.outcome == "refused":
                    raise WorkFailed(f"An event was refused: {result.why or 'no reason was given'}")
                paused = result.paused or paused
        return paused

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        """Credentials for these folders."""
        minting = Minting(self._attempt, self._work, self._client, self._clock, self._entropy)
        minted = await minting.some(locations)
        return TaskCredentials(
            access_key=minted.access_key,
            secret_key=minted.secret_key,
            session_token=minted.session_token,
            expires_at=minted.expires_at,
            region=minted.region,
            endpoint=minted.endpoint,
        )

    def _ask(self, news: Sequence[News]) -> TaskEventsAsk:
        ask = TaskEventsAsk(
            task_id=self._work.task_id,
            attempt=self._work.attempt,
            lease_token=self._attempt.assignment.lease_token,
            events=[self._event(each) for each in news],
        )
        try:
            return _ASKS.decode(msgspec.json.encode(ask))
        except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError) as error:
            raise WorkFailed(f"An event cannot be sent: {error}.") from error

    def _event(self, news: News) -> EventAsk:
        place = self._work.outputs.get(news.output)
        if place is None:
            known = ", ".join(sorted(self._work.outputs)) or "none"
            raise WorkFailed(
                f"There is an event of {news.output!r}, which is no output of job {self._work.job};"
                f" its outputs: {known}.",
                is_retried=False,
            )
        return EventAsk(
            event_id=news.event_id,
            dataset=place.dataset,
            cursor=news.cursor,
            partition_key=news.partition_key,
            start=news.start,
            end=news.end,
            payload=dict(news.payload) if news.payload else None,
        )

    async def _until_heard(self, ask: TaskEventsAsk) -> Sequence[EventResult]:
        backoff = Backoff(self._entropy)
        unproved = 0
        while not self._attempt.is_over:
            token = self._attempt.token
            try:
                return (await self._client.task_events(ask, token=token)).results
            except DispatcherUnavailable as error:
                if not backoff.failures:
                    _log.warning("%s: its events wait: %s", self._attempt, error)
            except DispatcherRefused as error:
                if error.status in _OVER:
                    self._attempt.interrupt(Interruption.LOST)
                unproved += error.status in _UNPROVED
                if error.status not in _UNPROVED or unproved > _UNPROVED_MAX:
                    raise WorkFailed(f"Its events were refused: {error.message}") from error
                if error.kind != _EXPIRED:
                    self._attempt.doubt(token)
            await self._clock.sleep(backoff.next_seconds())
        raise WorkFailed("The attempt is over; its events are not sent.")
