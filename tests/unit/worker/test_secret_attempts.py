"""Attempts of jobs with secrets: what the work gets, and what the dispatcher is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import SecretUnavailable, WorkFailed
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from penstock.runtimes.secrets import hidden
from penstock.testing.virtual import World
from penstock.worker.assignment_codec import REASON_CHARACTERS_MAX
from penstock.worker.secrets import SecretResolver
from tests.unit.worker.bench import Bench, nothing, play
from tests.unit.worker.scripted import DATASET, Dispatcher

VALUE = "hunter2-hunter2"
ENVIRONMENT = {"KEY": VALUE, "SHORT": "abc"}


def found(world: World) -> SecretResolver:
    del world
    return SecretResolver(environment=ENVIRONMENT, folder=Path("/nowhere"), prefix="", vault=None)


def waiting(**secrets: Any) -> Callable[[Dispatcher], object]:
    definition = {
        "outputs": [{"name": "out", "dataset": "cleaned"}],
        "datasets": {"cleaned": DATASET},
        "secrets": secrets,
    }
    return lambda dispatcher: dispatcher.add(definition=definition)


def told(bench: Bench) -> str:
    """Everything that the dispatcher was told."""
    return "".join(msgspec.json.encode(ask).decode() for _, ask in bench.dispatcher.calls if ask)


def test_the_work_gets_its_secrets_and_the_dispatcher_does_not() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        assert work.secrets == {"TOKEN": VALUE}
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.status == "completed")
        assert VALUE not in told(bench)

    play(story, setting=waiting(TOKEN="env:KEY"), doing=doing, secrets=found)


def test_a_secret_that_is_not_there_fails_the_attempt_before_the_work_begins() -> None:
    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(task.ended))
        assert task.reason == (
            "The secret TOKEN of job clean (env:NONE) is not there: this worker has no variable"
            " NONE in its environment; set it where the worker is started."
        )
        failure = task.ended[0].failure
        assert failure is not None
        assert failure.is_retried
        assert bench.runtime.works == []

    play(story, setting=waiting(TOKEN="env:NONE"), secrets=found)


@pytest.mark.parametrize("secrets", [{"TOKEN": "env:PENSTOCK_WORKER_SECRET"}, {"TOKEN": 7}])
def test_what_is_forbidden_is_not_retried(secrets: dict[str, Any]) -> None:
    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(task.ended))
        failure = task.ended[0].failure
        assert failure is not None
        assert not failure.is_retried
        assert bench.runtime.works == []

    play(story, setting=waiting(**secrets), secrets=found)


def test_a_worker_that_gives_out_none_says_so() -> None:
    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(task.ended))
        assert task.reason == "The job clean names secrets, and this worker provides none."
        assert bench.runtime.works == []

    play(story, setting=waiting(TOKEN="env:KEY"))


@pytest.mark.parametrize("kind", [WorkFailed, ValueError])
def test_a_failure_is_told_without_values(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        raise kind(f"401 for key={work.secrets['TOKEN']} pin={work.secrets['PIN']}")

    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(task.ended))
        assert "401 for key=*** pin=abc" in task.reason
        assert VALUE not in told(bench)

    with caplog.at_level(logging.DEBUG):
        play(story, setting=waiting(TOKEN="env:KEY", PIN="env:SHORT"), doing=doing, secrets=found)
    assert VALUE not in caplog.text


def test_outputs_that_are_refused_are_told_without_values() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        return (ProducedOutput(output=f"no {work.secrets['TOKEN']}", location="file:///x"),)

    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(task.ended))
        assert "has made 'no ***', which is no output" in task.reason

    play(story, setting=waiting(TOKEN="env:KEY"), doing=doing, secrets=found)


class Slow:
    """A vault that answers after so long, with a failure."""

    def __init__(self, world: World, seconds: float) -> None:
        self._clock = world.clock()
        self._seconds = seconds

    async def text(self, name: str) -> str:
        await self._clock.sleep(self._seconds)
        raise SecretUnavailable(f"cannot be had now: {name} is away")


def slow(world: World) -> SecretResolver:
    vault = Slow(world, 10.0)
    return SecretResolver(environment={}, folder=Path("/nowhere"), prefix="", vault=vault)


def test_an_attempt_that_is_lost_while_its_secrets_are_looked_for_tells_nothing() -> None:
    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.attempt == 1)
        # Somebody ends the attempt: the next heartbeat is refused.
        task.status = "dead"
        await bench.clock.sleep(60)
        assert task.ended == []
        assert bench.dispatcher.paths()["/v1/task/complete"] == 0

    def setting(dispatcher: Dispatcher) -> None:
        waiting(TOKEN="aws:p")(dispatcher)
        dispatcher.tasks[1].heartbeat_seconds = 3.0

    play(story, setting=setting, secrets=slow)


def test_a_worker_that_is_stopped_meanwhile_ends() -> None:
    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.attempt == 1)
        assert await bench.stopped() < 15.0
        assert len(task.ended) == 1
        assert bench.runtime.works == []

    play(story, setting=waiting(TOKEN="aws:p"), secrets=slow, stop_seconds=0.0)


def test_secrets_stay_with_their_task() -> None:
    seen: dict[int, dict[str, str]] = {}

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        seen[work.task_id] = dict(work.secrets)
        return await nothing(work, reporter)

    def setting(dispatcher: Dispatcher) -> None:
        waiting(TOKEN="env:KEY")(dispatcher)
        waiting(PIN="env:SHORT")(dispatcher)
        waiting()(dispatcher)

    async def story(bench: Bench) -> None:
        tasks = bench.dispatcher.tasks.values()
        await bench.until(lambda: all(task.status == "completed" for task in tasks))
        assert seen == {1: {"TOKEN": VALUE}, 2: {"PIN": "abc"}, 3: {}}

    play(story, setting=setting, doing=doing, secrets=found)


def test_a_reason_is_cut_before_values_are_looked_for_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child can say sixteen megabytes, and everybody's heartbeats wait for this."""
    lengths: list[int] = []

    def looked(text: str, values: Iterable[str]) -> str:
        lengths.append(len(text))
        return hidden(text, values)

    monkeypatch.setattr("penstock.worker.attempt.hidden", looked)
    room = REASON_CHARACTERS_MAX - 10

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        raise WorkFailed("x" * room + VALUE + "y" * 1_000_000)

    async def story(bench: Bench) -> None:
        (task,) = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.status == "failed")
        assert task.reason == "x" * room + "***", "also what the cut has left of one"
        assert max(lengths) == REASON_CHARACTERS_MAX

    play(story, setting=waiting(TOKEN="env:KEY"), doing=doing, secrets=found, seeds=[1])
