"""The console of a queue alone: every page over HTTP, what its forms do, and who may."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from penstock.console.application import Console
from penstock.console.live import LivePages
from penstock.console.sessions import COOKIE, ConsoleSessions
from penstock.dispatcher.bucket_queues import QueueInspector
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.queue_console import SITE, STORE_AWAY, InMemorySignOuts, QueueOnlyParts, no_api
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.integration.console.looking import words

NASTY = "<script>alert(1)</script>"
PAGES = ("/", "/queue/tasks", "/queue/limits", "/queue/schedules", "/queue/batches")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to wait for a first look."""
    monkeypatch.setattr("penstock.dispatcher.bucket_queues.SNAPSHOT_FIRST_SECONDS", 0.0)
    monkeypatch.setattr("penstock.dispatcher.bucket_queues.READ_FIRST_SECONDS", 0.0)


@dataclass
class Visitor:
    """Somebody with a browser, and the queue that is looked at."""

    browser: httpx.AsyncClient
    sessions: ConsoleSessions
    queue: Queue

    async def page(self, path: str, *, status: int = 200) -> str:
        answer = await self.browser.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    async def words(self, path: str, *, status: int = 200) -> str:
        return words(await self.page(path, status=status))

    async def send(self, path: str, *, status: int = 200, **fields: str) -> str:
        """Send a form as a page has it, and return what the next page says."""
        session = self.sessions.read(self.browser.cookies.get(COOKIE) or "")
        assert session is not None, "Nobody was let in."
        said = {"form_token": self.sessions.form_token(session), "to": "/", "name": "images"}
        answer = await self.browser.post(path, data={**said, **fields})
        if answer.status_code == 303:
            answer = await self.browser.get(answer.headers["location"])
        assert answer.status_code == status, answer.text
        return words(answer.text)


Story = Callable[[Visitor], Awaitable[None]]


def _look(story: Story, *, api_token: str = "", is_read_only: bool = False) -> None:
    async def main() -> None:
        clock, entropy = SystemClock(), seeded_entropy(4)
        store = MemoryStore(MemoryBucket(clock), clock=clock)
        queue = await Queue.on(store, name="images", entropy=entropy)
        sessions = ConsoleSessions(
            "a secret",
            clock=clock,
            entropy=entropy,
            ended=InMemorySignOuts(clock),
            api_token=api_token,
            viewer_token="the viewer's token" if api_token else "",
            is_read_only=is_read_only,
        )
        parts = QueueOnlyParts(
            queues=QueueInspector(store, entropy=entropy),
            store=store,
            root="memory://",
            first_queue="images",
        )
        async with LivePages(clock=clock, over=sessions.over) as live:
            console = Console(
                no_api, parts, SITE, sessions=sessions, live=live, clock=clock, away=STORE_AWAY
            )
            transport = httpx.ASGITransport(console)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as browser:
                await story(Visitor(browser, sessions, queue))

    asyncio.run(main())


@asynccontextmanager
async def _working(queue: Queue) -> AsyncIterator[None]:
    """A worker beside that fails what is `bad`, and returns what the others are given."""
    settings = WorkerSettings(polling=Polling(min_seconds=0.02, max_seconds=0.1))
    worker = Worker(queue, concurrency=8, name="ada", mode=DiscoveryMode.SHARED, settings=settings)

    @worker.handler("bad", retry=Retry(attempts=1))
    async def bad(task: TaskContext) -> None:
        raise ValueError(f"it was {task.input}")

    @worker.handler("good")
    async def good(task: TaskContext) -> object:
        return {"made of": task.input}

    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(signals=False))
        yield
        worker.stop()


def test_pages_of_a_queue_that_is_empty_and_of_one_that_is_not_there() -> None:
    async def story(visitor: Visitor) -> None:
        for path in PAGES:
            said = await visitor.words(path)
            assert "Wake-ups" not in said
            assert "Overview Tasks Limits Schedules Batches" in said
            assert "There is no queue 'none'" in await visitor.words(
                f"{path}?name=none", status=404
            )
        page = await visitor.page(
            f"/queue/tasks?name=images&find={NASTY}&type=x&tag={NASTY}", status=404
        )
        assert NASTY not in page
        assert "is not a tag filter" in words(page)
        assert (await visitor.browser.get("/healthz")).text == "ok\n"
        assert (await visitor.browser.get("/v1/tasks")).status_code == 404
        assert (await visitor.browser.get("/tasks")).status_code == 404

    _look(story)


def test_tasks_are_listed_filtered_and_found() -> None:
    async def story(visitor: Visitor) -> None:
        queue = visitor.queue
        async with _working(queue):
            bad = await queue.submit("bad", {"file": NASTY}, tags={"env": "prod"})
            good = await queue.submit("good", {"n": 1}, key="order-17")
            with pytest.raises(Exception, match="it was"):
                await queue.result(bad.id, timeout=20)
            await queue.result(good.id, timeout=20)
        later = await queue.submit("later", delay=7200, priority=3)
        page = await visitor.page("/queue/tasks?name=images")
        assert NASTY not in page
        said = words(page)
        assert "3 tasks Task" in said
        assert "on S3. Refreshed at most every 10 s" in said
        for query, ids in (
            ("status=failed", [bad.id]),
            ("status=delayed", [later.id]),
            ("type=good", [good.id]),
            ("tag=env%3Dprod", [bad.id]),
            (f"find={later.id}", [later.id]),
            ("find=order-17&type=good", [good.id]),
            ("find=ORDER-1", [good.id]),
            ("find=it+was", [bad.id]),
            ("find=nowhere", []),
        ):
            page = await visitor.page(f"/queue/tasks?name=images&{query}")
            assert re.findall(r'<tr data-key="([^"]+)"', page) == ids, query
        assert "No matching tasks." in await visitor.words("/queue/tasks?name=images&find=nowhere")

    _look(story)


def test_a_task_shows_its_input_its_end_and_its_history_and_is_replayed() -> None:
    async def story(visitor: Visitor) -> None:
        queue = visitor.queue
        async with _working(queue):
            bad = await queue.submit("bad", {"file": NASTY}, tags={"env": "prod"}, limit="api")
            good = await queue.submit("good", {"n": 1})
            with pytest.raises(Exception, match="it was"):
                await queue.result(bad.id, timeout=20)
            await queue.result(good.id, timeout=20)
        page = await visitor.page(f"/queue/task/{bad.id}?name=images")
        assert NASTY not in page
        said = words(page)
        assert f'"file": "{NASTY}"' in said
        assert "Error ValueError: it was" in said
        assert "Traceback" in said
        assert "submitted" in said
        assert "claimed 1 ada" in said
        said = await visitor.words(f"/queue/task/{good.id}?name=images")
        assert 'Result { "made of": { "n": 1 } }' in said
        said = await visitor.send("/queue/task/replay", id=bad.id)
        assert "Replayed as this task." in said
        assert "ready" in said
        none = bad.id.replace(".bad", ".bat")
        assert "There is no task" in await visitor.words(
            f"/queue/task/{none}?name=images", status=404
        )
        assert "is not the id of a task" in await visitor.words(
            "/queue/task/x/y?name=images", status=404
        )

    _look(story)


def test_tasks_are_cancelled_one_and_many_with_a_reason() -> None:
    async def story(visitor: Visitor) -> None:
        queue = visitor.queue
        one = await queue.submit("mail", 1)
        many = await queue.submit_many("mail", [1, 2, 3], tags={"env": "prod"})
        other = await queue.submit("other")
        await visitor.page("/")
        said = await visitor.send("/queue/task/cancel", id=one.id, reason="a typo")
        assert "It is cancelled." in said
        assert "a typo" in await visitor.words(f"/queue/task/{one.id}?name=images")
        assert "Choose a type or a tag first" in await visitor.send("/queue/tasks/cancel")
        said = await visitor.send("/queue/tasks/cancel", type="mail", tag="env=prod")
        assert "3 tasks are cancelled" in said
        assert {(await queue.get(each.id)).status for each in many} == {"cancelled"}
        assert (await queue.get(other.id)).status == "ready"

    _look(story)


def test_limits_schedules_and_batches_are_shown_and_steered() -> None:
    async def story(visitor: Visitor) -> None:
        queue = visitor.queue
        await visitor.page("/")
        said = await visitor.send(
            "/queue/limits/set", key="api", concurrency="3", rate="10", to="/queue/limits"
        )
        assert "The limit api is set" in said
        assert "api 3 10 per 1.0 s" in said
        wrong = await visitor.send("/queue/limits/set", key="api", concurrency="many")
        assert "The concurrency is a whole number, not 'many'." in wrong
        said = await visitor.send(
            "/queue/limits/set", key="api", rate="10", per_seconds="1h", to="/queue/limits"
        )
        assert "The limit api is set" in said
        assert [each.per_seconds for each in await queue.limits.list()] == [3600]
        wrong = await visitor.send("/queue/limits/set", key="api", rate="1", per_seconds="soon")
        assert "The length of time 'per', 'soon', is not a duration; write" in wrong
        assert "The limit api is removed" in await visitor.send("/queue/limits/remove", key="api")
        assert "There is no limit api." in await visitor.send("/queue/limits/remove", key="api")

        await queue.schedules.add("nightly", cron="0 6 * * *", type="report", input={"days": 1})
        for verb, told in (
            ("pause", "The schedule nightly is paused."),
            ("resume", "The schedule nightly is resumed."),
            ("run", "The schedule nightly has submitted this task."),
        ):
            said = await visitor.send(
                f"/queue/schedules/{verb}", schedule="nightly", to="/queue/schedules"
            )
            assert told in said
        assert "nightly 0 6 * * *" in await visitor.words("/queue/schedules")
        assert "is removed" in await visitor.send("/queue/schedules/remove", schedule="nightly")
        assert "There are no schedules." in await visitor.words("/queue/schedules")
        assert "not 'burn'" in await visitor.send("/queue/schedules/burn", schedule="nightly")

        batch = await queue.batch("mail", [1, 2, 3], then="report")
        said = await visitor.words("/queue/batches")
        assert f"{batch.id} sealed 0 of 3" in said
        assert "a task when all ended" in said

    _look(story)


def test_a_console_that_is_read_only_changes_nothing() -> None:
    async def story(visitor: Visitor) -> None:
        task = await visitor.queue.submit("mail", 1)
        page = await visitor.page("/")
        assert "read-only" in words(page)
        assert re.findall(r"<button class=\"\"(?! disabled)", page) == []
        for path, fields in (
            ("/queue/pause", {}),
            ("/queue/task/cancel", {"id": task.id}),
            ("/queue/limits/set", {"key": "api", "concurrency": "1"}),
        ):
            said = await visitor.send(path, status=403, **fields)
            assert "This console is read-only." in said
        assert (await visitor.queue.get(task.id)).status == "ready"
        assert await visitor.queue.limits.list() == ()

    _look(story, is_read_only=True)


def test_a_token_lets_people_in_and_read_only_makes_viewers_of_them() -> None:
    async def signed_in(visitor: Visitor, token: str) -> httpx.Response:
        return await visitor.browser.post("/sign-in", data={"token": token, "to": "/"})

    async def story(visitor: Visitor) -> None:
        await visitor.page("/", status=401)
        assert (await signed_in(visitor, "no token")).status_code == 403
        assert (await signed_in(visitor, "the token of operators")).status_code == 303
        assert "The queue images is paused" in await visitor.send("/queue/pause")
        await visitor.send("/sign-out", status=401)
        await visitor.page("/", status=401)

    async def reading(visitor: Visitor) -> None:
        assert (await signed_in(visitor, "the token of operators")).status_code == 303
        assert "read-only" in await visitor.send("/queue/pause", status=403)

    _look(story, api_token="the token of operators")
    _look(reading, api_token="the token of operators", is_read_only=True)


def test_who_watches_the_same_page_costs_nothing_more() -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.queue.submit_many("mail", list(range(20)))
        pages = [await visitor.page("/queue/tasks?name=images") for _ in range(5)]
        times = {re.findall(r'Read <time datetime="([^"]+)"', each)[0] for each in pages}
        assert len(times) == 1

    _look(story)
