"""What one worker holds of one limit, and how it asks for more. The rules are in this package.

`grab` and `give` are answered from memory; `ask` makes one write for all who wait here. What is
about to be returned is given up here before the write that says so is sent, and what was asked for
counts only when its write has surely succeeded: so whatever becomes of a write, this worker never
uses more than the object gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.queue.access import Access
from penstock.queue.limits.state import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    Ask,
    LimitState,
    Share,
    asked,
    part,
    tokens_in_seconds,
)
from penstock.store.cell import Cell
from penstock.store.metered import labelled

ABSENT_SECONDS: Final = 30.0
RENEW_SECONDS: Final = LEASE_SECONDS / 3
IDLE_SECONDS: Final = 5.0
"""How long permits are kept that nobody uses."""
REPORT_SECONDS: Final = 1.0
"""How long starts wait to be reported, and tokens to be returned."""
RETRY_SECONDS: Final = 5.0
_WISH_SECONDS: Final = 3.0
_JOIN_SECONDS: Final = 0.02
"""How long an ask waits for others here to join it."""
_WORKERS_A_SECOND: Final = 10
_WAIT_SECONDS_MIN: Final = 0.05
_WAIT_SECONDS_MAX: Final = 30.0


class Hold:
    """One worker's part of one limit."""

    def __init__(self, access: Access, key: str, *, worker: str) -> None:
        self.key = key
        self.used = 0
        """Tasks that run here under the limit, or are about to."""
        self.pending = 0
        """Those of them that have not started, at the most."""
        self._access = access
        self._clock = access.store.clock.machine
        where = access.layout.limit(key)
        self._cell = Cell(access.store, where, LimitState, entropy=access.entropy)
        self._worker = worker
        self._state: LimitState | None = None
        self._share: Share | None = None
        """As it was written last."""
        self._permits = 0
        self._part = 0
        """Of the permits, how many may be used again."""
        self._ends_ms = 0
        self._pool = 0
        """Tokens that were taken and not used."""
        self._starts = 0
        self._started_ms = 0
        self._wishes: dict[object, tuple[int, float]] = {}
        """How many more each who was refused would have had, and when."""
        self._asking = asyncio.Lock()
        self._asks = 0
        """How many are asking or wait for their turn to ask: a lock is free between two turns."""
        self._read_at = self._written_at = self._ask_at = self._asked_at = float("-inf")
        self._used_at = self._clock.monotonic()
        self._watching: dict[object, tuple[Callable[[], None], Callable[[], None]]] = {}

    @property
    def is_known(self) -> bool:
        """Whether what the limit allows was read lately."""
        return self._clock.monotonic() - self._read_at < ABSENT_SECONDS

    @property
    def is_limited(self) -> bool:
        return self._state is not None

    @property
    def is_over(self) -> bool:
        """Whether permits are held, or were, and cannot be trusted: what runs must stop."""
        return self._permits > 0 and not self._is_trusted

    @property
    def is_idle(self) -> bool:
        """Whether it may be forgotten: nothing runs, and nothing is in the bucket."""
        # An ask that is on its way may bring permits, however long it takes.
        is_in_use = self.used or self._share or self._asks or self._wanted()
        return not (is_in_use or self.is_known)

    @property
    def _is_trusted(self) -> bool:
        return self._access.now().latest + MARGIN_SECONDS < self._ends_ms / 1000

    def _wanted(self, *, but: object = None) -> int:
        """How many more are wished for, by all but one. Who still waits has said so lately."""
        since = min(self._asked_at, self._clock.monotonic() - _WISH_SECONDS)
        self._wishes = {who: wish for who, wish in self._wishes.items() if wish[1] >= since}
        return sum(tasks for who, (tasks, _) in self._wishes.items() if who != but)

    def _wish(self, who: object, tasks: int) -> None:
        self._wishes.pop(who, None)
        if tasks:
            self._wishes[who] = tasks, self._clock.monotonic()

    def is_wished_by_others(self, who: object) -> bool:
        """Whether others here wait for the same limit: then they are next."""
        return self._wanted(but=who) > 0

    def free(self) -> int | None:
        """How many more may run now, without a request; None if there is no limit."""
        if self._state is None:
            return None
        definition = self._state.definition
        if not self._is_trusted:
            return 0
        frees = []
        if definition.concurrency is not None:
            frees.append(min(self._permits, self._part) - self.used)
        if definition.rate is not None:
            frees.append(self._pool - self.pending)
        return max(0, min(frees))

    def is_shut(self) -> bool:
        """Whether nothing is free and it is too early to ask."""
        return self.free() == 0 and self.seconds_to_ask() > 0

    def seconds_to_ask(self) -> float:
        return self._ask_at - self._clock.monotonic()

    def grab(self, who: object, tasks: int) -> int:
        """Take leave for up to so many tasks; what is missing is remembered as wished for."""
        free = self.free()
        taken = tasks if free is None else min(tasks, free)
        self.used += taken
        if taken:
            self._used_at = self._clock.monotonic()
        self._wish(who, tasks - taken)
        return taken

    def give(self, tasks: int) -> None:
        """So many run no longer."""
        self.used -= tasks
        assert self.used >= 0, "more was given back than was taken"
        self._used_at = self._clock.monotonic()

    def forget(self, who: object) -> None:
        """Somebody wishes for nothing any more, and runs nothing."""
        self._wishes.pop(who, None)
        self._watching.pop(who, None)

    def may_start(self) -> bool:
        """Whether one of those that have leave may start."""
        if self._state is None:
            return True
        definition = self._state.definition
        if definition.concurrency is not None and self.used > self._permits:
            # The share that they got leave from was lost, and won again with fewer permits.
            return False
        return self._is_trusted and (definition.rate is None or self._pool > 0)

    def begin(self) -> None:
        """One of those that have leave starts."""
        if self._state is not None and self._state.definition.rate is not None:
            self._pool -= 1
            self._starts += 1
            self._started_ms = int(self._access.now().latest * 1000) + 1

    def watch(self, who: object, calls: tuple[Callable[[], None], Callable[[], None]]) -> None:
        """Call the one when what runs must stop, and the other when there is more."""
        self._watching[who] = calls

    def end_all(self) -> None:
        """Interrupt what runs under permits that cannot be trusted."""
        for over, _ in tuple(self._watching.values()):
            over()

    async def ask_for(self, who: object, tasks: int) -> int:
        """Leave for up to so many tasks, asking the store if there is none here."""
        free = self.free()
        if free or (free is None and self.is_known):
            return self.grab(who, tasks)
        self._wish(who, tasks)
        self._asks += 1
        try:
            async with self._asking:
                # Somebody else may have asked for all of us meanwhile.
                free = self.free()
                if not self.is_known if free is None else not free and self.seconds_to_ask() <= 0:
                    await self._clock.sleep(_JOIN_SECONDS)
                    await self._write()
        finally:
            self._asks -= 1
        return self.grab(who, tasks)

    async def mind(self) -> None:
        """Do what is due: renew, return what nobody uses, report, ask for what is wished for."""
        if self._asking.locked() or not self._is_due():
            return
        async with self._asking:
            await self._write()

    async def end(self) -> None:
        """Return everything."""
        async with self._asking:
            if self._share is not None:
                self._wishes.clear()
                self._used_at = float("-inf")
                await self._write()

    def _is_due(self) -> bool:
        instant = self._clock.monotonic()
        if self._state is None:
            return self.used > 0 and not self.is_known
        is_asked = instant >= self._ask_at and self._wanted() > 0
        if self._share is None:
            return is_asked
        if instant >= self._written_at + RENEW_SECONDS or is_asked:
            return True
        written_seconds = instant - self._written_at
        is_unreported = self._share.tokens > self._pool - self._idle_tokens()
        # Idle, or above our part, which others wait for.
        is_held_in_vain = self._share.permits > self._keeps()
        return (is_unreported or is_held_in_vain) and written_seconds >= REPORT_SECONDS

    def _keeps(self) -> int:
        """How many permits to go on with: those in use, and others if they were used lately."""
        is_idle = self._clock.monotonic() - self._used_at >= IDLE_SECONDS
        kept = 0 if is_idle else min(self._permits, self._part)
        return max(self.used, kept)

    def _idle_tokens(self) -> int:
        is_idle = self._clock.monotonic() - self._used_at >= REPORT_SECONDS
        return max(0, self._pool - self.pending) if is_idle else 0

    async def _write(self) -> None:
        """One write that says what is so and asks for what is wished for."""
        keeps = min(self._keeps(), max(self._permits, self.used))
        self._permits = min(self._permits, keeps)
        self._pool -= self._idle_tokens()
        wants = self._wanted()
        self._asked_at = self._clock.monotonic()
        now = await self._access.store.now()
        ask = Ask(
            worker=self._worker,
            keeps=keeps,
            runs=self.used,
            wants=wants,
            tokens=self._pool,
            spare=max(0, self._pool - self.pending),
            starts=self._starts,
            started_ms=self._started_ms,
            incarnation=self._access.incarnation,
        )

        def change(present: LimitState | None) -> LimitState | None:
            if present is None:
                return None
            following = asked(present, ask, now)
            is_same = _is_same(present.shares.get(self._worker), following.shares.get(self._worker))
            is_young = self._clock.monotonic() - self._written_at < RENEW_SECONDS
            return present if is_same and is_young else following

        instant = self._clock.monotonic()
        with labelled("limits"):
            state = await self._cell.update(change)
        self._take_in(state, ask, instant)

    def _take_in(self, state: LimitState | None, ask: Ask, instant: float) -> None:
        """What is so after a write that succeeded."""
        before, self._share = self._share, state.shares.get(self._worker) if state else None
        self._state = state
        self._read_at = instant
        share = self._share
        is_renewed = share is not None and (before is None or share.ends_ms != before.ends_ms)
        if is_renewed or (share is None and before is not None):
            self._written_at = instant
        had = self._permits
        self._permits = share.permits if share else 0
        self._ends_ms = share.ends_ms if share else 0
        # What has started meanwhile has used what was kept.
        self._pool = max(0, (share.tokens if share else 0) - (self._starts - ask.starts))
        now = self._access.now()
        self._part = part(state, self._worker, now) if state else 0
        self._ask_at = self._clock.monotonic() + self._seconds_to_wait(state, ask)
        if state is not None and self._permits < min(had, self.used):
            self.end_all()
        elif self.free() != 0:
            for _, freed in tuple(self._watching.values()):
                freed()

    def _seconds_to_wait(self, state: LimitState | None, ask: Ask) -> float:
        """How long until it is worth asking again."""
        if state is None:
            return 0.0
        uniform = self._access.entropy.uniform
        crowd = max(1.0, len(state.shares) / _WORKERS_A_SECOND)
        wait = 0.0
        definition = state.definition
        if self._share is not None and self._share.wants:
            wait = RETRY_SECONDS * crowd * uniform(0.8, 1.2)
        if definition.rate is not None and self._pool - self.pending < ask.wants:
            # As many as a second brings, so that one write serves many starts.
            a_second = int(definition.starts_a_second * crowd)
            wanted = max(1, min(ask.wants, definition.burst, a_second))
            seconds = tokens_in_seconds(state, wanted, self._access.now()) + 0.001
            if any(name != self._worker and share.tokens for name, share in state.shares.items()):
                # What others have taken they report after a second, whatever the rate.
                seconds = max(seconds, REPORT_SECONDS / 4 * crowd)
            wait = max(wait, _WAIT_SECONDS_MIN, seconds * uniform(1.0, 1.1))
        return min(_WAIT_SECONDS_MAX, wait)


def _is_same(before: Share | None, after: Share | None) -> bool:
    """Whether a write would change nothing but the end of a share."""
    if before is None or after is None:
        return before is after
    return (
        before.permits == after.permits
        and before.wants == after.wants
        and before.tokens == after.tokens
        and before.starts == after.starts
    )
