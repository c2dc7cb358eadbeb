"""A worker's part of the limits: `LimitGate` admits tasks, `LimitHold` holds permits and tokens.

The rules LIMIT-1 to LIMIT-6 are kept by `penstock.queue.limits`. There is one `LimitHold` for
each key that this worker meets; tasks without a key pass at once. A key whose limit is full is
shut until it is worth asking again, so that its packs do not block others. While something is
held, one loop renews and returns it, and another, which never waits for the store, interrupts
what runs under permits that can no longer be trusted.

`grab` and `give` are answered from memory; `ask_for` makes one write for all who wait here.
Permits to be returned are given up here before the write that says so is sent, and what was
asked for counts only when its write has surely succeeded: so whatever becomes of a write, this
worker never uses more than the object grants it. A worker that meets no key sends no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.discovery.scanner import PackCandidate
from penstock.queue.ids import PackAt
from penstock.queue.limits import (
    LEASE_SECONDS,
    MARGIN_SECONDS,
    LimitRequest,
    LimitShare,
    LimitState,
    apply_request,
    share_of,
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


class LimitHold:
    """One worker's part of one limit."""

    def __init__(self, access: QueueContext, key: str, *, worker: str) -> None:
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
        self._share: LimitShare | None = None
        """As it was written last."""
        self._permits = 0
        self._entitled = 0
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
            frees.append(min(self._permits, self._entitled) - self.used)
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

    async def refresh(self) -> None:
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
        kept = 0 if is_idle else min(self._permits, self._entitled)
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
        request = LimitRequest(
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
            following = apply_request(present, request, now)
            is_same = _is_same(present.shares.get(self._worker), following.shares.get(self._worker))
            is_young = self._clock.monotonic() - self._written_at < RENEW_SECONDS
            return present if is_same and is_young else following

        instant = self._clock.monotonic()
        with labelled("limits"):
            state = await self._cell.update(change)
        self._take_in(state, request, instant)

    def _take_in(self, state: LimitState | None, request: LimitRequest, instant: float) -> None:
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
        self._pool = max(0, (share.tokens if share else 0) - (self._starts - request.starts))
        now = self._access.now()
        self._entitled = share_of(state, self._worker, now) if state else 0
        self._ask_at = self._clock.monotonic() + self._seconds_to_wait(state, request)
        if state is not None and self._permits < min(had, self.used):
            self.end_all()
        elif self.free() != 0:
            for _, freed in tuple(self._watching.values()):
                freed()

    def _seconds_to_wait(self, state: LimitState | None, request: LimitRequest) -> float:
        """How long until it is worth asking again."""
        if state is None:
            return 0.0
        uniform = self._access.entropy.uniform
        crowd = max(1.0, len(state.shares) / _WORKERS_A_SECOND)
        wait = 0.0
        definition = state.definition
        if self._share is not None and self._share.wants:
            wait = RETRY_SECONDS * crowd * uniform(0.8, 1.2)
        if definition.rate is not None and self._pool - self.pending < request.wants:
            # As many as a second brings, so that one write serves many starts.
            a_second = int(definition.starts_a_second * crowd)
            wanted = max(1, min(request.wants, definition.burst, a_second))
            seconds = tokens_in_seconds(state, wanted, self._access.now()) + 0.001
            if any(name != self._worker and share.tokens for name, share in state.shares.items()):
                # What others have taken they report after a second, whatever the rate.
                seconds = max(seconds, REPORT_SECONDS / 4 * crowd)
            wait = max(wait, _WAIT_SECONDS_MIN, seconds * uniform(1.0, 1.1))
        return min(_WAIT_SECONDS_MAX, wait)


def _is_same(before: LimitShare | None, after: LimitShare | None) -> bool:
    """Whether a write would change nothing but the end of a share."""
    if before is None or after is None:
        return before is after
    return (
        before.permits == after.permits
        and before.wants == after.wants
        and before.tokens == after.tokens
        and before.starts == after.starts
    )


_TURN_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 2.0
_WRITE_SECONDS_MAX: Final = 15.0
_RELEASE_SECONDS: Final = 5.0
_NAME_CHARACTERS: Final = 60


class LimitGate:
    """One worker's part of all limits."""

    def __init__(self, access: QueueContext, *, name: str, concurrency: int) -> None:
        self._access = access
        self._clock = access.store.clock.machine
        self._worker = f"{name[:_NAME_CHARACTERS]}-{new_id(access.entropy, characters=12)}"
        self._concurrency = concurrency
        self._warn = LogLimiter(self._clock)
        self._holds: dict[str, LimitHold] = {}
        self._failed_at: dict[str, float] = {}
        self._busy = asyncio.Event()

    def concerns(self, sight: PackCandidate) -> bool:
        return bool(sight.limit)

    def is_shut(self, sight: PackCandidate) -> bool:
        hold = self._holds.get(sight.limit) if sight.limit else None
        return hold is not None and hold.is_shut()

    def seconds_to_open(self) -> float | None:
        waits = [hold.seconds_to_ask() for hold in self._holds.values() if hold.is_shut()]
        return min(waits, default=None)

    async def admit(self, sight: PackCandidate, tasks: int) -> LimitAdmission | None:
        hold = self._holds.get(sight.limit)
        if hold is None:
            hold = LimitHold(self._access, sight.limit, worker=self._worker)
            self._holds[sight.limit] = hold
            self._busy.set()
        # What could not start at once would only keep others from it.
        taken = await hold.ask_for(sight.at, min(tasks, self._concurrency))
        if not taken:
            return None
        return LimitAdmission(hold, sight.at, taken, concurrency=self._concurrency)

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._refresh())
            group.create_task(self._guard())

    async def _guard(self) -> None:
        """Interrupt what runs under permits that have nearly ended."""
        while True:
            await self._busy.wait()
            for hold in self._holds.values():
                if hold.is_over:
                    self._warn(f"failed to renew the limit {hold.key!r}: giving back what runs")
                    hold.end_all()
            await self._clock.sleep(_TURN_SECONDS)

    async def _refresh(self) -> None:
        """Renew, return and report."""
        while True:
            await self._busy.wait()
            async with asyncio.TaskGroup() as group:
                for hold in tuple(self._holds.values()):
                    group.create_task(self._refresh_one(hold))
            for hold in [hold for hold in self._holds.values() if hold.is_idle]:
                del self._holds[hold.key]
                self._failed_at.pop(hold.key, None)
            if not self._holds:
                self._busy.clear()
            await self._clock.sleep(_TURN_SECONDS)

    async def _refresh_one(self, hold: LimitHold) -> None:
        failed_at = self._failed_at.get(hold.key, float("-inf"))
        if self._clock.monotonic() < failed_at + _AGAIN_SECONDS:
            return
        try:
            async with asyncio.timeout(_WRITE_SECONDS_MAX):
                await hold.refresh()
            self._failed_at.pop(hold.key, None)
        except (StoreError, UnreadableObject, TimeoutError) as error:
            self._failed_at[hold.key] = self._clock.monotonic()
            self._warn(f"failed to update the limit {hold.key!r}, retrying: {error}")

    async def release(self) -> None:
        try:
            async with asyncio.timeout(_RELEASE_SECONDS), asyncio.TaskGroup() as group:
                for hold in self._holds.values():
                    group.create_task(self._end(hold))
        except TimeoutError:
            self._warn("failed to release limits in time, they will expire")

    async def _end(self, hold: LimitHold) -> None:
        try:
            await hold.end()
        except (StoreError, UnreadableObject) as error:
            self._warn(f"failed to release the limit {hold.key!r}, it will expire: {error}")


class LimitAdmission:
    """Leave to run tasks of one pack under one limit."""

    def __init__(self, hold: LimitHold, at: PackAt, tasks: int, *, concurrency: int) -> None:
        self._hold = hold
        self._at = at
        self._concurrency = concurrency
        self.tasks = tasks
        self._begun = 0
        self._given = 0
        self._pending = 0
        self._calls: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._count_pending()

    def _count_pending(self) -> None:
        """Those that have not started: who ends and who never began is told in one word."""
        pending = self.tasks + self._given - max(self._begun, self._given)
        self._hold.pending += pending - self._pending
        self._pending = pending

    def more(self, tasks: int) -> int:
        # Packs of one limit take turns, as all packs do.
        is_next = not self._hold.is_wished_by_others(self._at)
        startable = max(0, min(tasks, self._concurrency - self._hold.used))
        taken = self._hold.grab(self._at, startable) if is_next else 0
        self.tasks += taken
        self._count_pending()
        if self._calls is not None and taken:
            self._hold.watch(self._at, self._calls)
        return taken

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        # Before the first start it is clear that they never began.
        self._given += tasks if self._begun else 0
        self._hold.give(tasks)
        self._count_pending()
        if not self.tasks:
            self._hold.forget(self._at)

    def may_start(self) -> bool:
        return self._hold.may_start()

    def begin(self) -> None:
        self._begun += 1
        self._count_pending()
        self._hold.begin()

    def may_run(self) -> bool:
        return not self._hold.is_over

    def has_more(self) -> bool:
        return self._hold.free() != 0 and not self._hold.is_wished_by_others(self._at)

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        self._calls = over, freed
        self._hold.watch(self._at, self._calls)
