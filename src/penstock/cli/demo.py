"""`penstock demo`: what there is to see, on a store in a temporary folder."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter

import click

from penstock.cli.doctor import show_finding
from penstock.kernel.clock import Clock, SystemClock
from penstock.store.doctor.examination import examine
from penstock.store.doctor.patient import open_patient
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.opening import Opening, open_backend
from penstock.store.races import count_race
from penstock.store.retrying import Retries, RetryingStore
from penstock.testing.virtual import World, simulate

_DAY_SECONDS = 86_400
_FAULTS = FaultPlan(throttled=0.05, failed=0.05, lost_request=0.1, lost_answer=0.1)
_SHORT_PAUSES = Retries(tries_max=20, first_pause_seconds=0.001, pause_seconds_max=0.02)


@click.command(epilog="Example: penstock demo")
def demo() -> None:
    """Show what Penstock can do, on embedded defaults. Takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        asyncio.run(_show_store(f"file://{folder}/bucket"))
    _show_virtual_day()
    click.echo(
        "\nGo on with your own bucket: .venv/bin/penstock doctor s3://BUCKET/PREFIX\n"
        "or read docs/store.md."
    )


async def _show_store(url: str) -> None:
    click.secho("Penstock, so far: the object store that everything stands on.", bold=True)
    await _show_trust(url)
    await _show_lost_answers(url)
    await _show_time(url)


def _title(number: int, text: str) -> None:
    click.secho(f"\n{number}. {text}", bold=True)


async def _show_trust(url: str) -> None:
    _title(1, f"Can this store be trusted? (penstock doctor {url})")
    async with open_patient(url, Opening()) as patient:
        report = await examine(patient, tell=show_finding)
    click.echo(f"   {report.verdict}")


async def _show_lost_answers(url: str) -> None:
    writers, each = 16, 20
    _title(2, f"{writers} writers add 1 to one object {each} times, and a third of it goes wrong")
    opening = Opening()
    faulty = [
        FaultyStore(await open_backend(url, opening), _FAULTS, entropy=opening.entropy)
        for _ in range(writers)
    ]
    stores = [
        RetryingStore(each_faulty, entropy=opening.entropy, retries=_SHORT_PAUSES)
        for each_faulty in faulty
    ]
    total = await count_race(stores, "counter", each=each, entropy=opening.entropy)
    injected = sum((each_faulty.injected for each_faulty in faulty), Counter[str]())
    for store in stores:
        await store.close()
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(injected.items()))
    click.echo(f"   met on the way: {faults}")
    click.echo(f"   {writers * each} additions were made, and the object says {total}.")


async def _show_time(url: str) -> None:
    _title(3, "The store's time, on a machine whose clock is a day ahead")
    clock = _DayAhead()
    store = await open_backend(url, Opening(clock=clock))
    known = await store.now()
    await store.close()
    off = clock.wall() - known.middle
    click.echo(f"   this machine is {off / 3600:.1f} hours ahead of the store and does not mind:")
    click.echo(f"   leases go by the store's time, known here to {known.width * 1000:.0f} ms.")


class _DayAhead(SystemClock):
    def wall(self) -> float:
        return super().wall() + _DAY_SECONDS


def _show_virtual_day() -> None:
    pollers, every = 10, 10.0
    _title(
        4, f"A day of {pollers} idle pollers, one list every {every:.0f} s each, in virtual time"
    )
    clock = SystemClock()
    began = clock.monotonic()
    meter = simulate(lambda world: idle_day(world, pollers=pollers, every=every), seed=1)
    click.echo(
        f"   {meter.requests():,} requests, ${meter.dollars():.2f} at S3 Standard's prices; "
        f"simulated in {clock.monotonic() - began:.1f} s."
    )


async def idle_day(world: World, *, pollers: int, every: float) -> Meter:
    """Pollers that find nothing for a day; returns what that would have cost."""
    meter = Meter()
    bucket = MemoryBucket(world.clock())

    async def poll(clock: Clock) -> None:
        store = MeteredStore(MemoryStore(bucket, clock=clock), meter)
        for _ in range(int(_DAY_SECONDS / every)):
            await store.list("tasks/", limit=10)
            await clock.sleep(every)

    async with asyncio.TaskGroup() as group:
        for _ in range(pollers):
            group.create_task(poll(world.clock()))
    return meter
