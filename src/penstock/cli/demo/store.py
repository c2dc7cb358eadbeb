"""The store: can it be trusted, and what happens when a third of the requests go wrong?"""

from __future__ import annotations

from collections import Counter

import click

from penstock.cli.doctor import show_finding
from penstock.store.doctor.examination import examine
from penstock.store.doctor.patient import open_patient
from penstock.store.doctor.report import Mark
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.opening import Opening, open_backend
from penstock.store.races import count_race
from penstock.store.retrying import Retries, RetryingStore

_FAULTS = FaultPlan(throttled=0.05, failed=0.05, lost_request=0.1, lost_answer=0.1)
_SHORT_PAUSES = Retries(tries_max=20, first_pause_seconds=0.001, pause_seconds_max=0.02)


async def show_trust(url: str) -> None:
    """Examine a store, as `penstock doctor` does."""
    async with open_patient(url, Opening()) as patient:
        report = await examine(patient, tell=lambda _: None)
    for finding in report.findings:
        if finding.mark is not Mark.GOOD:
            show_finding(finding)
    click.echo(f"   {len(report.findings)} rules tried, alone and in races of sixteen writers.")
    click.echo(f"   {report.verdict}")


async def show_lost_answers(url: str) -> None:
    """Update one object from many sides while requests and answers are lost."""
    writers, each = 16, 20
    click.echo(f"   {writers} writers add 1 to one object, {each} times each.")
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
