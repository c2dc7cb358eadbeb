"""The rules of limits on their own: what one object gives to workers whose clocks are unsure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.limits import (
    LEASE_SECONDS,
    TURN_SECONDS,
    LimitDefinition,
    LimitRequest,
    LimitState,
    apply_request,
    level,
    limit_definition,
    redefined,
    share_of,
    tokens_in_seconds,
    without_ended,
)
from penstock.store.time import Interval
from tests.sizes import some

T0 = 1_800_000_000.0

Any = TypeVar("Any")


def at(seconds: float, *, width: float = 0.0) -> Interval:
    return Interval(T0 + seconds - width / 2, T0 + seconds + width / 2)


def limit(**words: float) -> LimitState:
    return LimitState(definition=limit_definition(**words))  # type: ignore[arg-type]  # ints are given


def permits(state: LimitState) -> dict[str, int]:
    return {name: share.permits for name, share in state.shares.items()}


def test_permits_are_given_up_to_the_limit_and_not_beyond() -> None:
    state = apply_request(limit(concurrency=5), LimitRequest(worker="a", wants=3), at(0))
    state = apply_request(state, LimitRequest(worker="b", wants=3), at(1))
    assert permits(state) == {"a": 3, "b": 2}
    assert state.shares["b"].wants == 1


def test_a_dead_holder_is_gone_when_its_lease_has_surely_ended() -> None:
    state = apply_request(limit(concurrency=1), LimitRequest(worker="a", wants=1), at(0))
    early = apply_request(state, LimitRequest(worker="b", wants=1), at(LEASE_SECONDS, width=0.2))
    assert permits(early) == {"a": 1, "b": 0}
    late = apply_request(
        early, LimitRequest(worker="b", wants=1), at(LEASE_SECONDS + 0.1, width=0.2)
    )
    assert permits(late) == {"b": 1}


def test_a_lowered_limit_gives_nothing_until_enough_was_returned() -> None:
    state = apply_request(limit(concurrency=10), LimitRequest(worker="a", wants=10), at(0))
    lowered = redefined(state, limit_definition(concurrency=4), at(1))
    assert lowered is not None
    lowered = apply_request(lowered, LimitRequest(worker="b", wants=2), at(2))
    lowered = apply_request(lowered, LimitRequest(worker="a", keeps=6, runs=6), at(3))
    assert permits(lowered) == {"a": 6, "b": 0}
    assert share_of(lowered, "a", at(3)) == 2
    lowered = apply_request(lowered, LimitRequest(worker="a", keeps=2, runs=2), at(4))
    assert permits(apply_request(lowered, LimitRequest(worker="b", wants=2), at(5))) == {
        "a": 2,
        "b": 2,
    }


def test_holders_give_others_their_fair_part() -> None:
    state = apply_request(limit(concurrency=10), LimitRequest(worker="a", wants=10), at(0))
    state = apply_request(state, LimitRequest(worker="b", wants=10), at(1))
    state = apply_request(state, LimitRequest(worker="c", wants=2), at(2))
    assert {name: share_of(state, name, at(2)) for name in "abc"} == {"a": 4, "b": 4, "c": 2}
    state = apply_request(state, LimitRequest(worker="a", keeps=4, runs=4, wants=6), at(3))
    state = apply_request(state, LimitRequest(worker="b", wants=10), at(4))
    # What is free for the third is not taken by the first or the second.
    state = apply_request(state, LimitRequest(worker="a", keeps=4, runs=4, wants=6), at(5))
    assert permits(state) == {"a": 4, "b": 4, "c": 0}
    assert permits(apply_request(state, LimitRequest(worker="c", wants=2), at(6)))["c"] == 2


def test_one_permit_goes_round_among_many() -> None:
    state = limit(concurrency=1)
    seconds, order = 0.0, []
    held = ""
    for _ in range(200):
        seconds += 5
        for name in "abcd":
            runs = 1 if held == name and share_of(state, name, at(seconds)) else 0
            state = apply_request(
                state, LimitRequest(worker=name, keeps=runs, runs=runs, wants=1 - runs), at(seconds)
            )
            if state.shares[name].permits and held != name:
                held = name
                order.append((name, seconds))
    assert [name for name, _ in order[:8]] == list("abcdabcd")
    gaps = [later - earlier for (_, earlier), (_, later) in pairwise(order)]
    assert max(gaps) <= TURN_SECONDS + 15


def test_tokens_flow_in_by_the_rate_and_no_higher_than_the_burst() -> None:
    state = apply_request(limit(rate=2, burst=5), LimitRequest(worker="a", wants=9), at(0))
    assert state.shares["a"].tokens == 5
    # Nothing flows in for what is taken and not reported.
    assert level(state, at(100)) == 0
    used = LimitRequest(worker="a", starts=5, started_ms=int((T0 + 100) * 1000))
    state = apply_request(state, used, at(100.5))
    assert state.shares == {}
    assert level(state, at(100.5)) == pytest.approx(1)
    assert tokens_in_seconds(state, 3, at(100.5)) == pytest.approx(1)
    assert level(state, at(1000)) == 5


def test_a_report_that_comes_twice_counts_once() -> None:
    state = apply_request(limit(rate=1, burst=5), LimitRequest(worker="a", wants=5), at(0))
    report = LimitRequest(worker="a", tokens=2, starts=3, started_ms=int(T0 * 1000))
    once = apply_request(state, report, at(0))
    assert apply_request(once, report, at(0)).full_ms == once.full_ms
    gone = apply_request(once, LimitRequest(worker="a", starts=3, started_ms=int(T0 * 1000)), at(0))
    assert apply_request(gone, report, at(0)).full_ms == once.full_ms


def test_the_tokens_of_a_dead_worker_count_as_used_at_its_end() -> None:
    state = apply_request(limit(rate=1, burst=5), LimitRequest(worker="a", wants=5), at(0))
    after = without_ended(state, at(LEASE_SECONDS + 2))
    assert level(after, at(LEASE_SECONDS + 2)) == pytest.approx(2)


def test_another_rate_forgets_nothing_that_was_used() -> None:
    state = apply_request(limit(rate=1, burst=5), LimitRequest(worker="a", wants=5), at(0))
    state = apply_request(
        state, LimitRequest(worker="a", starts=5, started_ms=int(T0 * 1000)), at(0)
    )
    faster = redefined(state, limit_definition(rate=2, burst=10), at(0))
    assert faster is not None
    assert level(faster, at(0)) == pytest.approx(5)
    assert redefined(faster, limit_definition(rate=2, burst=10), at(9)) is faster


@dataclass
class Fleet:
    """Workers that keep the rules, on clocks that are unsure, over one object; and a referee."""

    state: LimitState
    entropy: Entropy
    seconds: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    made_ms: dict[str, int] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    deaths: int = 0

    def draw(self, choices: Sequence[Any]) -> Any:
        return choices[self.entropy.randrange(len(choices))]

    def between(self, least: int, most: int) -> int:
        return least + self.entropy.randrange(most - least + 1)

    def now(self) -> Interval:
        width = self.draw([0.0, 0.2, 2.0])
        earliest = T0 + self.seconds - self.entropy.random() * width
        return Interval(earliest, earliest + width)

    def step(self) -> None:
        self.seconds += self.draw([0.0] * 12 + [0.05, 0.3, 1.0, 30.0])
        name = self.draw("abc")
        now = self.now()
        if now.latest >= self.ends.get(name, 0.0):
            # LIMIT-3, LIMIT-4: it has stopped by itself.
            self.running[name] = self.pool[name] = 0
        match self.draw(["ask", "ask", "start", "start", "start", "end", "die"]):
            case "ask":
                self.request(name, now)
            case "start":
                self.start(name, now)
            case "end" if self.running.get(name):
                self.running[name] -= 1
            case "die":
                self.deaths += 1
                fresh = f"{name}{self.deaths}"
                for of in (self.running, self.pool, self.made, self.made_ms, self.ends):
                    assert isinstance(of, dict)
                    of.pop(name, None)
                # Whoever starts again has another name; its old share stays until it ends.
                shares = {fresh if n == name else n: s for n, s in self.state.shares.items()}
                self.state = type(self.state)(
                    definition=self.state.definition, full_ms=self.state.full_ms, shares=shares
                )
            case _:
                pass

    def request(self, name: str, now: Interval) -> None:
        runs = self.running.get(name, 0)
        keeps = self.between(runs, runs + 2)
        kept = self.between(0, self.pool.get(name, 0))
        request = LimitRequest(
            worker=name,
            keeps=keeps,
            runs=runs,
            wants=self.between(0, 5),
            tokens=kept,
            starts=self.made.get(name, 0),
            started_ms=self.made_ms.get(name, 0),
        )
        self.state = apply_request(self.state, request, now)
        share = self.state.shares.get(name)
        self.pool[name] = share.tokens if share else 0
        self.ends[name] = share.ends_ms / 1000 if share else 0.0
        if (share.permits if share else 0) < runs:
            self.running[name] = 0

    def start(self, name: str, now: Interval) -> None:
        share = self.state.shares.get(name)
        if share is None:
            return
        words: LimitDefinition = self.state.definition
        if words.rate is not None and not self.pool.get(name):
            return
        if words.concurrency is not None and self.running.get(name, 0) >= share.permits:
            return
        if words.rate is not None:
            self.pool[name] -= 1
            self.made[name] = self.made.get(name, 0) + 1
            self.made_ms[name] = int(now.latest * 1000) + 1
        self.running[name] = self.running.get(name, 0) + 1
        self.starts.append(T0 + self.seconds)

    def judge(self) -> None:
        words = self.state.definition
        live = {n: r for n, r in self.running.items() if T0 + self.seconds < self.ends.get(n, 0)}
        if words.concurrency is not None:
            assert sum(live.values()) <= words.concurrency
        if words.rate is not None and self.starts:
            last = self.starts[-1]
            for count, first in enumerate(reversed(self.starts), 1):
                allowed = words.burst + (last - first) * words.starts_a_second
                assert count <= allowed + 1e-6


@settings(max_examples=some(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    concurrency=st.one_of(st.none(), st.integers(1, 6)),
    rate=st.one_of(st.none(), st.sampled_from([0.05, 0.5, 1.0, 3.0, 10.0])),
    burst=st.integers(1, 6),
)
def test_whatever_workers_do_no_limit_is_exceeded(
    seed: int, concurrency: int | None, rate: float | None, burst: int
) -> None:
    if concurrency is None and rate is None:
        concurrency = 2
    words = limit_definition(
        concurrency=concurrency, rate=rate, burst=burst if rate is not None else None
    )
    fleet = Fleet(LimitState(definition=words), seeded_entropy(seed))
    for _ in range(250):
        fleet.step()
        fleet.judge()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({}, "needs a concurrency, a rate"),
        ({"concurrency": 0}, "concurrency of zero"),
        ({"rate": 0}, "rate of zero"),
        ({"rate": 5, "per_seconds": 0}, "per_seconds of zero"),
        ({"rate": 5, "burst": 0}, "burst of zero"),
        ({"concurrency": -1}, "whole number"),
        ({"concurrency": 1.5}, "whole number"),
        ({"concurrency": True}, "whole number"),
        ({"rate": float("nan")}, "positive number"),
        ({"rate": float("inf")}, "positive number"),
        ({"rate": "many"}, "positive number"),
        ({"concurrency": 5, "burst": 2}, "belongs to a rate"),
        ({"rate": 1, "per_seconds": 1e9}, "positive number"),
    ],
)
def test_a_definition_that_cannot_be_meant_is_refused(
    words: dict[str, float], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        limit_definition(**words)  # type: ignore[arg-type]  # that is the point
    if "zero" in problem:
        assert "pause" in caught.value.hint


def test_a_rate_has_a_burst_of_what_it_allows_in_its_time() -> None:
    assert limit_definition(rate=100, per_seconds=60).burst == 100
    assert limit_definition(rate=0.5).burst == 1
    assert limit_definition(rate=10, burst=3).burst == 3
