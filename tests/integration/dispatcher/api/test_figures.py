"""What claims bring and ends tell beside the task itself: batches, manifests, what it took."""

from __future__ import annotations

from typing import Any

from penstock.dispatcher.metrics import OTHERS
from penstock.protocol.steering import TaskAnswer
from penstock.protocol.work import InputColumnAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, place, read
from tests.integration.dispatcher.test_routing import FEED, reader
from tests.unit.dispatcher.metrics.test_counters import parse

DIGEST = "a" * 64


def facts(**more: Any) -> dict[str, Any]:
    columns = [{"name": "day", "type": "date"}, {"name": "n", "type": "bigint"}]
    said = {"manifest": DIGEST, "files": 2, "rows": 30, "bytes": 400, "columns": columns}
    return {**said, **more}


def test_partitions_are_claimed_together_and_read_what_was_published(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        dag = FEED + reader("clean", coalesce="3") + reader("report", inputs="[clean]")
        ok(await stage.apply(dag))
        await stage.trigger(*"abcd")
        found = await stage.claim(limit=1, in_batches=True)
        assert [each.payload["partition_key"] for each in found] == ["a", "b", "c"]
        assert {each.batch for each in found} == {f"{found[0].task_id}-1"}
        made = output(found[0], "clean", facts=facts())
        ok(await stage.complete(held(found[0], outputs=[made])))
        (alone,) = await stage.claim()
        assert alone.batch == ""
        # What it will have to fit into is told before it computes anything.
        assert found[0].columns == {}
        told = [
            InputColumnAnswer(name="day", type="date"),
            InputColumnAnswer(name="n", type="bigint"),
        ]
        assert alone.columns == {"clean": told}
        (report,) = await stage.claim("a:report", limit=9)
        (part,) = report.inputs["clean"].parts
        assert (part.location, part.partition_key) == (place(found[0], "clean"), "a")
        assert (part.revision, part.append_key) == (1, None)

    on_stage(story)


def test_what_an_attempt_took_is_shown(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"ab")
        first, second = await stage.claim(limit=2)
        metrics = {"rows_out": 5, "phases": {"read_seconds": 0.25}, "odd": "\x00"}
        end = held(first, outputs=[output(first)], metrics=metrics)
        failure = held(second, failure={"reason": "No."}, metrics={"rows_in": 1})
        ok(await stage.complete(end, failure))
        # The same end again is known again, also if it says otherwise what it took.
        ok(await stage.complete({**end, "metrics": {"rows_out": 6}}))

        async def shown(task_id: int) -> dict[str, Any] | None:
            answer = read(await stage.public.get(f"/v1/tasks/{task_id}"), TaskAnswer)
            return answer.attempts[0].metrics

        assert await shown(first.task_id) == {**metrics, "odd": "\N{REPLACEMENT CHARACTER}"}
        assert await shown(second.task_id) == {"rows_in": 1}

    on_stage(story)


def test_calls_are_counted_by_the_paths_of_the_table(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        for path in ("/v1/tasks/7", "/v1/tasks/8", "/secret"):
            assert (await stage.public.get(path)).status_code == 404
        assert (await stage.internal.get("/healthz")).status_code == 200
        told = parse((await stage.public.get("/metrics")).text)["penstock_http_requests_total"]
        labels = 'listener="public",method="{}",path="{}",status="4xx"'
        assert told == {
            f"penstock_http_requests_total{{{labels.format('GET', '/v1/tasks/{id}')}}}": 2,
            f"penstock_http_requests_total{{{labels.format(OTHERS, OTHERS)}}}": 1,
        }

    on_stage(story)


def test_figures_that_are_too_many_cost_no_neighbour_anything(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"ab")
        first, second = await stage.claim(limit=2)
        many = {"text": "x" * 20_000}
        ok(await stage.complete(held(first, metrics=many), held(second, metrics={"rows": 1})))
        rows = await stage.world.rows("SELECT metrics FROM attempt ORDER BY task_id")
        assert list(rows[0]["metrics"]) == ["omitted"]
        assert rows[1]["metrics"] == {"rows": 1}

    on_stage(story)


def test_a_manifest_that_cannot_be_is_refused(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("a")
        (task,) = await stage.claim()
        for wrong in (
            facts(manifest="A" * 64),
            facts(rows=-1),
            facts(bytes=2**63),
            facts(columns=[{"name": "a\x00", "type": "date"}]),
            facts(columns=[{"name": "", "type": "date"}]),
        ):
            made = output(task, facts=wrong)
            answer = await stage.complete(held(task, outputs=[made]))
            assert answer.status_code == 422, wrong
        ok(await stage.complete(held(task, outputs=[output(task, facts=facts())])))

    on_stage(story)
