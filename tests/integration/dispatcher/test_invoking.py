"""Functions are invoked through the Lambda API: a real server, and functions that really run."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import zipfile
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.dispatcher.capabilities.tokens import TokenIssuer
from penstock.dispatcher.carriers import EVENT_AGE_SECONDS_MAX, LambdaCarrier, WakeCarrier
from penstock.dispatcher.outbox import OutboxEntry, Relay
from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.kernel.aws import Aws, aws_client
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import InvalidInput, SignerUnavailable
from penstock.tokens.claims import INVOKE_AUDIENCE, Grants
from tests.integration.aws_server import AwsServer
from tests.integration.dispatcher.api.signing import StageKeys
from tests.integration.dispatcher.carrying import LIMITS, Still, Words
from tests.integration.dispatcher.world import Play, World, done

SOURCE = """
import json, socket

def handle(event, context):
    host, _, port = event["dispatcher"].removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as told:
        told.sendall(json.dumps(event).encode())
"""


def make_function(client: Any, name: str) -> None:
    code = io.BytesIO()
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("code.py", "")
        archive.writestr("told.py", SOURCE)
    client.create_function(
        FunctionName=name,
        Runtime="python3.11",
        Role="arn:aws:iam::000000000000:role/any",
        Handler="told.handle",
        Code={"ZipFile": code.getvalue()},
    )


class Functions:
    """A Lambda service with one function, which tells what it was invoked with."""

    def __init__(self, aws: Aws) -> None:
        self.name = f"f{new_id(system_entropy(), characters=12)}"
        self.aws = aws
        self.client = aws_client("lambda", aws=aws)
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        make_function(self.client, self.name)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.read()
        writer.close()
        self.told.put_nowait(json.loads(body))

    async def next(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            return [await self.told.get() for _ in range(count)]


async def token_for(task_id: int, attempt: int) -> str:
    return f"token of {task_id}, {attempt}"


def issuer_of(world: World) -> TokenIssuer:
    return TokenIssuer(world.database, StageKeys(world.database), root="file:///lake")


def rows(operator: str, tasks: Sequence[int]) -> list[OutboxEntry]:
    return [OutboxEntry(100 + task, "invoke", operator, {"task_id": task}, 0) for task in tasks]


def test_a_function_is_invoked_for_each_task(play: Play, aws_server: AwsServer) -> None:
    async def story(world: World) -> None:
        functions = Functions(aws_server.aws)
        async with await asyncio.start_server(functions.hear, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            job = await world.job(runtime="lambda", operator=functions.name)
            tasks = [
                each
                for each in await world.tasks.create([job.new("one"), job.new("two")])
                if each is not None
            ]
            issuer = issuer_of(world)
            async with LambdaCarrier(
                world.database,
                dispatcher_url=url,
                token_for=issuer.invocation,
                aws=functions.aws,
            ) as carrier:
                relay = Relay(
                    world.database, carriers={"invoke": carrier}, limits=LIMITS, clock=Still()
                )
                await relay.turn()
                events = await functions.next(2)
                for _ in range(1000):
                    if not await world.value("SELECT count(*) FROM outbox WHERE kind = 'invoke'"):
                        break
                    await relay.turn()
                else:
                    pytest.fail("what was sent is not recorded")
            for event in events:
                claims = await issuer.verify(
                    event.pop("claim_token"), audience=INVOKE_AUDIENCE, is_expiry_judged=True
                )
                assert (claims.task_id, claims.attempt) == (event["task_id"], 1)
                assert claims.exp - claims.iat == 900
                assert claims.grants == Grants()
            assert sorted(events, key=lambda event: event["task_id"]) == [
                {
                    "dispatcher": url,
                    "task_id": task,
                    "job": "job",
                    "operator": functions.name,
                    "generation": job.generation,
                    "payload": {"key": key},
                }
                for task, key in zip(tasks, ["one", "two"], strict=True)
            ]
            config = functions.client.get_function_event_invoke_config(FunctionName=functions.name)
            assert config["MaximumRetryAttempts"] == 0
            assert config["MaximumEventAgeInSeconds"] == EVENT_AGE_SECONDS_MAX
        functions.client.close()

    play(story)


class Recorded:
    """A Lambda client that only remembers what was invoked, and fails for some."""

    def __init__(self) -> None:
        self.invoked: list[int] = []
        self.configured: list[dict[str, Any]] = []
        self.fails: set[int] = set()

    def invoke(self, *, FunctionName: str, InvocationType: str, Payload: bytes) -> None:  # noqa: N803
        assert InvocationType == "Event"
        task = json.loads(Payload)["task_id"]
        if task in self.fails:
            raise OSError("away")
        self.invoked.append(task)

    def update_function_event_invoke_config(self, **asked: Any) -> None:
        self.configured.append(asked)

    def close(self) -> None: ...


def scripted(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[LambdaCarrier, Recorded]:
    recorded = Recorded()
    monkeypatch.setattr("penstock.dispatcher.carriers.aws_client", lambda *_, **__: recorded)
    return LambdaCarrier(world.database, dispatcher_url="http://d", token_for=token_for), recorded


def test_only_what_could_be_claimed_is_invoked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        carrier, recorded = scripted(world, monkeypatch)
        job = await world.job(runtime="lambda", max_concurrency=2)
        paused = await world.job("paused", runtime="lambda")
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason) VALUES (%s, 'x', 'all', 'x')",
            paused.id,
        )
        made = await world.tasks.create(
            [
                *(job.new(f"{number}") for number in range(4)),
                paused.new("paused"),
                job.new("later", delay_ms=1000),
            ]
        )
        tasks = [each for each in made if each is not None]
        await world.tasks.cancel([tasks[0]])
        asked = rows("operator", [*tasks, 1_000_000])
        assert await carrier.carry(asked) == {}
        # Two of the three that wait, for that is the limit.
        assert sorted(recorded.invoked) == tasks[1:3]
        await world.tasks.claim(tasks[1], worker="w")
        assert await carrier.carry(asked) == {}
        assert sorted(recorded.invoked) == [tasks[1], tasks[2], tasks[2]]
        assert len(recorded.configured) == 1
        await world.rows("INSERT INTO operator VALUES ('operator', 1)")
        assert await carrier.carry(asked) == {}
        assert len(recorded.invoked) == 3
        await carrier.stop()

    play(story)


def test_an_invocation_that_fails_among_good_ones(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        carrier, recorded = scripted(world, monkeypatch)
        job = await world.job(runtime="lambda")
        tasks = [each for each in await job.make("a", "b", "c") if each]
        recorded.fails = {tasks[1]}
        assert await carrier.carry(rows("operator", tasks)) == {100 + tasks[1]: "away"}
        assert sorted(recorded.invoked) == [tasks[0], tasks[2]]

    play(story)


def test_without_a_signer_nothing_is_invoked_and_all_is_tried_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        async def away(_task_id: int, _attempt: int) -> str:
            raise SignerUnavailable("KMS cannot sign now.")

        recorded = Recorded()
        monkeypatch.setattr("penstock.dispatcher.carriers.aws_client", lambda *_, **__: recorded)
        carrier = LambdaCarrier(world.database, dispatcher_url="http://d", token_for=away)
        job = await world.job(runtime="lambda")
        (task,) = await job.make("a")
        why = {100 + task: "KMS cannot sign now."}
        assert await carrier.carry(rows("operator", [task])) == why
        assert recorded.invoked == []

    play(story)


def test_a_function_that_is_not_there(play: Play, aws_server: AwsServer) -> None:
    async def story(world: World) -> None:
        job = await world.job(runtime="lambda", operator="nowhere")
        (task,) = await job.make("a")
        async with LambdaCarrier(
            world.database, dispatcher_url="http://d", token_for=token_for, aws=aws_server.aws
        ) as carrier:
            (why,) = (await carrier.carry(rows("nowhere", [task]))).values()
            assert "Function not found" in why
            with pytest.raises(InvalidInput, match="No function can have the name"):
                await carrier.carry(rows("x" * 65, [task]))

    play(story)


def test_a_function_that_ends_while_others_are_invoked_leaves_the_next_waiting(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        carrier, recorded = scripted(world, monkeypatch)
        job = await world.job(runtime="lambda", max_concurrency=1)
        first, second = await world.tasks.create([job.new("one"), job.new("two")])
        assert first is not None
        assert second is not None
        found = await world.rows(
            "SELECT id, kind, target, body, tries FROM outbox WHERE kind = 'invoke' ORDER BY id"
        )
        begun, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(**asked: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(30)
            recorded.invoked.append(json.loads(asked["Payload"])["task_id"])

        monkeypatch.setattr(recorded, "invoke", slow)
        async with asyncio.TaskGroup() as group:
            given = [OutboxEntry(**row) for row in found]
            carrying = group.create_task(carrier.carry(given))
            await begun.wait()
            # The function has begun, and is done, before its invocation is answered.
            claimed = await world.tasks.claim(first, worker="w")
            assert isinstance(claimed, ClaimedTask)
            await world.tasks.complete(done(claimed.fence))
            assert await world.wakes() == ["operator/normal"]
            body = {"operator": "operator", "priority": "normal"}
            wake = WakeCarrier(Words(), invokes=world.database)
            await wake.carry([OutboxEntry(1, "wake", "operator/normal", body, 0)])
            go_on.set()
        assert carrying.result() == {}
        assert recorded.invoked == [first]
        # What the relay writes down of the rows that it gave.
        await world.rows("DELETE FROM outbox WHERE id = ANY (%s)", [row["id"] for row in found])
        left = await world.rows("SELECT body FROM outbox WHERE kind = 'invoke'")
        assert [row["body"] for row in left] == [{"task_id": second}]

    play(story)
