"""The `file://` backend: a folder of plain files, shared by the processes of one machine.

Every object is a file under its key, so that people, Spark and `cp -r` can read it, and a file
that another program puts there is an object too. What is Penstock's own is in `.penstock/` and in
no list. `penstock.store.file.objects` says how an object is written and what a crash leaves.

Everything that touches the disk runs in the store's own threads. A write first waits its turn
among the tasks of this process that want the same lock, in order; then it asks for the lock of
the key, without blocking, and again after a pause while another process has it, for at most
`LOCK_SECONDS`. A task that is cancelled while its write is in a thread does not stop the write: it
is completed, and the lock freed, behind the caller's back. `close` waits for such writes.

Time is what the file system stamps on its files; no clock of Python's is read for it. The stamp is
the kernel's at its last tick, so that it may lag, and never leads. Every put is a sample.

Not for network file systems whose locks or times are not those of one machine. Where a file
system ignores case, keys that differ only in case are one object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import Unavailable
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Head,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Version,
    check_key,
    check_limit,
    check_metadata,
)
from penstock.store.file.disk import Disk
from penstock.store.file.listing import query
from penstock.store.file.objects import JITTER_NS_MAX, Chance, Done, FileObjects
from penstock.store.file.own import stripe_of
from penstock.store.time import StoreClock, TimeSample

STAMP_RESOLUTION_SECONDS: Final = 0.02
"""How far a stamp may lag: a tick of 10 ms at most, and as much again for a tick that is late."""

THREADS_MAX: Final = 8
LOCK_SECONDS: Final = 30.0
PAUSE_SECONDS_MIN: Final = 0.0005
PAUSE_SECONDS_MAX: Final = 0.02

Answer = TypeVar("Answer")


class FileStore(ObjectStore):
    """The objects below a folder, which must be there. A `disk` is for tests; `fsync` is its."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock,
        entropy: Entropy,
        fsync: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self._clock = StoreClock(clock)
        self._entropy = entropy
        self._files = FileObjects(root, disk or Disk(fsync=fsync))
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="penstock-file")
        self._turns: dict[str, asyncio.Lock] = {}
        self._preparing = asyncio.Lock()
        self._prepared = False

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        check_key(key)
        return await self._in_thread(partial(self._files.read, key, unless))

    async def head(self, key: str) -> Head:
        check_key(key)
        return await self._in_thread(partial(self._files.head, key))

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        work = partial(self._files.write, key, body, mode, dict(metadata), self._chance())
        return (await self._write(key, work)).version

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        work = partial(self._files.rewrite, key, version, dict(metadata), self._chance())
        return (await self._write(key, work)).version

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        check_key(key)
        await self._write(key, partial(self._files.remove, key, version))

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        asked = query(
            self._files.base,
            prefix=prefix,
            start_after=start_after,
            delimiter=delimiter,
            limit=check_limit(limit),
            cursor=cursor,
        )
        return await self._in_thread(partial(self._files.list, asked))

    async def sample(self) -> TimeSample:
        sent = self._clock.machine.monotonic()
        stamp_ns = await self._in_thread(self._files.stamp_ns)
        return self._observe(stamp_ns, sent)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    async def _write(self, key: str, work: Callable[[], Done]) -> Done:
        """Do the work under the lock of the key."""
        machine = self._clock.machine
        deadline = machine.monotonic() + LOCK_SECONDS
        pause = PAUSE_SECONDS_MIN
        await self._prepare()
        async with self._turns.setdefault(stripe_of(key), asyncio.Lock()):
            while True:
                sent = machine.monotonic()
                done = await self._in_thread(partial(self._files.attempt, key, work))
                if done is not None:
                    if done.stamp_ns is not None:
                        self._observe(done.stamp_ns, sent)
                    return done
                if machine.monotonic() >= deadline:
                    raise Unavailable(
                        f"The lock of the key {key!r} was not free for {LOCK_SECONDS:.0f} seconds.",
                        key=key,
                        hint="Look for a process that is stopped or stuck while it writes.",
                    )
                await machine.sleep(self._entropy.uniform(pause / 2, pause))
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _prepare(self) -> None:
        """Before the first write only: whoever may not write may still read."""
        if self._prepared:
            return
        async with self._preparing:
            if not self._prepared:
                await self._in_thread(self._files.prepare)
                self._prepared = True

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _observe(self, stamp_ns: int, sent: float) -> TimeSample:
        sample = TimeSample(
            stamp=stamp_ns / 1e9,
            resolution=STAMP_RESOLUTION_SECONDS,
            sent=sent,
            received=self._clock.machine.monotonic(),
        )
        self._clock.observe(sample)
        return sample

    def _chance(self) -> Chance:
        return Chance(
            name=new_id(self._entropy, characters=16),
            jitter_ns=self._entropy.randrange(JITTER_NS_MAX),
        )
