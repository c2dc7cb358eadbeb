"""Limits: how many tasks of a key run at a time, or start in a time, in the whole fleet.

    await queue.limits.set("api", concurrency=5)
    await queue.limits.set("mail", rate=100, per_seconds=60, burst=10)

A task falls under the limit whose key was given at its submit. One cell a limit,
`limits/{key}.json`, holds its definition, which users write, and a share for every worker that
holds or waits for some of it, which that worker writes. A key without an object is unlimited.
Here are the documents, their transitions (pure) and the users' side; the worker's side is
`penstock.queue.execution.limit_gate`.

**Concurrency.** A worker holds permits under a lease of `LEASE_SECONDS` (60 s), renewed at a
third. Three rules keep the tasks that run at or below the limit at every moment of the store's
time:

- Only its worker changes a share. Others remove it, and only when it has surely ended
  (`earliest >= ends`), or its process has, with all its children, by the lock that proves it
  (`penstock.queue.incarnation`); by no other sign (LIMIT-1).
- A share grows only if all shares together then stay within the limit. It may always shrink or
  be renewed as it is. So a limit that is lowered while it is held gives nothing until enough was
  returned (LIMIT-2).
- A worker runs at most as many tasks as its share has permits, and none at `ends` (LIMIT-3): it
  interrupts them `MARGIN_SECONDS` (10 s) before, if it could not renew, and starts none from then
  on. What has leave to start, but not yet started when a share came back smaller, does not start.
  A handler that does not heed its interruption keeps its permit for as long as its worker renews
  it. When the worker has stopped or is cut off, the share ends by itself, within `LEASE_SECONDS`
  of its last write: a handler that ignores its interruption for longer exceeds the limit.

A write of unknown outcome counts as the worse of the two: the worker goes on with the fewer
permits and the earlier end. Shares are written as absolute values, so the next write that
succeeds is the truth, whatever became of the one before.

Fairness: a share also says how many more its worker would take. While the shares together want
more than there is, each gets its max-min fair part and holders return the surplus as their tasks
end. If there are more workers than permits, the permits rotate: a worker that has held for
`TURN_SECONDS` (20 s) yields to those that have waited longest. So every waiting worker gets a
permit after at most a turn, a renewal and the running tasks, for each `limit` workers before it.

**Rate.** A bucket of `burst` tokens that fills by `rate` a second; a start takes one. Taking and
starting are two moments, and the promise is about starts: at most `burst + rate * t` in any t
seconds of the store's time. So a token that was taken counts as not yet back until its worker
reports when it was used:

- `full_ms` is the time at which the bucket would be full again if every start that was reported
  was all there was. A report of k starts, the last of them surely before l, moves it to
  max(full_ms, l) + k / rate.
- A share's `tokens` are those that were taken and not reported. Tokens may be taken while
  (full_ms
  - now) * rate, the tokens of all shares and the new ones are together at most `burst`, by the
  earliest that now may be.
- A token is used before its share ends, by the latest that now may be (LIMIT-4).
- A share that has surely ended leaves its tokens as if they had been used at its end (LIMIT-5).
- A report is the number of all starts of this worker under the share, so that to report twice
  is to report once (LIMIT-6).

Why that holds: let D be the starts so far less what has flowed in since, but never less than
zero: the promise is that D never exceeds `burst`. For the reported starts alone D is at most
(full_ms - now) * rate, in whatever order the reports come, since each is put at or after its
true moment. Every other start adds at most one, and is among the tokens of a share. So D and
what may still start together are at most `burst` when tokens are taken, and a start moves one
from the second to the first.

A definition may change at any time: what is held stays held, what was used stays used. Workers
read it with their next write, within 20 s; a limit where there was none within `ABSENT_SECONDS`
(30 s), and what ran before that counts from then on.

**What a crash leaves.** Before a write: nothing. After one: a share that nobody uses, which
ends within `LEASE_SECONDS`; until then its permits and tokens are missing. A process that is
only slow stops by itself (LIMIT-3, LIMIT-4) before others count on it.

**Cost.** A worker keeps permits that it uses again, so a steady load writes once every 20 s per
worker and key, however many tasks run. To begin and to end are a PUT each, to wait is a GET
every 5 s and a PUT every 20 s. With a rate, a worker takes tokens about once a second at most,
the more at once the higher the rate, and reports in the same write: up to 86,400 PUTs a day
($0.43) for a worker and key that is busy all the time. Idle workers and unused keys cost
nothing. One object takes about 15 swaps a second on S3, for the whole fleet: the more workers,
the more rarely each asks. For users, `set` is a GET and a PUT, `get` a GET, `list` a LIST and a
GET for each limit, at most `LIMITS_MAX`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Stamped
from penstock.kernel.errors import InvalidInput, NotFound, UnreadableObject, VersionConflict
from penstock.queue.context import QueueContext
from penstock.queue.ids import check_limit
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.store.base import pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval

CONCURRENCY_MAX = 1_000_000
SECONDS_MAX = 366 * 86_400.0


class LimitDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tasks may run at a time, or start in a time, or both. None is no such limit."""

    concurrency: int | None = None
    rate: float | None = None
    """Starts in `per_seconds`."""
    per_seconds: float = 1.0
    burst: int = 0
    """How many may start at once; 0 where there is no rate."""

    @property
    def starts_a_second(self) -> float:
        """The rate by the second. Only for one that has a rate."""
        assert self.rate is not None, "this limit has no rate"
        return self.rate / self.per_seconds


def limit_definition(
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    per_seconds: float = 1.0,
    burst: int | None = None,
) -> LimitDefinition:
    """A definition, or `InvalidInput`. Where no burst is given, it is the rate, and at least 1."""
    if concurrency is None and rate is None:
        raise InvalidInput(
            "A limit needs a concurrency, a rate, or both.",
            hint="Write concurrency=5, or rate=10 with per_seconds=1.",
        )
    if concurrency is not None:
        _check_whole("concurrency", concurrency)
    if rate is None:
        if burst is not None:
            raise InvalidInput("A burst belongs to a rate.", hint="Give a rate, or leave it out.")
        return LimitDefinition(concurrency=concurrency)
    _check_length("rate", rate, most=float(CONCURRENCY_MAX))
    _check_length("per_seconds", per_seconds, most=SECONDS_MAX)
    if burst is not None:
        _check_whole("burst", burst)
    if not 1 / SECONDS_MAX <= rate / per_seconds <= CONCURRENCY_MAX:
        raise InvalidInput(f"A rate of {rate:g} in {per_seconds:g} s is out of range.")
    return LimitDefinition(
        concurrency=concurrency,
        rate=float(rate),
        per_seconds=float(per_seconds),
        burst=max(1, int(rate)) if burst is None else burst,
    )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= CONCURRENCY_MAX:
        raise InvalidInput(
            f"The {name} of a limit must be a whole number from 1 to {CONCURRENCY_MAX:,},"
            f" not {value!r}."
        )
    if value == 0:
        raise _zero(name)


def _check_length(name: str, value: object, *, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(str(value)) if is_number else math.nan
    if not 0 <= number <= most:
        raise InvalidInput(
            f"The {name} of a limit must be a positive number up to {most:,.0f}, not {value!r}."
        )
    if value == 0:
        raise _zero(name)


def _zero(name: str) -> InvalidInput:
    return InvalidInput(
        f"A limit with a {name} of zero would let nothing run.",
        hint="To let nothing run, pause: 'penstock queue pause', of the whole queue or a --type.",
    )


LEASE_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 10.0
TURN_SECONDS: Final = 20.0


class LimitShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker holds of a limit, and what it waits for."""

    ends_ms: int
    permits: int = 0
    wants: int = 0
    """How many permits it would take besides."""
    since_ms: int = 0
    """Since when it holds permits, or waits for the first."""
    tokens: int = 0
    """Taken, and not known to be used."""
    starts: int = 0
    """How many starts it has reported, ever."""
    incarnation: str = ""
    """Its process, of which a lock tells when it has ended (`penstock.queue.incarnation`)."""

    @property
    def demand(self) -> int:
        return self.permits + self.wants


class LimitState(Stamped, frozen=True, kw_only=True):
    """The object: what the limit allows, and the share of each worker that has one."""

    kind: ClassVar[str] = "limit"

    definition: LimitDefinition
    full_ms: float = 0.0
    """When the bucket is full again, by the starts that were reported."""
    shares: dict[str, LimitShare] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRequest:
    """What a worker says of itself, and what it would like."""

    worker: str
    keeps: int = 0
    """How many permits it goes on to hold, as far as it has them."""
    runs: int = 0
    """How many tasks run, or are about to, under this limit."""
    wants: int = 0
    """How many more it would start at once."""
    tokens: int = 0
    """How many of its tokens it has not used and keeps."""
    spare: int = 0
    """How many of those are for nobody yet."""
    starts: int = 0
    """How many starts it has made, ever."""
    started_ms: int = 0
    """By when, surely, the last of them was made."""
    incarnation: Incarnation = NOBODY


def without_ended(
    state: LimitState, now: Interval, *, but: str = "", incarnation: Incarnation = NOBODY
) -> LimitState:
    """Without the shares that have surely ended (LIMIT-1); their tokens count as used (LIMIT-5)."""
    now_ms = now.earliest * 1000
    # What a process that has ended has started, it has started by now.
    by_ms = math.ceil(now.latest * 1000)
    ends = {
        name: min(share.ends_ms, by_ms) if incarnation.is_ended(share.incarnation) else 0
        for name, share in state.shares.items()
    }
    ended = [n for n, s in state.shares.items() if (ends[n] or s.ends_ms <= now_ms) and n != but]
    if not ended:
        return state
    full_ms = state.full_ms
    for name in sorted(ended, key=lambda name: ends[name] or state.shares[name].ends_ms):
        share = state.shares[name]
        full_ms = _spent(state.definition, full_ms, share.tokens, ends[name] or share.ends_ms)
    kept = {name: share for name, share in state.shares.items() if name not in ended}
    return msgspec.structs.replace(state, full_ms=full_ms, shares=kept)


def apply_request(state: LimitState, request: LimitRequest, now: Interval) -> LimitState:
    """The object after a worker's ask was granted, as far as it can be."""
    state = without_ended(state, now, but=request.worker, incarnation=request.incarnation)
    mine = state.shares.get(request.worker)
    full_ms = state.full_ms
    if mine is not None:
        # Of a share that was removed, all tokens count as used already.
        full_ms = _spent(
            state.definition, full_ms, request.starts - mine.starts, request.started_ms
        )
    others = {name: each for name, each in state.shares.items() if name != request.worker}
    permits = _permits(state.definition, others, mine, request, now)
    keeps = min(request.tokens, mine.tokens) if mine else 0
    tokens = keeps
    if state.definition.rate is not None:
        is_counted = state.definition.concurrency is not None
        usable = min(request.wants, permits - request.runs) if is_counted else request.wants
        level = _level(state.definition, full_ms, others, now) - keeps
        tokens += max(0, min(usable - min(request.spare, keeps), math.floor(level)))
    share = _share(request, mine, now, permits=permits, tokens=tokens, state=state)
    shares = {**others, request.worker: share}
    if not (share.permits or share.wants or share.tokens):
        del shares[request.worker]
    return msgspec.structs.replace(state, full_ms=full_ms, shares=shares)


def share_of(state: LimitState, worker: str, now: Interval) -> int:
    """How many permits a worker should hold: all that it wants, or its fair part."""
    limit = state.definition.concurrency
    mine = state.shares.get(worker)
    if limit is None or mine is None:
        return 0
    return _fair(state.shares, limit, now)[worker]


def tokens_in_seconds(state: LimitState, tokens: int, now: Interval) -> float:
    """How long until so many tokens can be taken, if nobody else takes any; at least 0."""
    assert state.definition.rate is not None, "only a rate has tokens"
    level = _level(state.definition, state.full_ms, state.shares, now)
    return max(0.0, (tokens - level) / state.definition.starts_a_second)


def redefined(
    present: LimitState | None, definition: LimitDefinition, now: Interval
) -> LimitState | None:
    """The object with another definition; what is held stays held, what was used stays used."""
    if present is None:
        return LimitState(definition=definition)
    if present.definition == definition:
        return present
    full_ms = 0.0
    if present.definition.rate is not None and definition.rate is not None:
        missing_ms = max(0.0, present.full_ms - now.earliest * 1000)
        missing = missing_ms * present.definition.starts_a_second
        full_ms = now.latest * 1000 + missing / definition.starts_a_second
    return msgspec.structs.replace(present, definition=definition, full_ms=full_ms)


def level(state: LimitState, now: Interval) -> float:
    """How many tokens can be taken now, less than none if too many are out."""
    return _level(state.definition, state.full_ms, state.shares, now)


def _spent(definition: LimitDefinition, full_ms: float, starts: int, by_ms: int) -> float:
    """When the bucket is full after so many starts more, all of them made by then."""
    if definition.rate is None or starts <= 0:
        return full_ms
    return max(full_ms, float(by_ms)) + starts * 1000 / definition.starts_a_second


def _level(
    definition: LimitDefinition, full_ms: float, shares: Mapping[str, LimitShare], now: Interval
) -> float:
    missing = max(0.0, full_ms / 1000 - now.earliest) * definition.starts_a_second
    return definition.burst - missing - sum(share.tokens for share in shares.values())


def _permits(
    definition: LimitDefinition,
    others: Mapping[str, LimitShare],
    mine: LimitShare | None,
    request: LimitRequest,
    now: Interval,
) -> int:
    """How many permits a worker has after its ask (LIMIT-2, and its fair part)."""
    limit = definition.concurrency
    if limit is None:
        return 0
    kept = min(request.keeps, mine.permits) if mine else 0
    wished = LimitShare(
        ends_ms=0,
        permits=kept,
        wants=max(request.keeps, request.runs) + request.wants - kept,
        since_ms=_since_ms(mine, kept, now),
    )
    fair = _fair({**others, request.worker: wished}, limit, now)[request.worker]
    free = limit - sum(share.permits for share in others.values())
    return max(kept, min(fair, free))


def _share(
    request: LimitRequest,
    mine: LimitShare | None,
    now: Interval,
    *,
    permits: int,
    tokens: int,
    state: LimitState,
) -> LimitShare:
    demand = max(request.keeps, request.runs) + request.wants
    is_counted = state.definition.concurrency is not None
    return LimitShare(
        ends_ms=int((now.earliest + LEASE_SECONDS) * 1000),
        permits=permits,
        wants=max(0, demand - permits) if is_counted else 0,
        since_ms=_since_ms(mine, permits, now),
        tokens=tokens,
        starts=request.starts,
        incarnation=request.incarnation.id,
    )


def _since_ms(mine: LimitShare | None, permits: int, now: Interval) -> int:
    """Since when a worker holds or waits: who held and now waits begins to wait now."""
    is_as_before = mine is not None and (mine.permits > 0) == (permits > 0)
    return mine.since_ms if mine and is_as_before else int(now.latest * 1000)


def _fair(shares: Mapping[str, LimitShare], limit: int, now: Interval) -> dict[str, int]:
    """The max-min fair part of each; what cannot be divided goes to the first in the order."""
    parts = dict.fromkeys(shares, 0)
    rest = limit
    open_ = [name for name in _order(shares, now) if shares[name].demand]
    while rest and open_:
        each = rest // len(open_)
        if not each:
            for name in open_[:rest]:
                parts[name] += 1
            break
        for name in open_:
            more = min(each, shares[name].demand - parts[name])
            parts[name] += more
            rest -= more
        open_ = [name for name in open_ if parts[name] < shares[name].demand]
    return parts


def _order(shares: Mapping[str, LimitShare], now: Interval) -> Sequence[str]:
    """Who holds and has not had its turn, who waits, who has had it; each the longest first."""
    turn_began_ms = (now.earliest - TURN_SECONDS) * 1000

    def rank(name: str) -> tuple[int, int, str]:
        share = shares[name]
        had_turn = share.since_ms <= turn_began_ms
        place = 1 if not share.permits else 2 if had_turn else 0
        return place, share.since_ms, name

    return sorted(shares, key=rank)


LIMITS_MAX: Final = 1000
_TRIES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class LimitHolder:
    """A worker that holds or waits for something of a limit."""

    worker: str
    permits: int
    waits_for: int
    tokens: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class LimitView:
    """What a limit allows, and how much of that is taken, as of a moment that is over."""

    key: str
    concurrency: int | None
    rate: float | None
    """Starts in `per_seconds`."""
    per_seconds: float
    burst: int
    permits_held: int
    tokens_left: int
    holders: tuple[LimitHolder, ...]


class QueueLimits:
    """The limits of a queue."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access

    async def set(
        self,
        key: str,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        per_seconds: float = 1.0,
        burst: int | None = None,
    ) -> LimitView:
        """Define a limit, or change it; what is held of it stays held.

        At most `concurrency` tasks of the key run at a time, and at most `rate` start in
        `per_seconds`, after `burst` at once. Workers that have met the key hear of a change within
        20 s, others when they meet it.
        """
        wanted = limit_definition(
            concurrency=concurrency, rate=rate, per_seconds=per_seconds, burst=burst
        )
        with labelled("limits"):
            now = await self._access.store.now()
            state = await self._cell(key).update(lambda present: redefined(present, wanted, now))
        assert state is not None, "it was just written"
        return _limit(key, state, now)

    async def get(self, key: str) -> LimitView | None:
        """A limit; None if the key has none and is unlimited."""
        with labelled("limits"):
            now = await self._access.store.now()
            state = await self._cell(key).read()
        return _limit(key, state, now) if state else None

    async def remove(self, key: str) -> bool:
        """Let the tasks of a key run without a limit; whether there was one.

        Workers hear of it within 20 s. What was held is forgotten.
        """
        cell = self._cell(key)
        with labelled("limits"):
            for _ in range(_TRIES_MAX):
                try:
                    head = await self._access.store.head(cell.key)
                    await self._access.store.delete(cell.key, version=head.version)
                except NotFound:
                    return False
                except VersionConflict:
                    continue  # A worker has just written.
                return True
        raise VersionConflict(
            f"The limit {key!r} is written too often to be removed now.",
            key=cell.key,
            hint="Try again, or pause what uses it first.",
        )

    async def list(self) -> tuple[LimitView, ...]:
        """All limits, by their keys. What cannot be read is left out; `get` says why."""
        access = self._access
        found: list[LimitView] = []
        with labelled("limits"):
            now = await access.store.now()
            async for page in pages(access.store, access.layout.limits):
                for entry in page.entries[: LIMITS_MAX - len(found)]:
                    key = _key_of(access.layout.limits, entry.key)
                    try:
                        state = await self._cell(key).read() if key else None
                    except UnreadableObject:
                        continue
                    if state is not None:
                        found.append(_limit(key, state, now))
                if len(found) >= LIMITS_MAX:
                    break
        return tuple(found)

    def _cell(self, key: str) -> Cell[LimitState]:
        access = self._access
        where = access.layout.limit(key)
        return Cell(access.store, where, LimitState, entropy=access.entropy)


def _key_of(prefix: str, where: str) -> str:
    """The key of the limit at a place; empty if it is none of ours."""
    name = where.removeprefix(prefix)
    try:
        return check_limit(name.removesuffix(".json")) if name.endswith(".json") else ""
    except InvalidInput:
        return ""


def _limit(key: str, state: LimitState, now: Interval) -> LimitView:
    state = without_ended(state, now)
    holders = tuple(
        LimitHolder(name, share.permits, share.wants, share.tokens, share.ends_ms / 1000)
        for name, share in sorted(state.shares.items())
    )
    limit_definition = state.definition
    return LimitView(
        key=key,
        concurrency=limit_definition.concurrency,
        rate=limit_definition.rate,
        per_seconds=limit_definition.per_seconds,
        burst=limit_definition.burst,
        permits_held=sum(holder.permits for holder in holders),
        tokens_left=max(0, int(level(state, now))) if limit_definition.rate is not None else 0,
        holders=holders,
    )
