"""One run of the pipeline of flights: an installation, its events, and the wait for all of it.

The events of days are sent while Spark starts. The jobs that they are for are paused until the
small tables are published, which days are joined with; so days wait, and are taken together. From
then on the dispatcher is only asked how far it is; one that is dead at the moment is asked again.
A task that is dead ends the run with what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click

from penstock.cli.demo.chaos import Chaos
from penstock.cli.demo.display import Display, Stage
from penstock.cli.demo.result import Dataset, read_datasets
from penstock.cli.installation import wiring
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import StatusAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DispatcherUnavailable, PenstockError
from penstock.settings import Settings

FIRST_DAY: Final = date(2013, 1, 1)
DAG: Final = "flights.yaml"
_REFERENCE: Final = ("airlines", "airports", "planes")
_FIRST: Final = ("ingest_flights", "ingest_weather")
# A day is a thousand flights: all that takes time is the start of Spark.
_SETTINGS: Final = "[runtimes.spark]\ntiny = true\n"
_DAILY: Final = {
    "raw_flights": "ingest_flights",
    "raw_weather": "ingest_weather",
    "flights": "clean",
    "observed": "join_weather",
    "carrier_days": "carrier_days",
    "airport_days": "airport_days",
}
_MONTHLY: Final = {
    "carrier_months": "carrier_months",
    "airport_months": "airport_months",
    "carrier_report": "check_carriers",
    "airport_report": "check_airports",
}
_LOOK_SECONDS: Final = 0.25
_START_SECONDS_MAX: Final = 90.0
_RUN_SECONDS_MAX: Final = 300.0
_DAY_SECONDS_MAX: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has made, and what it took."""

    datasets: Mapping[str, Dataset]
    began_at: datetime
    seconds: float
    """From the first event to the last partition."""
    tasks: int
    again: int
    """How many of them needed more than one attempt."""


def stages_of(days: int) -> list[Stage]:
    """What will be there after so many days, in the order in which it is made."""
    months = len(whole_months(days))
    stages = [Stage(dataset=each, job="reference", partitions=1) for each in _REFERENCE]
    stages += [Stage(dataset=each, job=job, partitions=days) for each, job in _DAILY.items()]
    if months:
        stages += [
            Stage(dataset=each, job=job, partitions=months) for each, job in _MONTHLY.items()
        ]
    return stages


def days_of(count: int) -> list[date]:
    """The first days of 2013."""
    return [FIRST_DAY + timedelta(days=each) for each in range(count)]


def whole_months(count: int) -> list[str]:
    """The months that lie within so many days."""
    return [f"{day:%Y-%m}" for day in days_of(count) if (day + timedelta(days=1)).day == 1]


class Pipeline:
    """An installation with the pipeline in it, on a data folder, for one run."""

    def __init__(self, data: Path, code: Path, *, clock: Clock) -> None:
        self._clock = clock
        self._code = code
        self._data = data
        store = (data.absolute() / "store").as_uri()
        settings = Settings(data=data, store=store, port=0, internal_port=0, webhook_port=0)
        self._file = data / "penstock.toml"
        self._installation = wiring("penstock.installation").Installation(
            settings, code=code, file=self._file, waiting=click.echo
        )
        self._client = Client(self._installation.public_url)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._data.mkdir(parents=True, exist_ok=True)
        self._file.write_text(_SETTINGS)
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._installation)
            await opened.enter_async_context(self._client)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._opened.aclose()

    @property
    def url(self) -> str:
        """Where the console is."""
        url: str = self._installation.public_url
        return url

    @property
    def client(self) -> Client:
        """For what comes after the run."""
        return self._client

    async def run(self, days: int, display: Display, chaos: Chaos | None = None) -> Run:
        """Run the pipeline for so many days."""
        client, stages = self._client, stages_of(days)
        await self._until_ready()
        display.say(f"Watch it at {self.url}")
        await client.apply(self._code / DAG)
        began_at, began = (await client.status()).now, self._clock.monotonic()

        def show(published: Mapping[str, int], status: StatusAnswer) -> None:
            running = {each.name: each.running for each in status.jobs}
            display.show(published, running, seconds=self._clock.monotonic() - began)
            if chaos is not None:
                done = _done(stages, published)
                chaos.look(share_done=done, is_running=any(running.values()))

        await client.trigger("register", event_id="register")
        for job in _FIRST:
            await client.pause(job, reason="The small tables are not there yet.")
        for day in days_of(days):
            await _tell_of(client, day)
        await self._until([each for each in stages if each.dataset in _REFERENCE], show)
        for job in _FIRST:
            await client.resume(job)
        seconds_max = _RUN_SECONDS_MAX + days * _DAY_SECONDS_MAX
        await self._until(stages, show, seconds_max=seconds_max)
        seconds = self._clock.monotonic() - began
        display.end()
        await client.wait(timeout_seconds=_START_SECONDS_MAX)
        return await self._outcome(stages, began_at=began_at, seconds=seconds)

    async def _outcome(self, stages: Sequence[Stage], *, began_at: datetime, seconds: float) -> Run:
        client = self._client
        tasks, again, before = 0, 0, None
        for _ in range(100):
            page = await client.tasks(limit=1000, before=before)
            tasks += len(page.tasks)
            again += sum(each.attempt > 1 for each in page.tasks)
            before = page.before
            if before is None:
                break
        datasets = await read_datasets(client, [each.dataset for each in stages])
        return Run(datasets=datasets, began_at=began_at, seconds=seconds, tasks=tasks, again=again)

    async def _until_ready(self) -> None:
        """Wait until the dispatcher answers. The worker finds it, and what it is to serve."""
        deadline = self._clock.monotonic() + _START_SECONDS_MAX
        while self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                await self._client.status()
                return
            self._check()
            await self._clock.sleep(_LOOK_SECONDS)
        raise PenstockError(
            f"It has not started in {_START_SECONDS_MAX:.0f} s.",
            hint=f"The logs are in {self._data / 'logs'}.",
        )

    async def _until(
        self,
        stages: Sequence[Stage],
        show: Callable[[Mapping[str, int], StatusAnswer], None],
        *,
        seconds_max: float = _RUN_SECONDS_MAX,
    ) -> None:
        """Look again and again until these are complete; a dispatcher that is dead comes back."""
        deadline = self._clock.monotonic() + seconds_max
        while self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                status = await self._client.status()
                published = await _published(self._client)
                show(published, status)
                if _is_complete(stages, published):
                    return
                if any(each.dead for each in status.jobs):
                    raise await _death(self._client)
            self._check()
            await self._clock.sleep(_LOOK_SECONDS)
        names = ", ".join(each.dataset for each in stages)
        raise PenstockError(
            f"Not all of {names} is there after {seconds_max:.0f} s.",
            hint=f"The logs are in {self._data / 'logs'}; --data FOLDER keeps them.",
        )

    def _check(self) -> None:
        """Raise what is wrong with a process that ends again and again."""
        failure: PenstockError | None = self._installation.failure()
        if failure is not None:
            raise failure


async def _tell_of(client: Client, day: date) -> None:
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    key = day.isoformat()
    await client.trigger(
        "calendar", event_id=key, partition_key=key, start=start, end=start + 86_400
    )


async def _published(client: Client) -> dict[str, int]:
    """How many partitions of each dataset are published."""
    found: dict[str, int] = {}
    for dataset in (await client.datasets()).datasets:
        for generation in dataset.generations:
            found[dataset.name] = max(found.get(dataset.name, 0), generation.partitions)
    return found


async def _death(client: Client) -> PenstockError:
    """What to say of a task without attempts left."""
    dead = (await client.tasks(status="dead", limit=1)).tasks
    said = [f"{each.job} has failed for {each.partition_key}: {each.reason}" for each in dead]
    return PenstockError(*said or ["A task has failed."])


def _is_complete(stages: Iterable[Stage], published: Mapping[str, int]) -> bool:
    return all(published.get(each.dataset, 0) >= each.partitions for each in stages)


def _done(stages: Sequence[Stage], published: Mapping[str, int]) -> float:
    """Which share of all partitions is there."""
    done = sum(min(each.partitions, published.get(each.dataset, 0)) for each in stages)
    return done / sum(each.partitions for each in stages)
