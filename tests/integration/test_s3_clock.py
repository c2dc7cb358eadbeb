"""The store's time from answers that are dated, wrongly dated and not dated at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from penstock.kernel.errors import Refused, StoreError, Unavailable
from tests.integration.asking import READS, WRITES, run
from tests.integration.scripted import (
    DATE,
    MODIFIED,
    SERVERS_TIME,
    Call,
    MachineClock,
    Script,
    ScriptedServer,
    answers,
    error_xml,
    fine_object,
    message,
    s3_error,
)

DAY = 86_400.0


def minds_the_time(call: Call) -> bool:
    """Whether the signature is of the server's time, more or less."""
    signed = datetime.strptime(call.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return abs(signed.timestamp() - SERVERS_TIME) < 900


def strict(*, refusal: Callable[[Call], bytes], good: Script | None = None) -> Script:
    """Serves what is signed in time, and refuses the rest."""

    async def script(call: Call) -> None:
        if minds_the_time(call):
            await (good or fine_object())(call)
        else:
            await call.read()
            await call.write(refusal(call))

    return script


def skewed(call: Call) -> bytes:
    body = b"" if call.method == "HEAD" else error_xml("RequestTimeTooSkewed")
    return message(403, body)


@pytest.mark.parametrize("off", [-DAY, DAY, -3650 * DAY, 3650 * DAY])
@pytest.mark.parametrize("name", ["get", "head", "sample", "put", "put of much", "swap"])
def test_a_wrong_wall_clock_costs_one_request(name: str, off: float) -> None:
    async def check() -> None:
        async with ScriptedServer(strict(refusal=skewed)) as server:
            store = server.store(clock=MachineClock(off))
            await (READS | WRITES)[name](store)
            assert [minds_the_time(call) for call in server.calls] == [False, True]
            assert server.calls[0].body == server.calls[1].body
            await store.get("k")
            await store.put("k", b"")
            assert len(server.calls) == 4
            await store.close()

    run(check())


def test_many_at_once_with_a_wrong_clock() -> None:
    async def check() -> None:
        async with ScriptedServer(strict(refusal=skewed)) as server:
            store = server.store(clock=MachineClock(DAY))
            await asyncio.gather(*(store.get("k") for _ in range(50)))
            assert len(server.calls) <= 100
            await store.close()

    run(check())


def test_a_clock_that_is_nearly_right_is_not_tried_again() -> None:
    async def check() -> None:
        async with ScriptedServer(s3_error(403, "AccessDenied")) as server:
            store = server.store(clock=MachineClock(200))
            with pytest.raises(Refused):
                await store.get("k")
            assert len(server.calls) == 1
            await store.close()

    run(check())


def test_a_refusal_is_tried_again_once_at_most() -> None:
    async def check() -> None:
        async with ScriptedServer(s3_error(403, "RequestTimeTooSkewed")) as server:
            store = server.store(clock=MachineClock(DAY))
            with pytest.raises(Refused, match="clock is too far from the store's"):
                await store.put("k", b"")
            assert len(server.calls) == 2
            await store.close()

    run(check())


@pytest.mark.parametrize("date", [None, "yesterday", "Mon, 08 Nov 1926 08:49:37 GMT"])
def test_a_refusal_without_a_date_stands(date: str | None) -> None:
    async def check() -> None:
        async with ScriptedServer(s3_error(403, "RequestTimeTooSkewed", date=date)) as server:
            store = server.store(clock=MachineClock(DAY))
            with pytest.raises(Refused) as caught:
                await store.put("k", b"")
            assert "Set the clock" in caught.value.hint
            assert len(server.calls) == 1
            await store.close()

    run(check())


@pytest.mark.parametrize(
    "script",
    [
        fine_object(date=None),
        fine_object(date="yesterday"),
        fine_object(date="Fri, 08 Nov 1926 08:49:37 GMT"),
        fine_object(date="Fri, 08 Nov 12026 08:49:37 GMT"),
        answers(200, b"x", ETag='"e"', Last_Modified=MODIFIED, Age="0"),
        answers(200, b"x", ETag='"e"', Last_Modified=MODIFIED, Age="3600"),
    ],
)
def test_an_answer_that_does_not_tell_the_time(script: Script) -> None:
    async def check() -> None:
        async with ScriptedServer(script) as server:
            store = server.store()
            await store.get("k")
            assert store.clock.estimate() is None
            for request in (store.sample, store.now):
                with pytest.raises(Unavailable, match="has no date of its own"):
                    await request()
            await store.close()

    run(check())


@pytest.mark.parametrize("status", [500, 502, 503])
def test_the_date_of_a_failing_proxy_is_not_the_stores(status: int) -> None:
    async def check() -> None:
        async with ScriptedServer(answers(status)) as server:
            store = server.store()
            with pytest.raises(Unavailable, match=f"The store failed \\({status}\\)"):
                await store.sample()
            assert store.clock.estimate() is None
            await store.close()

    run(check())


@pytest.mark.parametrize("status", [200, 403, 404])
def test_every_other_dated_answer_tells_the_time(status: int) -> None:
    async def check() -> None:
        async with ScriptedServer(answers(status)) as server:
            store = server.store()
            sample = await store.sample()
            assert (sample.stamp, sample.resolution) == (SERVERS_TIME, 1.0)
            assert sample.sent <= sample.received
            now = await store.now()
            assert now.earliest <= SERVERS_TIME + 1
            assert now.latest >= SERVERS_TIME
            await store.close()

    run(check())


def test_samples_at_once_are_each_their_own() -> None:
    async def check() -> None:
        given: list[float] = []

        async def dated(call: Call) -> None:
            given.append(SERVERS_TIME + len(given))
            when = format_datetime(datetime.fromtimestamp(given[-1], tz=UTC), usegmt=True)
            await answers(200, date=when)(call)

        async with ScriptedServer(dated) as server:
            store = server.store()
            samples = await asyncio.gather(*(store.sample() for _ in range(50)))
            assert sorted(sample.stamp for sample in samples) == given
            await store.close()

    run(check())


def test_a_sample_beside_others_is_not_taken_from_them() -> None:
    """An undated answer does not become a sample because another request was just dated."""

    async def check() -> None:
        async def dated_or_not(call: Call) -> None:
            await fine_object(date=DATE if call.path == "/bucket/k" else None)(call)

        async with ScriptedServer(dated_or_not) as server:
            store = server.store()
            results = await asyncio.gather(
                *(store.get("k") for _ in range(10)),
                *(store.sample() for _ in range(10)),
                *(store.get("k") for _ in range(10)),
                return_exceptions=True,
            )
            assert [type(result) for result in results[10:20]] == [Unavailable] * 10
            assert not any(isinstance(result, StoreError) for result in results[:10])
            await store.close()

    run(check())
