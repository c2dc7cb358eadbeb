"""The object of a limit, and the one change that workers make to it. Pure.

The rules C1 to C3 and R1 to R3, and why they hold, are told in `penstock.queue.limits`. Everything
here is a function of the object, of what a worker asks, and of the store's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from penstock.kernel.wire import Stamped
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.limits.definition import Definition
from penstock.store.time import Interval

LEASE_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 10.0
TURN_SECONDS: Final = 20.0


class Share(msgspec.Struct, frozen=True, omit_defaults=True):
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

    definition: Definition
    full_ms: float = 0.0
    """When the bucket is full again, by the starts that were reported."""
    shares: dict[str, Share] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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
    """The object without shares that have surely ended (C1); their tokens count as used (R2)."""
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


def asked(state: LimitState, ask: Ask, now: Interval) -> LimitState:
    """The object after a worker's ask was granted, as far as it can be."""
    state = without_ended(state, now, but=ask.worker, incarnation=ask.incarnation)
    mine = state.shares.get(ask.worker)
    full_ms = state.full_ms
    if mine is not None:
        # Of a share that was removed, all tokens count as used already.
        full_ms = _spent(state.definition, full_ms, ask.starts - mine.starts, ask.started_ms)
    others = {name: each for name, each in state.shares.items() if name != ask.worker}
    permits = _permits(state.definition, others, mine, ask, now)
    keeps = min(ask.tokens, mine.tokens) if mine else 0
    tokens = keeps
    if state.definition.rate is not None:
        is_counted = state.definition.concurrency is not None
        usable = min(ask.wants, permits - ask.runs) if is_counted else ask.wants
        level = _level(state.definition, full_ms, others, now) - keeps
        tokens += max(0, min(usable - min(ask.spare, keeps), math.floor(level)))
    share = _share(ask, mine, now, permits=permits, tokens=tokens, state=state)
    shares = {**others, ask.worker: share}
    if not (share.permits or share.wants or share.tokens):
        del shares[ask.worker]
    return msgspec.structs.replace(state, full_ms=full_ms, shares=shares)


def part(state: LimitState, worker: str, now: Interval) -> int:
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
    present: LimitState | None, definition: Definition, now: Interval
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


def _spent(definition: Definition, full_ms: float, starts: int, by_ms: int) -> float:
    """When the bucket is full after so many starts more, all of them made by then."""
    if definition.rate is None or starts <= 0:
        return full_ms
    return max(full_ms, float(by_ms)) + starts * 1000 / definition.starts_a_second


def _level(
    definition: Definition, full_ms: float, shares: Mapping[str, Share], now: Interval
) -> float:
    missing = max(0.0, full_ms / 1000 - now.earliest) * definition.starts_a_second
    return definition.burst - missing - sum(share.tokens for share in shares.values())


def _permits(
    definition: Definition,
    others: Mapping[str, Share],
    mine: Share | None,
    ask: Ask,
    now: Interval,
) -> int:
    """How many permits a worker has after its ask (C2, and its fair part)."""
    limit = definition.concurrency
    if limit is None:
        return 0
    kept = min(ask.keeps, mine.permits) if mine else 0
    wished = Share(
        ends_ms=0,
        permits=kept,
        wants=max(ask.keeps, ask.runs) + ask.wants - kept,
        since_ms=_since_ms(mine, kept, now),
    )
    fair = _fair({**others, ask.worker: wished}, limit, now)[ask.worker]
    free = limit - sum(share.permits for share in others.values())
    return max(kept, min(fair, free))


def _share(
    ask: Ask, mine: Share | None, now: Interval, *, permits: int, tokens: int, state: LimitState
) -> Share:
    demand = max(ask.keeps, ask.runs) + ask.wants
    is_counted = state.definition.concurrency is not None
    return Share(
        ends_ms=int((now.earliest + LEASE_SECONDS) * 1000),
        permits=permits,
        wants=max(0, demand - permits) if is_counted else 0,
        since_ms=_since_ms(mine, permits, now),
        tokens=tokens,
        starts=ask.starts,
        incarnation=ask.incarnation.id,
    )


def _since_ms(mine: Share | None, permits: int, now: Interval) -> int:
    """Since when a worker holds or waits: who held and now waits begins to wait now."""
    is_as_before = mine is not None and (mine.permits > 0) == (permits > 0)
    return mine.since_ms if mine and is_as_before else int(now.latest * 1000)


def _fair(shares: Mapping[str, Share], limit: int, now: Interval) -> dict[str, int]:
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


def _order(shares: Mapping[str, Share], now: Interval) -> Sequence[str]:
    """Who holds and has not had its turn, who waits, who has had it; each the longest first."""
    turn_began_ms = (now.earliest - TURN_SECONDS) * 1000

    def rank(name: str) -> tuple[int, int, str]:
        share = shares[name]
        had_turn = share.since_ms <= turn_began_ms
        place = 1 if not share.permits else 2 if had_turn else 0
        return place, share.since_ms, name

    return sorted(shares, key=rank)
