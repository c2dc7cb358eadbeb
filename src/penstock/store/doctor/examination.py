"""The examination: every rule alone, the races of sixteen, two processes, time, lists, latency.

Everything is written below one folder of a random name, which is removed at the end, also when
the examination fails or is cancelled. A failed check does not end the examination: the verdict
names all that is broken. An error that is no verdict on the store (nobody answers, the
credentials are refused) does end it and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import Unsupported
from penstock.store.base import ObjectStore, pages
from penstock.store.doctor import rules
from penstock.store.doctor.report import Finding, Latency, Mark, Report
from penstock.store.doctor.rules import Broken
from penstock.store.doctor.second import SecondProcess
from penstock.store.metered import Meter
from penstock.store.races import (
    Outcome,
    count_race,
    create_race,
    delete_against_swap,
    swap_race,
    touch_against_swap,
)

WRITERS: Final = 16
ROUNDS: Final = 3
ROUNDS_OF_TWO: Final = 25
LATENCY_REQUESTS: Final = 15
CLEAN_UP_SECONDS_MAX: Final = 60.0
LATE_LOOKS: Final = 4
LATE_LOOK_SECONDS: Final = 0.5
WIDTH_SECONDS_MAX: Final = 1.0

Rule = Callable[[ObjectStore, str, Entropy], Awaitable[str]]

RULES: Final[Sequence[tuple[str, Rule]]] = (
    ("create only if absent", rules.creates_are_conditional),
    ("swap only from the version named", rules.swaps_are_conditional),
    ("swap only what is there", rules.swaps_need_an_object),
    ("delete only the version named", rules.deletes_are_conditional),
    ("get unless unchanged", rules.gets_are_conditional),
    ("touch only the version named", rules.touches_are_conditional),
    ("lists follow writes", rules.lists_follow_writes),
)

_AGAINST_SWAP: Final = "delete against swap"
_OF_DELETES: Final = ("delete only the version named", _AGAINST_SWAP)
"""The checks that a server may fail which is trusted with deletes by tombstone."""


@dataclass(frozen=True, slots=True)
class Patient:
    """The store under examination: several clients of it, and what their requests cost."""

    url: str
    clients: Sequence[ObjectStore]
    meter: Meter
    entropy: Entropy
    second: SecondProcess | None = None
    """None where another process cannot see the store."""
    with_tombstones: Sequence[ObjectStore] = ()
    """The same clients with deletes by tombstone, if that can be chosen."""
    by_tombstone: bool = False
    """Whether those of `clients` are so already."""
    purge: Callable[[str], Awaitable[None]] | None = None
    """Where the bucket keeps former versions: removes all of them below a prefix."""

    @property
    def store(self) -> ObjectStore:
        return self.clients[0]

    @property
    def writers(self) -> Sequence[ObjectStore]:
        return [self.clients[number % len(self.clients)] for number in range(WRITERS)]


async def examine(
    patient: Patient, *, tell: Callable[[Finding], None] = lambda _finding: None
) -> Report:
    """Try everything and report. `tell` hears of each finding at once."""
    examination = _Examination(patient, tell)
    try:
        await examination.rules()
        await examination.races()
        if patient.purge is not None:
            await examination.rules(suffix=", again on a versioned key")
            await examination.races(suffix=", again on a versioned key")
        would_do = await examination.tombstones() if not patient.by_tombstone else False
        await examination.two_processes()
        await examination.time()
        latencies = await examination.latencies()
    except BaseException:
        # A write that was given up may still be on its way to the store.
        await _to_its_end(examination.clean_up(looks=LATE_LOOKS))
        raise
    await _to_its_end(examination.clean_up(looks=1))
    return Report(
        url=patient.url,
        findings=examination.findings,
        latencies=latencies,
        requests=patient.meter.requests(),
        dollars=patient.meter.dollars(),
        by_tombstone=patient.by_tombstone,
        tombstones_would_do=would_do and examination.is_bad_in(_OF_DELETES),
    )


class _Examination:
    def __init__(self, patient: Patient, tell: Callable[[Finding], None]) -> None:
        self.findings: list[Finding] = []
        self._patient = patient
        self._tell = tell
        self._folder = f"doctor/{new_id(patient.entropy)}"

    def _key(self, name: str) -> str:
        # Without a suffix each check has a key of its own; the second pass finds its past there.
        return f"{self._folder}/{name.replace(' ', '-')}"

    async def _check(self, name: str, trial: Awaitable[str]) -> None:
        try:
            seen, mark = await trial, Mark.GOOD
        except Broken as broken:
            seen, mark = str(broken), Mark.BAD
        except Unsupported as unsupported:
            seen, mark = unsupported.message, Mark.BAD
            if name.startswith("touch"):
                seen, mark = f"{seen} Penstock then does without touch.", Mark.NOTE
        self._note(name, mark, seen)

    def _note(self, name: str, mark: Mark, seen: str) -> None:
        finding = Finding(name, mark, seen)
        self.findings.append(finding)
        self._tell(finding)

    def is_bad_in(self, checks: Collection[str]) -> bool:
        """Whether some of these checks have ended badly, and no others, in whatever pass."""
        bad = {each.check.partition(",")[0] for each in self.findings if each.mark is Mark.BAD}
        return bool(bad) and bad <= set(checks)

    async def tombstones(self) -> bool:
        """If only conditional deletes are broken: whether all holds with deletes by tombstone."""
        patient, known = self._patient, len(self.findings)
        if not patient.with_tombstones or not self.is_bad_in(_OF_DELETES):
            return False
        self._patient = replace(patient, clients=patient.with_tombstones)
        try:
            await self.rules(suffix=", by tombstone")
            await self.races(suffix=", by tombstone")
        finally:
            self._patient = patient
        return all(each.mark is not Mark.BAD for each in self.findings[known:])

    async def rules(self, *, suffix: str = "") -> None:
        for name, rule in RULES:
            key = self._key(name)
            if suffix:
                await self._patient.store.delete(key)
            await self._check(name + suffix, rule(self._patient.store, key, self._patient.entropy))

    async def races(self, *, suffix: str = "") -> None:
        await self._check(f"one of {WRITERS} creators wins{suffix}", self._create_races())
        await self._check(f"one of {WRITERS} swappers wins{suffix}", self._swap_races())
        await self._check(f"{WRITERS} writers count exactly{suffix}", self._count())
        await self._check(f"{_AGAINST_SWAP}{suffix}", self._delete_races())
        await self._check(f"touch against swap{suffix}", self._touch_races())

    async def _create_races(self) -> str:
        patient, key = self._patient, self._key("creators")
        for number in range(1, ROUNDS + 1):
            await patient.store.delete(key)
            _judge(await create_race(patient.writers, key, entropy=patient.entropy), number)
        return f"{ROUNDS} rounds, one winner each"

    async def _swap_races(self) -> str:
        patient, key = self._patient, self._key("swappers")
        for number in range(1, ROUNDS + 1):
            _judge(await swap_race(patient.writers, key, entropy=patient.entropy), number)
        return f"{ROUNDS} rounds, one winner each"

    async def _count(self) -> str:
        patient, key, each = self._patient, self._key("counter"), 2
        await patient.store.delete(key)
        count = await count_race(patient.writers, key, each=each, entropy=patient.entropy)
        if count != each * WRITERS:
            raise Broken(f"{each * WRITERS} increments counted as {count}")
        return f"{count} increments, {count} counted"

    async def _delete_races(self) -> str:
        patient, key = self._patient, self._key("deleters")
        one, other = patient.clients[0], patient.clients[-1]
        for number in range(1, ROUNDS_OF_TWO + 1):
            if not await delete_against_swap(one, other, key, entropy=patient.entropy):
                raise Broken(f"a delete and a swap of one version both won (round {number})")
        return f"{ROUNDS_OF_TWO} rounds, never both"

    async def _touch_races(self) -> str:
        patient, key = self._patient, self._key("touchers")
        one, other = patient.clients[0], patient.clients[-1]
        for number in range(1, ROUNDS_OF_TWO + 1):
            if not await touch_against_swap(one, other, key, entropy=patient.entropy):
                raise Broken(f"a touch brought an old body back (round {number})")
        return f"{ROUNDS_OF_TWO} rounds, no old body came back"

    async def two_processes(self) -> None:
        name = "two processes, one winner"
        if self._patient.second is None:
            self._note(name, Mark.NOTE, "not tried: no other process can see this store")
            return
        async with self._patient.second as second:
            await self._check(name, self._race_two_processes(second))

    async def _race_two_processes(self, second: SecondProcess) -> str:
        patient = self._patient
        half = patient.writers[: WRITERS // 2]
        for number in range(1, ROUNDS + 1):
            for swap in (False, True):
                key = self._key(f"two-{number}-{swap}")
                winners = await second.race(half, key, swap=swap, entropy=patient.entropy)
                if winners != 1:
                    what = "swap" if swap else "create"
                    raise Broken(f"{winners} of {WRITERS} writers won a {what} (round {number})")
        return f"{ROUNDS} rounds of creates and of swaps, one winner each"

    async def time(self) -> None:
        await self._check("dates can be trusted", self._dates())

    async def _dates(self) -> str:
        store, key = self._patient.store, self._key("dated")
        known = await store.calibrate()
        before = await store.now()
        await store.put(key, b"")
        modified = (await store.head(key)).modified
        after = await store.now()
        if not before.earliest - 1 <= modified <= after.latest:
            raise Broken("an object is dated outside of the time at which it was written")
        if known.width > WIDTH_SECONDS_MAX:
            raise Broken(f"dates contradict each other by {known.width:.1f} s")
        wall = store.clock.machine.wall()
        off = wall - (await store.now()).middle
        machine = (
            "agrees" if abs(off) < 1 else f"is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
        )
        return f"known to {known.width * 1000:.0f} ms; this machine's clock {machine}"

    async def latencies(self) -> Sequence[Latency]:
        store, key = self._patient.store, self._key("latency")
        body = b"x" * 1024
        kinds: Sequence[tuple[str, Callable[[], Awaitable[object]]]] = (
            ("put", lambda: store.put(key, body)),
            ("get", lambda: store.get(key)),
            ("list", lambda: store.list(f"{self._folder}/")),
            ("delete", lambda: store.delete(key)),
        )
        return [await self._latency(kind, request) for kind, request in kinds]

    async def _latency(self, kind: str, request: Callable[[], Awaitable[object]]) -> Latency:
        clock = self._patient.store.clock.machine
        taken: list[float] = []
        for _ in range(LATENCY_REQUESTS):
            sent = clock.monotonic()
            await request()
            taken.append(1000 * (clock.monotonic() - sent))
        return Latency(kind, median_ms=median(taken), slowest_ms=max(taken))

    async def clean_up(self, *, looks: int) -> None:
        store = self._patient.store
        for look in range(looks):
            if look:
                await store.clock.machine.sleep(LATE_LOOK_SECONDS)
            async for page in pages(store, f"{self._folder}/"):
                for entry in (*page.entries, *page.tombstones):
                    await store.delete(entry.key)
        if self._patient.purge is not None:
            await self._patient.purge(f"{self._folder}/")


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Finish this, within a bound, also while we are cancelled: nothing may be left behind."""

    async def bounded() -> None:
        async with asyncio.timeout(CLEAN_UP_SECONDS_MAX):
            await work

    cleaning = asyncio.get_running_loop().create_task(bounded())
    cancelled = False
    while not cleaning.done():
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:
            cancelled = True
    cleaning.result()
    if cancelled:
        raise asyncio.CancelledError


def _judge(outcome: Outcome, number: int) -> None:
    if outcome.winners != 1:
        raise Broken(f"{outcome.winners} of {WRITERS} writers won (round {number})")
    if not outcome.stands:
        raise Broken(f"the winner's body is not the one that stands (round {number})")
