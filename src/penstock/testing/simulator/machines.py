"""A simulated machine: it can crash at any await, freeze for any time, and its clocks are wrong.

All that a process on the machine can do to the outside goes through two things: its store and its
clock. `MachineStore` and `MachineClock` are the gates. Of a machine that is dead no request is sent
and no sleep returns: whatever its cleanup code tries ends with `CancelledError`. A machine that is
frozen gets no answer and no sleep of it ends before it thaws; its clocks go on, as those of a
suspended machine do.

The network is not the machine. What was sent before the end may still arrive (`late`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError
from penstock.store.base import Answer, ObjectStore, StoreOperation, Wrapper
from penstock.store.time import StoreClock
from penstock.testing.virtual import VirtualClock

Tell = Callable[[str, str], None]
"""Told of what happens to a machine: its name, and the words."""

MACHINE: Final[ContextVar[str]] = ContextVar("machine", default="")
HELD_BACK_SECONDS: Final[ContextVar[float]] = ContextVar("held_back_seconds", default=0.0)
"""How long the machine was frozen between deciding on the present request and sending it."""
"""The machine on which the present task runs."""

_LATE_SECONDS_MAX: Final = 40.0
_SOON_SECONDS_MAX: Final = 4.0
_WRITES: Final = ("create", "swap", "replace", "touch", "delete")


def what_is(key: str) -> str:
    """What a key of a queue is of, in a word."""
    folder = key.split("/", 3)[2] if key.count("/") > 2 else key
    if folder in ("tasks", "keyed", "ready", "unhurried"):
        return "ledger" if key.endswith(".ledger") else "pointer" if "@" in key else "pack"
    return folder


class MachineFault(StrEnum):
    """What can befall a machine at a request."""

    DIES_BEFORE = "dies before"
    DIES_AFTER = "dies after"
    DIES_DURING = "dies during"
    """The request is on its way, and arrives later."""
    FREEZES_BEFORE = "freezes before"
    FREEZES_AFTER = "freezes after"
    ECHOES = "has an echo of"
    """The request arrives once more, later."""


@dataclass(slots=True)
class FaultTrigger:
    """What befalls a machine, and at which request."""

    blow: MachineFault
    at: str = ""
    """The kind of request, "ledger create" say; any if empty."""
    skipped: int = 0
    """How many such requests go well before."""
    seconds: float = 0.0
    """How long it freezes, or how late the echo is."""
    freeze_seconds: float = 0.0
    """With an echo: how long the machine freezes, a moment after the request."""


class HostLock:
    """The lock of a machine's process: nobody else has it before the process has ended."""

    descriptor = None

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.incarnation = f"process on {machine.name}"
        self._is_held = True

    @property
    def is_free(self) -> bool:
        """Whether its process has ended, and has left something behind."""
        return self._is_held and self._machine.is_dead

    def refresh(self) -> None:
        pass

    def release(self) -> None:
        self._is_held = False


class HostLocks:
    """The locks of one host, on which machines' processes run beside or after each other."""

    def __init__(self) -> None:
        self._locks: list[HostLock] = []

    def of(self, machine: Machine) -> MachineLocks:
        """The locks as a process on this machine sees them."""
        return MachineLocks(self._locks, machine)


class MachineLocks:
    """The locks of a host, as one process sees them."""

    def __init__(self, locks: list[HostLock], machine: Machine) -> None:
        self._locks = locks
        self._machine = machine

    def acquire(self) -> HostLock:
        lock = HostLock(self._machine)
        self._locks.append(lock)
        return lock

    def ended(self) -> frozenset[str]:
        return frozenset(lock.incarnation for lock in self._locks if lock.is_free)


class MachineClock:
    """The clock of a machine, as the processes on it see it."""

    def __init__(self, machine: Machine, inner: VirtualClock) -> None:
        self._machine = machine
        self._inner = inner
        # Asked so often that a call less counts.
        self.monotonic = inner.monotonic
        self.wall = inner.wall

    async def sleep(self, seconds: float) -> None:
        try:
            await self._inner.sleep(seconds)
        finally:
            if self._machine.is_halted:
                await self._machine.gate()


class Machine:
    """One machine and the process on it."""

    def __init__(self, name: str, *, clock: VirtualClock, entropy: Entropy, tell: Tell) -> None:
        self.name = name
        self.network_clock = clock
        self.clock = MachineClock(self, clock)
        self.entropy = entropy
        self.is_dead = False
        self.is_halted = False
        self.freezes = 0
        """How often it was frozen."""
        self.problem: BaseException | None = None
        """What its process fell over, if it did."""
        self._tell = tell
        self._thaw: asyncio.Event | None = None
        self._main: asyncio.Task[None] | None = None
        self._on_their_way: set[asyncio.Task[None]] = set()
        self.triggers: list[FaultTrigger] = []

    @property
    def has_ended(self) -> bool:
        """Whether its process is over, in whatever way."""
        return self.is_dead or (self._main is not None and self._main.done())

    def start(
        self, group: asyncio.TaskGroup, process: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a process on it."""
        self._main = group.create_task(self._live(process))

    async def _live(self, process: Callable[[], Coroutine[Any, Any, None]]) -> None:
        MACHINE.set(self.name)
        try:
            await process()
        except asyncio.CancelledError:
            if not self.is_dead:
                raise
        except Exception as error:  # noqa: BLE001 - it is shown by the referee
            if not self.is_dead:
                self.problem = error

    def die(self) -> None:
        """Crash now."""
        if not self.has_ended:
            self._tell(self.name, "crashes")
        self.is_dead = self.is_halted = True
        if self._thaw is not None:
            self._thaw.set()
        if self._main is not None:
            self._main.cancel()

    def freeze(self) -> None:
        """Stop where it is, until `thaw`."""
        if not self.has_ended and self._thaw is None:
            self._tell(self.name, "freezes")
            self._thaw = asyncio.Event()
            self.is_halted = True
            self.freezes += 1

    def thaw(self) -> None:
        """Go on."""
        if self._thaw is not None and not self.is_dead:
            self._tell(self.name, "thaws")
            self._thaw.set()
            self._thaw = None
            self.is_halted = False

    async def gate(self) -> None:
        """Wait while frozen; a dead machine gets no further."""
        while self._thaw is not None and not self.is_dead:
            await self._thaw.wait()
        if self.is_dead:
            raise asyncio.CancelledError

    async def send(
        self, request: Callable[[], Awaitable[Answer]], *, kind: str, key: str
    ) -> Answer:
        """Make a request, unless the end comes first."""
        decided_at = asyncio.get_running_loop().time()
        if self.is_halted:
            await self.gate()
        trigger = self._pulled(f"{what_is(key)} {kind}") if self.triggers else None
        blow = trigger.blow if trigger else None
        if blow is MachineFault.DIES_DURING and kind in _WRITES:
            self._deliver(request, seconds=self.entropy.uniform(0, _LATE_SECONDS_MAX))
        if blow is MachineFault.DIES_BEFORE or blow is MachineFault.DIES_DURING:
            self.die()
            raise asyncio.CancelledError
        if trigger is not None and blow is MachineFault.FREEZES_BEFORE:
            self.freeze_for(trigger.seconds)
            await self.gate()
        held_back = HELD_BACK_SECONDS.set(asyncio.get_running_loop().time() - decided_at)
        try:
            return await request()
        finally:
            HELD_BACK_SECONDS.reset(held_back)
            if trigger is not None and blow is MachineFault.ECHOES:
                self._deliver(request, seconds=trigger.seconds)
                self._freeze_soon(trigger.freeze_seconds)
            if blow is MachineFault.DIES_AFTER:
                self.die()
            if trigger is not None and blow is MachineFault.FREEZES_AFTER:
                self.freeze_for(trigger.seconds)
            if self.is_halted:
                await self.gate()

    def freeze_for(self, seconds: float) -> None:
        """Stop where it is for so long; one that is frozen stays so for as long as it would."""
        if self._thaw is None:
            self.freeze()
            asyncio.get_running_loop().call_later(seconds, self._thaw_from, self._thaw)

    def _freeze_soon(self, seconds: float) -> None:
        if seconds:
            soon = self.entropy.uniform(0, _SOON_SECONDS_MAX)
            asyncio.get_running_loop().call_later(soon, self.freeze_for, seconds)

    def _thaw_from(self, frozen: asyncio.Event | None) -> None:
        if self._thaw is frozen:
            self.thaw()

    def _pulled(self, kind: str) -> FaultTrigger | None:
        for trigger in self.triggers:
            if trigger.at in ("", kind):
                trigger.skipped -= 1
                if trigger.skipped < 0:
                    self.triggers.remove(trigger)
                    self._tell(self.name, f"{trigger.blow} a {kind}")
                    return trigger
        return None

    def _deliver(self, request: Callable[[], Awaitable[object]], *, seconds: float) -> None:
        async def deliver() -> None:
            await self.network_clock.sleep(seconds)
            try:
                await request()
            except StoreError:
                return  # Nobody waits for this answer.

        task = asyncio.get_running_loop().create_task(deliver())
        self._on_their_way.add(task)
        task.add_done_callback(self._on_their_way.discard)


class MachineStore(Wrapper):
    """A machine's access to the network, with a store's clock over the machine's own."""

    def __init__(self, inner: ObjectStore, machine: Machine) -> None:
        super().__init__(inner)
        self._machine = machine
        self._clock = StoreClock(machine.clock)

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        try:
            return await self._machine.send(ask, kind=operation.value, key=key)
        finally:
            sample = self.inner.clock.last_sample
            if sample is not None and sample is not self._clock.last_sample:
                self._clock.observe(sample)
