"""A worker whose dispatchers have been brought to a release that does not serve it any more."""

from __future__ import annotations

import pytest

from penstock.kernel.errors import DispatcherRefused
from penstock.protocol.problem import Problem
from tests.unit.worker.bench import Bench, play
from tests.unit.worker.scripted import Dispatcher

PATHS = ("/internal/hello", "/internal/task-claim", "/v1/task/heartbeat", "/v1/task/complete")
TOO_OLD = Problem(
    type="release",
    title="The caller runs an earlier release of Penstock than this dispatcher supports.",
    status=426,
    detail="Upgrade it to the release of the dispatcher, and restart it.",
)


def _one(dispatcher: Dispatcher) -> None:
    dispatcher.add()


def test_one_that_runs_keeps_what_it_has_made_and_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: len(bench.runtime.running) == 1)
        bench.dispatcher.problems |= dict.fromkeys(PATHS, TOO_OLD)
        # Longer than it runs, and than its lease.
        await bench.clock.sleep(120)
        assert bench.runtime.cancelled == []
        assert (task.status, task.ended) == ("running", [])
        # The upgrade is taken back, or a dispatcher that serves it is there again.
        bench.dispatcher.problems.clear()
        await bench.until(lambda: task.status == "completed", seconds=120)
        assert [end.failure for end in task.ended] == [None]

    play(story, setting=_one, seconds=60)
    told = [each.getMessage() for each in caplog.records if TOO_OLD.title in each.getMessage()]
    assert told
    assert all(TOO_OLD.detail in each for each in told)


def test_one_that_starts_ends_with_the_sentence() -> None:
    async def story(bench: Bench) -> None:
        with pytest.raises(DispatcherRefused) as caught:
            await bench.running[0]
        assert caught.value.message == TOO_OLD.title
        assert caught.value.hint == TOO_OLD.detail
        bench.running.clear()
        raise Over

    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.problems |= dict.fromkeys(PATHS, TOO_OLD)

    with pytest.raises(Over):
        play(story, setting=setting)


class Over(Exception):
    """The story is told."""
