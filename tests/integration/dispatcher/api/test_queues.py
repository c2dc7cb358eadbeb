"""Named runtimes: whose workers are offered which tasks, and how many of them are wanted."""

from __future__ import annotations

from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.protocol.work import HelloAnswer
from penstock.runtimes.registry import RuntimeRegistry
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, ok, read, refused, staged

DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  small: {runtime: process, operator: "a:work", inputs: [raw], outputs: [one]}
  big: {runtime: process-big, operator: "a:work", inputs: [raw], outputs: [two]}
  own: {runtime: process, operator: "a:work", inputs: [raw], outputs: [three],
        resources: {queue: gpu}}
  back: {runtime: process-big, operator: "a:work", inputs: [raw], outputs: [four],
         resources: {queue: default}}
"""


def _runtimes(**settings: str) -> RegisteredRuntimes:
    big = {"process-big": {"uses": "process", **settings}}
    return RegisteredRuntimes(RuntimeRegistry(big, installed=[]))


async def _offered(stage: Stage, *queues: str) -> list[str]:
    ask = {"runtimes": ["process", "process-big"], "queues": list(queues)}
    headers = stage.identity("w1")
    answer = await stage.internal.post("/internal/hello", json=ask, headers=headers)
    return sorted({each.name for each in read(answer, HelloAnswer).operators})


def test_tasks_of_one_operator_go_to_the_workers_of_their_queue(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(DAG))
        assert await _offered(stage) == ["a:work", "a:work@gpu", "a:work@process-big"]
        assert await _offered(stage, "process-big") == ["a:work@process-big"]
        assert await _offered(stage, "gpu", "default") == ["a:work", "a:work@gpu"]
        assert await _offered(stage, "nobody") == []

        await stage.trigger("p")
        (big,) = await stage.claim("a:work@process-big", limit=9)
        # What is run has the name that the code has; a worker of an earlier release knows no other.
        assert (big.job, big.operator, big.claimed_as) == ("big", "a:work", "a:work@process-big")
        assert big.runtime == "process-big"
        assert [each.job for each in await stage.claim("a:work@gpu", limit=9)] == ["own"]
        default = await stage.claim("a:work", limit=9)
        assert sorted(each.job for each in default) == ["back", "small"]

    on_stage(story, runtimes=_runtimes())


def test_each_queue_is_woken_counted_and_limited_by_itself(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(DAG))
        await stage.trigger("p", "q")
        woken = {each.partition("/")[0] for each in await stage.world.wakes()}
        assert woken == {"a:work", "a:work@gpu", "a:work@process-big"}
        asked = {"in_flight_max": 1}
        ok(await stage.public.put("/v1/operators/a:work@process-big", json=asked))
        assert len(await stage.claim("a:work@process-big", limit=9)) == 1
        metrics = (await stage.public.get("/metrics")).text.splitlines()
        assert {each for each in metrics if each.startswith("penstock_queue_desired{")} == {
            'penstock_queue_desired{queue="default"} 4',
            'penstock_queue_desired{queue="gpu"} 2',
            'penstock_queue_desired{queue="process-big"} 1',
        }

    on_stage(story, runtimes=_runtimes())


def test_another_queue_in_the_settings_is_another_version_and_no_rebuild(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        first = ok(await stage.apply(DAG))
        assert ok(await stage.apply(DAG))["version"] == first["version"]
        await stage.trigger("p")
        await stage.route()
        # Another dispatcher, which has read other settings.
        async with staged(stage.world, runtimes=_runtimes(queue="huge")) as other:
            moved = ok(await other.apply(DAG))
        assert moved["version"] == first["version"] + 1
        generations = await stage.world.value("SELECT count(DISTINCT generation) FROM dag_job")
        assert generations == 5
        # Tasks that waited before are still offered to who runs their runtime.
        assert await _offered(stage, "huge", "process-big") == ["a:work@huge", "a:work@process-big"]

    on_stage(story, runtimes=_runtimes())


def test_what_a_job_may_not_say(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        for said, sentence in (
            ("{queue: 'A B'}", "'A B' is no name of a queue"),
            ("{queue: 7}", "'7' is no name of a queue"),
            ("{image: mine}", "has no resource 'image'"),
            (f"{{queue: {'q' * 65}}}", "is no name of a queue"),
        ):
            problem = refused(await stage.apply(DAG.replace("{queue: gpu}", said)), 422)
            assert sentence in str(problem), said
        lambda_ = DAG.replace("process-big, operator", "lambda, operator", 1)
        lambda_ = lambda_.replace("outputs: [two]}", "outputs: [two], resources: {queue: x}}")
        assert "wait in no queue" in str(refused(await stage.apply(lambda_), 422))
        longest = "a:" + "w" * 190
        problem = refused(await stage.apply(DAG.replace("a:work", longest)), 422)
        assert "more than 200 characters together" in str(problem)

    on_stage(story, runtimes=_runtimes())
