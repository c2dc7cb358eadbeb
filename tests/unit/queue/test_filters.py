"""Filters by tags: what each form means, what is refused, and which tasks it finds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.canceller import cancel_tasks
from penstock.queue.client import Queue
from penstock.queue.inspection import list_tasks
from penstock.queue.inspection.task_search import TagFilter, tag_filters, unknown_tags
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

PROD = {"env": "prod", "team": "a"}
TEST = {"env": "test"}


@pytest.mark.parametrize(
    ("form", "holds_for"),
    [
        ("env=prod", [PROD]),
        ("env!=prod", [TEST, {}]),
        ("env", [PROD, TEST]),
        ("team", [PROD]),
        ("env=", []),
        ("env!=", [PROD, TEST, {}]),
    ],
)
def test_a_form_holds_for_these(form: str, holds_for: Sequence[Mapping[str, str]]) -> None:
    (made,) = tag_filters([form])
    assert [tags for tags in (PROD, TEST, {}) if made.holds(tags)] == holds_for


def test_a_value_may_have_anything_in_it() -> None:
    assert tag_filters(["a=b=c!=d\n "]) == (TagFilter("a", "b=c!=d\n "),)
    assert tag_filters({"a": "x", "b": None}) == (TagFilter("a", "x"), TagFilter("b"))
    assert tag_filters(None) == ()


@pytest.mark.parametrize(
    "given",
    [
        ["env~prod"],
        ["=x"],
        [""],
        ["!env"],
        ["a b=c"],
        ["env==", "-x=1"],
        "env=prod",
        {"a b": "c"},
        {"env": 5},
        ["e=" + "x" * 201],
        ["a"] * 21,
        [7],
    ],
)
def test_what_is_no_filter_is_refused_in_words(given: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        tag_filters(given)  # type: ignore[arg-type]  # What users pass by mistake.
    assert refused.value.message.endswith(".")


def test_a_tag_that_nobody_has_is_told_with_the_one_that_is_meant() -> None:
    wrong = tag_filters(["envv=prod", "envv!=x", "team", "zzz"])
    assert unknown_tags(wrong, {"env", "team"}) == [
        "no task in sight has a tag 'envv'; is 'env' meant?",
        "no task in sight has a tag 'zzz'; there are env and team.",
    ]
    assert unknown_tags(wrong[3:], ()) == ["no task in sight has a tag 'zzz'."]


def _on_a_queue(test: Callable[[Queue, Meter], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        meter = Meter()
        store = MeteredStore(MemoryStore(bucket, clock=world.clock()), meter)
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await test(queue, meter)

    simulate(main, seed=1)


def test_tasks_are_found_by_status_type_and_tags() -> None:
    async def test(queue: Queue, _: Meter) -> None:
        one = await queue.submit("ok", 1, tags=PROD)
        two = await queue.submit("ok", 2, tags=TEST, delay=60)
        three = await queue.submit("other", 3, key="k", tags=PROD)
        four = await queue.submit("ok", 4)
        assert {v.id for v in await queue.tasks(tags=PROD)} == {one.id, three.id}
        assert {v.id for v in await queue.tasks(tags=["env!=prod"])} == {two.id, four.id}
        assert [v.id for v in await queue.tasks(tags=["env"], status="delayed")] == [two.id]
        assert [v.id for v in await queue.tasks(tags={"env": None}, type="other")] == [three.id]
        assert len(await queue.tasks(status=["ready", "delayed"])) == 4
        unknown = await queue.tasks(tags=["envv"])
        assert (len(unknown), len(unknown.unknown_tags)) == (0, 1)
        for wrong in ({"status": "reddy"}, {"limit": 0}, {"type": "a b"}, {"tags": ["~"]}):
            with pytest.raises(InvalidInput):
                await queue.tasks(**wrong)

    _on_a_queue(test)


def test_many_tasks_of_a_pack_are_cancelled_with_the_requests_of_one() -> None:
    async def test(queue: Queue, meter: Meter) -> None:
        tasks = await queue.submit_many("ok", list(range(100)), tags=TEST)
        await queue.submit("ok", tags=PROD)
        found = await list_tasks(queue.access, tags=TEST, limit=1000)
        meter.billed.clear()
        views = await cancel_tasks(queue.access, [view.id for view in found])
        assert {view.status for view in views.values()} == {"cancelled"}
        assert set(views) == {task.id for task in tasks}
        puts = sum(count for (_, kind), count in meter.billed.items() if kind is Kind.PUT)
        assert puts == 2  # The claim of all of them, and the swap that ends it.
        assert [view.tags for view in await queue.tasks(status="ready")] == [PROD]

    _on_a_queue(test)
