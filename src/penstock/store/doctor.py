"""Can this bucket be trusted? Every rule alone, races of sixteen, two processes, time, latency.

`open_examined` opens the store of a URL for it: several clients, a second process, one meter.

Everything is written below one folder of a random name, which is removed at the end, also when
the examination fails or is cancelled. A failed check does not end the examination: the verdict
names all that is broken. An error that is no verdict on the store (nobody answers, the
credentials are refused) does end it and is raised.

Each rule for one client raises `BrokenPromise` with what was seen, or returns it. A report has one
finding a check, and a verdict over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import AlreadyExists, NotFound, StoreError, Unsupported, VersionConflict
from penstock.store.base import CREATE, ObjectStore, Swap, Version, pages
from penstock.store.doctor_process import SecondProcess
from penstock.store.metered import Meter
from penstock.store.opening import Opening, is_by_tombstone, open_backend, wrapped
from penstock.store.races import (
    RaceOutcome,
    count_race,
    create_race,
    delete_against_swap,
    swap_race,
    touch_against_swap,
)
from penstock.store.s3.backend import S3Store, is_versioned, purge


class CheckMark(StrEnum):
    """How a check ended."""

    GOOD = "good"
    BAD = "bad"
    NOTE = "note"
    """Worth knowing, no reason for distrust."""


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """One check: what was tried, how it ended, what was seen."""

    check: str
    mark: CheckMark
    seen: str


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips of one kind of request, in milliseconds."""

    kind: str
    median_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Everything that one examination found."""

    url: str
    findings: Sequence[StoreFinding]
    latencies: Sequence[Latency]
    requests: int
    dollars: float
    by_tombstone: bool = False
    """Whether its deletes are by tombstone already."""
    tombstones_would_do: bool = False
    """Whether nothing is broken but its conditional deletes, and those by tombstone are not."""

    @property
    def trusted(self) -> bool:
        """Whether nothing bad was found."""
        return all(finding.mark is not CheckMark.BAD for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.trusted and self.by_tombstone:
            return "This store can be trusted, with deletes by tombstone."
        if self.trusted:
            return "This store keeps every promise that Penstock builds on."
        if self.tombstones_would_do:
            return (
                "Do not use this store as it is: its conditional deletes are not atomic. It can be"
                " trusted, with deletes by tombstone: add deletes=tombstone to its URL, wherever"
                " it stands."
            )
        broken = [finding.check for finding in self.findings if finding.mark is CheckMark.BAD]
        return (
            f"Do not use this store: it broke {len(broken)} of its promises ({'; '.join(broken)})."
        )

    @property
    def dollars_per_month(self) -> float:
        """The price of such an examination once a day, at S3 Standard's prices."""
        return 30 * self.dollars


_WRONG: Final = Version("00000000000000000000000000000000")
LISTED_KEYS: Final = 25


class BrokenPromise(Exception):
    """A promise does not hold."""


async def creates_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    await store.put(key, one, CREATE)
    await _refused(store.put(key, two, CREATE), AlreadyExists, "a second create took effect")
    await _holds(store, key, one)
    return "a second create is refused"


async def swaps_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one)
    second = await store.put(key, two, Swap(first))
    if first == second:
        raise BrokenPromise("two bodies got the same version")
    for version in (first, _WRONG):
        swap = store.put(key, one, Swap(version))
        await _refused(swap, VersionConflict, "a swap from an old version took effect")
    await _holds(store, key, two)
    return "a swap from an old version is refused"


async def swaps_need_an_object(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    version = await store.put(key, one)
    await store.delete(key)
    await _refused(
        store.put(key, two, Swap(version)), VersionConflict, "a swap brought a deleted object back"
    )
    await store.put(key, two, CREATE)
    await _holds(store, key, two)
    return "a swap of a deleted object is refused, a create after it is not"


async def deletes_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one)
    second = await store.put(key, two)
    await _refused(
        store.delete(key, version=first), VersionConflict, "a delete of an old version took effect"
    )
    await _holds(store, key, two)
    await store.delete(key, version=second)
    await _refused(store.get(key), NotFound, "a deleted object is still there")
    return "a delete of an old version is refused"


async def gets_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    version = await store.put(key, one)
    if await store.get(key, unless=version) is not None:
        raise BrokenPromise("an unchanged object was sent again")
    await store.put(key, two)
    if await store.get(key, unless=version) is None:
        raise BrokenPromise("a changed object was reported as unchanged")
    return "an unchanged object is not sent again, a changed one is"


async def touches_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one, metadata={"owner": "first"})
    touched = await store.touch(key, version=first, metadata={"owner": "second"})
    found = await store.get(key)
    if found is None or found.body != one or dict(found.metadata) != {"owner": "second"}:
        raise BrokenPromise("a touch did not keep the body and replace the metadata")
    await store.put(key, two, Swap(touched))
    await _refused(
        store.touch(key, version=touched, metadata={"owner": "late"}),
        VersionConflict,
        "a touch of an old version took effect",
    )
    await _holds(store, key, two)
    return "a touch of an old version is refused and brings no body back"


async def lists_follow_writes(store: ObjectStore, key: str, entropy: Entropy) -> str:
    keys = [f"{key}/{number:04}" for number in range(LISTED_KEYS)]
    for number, each in enumerate(keys):
        await store.put(each, new_id(entropy).encode())
        seen = [entry.key for entry in (await store.list(f"{key}/")).entries]
        if seen != keys[: number + 1]:
            raise BrokenPromise(f"a list after {number + 1} writes shows {len(seen)} of them")
    paged = [
        entry.key async for page in pages(store, f"{key}/", page_keys=7) for entry in page.entries
    ]
    if paged != keys:
        raise BrokenPromise("pages of 7 keys show something else than one page")
    after = [entry.key for entry in (await store.list(f"{key}/", start_after=keys[9])).entries]
    if after != keys[10:]:
        raise BrokenPromise("a list that starts after a key shows the wrong keys")
    for each in keys:
        await store.delete(each)
    if (await store.list(f"{key}/")).entries:
        raise BrokenPromise("a list shows deleted objects")
    return f"{LISTED_KEYS} writes and deletes were listed at once, in order, in pages"


def _bodies(entropy: Entropy) -> tuple[bytes, bytes]:
    return new_id(entropy).encode(), new_id(entropy).encode()


async def _refused(request: Awaitable[object], expected: type[StoreError], otherwise: str) -> None:
    try:
        await request
    except expected:
        return
    raise BrokenPromise(otherwise)


async def _holds(store: ObjectStore, key: str, body: bytes) -> None:
    found = await store.get(key)
    if found is None or found.body != body:
        raise BrokenPromise("the object does not hold what the accepted write put there")


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
    ("create only if absent", creates_are_conditional),
    ("swap only from the version named", swaps_are_conditional),
    ("swap only what is there", swaps_need_an_object),
    ("delete only the version named", deletes_are_conditional),
    ("get unless unchanged", gets_are_conditional),
    ("touch only the version named", touches_are_conditional),
    ("lists follow writes", lists_follow_writes),
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
    patient: Patient, *, tell: Callable[[StoreFinding], None] = lambda _finding: None
) -> StoreReport:
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
    return StoreReport(
        url=patient.url,
        findings=examination.findings,
        latencies=latencies,
        requests=patient.meter.requests(),
        dollars=patient.meter.dollars(),
        by_tombstone=patient.by_tombstone,
        tombstones_would_do=would_do and examination.is_bad_in(_OF_DELETES),
    )


class _Examination:
    def __init__(self, patient: Patient, tell: Callable[[StoreFinding], None]) -> None:
        self.findings: list[StoreFinding] = []
        self._patient = patient
        self._tell = tell
        self._folder = f"doctor/{new_id(patient.entropy)}"

    def _key(self, name: str) -> str:
        # Without a suffix each check has a key of its own; the second pass finds its past there.
        return f"{self._folder}/{name.replace(' ', '-')}"

    async def _check(self, name: str, trial: Awaitable[str]) -> None:
        try:
            seen, mark = await trial, CheckMark.GOOD
        except BrokenPromise as broken:
            seen, mark = str(broken), CheckMark.BAD
        except Unsupported as unsupported:
            seen, mark = unsupported.message, CheckMark.BAD
            if name.startswith("touch"):
                seen, mark = f"{seen} Penstock then does without touch.", CheckMark.NOTE
        self._note(name, mark, seen)

    def _note(self, name: str, mark: CheckMark, seen: str) -> None:
        finding = StoreFinding(name, mark, seen)
        self.findings.append(finding)
        self._tell(finding)

    def is_bad_in(self, checks: Collection[str]) -> bool:
        """Whether some of these checks have ended badly, and no others, in whatever pass."""
        bad = {each.check.partition(",")[0] for each in self.findings if each.mark is CheckMark.BAD}
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
        return all(each.mark is not CheckMark.BAD for each in self.findings[known:])

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
            raise BrokenPromise(f"{each * WRITERS} increments counted as {count}")
        return f"{count} increments, {count} counted"

    async def _delete_races(self) -> str:
        patient, key = self._patient, self._key("deleters")
        one, other = patient.clients[0], patient.clients[-1]
        for number in range(1, ROUNDS_OF_TWO + 1):
            if not await delete_against_swap(one, other, key, entropy=patient.entropy):
                raise BrokenPromise(f"a delete and a swap of one version both won (round {number})")
        return f"{ROUNDS_OF_TWO} rounds, never both"

    async def _touch_races(self) -> str:
        patient, key = self._patient, self._key("touchers")
        one, other = patient.clients[0], patient.clients[-1]
        for number in range(1, ROUNDS_OF_TWO + 1):
            if not await touch_against_swap(one, other, key, entropy=patient.entropy):
                raise BrokenPromise(f"a touch brought an old body back (round {number})")
        return f"{ROUNDS_OF_TWO} rounds, no old body came back"

    async def two_processes(self) -> None:
        name = "two processes, one winner"
        if self._patient.second is None:
            self._note(name, CheckMark.NOTE, "not tried: no other process can see this store")
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
                    raise BrokenPromise(
                        f"{winners} of {WRITERS} writers won a {what} (round {number})"
                    )
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
            raise BrokenPromise("an object is dated outside of the time at which it was written")
        if known.width > WIDTH_SECONDS_MAX:
            raise BrokenPromise(f"dates contradict each other by {known.width:.1f} s")
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


def _judge(outcome: RaceOutcome, number: int) -> None:
    if outcome.winners != 1:
        raise BrokenPromise(f"{outcome.winners} of {WRITERS} writers won (round {number})")
    if not outcome.stands:
        raise BrokenPromise(f"the winner's body is not the one that stands (round {number})")


CLIENTS: Final = 4


@asynccontextmanager
async def open_patient(url: str, opening: Opening) -> AsyncIterator[Patient]:
    """The store at this URL, ready for `examine`, closed afterwards."""
    async with AsyncExitStack() as stack:
        backends: list[ObjectStore] = []
        for _ in range(CLIENTS if not _is_private(url) else 1):
            backend = await open_backend(url, opening)
            stack.push_async_callback(backend.close)
            backends.append(backend)
        yield Patient(
            url=url,
            clients=[wrapped(backend, opening) for backend in backends],
            with_tombstones=[
                wrapped(backend, opening, by_tombstone=True)
                for backend in backends
                if isinstance(backend, S3Store)
            ],
            by_tombstone=is_by_tombstone(backends[0]),
            meter=opening.meter,
            entropy=opening.entropy,
            second=None if _is_memory(url) else SecondProcess(url, environment=_for_child(opening)),
            purge=await _purge_of(backends[0]),
        )


async def _purge_of(backend: ObjectStore) -> Callable[[str], Awaitable[None]] | None:
    if isinstance(backend, S3Store) and await is_versioned(backend.bucket):
        return partial(purge, backend.bucket)
    return None


def _is_memory(url: str) -> bool:
    return url.startswith("memory://")


def _is_private(url: str) -> bool:
    """A memory store without a name is another one each time it is opened."""
    return url == "memory://"


def _for_child(opening: Opening) -> Mapping[str, str]:
    """The environment of the second process; credentials go there and nowhere else."""
    environment = dict(opening.environment)
    if opening.credentials is not None:
        environment["AWS_ACCESS_KEY_ID"] = opening.credentials.access_key
        environment["AWS_SECRET_ACCESS_KEY"] = opening.credentials.secret_key
        environment.pop("AWS_SESSION_TOKEN", None)
        if opening.credentials.session_token:
            environment["AWS_SESSION_TOKEN"] = opening.credentials.session_token
    return environment
