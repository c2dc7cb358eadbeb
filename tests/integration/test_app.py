"""The wiring: a whole dispatcher in this process, and settings that cannot work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock import installation as installations
from penstock.app import make_client, make_webhook_source, make_worker, secret_of_settings
from penstock.dispatcher.api import server
from penstock.dispatcher.client import Client
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.tasks.completion import UNACKNOWLEDGED_SECONDS
from penstock.dispatcher.wakeups.long_poll import Broker, WakeUp
from penstock.dispatcher_app import Dispatcher
from penstock.installation import Installation
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, PenstockError
from penstock.kernel.ports import free_port
from penstock.protocol.events import AuthAnswer, SourceAnswer
from penstock.protocol.identity import Identities
from penstock.protocol.work import (
    Assignment,
    ClaimAsk,
    CompleteAsk,
    EndAsk,
    OutputAsk,
    WaitAnswer,
    WaitAsk,
)
from penstock.runtimes.base import AttemptPaths
from penstock.settings import Settings, read_settings
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import Worlds
from tests.integration.test_s3_local import needs_proc, processes_naming
from tests.unit.dispatcher.sources.scripted import ScriptedDispatcher

CLOCK = SystemClock()
SECRET = "a secret of the tests"
STOP_SECONDS_MAX = 30.0
Found = TypeVar("Found")


async def until(look: Callable[[], Awaitable[Found | None]]) -> Found:
    """The first thing that is found, within a bound."""
    async with asyncio.timeout(60):
        while not (found := await look()):
            await CLOCK.sleep(0.02)
        return found


async def run_sql(dsn: str, statement: bytes) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        return await (await connection.execute(statement)).fetchall()


async def stopped(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(STOP_SECONDS_MAX):
        await dispatcher.stop()


async def one_task(settings: Settings) -> Assignment:
    """Claim a task as a worker does, and complete it."""
    async with make_client(settings, "w1") as client:

        async def look() -> Assignment | None:
            answer = await client.claim(ClaimAsk(operator="a:clean"))
            return answer.tasks[0] if answer.tasks else None

        task = await until(look)
        made = OutputAsk(
            dataset=task.definition["datasets"]["tidy"],
            location=AttemptPaths(task.root).output(
                "tidy",
                generation=task.generation,
                payload=task.payload,
                attempt_id=task.folder,
            ),
            partition_key=task.payload["partition_key"],
        )
        end = EndAsk(
            task_id=task.task_id,
            attempt=task.attempt,
            lease_token=task.lease_token,
            token=task.token,
            outputs=[made],
        )
        answer = await client.complete(CompleteAsk(tasks=[end]))
        assert [each.task_status for each in answer.results] == ["completed"]
    return task


def test_a_claim_that_nobody_reads_goes_back_within_seconds_uncounted(
    worlds: Worlds, tmp_path: Path
) -> None:
    async def main() -> None:
        dsn = await worlds.empty()
        settings = Settings(data=tmp_path, postgres=dsn, port=0, internal_port=0)
        async with Dispatcher(settings) as dispatcher:
            there = replace(settings, dispatchers=(dispatcher.internal_url,))
            once = "  clean:\n    max_attempts: 1\n"
            async with (
                Client(dispatcher.public_url) as client,
                make_client(there, "w1") as dead,
            ):
                await client.apply(chain().replace("  clean:\n", once))
                await client.trigger("feed", partition_key="p")

                async def is_claimed() -> bool:
                    ask = ClaimAsk(operator="a:clean", claim_id="nobody-reads-this-answer")
                    return bool((await dead.claim(ask)).tasks)

                # Where nothing has run, no reaper has for a while: that is no outage.
                await run_sql(dsn, b"UPDATE reaper SET ran_at = now() RETURNING 1")
                await until(is_claimed)
                # Nothing more is heard of that worker.
                task = await one_task(there)
                assert task.attempt == 2
        lost, done = await run_sql(
            dsn,
            b"SELECT outcome, extract(epoch FROM ended_at - started_at)::float"
            b" FROM attempt ORDER BY number",
        )
        assert (lost[0], done[0]) == ("released", "completed")
        # Less than the minute that its job lets a worker be silent.
        assert UNACKNOWLEDGED_SECONDS <= lost[1] < 60

    asyncio.run(main())


def test_no_more_workers_wait_than_a_process_has_files_for(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the internal listener's twelve connections six are of workers, and four may wait.
    monkeypatch.setattr(server, "connections_within_files", lambda wanted: [12 for _ in wanted])

    async def main() -> None:
        settings = Settings(data=tmp_path, postgres=await worlds.empty(), port=0, internal_port=0)
        async with Dispatcher(settings) as dispatcher, AsyncExitStack() as stack:
            async with Client(dispatcher.public_url) as client:
                await client.apply(chain())
            there = replace(settings, dispatchers=(dispatcher.internal_url,))
            clients = [make_client(there, f"w{number}") for number in range(5)]
            for each in clients:
                await stack.enter_async_context(each)
            asks = [
                WaitAsk(listener=each.name, operators=["a:clean"], seconds=5) for each in clients
            ]
            found = await asyncio.gather(
                *(each.wait(ask) for each, ask in zip(clients, asks, strict=True)),
                return_exceptions=True,
            )
            (refused,) = (each for each in found if not isinstance(each, WaitAnswer))
            assert isinstance(refused, DispatcherUnavailable)
            assert "4 workers already wait at this dispatcher" in refused.message

    asyncio.run(main())


@needs_proc
@pytest.mark.usefixtures("postgres")
def test_a_dispatcher_with_a_postgres_of_its_own(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", port=0, internal_port=0)

    async def main() -> None:
        dispatcher = Dispatcher(settings)
        await dispatcher.start()
        try:
            async with httpx.AsyncClient() as http:
                for url in (dispatcher.public_url, dispatcher.internal_url):
                    assert (await http.get(f"{url}/readyz")).status_code == 200
                hidden = await http.post(f"{dispatcher.public_url}/internal/task-claim", json={})
                assert hidden.status_code == 404
            # Whoever shares the data folder has the secret: workers need nothing else.
            worker = replace(settings, dispatchers=(dispatcher.internal_url,))
            async with Client(dispatcher.public_url) as client:
                await client.apply(chain())
                await client.trigger("feed", partition_key="p")
                # The loops run: events become tasks without anybody's doing.
                assert (await one_task(worker)).payload["partition_key"] == "p"
                found = await client.partitions("tidy")
                assert [each.partition_key for each in found.partitions] == ["p"]
            url = dispatcher.public_url
        finally:
            await stopped(dispatcher)
        # It is harmless to stop it again.
        await stopped(dispatcher)
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as http:
                await http.get(f"{url}/healthz")
        assert processes_naming(str(tmp_path)) == set()
        # What was committed is there for the next.
        async with Dispatcher(settings) as again, Client(again.public_url) as client:
            assert (await client.dag()).version.id == 1

    asyncio.run(main())


def test_notifications_and_migrations_go_past_a_pooler(worlds: Worlds, tmp_path: Path) -> None:
    async def main() -> None:
        dsn = await worlds.empty()
        direct = make_conninfo(dsn, application_name="direct", options="-c role=direct")
        settings = Settings(
            data=tmp_path, postgres=dsn, postgres_direct=direct, port=0, internal_port=0
        )
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:

            async def listener() -> str | None:
                found = await connection.execute(
                    b"SELECT application_name FROM pg_stat_activity"
                    b" WHERE datname = current_database() AND query LIKE 'LISTEN%'"
                )
                return str((await found.fetchone() or [""])[0])

            await connection.execute(b"CREATE ROLE direct SUPERUSER")
            async with Dispatcher(settings):
                assert await until(listener) == "direct"
                found = await connection.execute(
                    b"SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'public'"
                )
                assert await found.fetchall() == [("direct",)]

    asyncio.run(main())


def test_who_waits_at_a_dispatcher_waits_as_long_as_is_set_and_is_let_go_first(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def wait(self: Broker, *args: Any, seconds: float, **fields: Any) -> Sequence[WakeUp]:
        waited.append(seconds)
        return await waiting(self, *args, seconds=seconds, **fields)

    waiting = Broker.wait
    monkeypatch.setattr(Broker, "wait", wait)

    async def main() -> None:
        dsn = await worlds.empty()
        settings = Settings(
            data=tmp_path, postgres=dsn, port=0, internal_port=0, wait_seconds=41, concurrency=1
        )
        async with Dispatcher(settings) as dispatcher, asyncio.TaskGroup() as group:
            async with Client(dispatcher.public_url) as client:
                await client.apply(chain())
            there = replace(settings, dispatchers=(dispatcher.internal_url,))
            worker = make_worker(there, name="w2")
            running = group.create_task(worker.run())

            async def longest() -> float | None:
                return max(waited, default=0) or None

            assert await until(longest) == 41
            worker.stop()
            await running
            async with make_client(there, "w1") as one:
                ask = WaitAsk(listener="one", operators=["a:clean"], seconds=49)

                async def is_let_go() -> None:
                    with pytest.raises(
                        DispatcherUnavailable, match="This dispatcher is shutting down"
                    ):
                        await one.wait(ask)

                letting_go = group.create_task(is_let_go())

                async def is_waiting() -> bool:
                    return 49 in waited

                await until(is_waiting)
                await stopped(dispatcher)
                await letting_go

    asyncio.run(main())


@needs_proc
@pytest.mark.usefixtures("postgres")
def test_a_port_that_is_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            settings = Settings(data=tmp_path / "data", port=0, internal_port=port)
            with pytest.raises(InvalidInput, match=f"internal listener cannot have .*:{port}"):
                async with Dispatcher(settings):
                    pytest.fail("it has started")
        assert processes_naming(str(tmp_path)) == set()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"worker_secret": "short"}, "worker_secret has fewer than 16 characters"),
        ({"runtimes": {"nonsense": {"a": 1}}}, "nonsense"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(
    postgres: LocalPostgres, tmp_path: Path, wrong: dict[str, object], words: str
) -> None:
    good = Settings(data=tmp_path, postgres=postgres.dsn, port=0, internal_port=0)

    async def main() -> None:
        async with Dispatcher(replace(good, **wrong)):  # type: ignore[arg-type] # names vary
            pytest.fail("it has started")

    _is_one_sentence(main, words)


@pytest.mark.parametrize(
    ("dsn", "words"),
    [
        ("nonsense", "nonsense"),
        ("postgresql://127.0.0.1:{free}/x", "does not answer"),
        ("{real} dbname=not_there", "not_there"),
        ("{real} nonsense=1", "nonsense"),
    ],
)
def test_a_postgres_that_cannot_be_had_is_one_sentence(
    postgres: LocalPostgres, tmp_path: Path, dsn: str, words: str
) -> None:
    real = dsn.format(free=free_port(), real=make_conninfo(postgres.dsn))

    async def main() -> None:
        async with Dispatcher(Settings(data=tmp_path, postgres=real, port=0, internal_port=0)):
            pytest.fail("it has started")

    _is_one_sentence(main, words)


def _is_one_sentence(main: Callable[[], Awaitable[None]], words: str) -> None:
    async def run() -> None:
        await main()

    with pytest.raises(PenstockError) as raised:
        asyncio.run(run())
    assert words in raised.value.message
    assert "\n" not in raised.value.message
    assert "\n" not in raised.value.hint


@needs_proc
@pytest.mark.usefixtures("postgres")
def test_a_dispatcher_needs_a_store_below_which_something_can_be_granted(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", store="memory://", port=0, internal_port=0)

    async def main() -> None:
        with pytest.raises(InvalidInput, match="Nothing can be granted below the store"):
            async with Dispatcher(settings):
                pass

    asyncio.run(main())


def test_a_worker_needs_runtimes_that_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nonsense"):
        make_worker(Settings(data=tmp_path, runtimes={"process": {"nonsense": 1}}))


def test_a_webhook_source_tells_when_its_dispatcher_is_away(tmp_path: Path) -> None:
    port = free_port()
    settings = Settings(
        data=tmp_path,
        webhook_port=port,
        worker_secret=SECRET,
        dispatchers=(f"http://127.0.0.1:{free_port()}",),
    )

    async def main() -> None:
        async with make_webhook_source(settings), httpx.AsyncClient() as http:
            answer = await http.post(f"http://127.0.0.1:{port}/orders", json={})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "A webhook on 0.0.0.0 needs webhook_token."),
        ({"webhook_token": SECRET}, "webhook_token is not a webhook token."),
        ({"webhook_token": "webhook.x", "worker_secret": SECRET}, "its settings have worker_sec"),
        ({"webhook_token": "webhook.x", "api_token": SECRET}, "its settings have api_token."),
        ({"webhook_token": "webhook.x", "postgres": "host=x"}, "its settings have postgres."),
    ],
)
def test_a_webhook_that_others_can_call_holds_its_own_token_alone(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_webhook_source(Settings(data=tmp_path / "none", webhook_host="0.0.0.0", **given))
    assert not (tmp_path / "none").exists()


def test_a_webhook_that_others_can_call_does_not_start_without_a_secret_for_each_source() -> None:
    settings = Settings(webhook_host="0.0.0.0", webhook_port=0, webhook_token="webhook.x")
    bare = SourceAnswer(job="orders", kind="webhook", datasets={}, path="/orders")
    proved = SourceAnswer(
        job="paid", kind="webhook", datasets={}, auth=AuthAnswer(type="stripe", secrets=["env:S"])
    )

    async def begin(*sources: SourceAnswer) -> None:
        made = make_webhook_source(settings)
        made._client = ScriptedDispatcher(list(sources))
        await made.until_let_in(asyncio.Event())

    asyncio.run(begin(proved))
    with pytest.raises(InvalidInput, match="are taken on loopback alone: orders"):
        asyncio.run(begin(proved, bare))


def test_an_installation_looks_at_its_ports_first(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            settings = Settings(data=tmp_path / "d", port=0, internal_port=port, webhook_port=0)
            installation = Installation(settings, code=tmp_path)
            assert installation.public_url.startswith("http://127.0.0.1:")
            assert not installation.public_url.endswith((":0", f":{port}"))
            with pytest.raises(InvalidInput, match=f"Cannot listen on 127.0.0.1:{port}") as raised:
                await installation.start()
            assert "--internal-port" in raised.value.hint
            await installation.stop()
            assert not (tmp_path / "d").exists()

    asyncio.run(main())


OPENING = "api_token = 'opens-everything-there-is'\nviewer_token = 'opens-all-for-looking'\n"


def test_processes_of_an_installation_have_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the folder of the code, and still read the settings that were read here, and
    nothing that was not."""
    monkeypatch.setenv("PENSTOCK_DISPATCHERS", "http://another.installation:7071")
    here, code = tmp_path / "here", tmp_path / "code"
    for folder, text in (
        (here, f"{OPENING}concurrency = 7\n[runtimes.process]\nidle_max = 3\n"),
        (code, "api_token = 'of somebody else'\n"),
    ):
        folder.mkdir()
        (folder / "penstock.toml").write_text(text)
    monkeypatch.chdir(here)
    made: dict[str, Settings] = {}

    class Process:
        running = True

        def __init__(
            self, command: list[str], *, environment: dict[str, str], folder: Path, **_: object
        ) -> None:
            told = read_settings({}, environment=environment, folder=folder)
            made[" ".join(command[3:])] = told.settings

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

    monkeypatch.setattr(installations, "ChildProcess", Process)
    ports = dict.fromkeys(("port", "internal_port", "webhook_port"), 0)
    given = {"data": here / "data", "postgres": "host=x", **ports}

    async def run(installation: Installation) -> None:
        made.clear()
        async with installation:
            pass

    wanted = read_settings(given, environment={}, folder=here).settings
    for name in ("penstock.toml", None):
        if name is None:
            (here / "penstock.toml").unlink()
            wanted = read_settings(given, environment={}, folder=here).settings
        asyncio.run(run(Installation(wanted, code=code)))
        assert sorted(made) == ["dispatcher --cron", "source webhook", "worker"]
        # The one that may face the internet has what it needs, and nothing that opens more.
        webhook = made.pop("source webhook")
        internal = made["dispatcher --cron"].internal_port
        assert webhook == Settings(
            webhook_port=webhook.webhook_port,
            webhook_token=Identities(secret_of_settings(wanted)).webhook().token,
            dispatchers=(f"http://127.0.0.1:{internal}",),
            secrets_folder=str(here / "data" / "secrets"),
        )
        for each in made.values():
            assert each.port != 0
            assert replace(
                each, port=0, internal_port=0, webhook_port=0, query_port=wanted.query_port
            ) == replace(wanted, query_host="127.0.0.1")
    (tmp_path / "other.toml").write_text("[runtimes.process]\nidle_max = 5\n")
    asyncio.run(run(Installation(wanted, code=code, file=tmp_path / "other.toml")))
    assert made["worker"].runtimes == {"process": {"idle_max": 5}}
