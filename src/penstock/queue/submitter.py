"""Submitting: inputs become packs, each written once, and the caller never gets a guess.

A pack is sent at most until `RESEND_SECONDS` after the moment in its id, on the store's clock.
What reaches the store later is void for every reader (QUEUE-2), so that a submit whose answer was
lost cannot take effect later. The submitter sees one of:

- The put succeeded in time: submitted.
- It was refused, or certainly not carried out: the error, and nothing was submitted.
- Its answer is lost: it is sent again, under the same name, until the time is over (`_create`).
  Only this submit can do so without submitting twice; a store that is unavailable, and has surely
  done nothing, is an error as soon as the retries of the store's client are used up.
- Its answer is lost for all that time, or dated too late: `OutcomeUnknown`. The tasks of that
  pack
  may run. A caller that must not submit twice uses a key.

A submit with a key goes to the one place of its key. It first writes a pointer, by which workers
find it, and then creates the pack (QUEUE-8). If one exists, this is a duplicate and its pointer is
deleted: the task of the key is that of the first. A crash between leaves a pointer to nothing,
which is removed when the pack can no longer come. A void pack in the way is deleted (QUEUE-6).

A large input is written first, as a payload; a crash between leaves an orphan
(`penstock.queue.payloads`). If a key is surely taken, nothing is sent. Last, the doorbell is
rung if needed (`penstock.queue.doorbell`); that may fail.

`submit_many` cuts the inputs into packs of at most 1,000 tasks and `PACK_BYTES_MAX` bytes. Packs
are sent in parallel and stand alone: if one fails, the others are submitted, and the error lists
those that are not.

**Gathering** (`gather_seconds`): `SubmitGatherer` collects the submits of a short while in one
pack. A submit returns its id only when its pack is in the bucket. Tasks share a pack if they
have one type and equal options (`_alike`) and no key. A pack is sent `gather_seconds` after its
first task, or when it is full.

- An invalid input is refused at once, and is in no pack.
- A pack that fails fails each submit in it with the same error; other packs go on.
- A submit that is cancelled before its pack is sent is not in it. After that its task may be
  there.
- Bounds: `TASKS_PER_PACK_MAX` tasks, `GATHERED_BYTES_MAX` bytes a pack; `WAITING_MAX` submits
  at a
  time, others wait.
- `close` sends what was accepted, and waits for it. A crash loses only submits that have not
  returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, Final, Protocol

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import Document, decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    KeyConflict,
    OutcomeUnknown,
    PenstockError,
    StoreError,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.queue.context import QueueContext
from penstock.queue.doorbell import DoorbellRinger
from penstock.queue.ids import (
    NONCE_CHARACTERS,
    TASKS_PER_PACK_MAX,
    PackAt,
    TaskId,
    check_name,
    delayed,
    keyed_pack,
    new_pack,
)
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger
from penstock.queue.pack import RESEND_SECONDS, Pack, is_void
from penstock.queue.payloads import (
    PAYLOAD_BYTES_MAX,
    PAYLOADS_OF_A_PACK_BYTES_MAX,
    REFERENCE_BYTES,
    Payloads,
    is_large,
)
from penstock.queue.submit_options import (
    Schemas,
    SubmitOptions,
    check_duration,
    check_inputs,
    checked_inputs,
    input_json,
    is_same_input,
)
from penstock.queue.tracing import present, submitting
from penstock.store.base import CREATE, ObjectStore, find
from penstock.store.metered import labelled

INPUT_BYTES_MAX: Final = PAYLOAD_BYTES_MAX
PACK_BYTES_MAX: Final = 1024 * 1024
PACKS_IN_FLIGHT: Final = 16
HEAVY_IN_FLIGHT: Final = 2
"""Of packs with large inputs: all of a pack must be there within W of its submit."""
PLAIN: Final = SubmitOptions()
RUNG_MS_MAX: Final = 180_000
"""What becomes due later than that is found by the slow lists of who is asleep."""
MIXED: Final = "several types"
_KEYED_TRIES_MAX: Final = 10
_PAUSE_SECONDS_MAX: Final = 15.0


class SubmitAnnouncer(Protocol):
    """Tells workers of packs (`penstock.queue.discovery.direct`). Never fails, nor takes long."""

    async def choose(self, at: PackAt, *, affinity: str = "") -> str | None:
        """Whom to tell of a pack, by its affinity if it has one; empty if nobody is there.

        None: its type is not announced.
        """

    async def announce(self, worker: str, at: PackAt, pack: Pack) -> None:
        """Tell of a pack that is written."""


@dataclass(frozen=True, slots=True)
class Submitter:
    """Writes packs into one queue."""

    store: ObjectStore
    layout: QueueLayout
    entropy: Entropy
    announcer: SubmitAnnouncer | None = None
    schemas: Schemas = field(default_factory=dict)
    """What inputs are checked by, of types that have a schema."""
    ringer: DoorbellRinger | None = None

    @classmethod
    def of(
        cls,
        access: QueueContext,
        announcer: SubmitAnnouncer | None = None,
        schemas: Schemas | None = None,
    ) -> Submitter:
        """That of one process."""
        return cls(
            access.store,
            access.layout,
            access.entropy,
            announcer,
            schemas=schemas or {},
            ringer=access.ringer,
        )

    @submitting
    async def submit_many(
        self, type: str, inputs: Sequence[object], options: SubmitOptions = PLAIN
    ) -> list[TaskId]:
        """Submit one task an input; returns their ids in the order of the inputs.

        Nothing is sent if an input is wrong. Raises `NotAllSubmitted` if a pack failed.
        """
        check_name(type, what="type")
        bodies = [_as_json(value, place) for place, value in enumerate(checked_inputs(inputs))]
        check_inputs(
            self.schemas, ((type, f"Input {place}", body) for place, body in enumerate(bodies))
        )
        batches = list(_batches(bodies))
        return _joined(batches, await self._send_all([(type, each) for each in batches], options))

    def encoded(self, type: str, value: object) -> msgspec.Raw:
        """An input as it is stored, checked as every submit checks it."""
        check_name(type, what="type")
        body = _as_json(value, 0)
        check_inputs(self.schemas, [(type, "The input", body)])
        return body

    @submitting
    async def submit_encoded(
        self, type: str, inputs: Sequence[msgspec.Raw], options: SubmitOptions = PLAIN
    ) -> list[TaskId]:
        """As `submit_many`, for inputs that are `encoded` already."""
        batches = list(_batches(inputs))
        return _joined(batches, await self._send_all([(type, each) for each in batches], options))

    @submitting
    async def submit_mixed(
        self, what: str, tasks: Sequence[tuple[str, object]], options: SubmitOptions = PLAIN
    ) -> list[TaskId]:
        """Submit tasks of several types; `what` they are called in traces. As `submit_many`."""
        assert what == MIXED, "the first argument names the span"
        places: dict[str, list[int]] = {}
        for place, (kind, _) in enumerate(tasks):
            places.setdefault(kind, []).append(place)
        bodies = [_as_json(value, place) for place, (_, value) in enumerate(tasks)]
        kinds = [kind for kind, _ in tasks]
        check_inputs(
            self.schemas,
            ((kinds[place], f"Input {place}", body) for place, body in enumerate(bodies)),
        )
        packs = [
            (kind, batch)
            for kind, of_type in places.items()
            for batch in _batches([bodies[place] for place in of_type])
        ]
        sent = _each(packs, await self._send_all(packs, options))
        order = [place for of_type in places.values() for place in of_type]
        return _surely([task for _, task in sorted(zip(order, sent, strict=True), key=_place)])

    async def _send_all(
        self, packs: Sequence[tuple[str, Sequence[msgspec.Raw]]], options: SubmitOptions
    ) -> list[list[TaskId] | PenstockError]:
        """Send these packs side by side; for each its tasks, or why it was not sent."""
        slots = asyncio.Semaphore(PACKS_IN_FLIGHT)
        heavy = asyncio.Semaphore(HEAVY_IN_FLIGHT)

        async def send(type: str, batch: Sequence[msgspec.Raw]) -> list[TaskId] | PenstockError:
            async with heavy if any(map(is_large, batch)) else slots:
                try:
                    with labelled("submit"):
                        return await self._submit(type, batch, options)
                except PenstockError as error:
                    return error

        return await asyncio.gather(*(send(*pack) for pack in packs))

    @submitting
    async def submit_keyed(
        self,
        type: str,
        value: object,
        options: SubmitOptions,
        *,
        key_seconds: int,
        submitted_ms: int | None = None,
    ) -> TaskId:
        """Submit one task unless its key is taken; returns the id of the key's task.

        A submit that rests on something that was read says with `submitted_ms` when that was, on
        the store's clock: what comes to the store W later than that is void (QUEUE-2), so that
        nobody acts on what was true long ago.
        """
        assert options.key is not None, "it has a key"
        at = keyed_pack(type=type, key=options.key)
        body = _as_json(value, 0)
        check_inputs(self.schemas, [(type, "The input", body)])
        with labelled("submit"):
            if submitted_ms is None:
                submitted_ms = int((await self.store.now()).latest * 1000)
            if options.same_input:
                await self._check_input(at, body)
            if is_large(body) and await self._is_surely_taken(at):
                return at.task(0)
            inputs, refs = await self.payloads.offload(at, (body,), submitted_ms=submitted_ms)
            nonce = new_id(self.entropy, characters=NONCE_CHARACTERS)
            pack = _pack(type, inputs, options, nonce=nonce, submitted_ms=submitted_ms)
            pack = msgspec.structs.replace(
                pack, key=options.key, key_seconds=key_seconds, refs=refs
            )
            await self._send_keyed(at, pack, affinity=options.affinity)
            if options.same_input:
                # Another may have come between.
                await self._check_input(at, body)
        return at.task(0)

    @property
    def payloads(self) -> Payloads:
        """Where large inputs go."""
        return Payloads(self.store, self.layout, self.entropy)

    async def _is_surely_taken(self, at: PackAt) -> bool:
        """Whether this is a duplicate, so that a large input need not be sent."""
        if await self._is_taken(at):
            return True
        where = self.layout.ledger(at)
        found = await find(self.store, where)
        ledger = decode(Ledger, found.body, where=where) if found else None
        now = await self.store.now()
        return ledger is not None and ledger.settled and now.latest * 1000 < ledger.key_ends_ms

    async def _check_input(self, at: PackAt, body: msgspec.Raw) -> None:
        """Raise `KeyConflict` if the key is taken by a task with another input: a GET or two."""
        found = await find(self.store, self.layout.ledger(at))
        said: Pack | Ledger | None = None
        if found is not None:
            ledger = decode(Ledger, found.body, where=found.key)
            now = await self.store.now()
            if ledger.settled and now.latest * 1000 < ledger.key_ends_ms:
                said = ledger
        if said is None:
            found = await find(self.store, self.layout.pack(at))
            said = decode(Pack, found.body, where=found.key) if found else None
        if said is None or not said.inputs or is_same_input(said.inputs[0], body, said.refs):
            return
        raise KeyConflict(
            f"This key is already used by the task {at.task(0)!r}, which has another input.",
            task=at.task(0),
            hint="Use another key, or leave out same_input to get the existing task.",
        )

    async def _send_keyed(self, at: PackAt, pack: Pack, *, affinity: str) -> None:
        where = self.layout.pack(at)
        pointer = self.layout.pointer(
            at,
            due_ms=pack.due_ms or pack.submitted_ms,
            nonce=pack.nonce,
            priority=pack.priority,
            limit=pack.limit,
            is_delayed=pack.due_ms > 0,
        )
        points = encode(Pointer(submitted_ms=pack.submitted_ms))
        await self._create(pointer, points, submitted_ms=pack.submitted_ms)
        for _ in range(_KEYED_TRIES_MAX):
            try:
                await self._create(
                    where, encode(pack), submitted_ms=pack.submitted_ms, nonce=pack.nonce
                )
            except AlreadyExists:
                if await self._is_taken(at):
                    # Whoever follows it removes it, if we cannot.
                    with suppress(StoreError):
                        await self.store.delete(pointer)
                    return
            else:
                await self._check_in_time(pack.submitted_ms, where)
                await self._announce(await self._choose(at, affinity), at, pack)
                await self._ring(pack)
                return
        raise OutcomeUnknown(
            "The pack of this key is written too often: it is unknown whether it was submitted.",
            key=where,
        )

    async def _is_taken(self, at: PackAt) -> bool:
        """Whether the key is taken by a pack; one that will not run is removed (QUEUE-6).

        That is a void pack, and one beside the record of an earlier one that has come to its end:
        it is either that earlier one or a duplicate of it, left behind by a crash.
        """
        where = self.layout.pack(at)
        found = await find(self.store, where)
        if found is None:
            return False
        pack = decode(Pack, found.body, where=where)
        if not is_void(pack.submitted_ms, found.modified):
            ledger = await self._ended_record(at)
            if ledger is None or (
                ledger.pack_version != found.version and pack.submitted_ms >= ledger.key_ends_ms
            ):
                return True
        with suppress(VersionConflict):
            await self.store.delete(where, version=found.version)
        return False

    async def _ended_record(self, at: PackAt) -> Ledger | None:
        """The settled ledger of the key, if the key's lifetime is over."""
        where = self.layout.ledger(at)
        found = await find(self.store, where)
        if found is None:
            return None
        ledger = decode(Ledger, found.body, where=where)
        now = await self.store.now()
        has_ended = ledger.settled and ledger.key_ends_ms <= now.earliest * 1000
        return ledger if has_ended else None

    async def _check_in_time(self, submitted_ms: int, where: str) -> None:
        if (await self.store.now()).latest * 1000 >= submitted_ms + RESEND_SECONDS * 1000:
            raise OutcomeUnknown(
                "The store took too long: it is unknown whether the tasks were submitted.",
                key=where,
            )

    async def _submit(
        self, type: str, inputs: Sequence[msgspec.Raw], options: SubmitOptions
    ) -> list[TaskId]:
        submitted_ms = int((await self.store.now()).latest * 1000)
        at = new_pack(
            type=type,
            count=len(inputs),
            submitted_ms=submitted_ms,
            entropy=self.entropy,
            priority=options.priority,
            limit=options.limit,
            affinity=options.affinity,
        )
        pack = _pack(type, inputs, options, nonce=new_id(self.entropy), submitted_ms=submitted_ms)
        worker = await self._choose(at, options.affinity)
        if pack.due_ms:
            at = delayed(at, due_ms=pack.due_ms)
        elif worker == "" and not pack.priority:
            # Nobody can be told of it now: workers look where things become due.
            at = delayed(at, due_ms=submitted_ms)
        inputs, refs = await self.payloads.offload(at, inputs, submitted_ms=submitted_ms)
        if refs:
            pack = msgspec.structs.replace(pack, inputs=inputs, refs=refs)
        await self._create(self.layout.pack(at), encode(pack), submitted_ms=submitted_ms)
        await self._check_in_time(submitted_ms, self.layout.pack(at))
        await self._announce(worker, at, pack)
        await self._ring(pack)
        return at.tasks(range(at.count))

    async def _create(self, where: str, body: bytes, *, submitted_ms: int, nonce: str = "") -> None:
        """Create an object; while it is not known whether it is there, send it again, until W.

        Nobody else has its name, or if others may, its pack has this `nonce`. What an earlier send
        has left, been run and gone meanwhile, makes a later one void (QUEUE-3).
        """
        unknown: OutcomeUnknown | None = None
        ends = self.store.clock.machine.monotonic() + RESEND_SECONDS
        for tries in count():
            try:
                await self.store.put(where, body, CREATE)
            except AlreadyExists:
                if unknown is None or not await self._is_ours(where, nonce, unknown):
                    raise
                return
            except (OutcomeUnknown, Throttled, Unavailable) as error:
                if isinstance(error, OutcomeUnknown):
                    unknown = error
                if unknown is None:
                    raise
            except StoreError as error:
                raise (unknown or error) from error
            else:
                return
            pause = self.entropy.uniform(0.5, 1.0) * min(_PAUSE_SECONDS_MAX, 2.0 ** min(tries, 9))
            await self.store.clock.machine.sleep(pause)
            if self._is_late(submitted_ms) or self.store.clock.machine.monotonic() >= ends:
                raise unknown

    def _is_late(self, submitted_ms: int) -> bool:
        """Whether what is sent now would be void."""
        now = self.store.clock.estimate()
        return now is not None and now.latest * 1000 >= submitted_ms + RESEND_SECONDS * 1000

    async def _is_ours(self, where: str, nonce: str, unknown: OutcomeUnknown) -> bool:
        """Whether what is there has this nonce, or can only be ours because there is none."""
        if not nonce:
            return True
        try:
            found = await find(self.store, where)
        except StoreError as error:
            raise unknown from error
        return found is not None and decode(Pack, found.body, where=where).nonce == nonce

    async def _choose(self, at: PackAt, affinity: str) -> str | None:
        return await self.announcer.choose(at, affinity=affinity) if self.announcer else None

    async def _announce(self, worker: str | None, at: PackAt, pack: Pack) -> None:
        """Tell a worker of a pack, which is written: never before."""
        if self.announcer and worker:
            await self.announcer.announce(worker, at, pack)

    async def _ring(self, pack: Pack) -> None:
        """Ring the doorbell for a pack that is written, if it comes soon (`doorbell`)."""
        if self.ringer is None or pack.due_ms > pack.submitted_ms + RUNG_MS_MAX:
            return
        await self.ringer.submitted(is_urgent=pack.priority > 0 and not pack.due_ms)


def _pack(
    type: str,
    inputs: Sequence[msgspec.Raw],
    options: SubmitOptions,
    *,
    nonce: str,
    submitted_ms: int,
) -> Pack:
    """What is submitted, with times on the store's clock."""
    return Pack(
        type=type,
        nonce=nonce,
        submitted_ms=submitted_ms,
        due_ms=submitted_ms + int(options.delay * 1000) if options.delay else 0,
        inputs=tuple(inputs),
        priority=options.priority,
        limit=options.limit,
        expires_ms=submitted_ms + int(options.expires * 1000) if options.expires else 0,
        tags=dict(options.tags),
        batch=options.batch,
        trace=options.trace or present(),
    )


class Pointer(Document, frozen=True, kw_only=True):
    """Says that a pack with a key is, or will be, where the pointer's own key says."""

    kind: ClassVar[str] = "pointer"

    submitted_ms: int


class NotAllSubmitted(PenstockError):
    """Some packs of a `submit_many` failed; `tasks` has an id or an error for every input."""

    def __init__(self, tasks: Sequence[TaskId | PenstockError]) -> None:
        self.tasks = tasks
        failed = [task for task in tasks if isinstance(task, PenstockError)]
        super().__init__(
            f"{len(failed)} of {len(tasks)} tasks may not have been submitted: {failed[0].message}",
            hint="`tasks` has an id or an error for every input; submit the failed ones again.",
        )


def _joined(
    batches: Sequence[Sequence[msgspec.Raw]], sent: Sequence[list[TaskId] | PenstockError]
) -> list[TaskId]:
    tasks = _each([("", batch) for batch in batches], sent)
    if len(batches) == 1 and isinstance(sent[0], PenstockError):
        raise sent[0]
    return _surely(tasks)


def _each(
    packs: Sequence[tuple[str, Sequence[msgspec.Raw]]],
    sent: Sequence[list[TaskId] | PenstockError],
) -> list[TaskId | PenstockError]:
    """For each task its id, or why its pack was not sent."""
    tasks: list[TaskId | PenstockError] = []
    for (_, batch), answer in zip(packs, sent, strict=True):
        tasks += [answer] * len(batch) if isinstance(answer, PenstockError) else answer
    return tasks


def _place(found: tuple[int, TaskId | PenstockError]) -> int:
    return found[0]


def _surely(tasks: list[TaskId | PenstockError]) -> list[TaskId]:
    """The ids, if all of them are submitted."""
    errors = [task for task in tasks if isinstance(task, PenstockError)]
    if not errors:
        return [task for task in tasks if not isinstance(task, PenstockError)]
    raise NotAllSubmitted(tasks)


def checked_tasks(tasks: Sequence[tuple[str, object]]) -> Sequence[tuple[str, object]]:
    """Types with their inputs, or `InvalidInput`."""
    for number, each in enumerate(tasks):
        if not _is_pair(each):
            raise InvalidInput(
                f"Task {number} is not a type and an input.", hint='Write ("resize", {"n": 1}).'
            )
        check_name(each[0], what="type")
    return tasks


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _as_json(value: object, place: int) -> msgspec.Raw:
    return input_json(value, what=f"Input {place}", bytes_max=INPUT_BYTES_MAX)


def _batches(inputs: Sequence[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    batch: list[msgspec.Raw] = []
    size = apart = 0
    for each in inputs:
        length = memoryview(each).nbytes
        large, length = (length, REFERENCE_BYTES) if is_large(each) else (0, length)
        is_full = len(batch) == TASKS_PER_PACK_MAX or size + length > PACK_BYTES_MAX
        if batch and (is_full or apart + large > PAYLOADS_OF_A_PACK_BYTES_MAX):
            yield batch
            batch, size, apart = [], 0, 0
        batch.append(each)
        size += length
        apart += large
    if batch:
        yield batch


GATHERED_BYTES_MAX: Final = 512 * 1024
WAITING_MAX: Final = 10_000
SECONDS_MAX: Final = 10.0

Send = Callable[[str, list[msgspec.Raw], SubmitOptions], Awaitable[list[TaskId]]]
"""Submits tasks of one type together; returns their ids in order."""


@dataclass(slots=True, eq=False)
class _Pack:
    """Tasks that will be sent together, and who waits for each."""

    type: str
    options: SubmitOptions
    waiting: dict[asyncio.Future[TaskId], msgspec.Raw] = field(default_factory=dict)
    bytes: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)


class SubmitGatherer:
    """Gathers the submits of one producer."""

    def __init__(self, send: Send, *, seconds: float, clock: Clock) -> None:
        self._send = send
        self._seconds = check_seconds(seconds)
        self._clock = clock
        self._open: dict[Hashable, _Pack] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(WAITING_MAX)

    async def submit(self, type: str, body: msgspec.Raw, options: SubmitOptions) -> TaskId:
        """Submit a task whose input is checked already; returns when its pack is in the bucket."""
        async with self._places:
            waiting: asyncio.Future[TaskId] = asyncio.get_running_loop().create_future()
            pack = self._pack(type, options)
            pack.waiting[waiting] = body
            pack.bytes += memoryview(body).nbytes
            if len(pack.waiting) >= TASKS_PER_PACK_MAX or pack.bytes >= GATHERED_BYTES_MAX:
                self._shut(pack)
            try:
                return await waiting
            except asyncio.CancelledError:
                # If it was not sent yet, it will not be.
                pack.waiting.pop(waiting, None)
                raise

    async def close(self) -> None:
        """Send what was taken in, and wait until that is done."""
        for pack in list(self._open.values()):
            self._shut(pack)
        while self._sending:
            await asyncio.wait(self._sending)

    def _pack(self, type: str, options: SubmitOptions) -> _Pack:
        alike = _alike(type, options)
        pack = self._open.get(alike)
        if pack is None:
            pack = self._open[alike] = _Pack(type, options)
            task = asyncio.get_running_loop().create_task(self._sent(pack))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return pack

    def _shut(self, pack: _Pack) -> None:
        """Take no more into a pack: it is sent now."""
        self._open = {alike: each for alike, each in self._open.items() if each is not pack}
        pack.is_full.set()

    async def _sent(self, pack: _Pack) -> None:
        """Send a pack when it is time, and tell everybody who waits."""
        full = asyncio.get_running_loop().create_task(pack.is_full.wait())
        pause = asyncio.get_running_loop().create_task(self._clock.sleep(self._seconds))
        try:
            await asyncio.wait({full, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            full.cancel()
            pause.cancel()
        self._shut(pack)
        waiting, pack.waiting = pack.waiting, {}
        if not waiting:
            return
        answers: list[TaskId | Exception]
        try:
            answers = list(await self._send(pack.type, list(waiting.values()), pack.options))
        except NotAllSubmitted as error:
            answers = list(error.tasks)
        except Exception as error:  # noqa: BLE001 - each submit raises it
            answers = [error] * len(waiting)
        for each, answer in zip(waiting, answers, strict=True):
            if each.done():
                continue
            if isinstance(answer, Exception):
                each.set_exception(answer)
            else:
                each.set_result(answer)


def check_seconds(seconds: float) -> float:
    """How long is gathered, or `InvalidInput`."""
    check_duration("gather_seconds", seconds)
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidInput(
            f"Submits are gathered for more than 0 and at most {SECONDS_MAX:g} s, not {seconds!r}.",
            hint="0.1 is a good choice; leave gather_seconds out to send each by itself.",
        )
    return seconds


def _alike(type: str, options: SubmitOptions) -> Hashable:
    """What tasks of one pack have in common."""
    tags = tuple(sorted(options.tags.items()))
    how = (options.delay, options.priority, options.limit, options.expires, options.affinity)
    return type, tags, how
