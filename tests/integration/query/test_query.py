"""Queries of people and tasks, through a dispatcher, to real processes of DuckDB."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dispatcher.catalog import queries
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, WorkFailed
from penstock.kernel.ports import free_port
from penstock.protocol.queries import QUERY_LESS_HINT
from penstock.query import service
from penstock.query.engine import QueryProcess
from penstock.runtimes.secrets import TOKEN, AttemptFiles
from penstock.runtimes.task import FunctionTask
from penstock.tokens.claims import INVOKE_AUDIENCE, QUERY_AUDIENCE, TASK_AUDIENCE
from tests.integration.dispatcher.api.stage import held, ok, refused
from tests.integration.dispatcher.world import Worlds
from tests.integration.query.site import (
    API,
    BOUNDS,
    VIEWER,
    Between,
    Site,
    lines,
    opened_site,
    whole,
)
from tests.unit.runtimes.benches import work

pytestmark = pytest.mark.timeout(300)
IS_ROOT = os.geteuid() == 0
OLD = pa.table({"n": [1, 2], "name": ["a", "b"]})
NEW = pa.table({"n": [3], "name": ["c"], "more": [0.5]})
SLOW = "WITH RECURSIVE t AS (SELECT 1 a UNION ALL SELECT a + 1 FROM t) SELECT max(a) FROM t"
HOSTILE = {
    "SELECT * FROM read_text('/etc/passwd')": "table function read_text is not allowed",
    "SELECT * FROM read_csv('/etc/passwd')": "table function read_csv is not allowed",
    "SELECT * FROM (SELECT * FROM glob('/*'))": "table function glob is not allowed",
    "SELECT (SELECT content FROM read_blob('/etc/shadow'))": "read_blob is not allowed",
    "SELECT * FROM query('SELECT 1')": "table function query is not allowed",
    "SELECT * FROM duckdb_secrets()": "table function duckdb_secrets is not allowed",
    "SELECT * FROM '/etc/passwd'": "There is no dataset '/etc/passwd'",
    "SELECT * FROM 'penstock://0/x.parquet'": "There is no dataset 'penstock://0/x.parquet'",
    "SELECT * FROM information_schema.tables": "datasets have no schema",
    "SELECT * FROM sys": "There is no dataset 'sys'",
    "SELECT getenv('HOME')": "getenv does not exist",
    "ATTACH '/tmp/x.db'": "Only one SELECT",
    "LOAD httpfs": "Only one SELECT",
    "INSTALL httpfs": "Only one SELECT",
    "SET threads = 64": "Only one SELECT",
    "PRAGMA database_list": "Only one SELECT",
    "COPY (SELECT 1) TO '/tmp/x'": "Only one SELECT",
    "CREATE TABLE t AS SELECT 1": "Only one SELECT",
    "SELECT 1; SELECT 2": "this text has 2",
    "SELECT nothing FROM tidy": "nothing",
    "SELECT 1 +": "syntax error",
    "SELECT range(100000000000)": "",
    "SELECT string_agg(repeat('x', 1000000) || i, '') FROM range(3000) t(i)": "Memory",
    "SELECT * FROM range(10001)": "more than 10,000 rows (`query_rows`).",
    "SELECT repeat('x', 5000) FROM range(9000)": "more than 4,194,304 bytes (`query_bytes`).",
}

BEGIN, END = "/internal/query/begin", "/internal/query/end"

Story = Callable[[Site], Coroutine[Any, Any, None]]


@pytest.fixture
def at_site(worlds: Worlds, tmp_path: Path) -> Callable[..., None]:
    """Runs a story where two partitions of `tidy` and one of `secret` are published."""

    def run(story: Story, **fields: Any) -> None:
        async def main() -> None:
            async with worlds.world() as world, opened_site(world, tmp_path / "s", **fields) as it:
                for task, table in zip(
                    await it.claim("a:clean", "p", "q"), (OLD, NEW), strict=True
                ):
                    await it.publish(task, "tidy", table)
                (task, *_) = await it.stage.claim("a:other", limit=2)
                await it.publish(task, "secret", OLD)
                await story(it)

        asyncio.run(main())

    return run


def rows_of(answer: httpx.Response) -> list[list[Any]]:
    assert answer.status_code == 200, answer.text
    columns, *rows, end = lines(answer)
    assert end["end"]["rows"] == len(rows)
    assert columns["columns"]
    return rows


def test_a_result_is_the_same_in_every_format(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        sql = "SELECT * FROM tidy ORDER BY n"
        names = ["n", "name", "more", "partition_key"]
        expected = [[1, "a", None, "p"], [2, "b", None, "p"], [3, "c", 0.5, "q"]]
        said = await site.query(sql, format="rows")
        assert rows_of(said) == expected
        assert [name for name, _ in lines(said)[0]["columns"]] == names
        text = (await site.query(sql)).text
        assert text == "n,name,more,partition_key\n1,a,,p\n2,b,,p\n3,c,0.5,q\n"
        every = [json.loads(x) for x in (await site.query(sql, format="jsonl")).text.splitlines()]
        assert every == [dict(zip(names, row, strict=True)) for row in expected]
        parquet = pq.read_table(io.BytesIO((await site.query(sql, format="parquet")).content))
        arrow = pa.ipc.open_stream((await site.query(sql, format="arrow")).content).read_all()
        for table in (parquet, arrow):
            assert [list(row.values()) for row in table.to_pylist()] == expected
        logged = await site.logged()
        assert (logged["caller"], logged["outcome"], logged["rows"]) == ("api", "completed", 3)
        assert logged["sql"] == sql
        assert logged["bytes"] > 0
        assert [(x["name"], x["parts"]) for x in logged["datasets"]] == [("tidy", 2)]
        # Cut where that is asked for; and by the partition no file is read that has no rows of it.
        cut = lines(await site.query(sql, format="rows", rows=1))
        assert cut[1:2] == expected[:1]
        assert cut[-1]["end"]["is_cut"]
        # A name that WITH gives hides nothing, and needs no dataset.
        named = await site.query("WITH other AS (SELECT 7 AS n) SELECT n FROM other")
        assert named.text == "n\n7\n"

    at_site(story)


def test_hostile_sql_is_refused_and_noted(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        for sql, why in HOSTILE.items():
            answer = await site.query(sql)
            assert answer.status_code == 422, (sql, answer.status_code, answer.text[:200])
            problem = answer.json()
            assert why in problem["title"], (sql, problem["title"])
            is_too_much = "more than" in why or why == "Memory"
            assert (problem["detail"] == QUERY_LESS_HINT) is is_too_much or not why, problem
            if why.endswith("is not allowed"):
                assert sql[problem["position"] :].startswith(why.split()[-4]), problem
            logged = await site.logged()
            assert logged["sql"] == sql
            assert logged["outcome"] in ("refused", "failed")
            assert logged["reason"]
        assert (await site.query("SELECT count(*) FROM tidy")).text == "count_star()\n3\n"

    at_site(story)


def test_people_read_what_their_token_may(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        sql = "SELECT count(*) AS n FROM {}"
        parts = site.stage.parts
        token = await parts.readers.make("bi", datasets=["tidy"], seconds=None)
        assert token is not None
        for shown, who in ((API, "api"), (VIEWER, "viewer")):
            assert (await site.query(sql.format("secret"), token=shown)).text == "n\n2\n"
            assert (await site.logged())["caller"] == who
        refused(await site.query(sql.format("tidy"), token="nonsense"), 401)
        if IS_ROOT:
            assert (await site.query(sql.format("tidy"), token=token)).text == "n\n3\n"
            assert (await site.logged())["caller"] == "reader bi"
        problem = refused(await site.query(sql.format("secret"), token=token), 403)
        assert problem.type == ("token not granted" if IS_ROOT else "not isolated")
        # The same name given by WITH is no way to it.
        hidden = f"WITH secret AS ({sql.format('secret')}) SELECT * FROM secret"
        assert (await site.query(hidden, token=token)).status_code in (403, 422)
        # What the dispatcher gives for one query is for the query service alone, and not for long.
        site.stage.world.later(1)
        short = await parts.issuer.query("api", None)
        for side, path in ((site.public, "/v1/queries"), (site.internal, "/internal/hello")):
            asked = await side.request("POST", path, headers={"Authorization": f"Bearer {short}"})
            assert asked.status_code in (401, 403, 405)
        direct = {"Authorization": f"Bearer {short}"}
        body = {"sql": "SELECT 1 AS n", "format": "csv"}
        assert (await site.direct.post("/v1/query", json=body, headers=direct)).text == "n\n1\n"
        site.stage.world.later(120)
        problem = refused(await site.direct.post("/v1/query", json=body, headers=direct), 403)
        assert problem.type == "token expired"

    at_site(story)


@pytest.mark.skipif(not IS_ROOT, reason="only root has users for queries")
def test_a_task_reads_the_parts_of_its_own_claim(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        mine, another = await site.stage.claim("a:last", limit=2)
        assert mine.payload["partition_key"] == "p"
        own = "SELECT n, partition_key FROM tidy ORDER BY n"
        # Before the service has asked for the keys: it asks again after seconds only.
        token = site.stage.token
        issued = await site.stage.parts.issuer.verify(
            mine.token, audience=TASK_AUDIENCE, is_expiry_judged=False
        )
        task = mine.task_id
        wrong = {
            "": (401, "token missing"),
            mine.token[:-9]: (403, "token malformed"),
            await token(task, 1, aud=INVOKE_AUDIENCE): (403, "token wrong audience"),
            await token(task, 1, aud=QUERY_AUDIENCE): (403, "token wrong audience"),
            await token(task, 1, grants=issued.grants, exp=1): (403, "token expired"),
            await token(task, 2, grants=issued.grants): (409, "stale"),
            # Signed by a key of ours, and wider than what was issued.
            await token(task, 1): (403, "token other grants"),
        }
        for direct in (False, True):
            answer = await site.as_task(mine.token, own, direct=direct)
            assert answer.text == "n,partition_key\n1,p\n2,p\n"
        logged = await site.logged()
        assert (logged["task_id"], logged["attempt"]) == (mine.task_id, 1)
        for direct in (False, True):
            for shown, (status, kind) in wrong.items():
                answer = await site.as_task(shown, own, direct=direct)
                assert refused(answer, status).type == kind, (direct, kind, answer.text)
        for sql in ("SELECT * FROM secret", "SELECT * FROM raw", "SELECT * FROM made_up"):
            assert refused(await site.as_task(mine.token, sql), 403).type == "token not granted"
        for sql in ("SELECT * FROM read_text('/etc/passwd')", "SELECT 1; SELECT 2"):
            refused(await site.as_task(mine.token, sql), 422)
        # Its part was replaced since: it goes on to read what it was given.
        (again,) = await site.claim("a:clean", "p")
        await site.publish(again, "tidy", NEW)
        assert (await site.as_task(mine.token, own)).text == "n,partition_key\n1,p\n2,p\n"
        assert (await site.query("SELECT n FROM tidy ORDER BY n")).text == "n\n3\n3\n"
        # It ends while its query runs: nothing of the result is told.
        clock = SystemClock()
        sql = "SELECT count(*) FROM tidy, range(60000) a, range(60000) b"
        async with asyncio.TaskGroup() as group:
            running = group.create_task(site.as_task(mine.token, sql))
            while (await site.logged())["sql"] != sql:
                await clock.sleep(0.05)
            failure = {"reason": "x", "is_retried": False}
            ok(await site.stage.complete(held(mine, failure=failure)))
        assert refused(running.result(), 409).type == "over"
        assert (await site.logged())["outcome"] == "cancelled"
        assert refused(await site.as_task(mine.token, own), 409).type == "over"
        assert refused(await site.as_task(mine.token, own, direct=True), 409).type == "over"
        assert (await site.as_task(another.token, own)).text == "n,partition_key\n3,q\n"

    at_site(story)


@pytest.mark.skipif(not IS_ROOT, reason="only root has users for queries")
def test_a_function_queries_what_it_was_given(
    at_site: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(site: Site) -> None:
        (mine, *_) = await site.stage.claim("a:last", limit=2)
        (tmp_path / TOKEN).write_text(mine.token)
        url = str(site.internal.base_url).rstrip("/")
        handed = AttemptFiles(folder=str(tmp_path), dispatchers=(url,))
        task = FunctionTask(work("mine:run", tmp_path, handed=handed))

        async def asked(sql: str) -> pa.Table:
            return await asyncio.to_thread(task.query, sql)

        found = await asked("SELECT n, partition_key FROM tidy ORDER BY n")
        assert found.to_pylist() == [{"n": n, "partition_key": "p"} for n in (1, 2)]
        with pytest.raises(InvalidInput, match="nothing"):
            await asked("SELECT nothing FROM tidy")
        with pytest.raises(WorkFailed, match="not given the dataset 'secret'"):
            await asked("SELECT * FROM secret")
        monkeypatch.setattr(service, "WAITING_MAX", 0)
        with pytest.raises(DispatcherUnavailable, match="Too many queries are waiting"):
            await asked("SELECT 1")
        alone = FunctionTask(work("mine:run", tmp_path))
        with pytest.raises(InvalidInput, match="handed no token"):
            alone.query("SELECT 1")
        away = AttemptFiles(folder=str(tmp_path), dispatchers=(f"http://127.0.0.1:{free_port()}",))
        lonely = FunctionTask(work("mine:run", tmp_path, handed=away))
        with pytest.raises(DispatcherUnavailable, match="No dispatcher"):
            await asyncio.to_thread(lonely.query, "SELECT 1")

    at_site(story)


def test_a_query_ends_when_its_caller_goes_or_its_time_is_over(
    at_site: Callable[..., None],
) -> None:
    async def story(site: Site) -> None:
        clock = SystemClock()
        answer = refused(await site.query(SLOW), 422)
        assert (answer.type, answer.title) == (
            "too slow",
            "The query was cancelled after 8 seconds (`query_seconds`).",
        )
        assert answer.detail == QUERY_LESS_HINT
        slow = f"{SLOW} WHERE a > 0"
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(site.query(slow))
            while (await site.logged())["sql"] != slow:
                await clock.sleep(0.05)
            asking.cancel()
        while (logged := await site.logged())["outcome"] is None:
            await clock.sleep(0.05)
        assert (logged["outcome"], logged["reason"]) == ("cancelled", "The caller left.")

    at_site(story, bounds=replace(BOUNDS, seconds_max=8))


def test_a_query_that_waits_too_long_is_told_so_and_noted(
    at_site: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(site: Site) -> None:
        clock = SystemClock()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(site.query(f"{SLOW} WHERE a > {i}")) for i in range(2)]
            while len(await site.every_logged()) < 2:
                await clock.sleep(0.05)
            with monkeypatch.context() as short:
                short.setattr(service, "WAIT_SECONDS", 0.5)
                busy = refused(await site.query("SELECT 1 AS busy"), 503)
            assert (busy.type, busy.detail) == ("busy", "Retry in a moment.")
            # The token that a dispatcher makes for a query lives for a minute.
            waiting = group.create_task(site.query("SELECT 2 AS late"))
            while not site.service.waiting:
                await clock.sleep(0.05)
            site.stage.world.later(65)
        assert [x.result().json()["type"] for x in running] == ["too slow"] * 2
        assert refused(waiting.result(), 403).type == "token expired"
        late, *_, early = [x for x in await site.every_logged() if x["sql"].startswith("SELECT ")]
        assert (late["sql"], late["outcome"]) == ("SELECT 2 AS late", "refused")
        assert "expired" in late["reason"]
        assert (early["sql"], early["outcome"]) == ("SELECT 1 AS busy", "refused")
        assert early["reason"] == "Too many queries are waiting."
        assert early["service"] == "here-1"

    at_site(story, bounds=replace(BOUNDS, seconds_max=8))


def test_a_dispatcher_that_cannot_serve_is_passed_over(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        every = await asyncio.gather(*(site.query("SELECT count(*) AS n FROM tidy") for _ in "ab"))
        assert [each.text for each in every] == ["n\n3\n"] * 2

    at_site(story, between=Between(statuses=(425, 408, 429, 426, 503)))


def test_what_no_dispatcher_says_well_is_told(at_site: Callable[..., None]) -> None:
    said = [
        (
            whole(426, b'{"type":"release","title":"Later.","status":426,"detail":"Upgrade."}'),
            "Later",
        ),
        (whole(200, b'{"nonsense":1}'), "invalid body"),
        (whole(404, b"<html>"), "not an answer of a dispatcher"),
    ]

    async def answer(path: str, handed_on: Callable[[], Any]) -> bytes:
        return said[0][0] if path == BEGIN else await handed_on()

    async def story(site: Site) -> None:
        while said:
            assert said[0][1] in refused(await site.query("SELECT 1 AS n"), 503).title
            # What is wrong with the query itself is told in any case.
            assert "syntax error" in (await site.query("SELECT 1 +")).json()["title"]
            said.pop(0)

    at_site(story, between=Between(answer=answer))


def test_without_keys_nothing_is_verified_and_why_is_said(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        title = refused(await site.query("SELECT 1 AS n"), 503).title
        assert title.startswith("Failed to fetch the keys that sign tokens"), title

    at_site(story, between=Between(statuses=(426,), has_real=False))


def test_a_begin_whose_answer_is_lost_is_repeated_and_no_row_runs_for_ever(
    at_site: Callable[..., None],
) -> None:
    way = ["lost"]
    began, released = asyncio.Event(), asyncio.Event()

    async def answer(path: str, handed_on: Callable[[], Any]) -> bytes | None:
        if path == END and way == ["unended"]:
            return whole(503, b"{}")
        found: bytes = await handed_on()
        if path == BEGIN and way == ["lost"]:
            way.clear()
            return None
        if path == BEGIN and way == ["held"]:
            began.set()
            await released.wait()
        return found

    async def story(site: Site) -> None:
        clock = SystemClock()
        assert (await site.query("SELECT 1 AS lost")).text == "lost\n1\n"
        (row,) = await site.every_logged()
        assert (row["outcome"], row["rows"]) == ("completed", 1)
        # Its caller leaves while the dispatcher begins it.
        way.append("held")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(site.query("SELECT 1 AS held"))
            await began.wait()
            asking.cancel()
        released.set()
        while (row := await site.logged())["outcome"] is None:
            await clock.sleep(0.05)
        assert (row["sql"], row["outcome"]) == ("SELECT 1 AS held", "cancelled")
        way[0] = "unended"
        # Its service reports no end.
        assert (await site.query("SELECT 1 AS unended")).text == "unended\n1\n"
        assert (await site.logged())["outcome"] is None
        site.stage.world.later(BOUNDS.seconds_max + 130)
        row = await site.logged()
        assert (row["sql"], row["outcome"]) == ("SELECT 1 AS unended", "lost")
        assert row["reason"].startswith("The query service here-1 has reported no end")
        assert row["began_at"] < row["ended_at"]

    at_site(story, between=Between(answer=answer))


@pytest.mark.skipif(not IS_ROOT, reason="only root has users for queries")
def test_what_is_wrong_with_a_query_is_told_whatever_is_noted(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        (mine, *_) = await site.stage.claim("a:last", limit=2)
        ok(await site.stage.complete(held(mine, failure={"reason": "x", "is_retried": False})))
        answer = await site.as_task(mine.token, "SELECT 1 +", direct=True)
        assert answer.status_code == 422
        assert "syntax error" in answer.json()["title"]
        assert "syntax error" in (await site.logged())["reason"]

    at_site(story)


def test_partitions_are_left_out_before_they_count(
    at_site: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "QUERY_PARTS_MAX", 1)

    async def story(site: Site) -> None:
        every = refused(await site.query("SELECT n FROM tidy"), 422)
        assert "reads 2 parts" in every.title
        assert every.detail == QUERY_LESS_HINT
        for where, expected in {
            "partition_key = 'q'": "3",
            "partition_key IN ('q', 'r') AND n > 0": "3",
            "'p' <= partition_key AND partition_key < 'p0'": "1 2",
            "partition_key LIKE 'q%' AND n = 3": "3",
            "partition_key > 'z'": "",
        }.items():
            sql = f"SELECT n, partition_key FROM tidy WHERE {where} ORDER BY n"
            for at in (None, "2030-01-02"):
                found = await site.query(sql, at=at)
                rows = [row.partition(",")[0] for row in found.text.split()[1:]]
                assert " ".join(rows) == expected, (where, at, found.text)
                (read,) = (await site.logged())["datasets"]
                assert read["parts"] == bool(expected)
        both = "SELECT n FROM tidy WHERE partition_key = 'q' UNION ALL SELECT n FROM tidy"
        refused(await site.query(both), 422)
        if IS_ROOT:
            (mine, *_) = await site.stage.claim("a:last", limit=2)
            own = "SELECT count(*) AS n FROM tidy WHERE partition_key = '{}'"
            assert (await site.as_task(mine.token, own.format("p"))).text == "n\n2\n"
            assert (await site.as_task(mine.token, own.format("q"))).text == "n\n0\n"

    at_site(story)


def test_the_command_line_explains_marks_and_cancels(at_site: Callable[..., None]) -> None:
    async def started(site: Site, *words: str) -> asyncio.subprocess.Process:
        url = str(site.public.base_url).rstrip("/")
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "query", *words, "--url", url),
            env={**os.environ, "PENSTOCK_API_TOKEN": API},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def story(site: Site) -> None:
        sql = "SELECT n, name FROM tidy ORDER BY n"
        ended = await started(site, f"{sql} LIMIT 1", "--format", "csv")
        assert await ended.communicate() == (b"n,name\n1,a\n", b"")
        exact = "SELECT 9007199254740993 AS a, 12345678901234567890.12 AS b"
        shown, _ = await (await started(site, exact)).communicate()
        assert shown.decode().split()[-2:] == ["9007199254740993", "12345678901234567890.12"]
        ended = await started(site, sql, "--explain")
        plan, _ = await ended.communicate()
        assert ended.returncode == 0
        assert "READ_PARQUET" in plan.decode()
        assert "ORDER_BY" in plan.decode()
        ended = await started(site, "SELECT n, '😀é',\n\tnope\nFROM tidy")
        _, said = await ended.communicate()
        assert ended.returncode == 2
        line, mark = said.decode().splitlines()[-2:]
        assert (line, mark.index("^")) == ("  line 2:  nope", line.index("nope")), said
        clock = SystemClock()
        running = await started(site, SLOW)
        while (await site.logged())["sql"] != SLOW:
            await clock.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = await running.communicate()
        assert running.returncode == 130
        assert b"Traceback" not in said
        while (logged := await site.logged())["outcome"] is None:
            await clock.sleep(0.05)
        assert (logged["outcome"], logged["reason"]) == ("cancelled", "The caller left.")

    at_site(story)


def test_a_query_is_of_one_moment(at_site: Callable[..., None]) -> None:
    async def story(site: Site) -> None:
        sql = "SELECT count(*) AS n FROM tidy"
        answer = await site.query(sql, format="rows", at="2030-01-02")
        assert rows_of(answer) == [[3]]
        snapshot = lines(answer)[-1]["end"]["datasets"][0]["snapshot"]
        site.stage.world.later(60)
        (again,) = await site.claim("a:clean", "p")
        await site.publish(again, "tidy", NEW)
        assert rows_of(await site.query(sql, format="rows")) == [[2]]
        assert rows_of(await site.query(sql, format="rows", at=str(snapshot))) == [[3]]
        both = f"SELECT (SELECT count(*) FROM secret) + n AS n FROM ({sql})"
        assert rows_of(await site.query(both, format="rows", at=str(snapshot))) == [[5]]
        missing = refused(await site.query(sql, at="2000-01-01"), 422)
        assert "no snapshot as old as 2000-01-01" in missing.title

    at_site(story)


def test_without_users_only_those_are_served_who_may_read_all(
    at_site: Callable[..., None],
) -> None:
    async def story(site: Site) -> None:
        assert (await site.query("SELECT count(*) AS n FROM tidy")).text == "n\n3\n"
        (mine, *_) = await site.stage.claim("a:last", limit=2)
        problem = refused(await site.as_task(mine.token, "SELECT * FROM tidy"), 403)
        assert problem.type == "not isolated"
        assert (await site.logged())["outcome"] == "refused"

    at_site(story, uids="")


def test_a_caller_that_leaves_while_its_process_is_ended_holds_no_place(
    at_site: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, close = threading.Event(), QueryProcess.close

    def slowly(process: QueryProcess) -> None:
        ending.wait(20)
        close(process)

    async def story(site: Site) -> None:
        headers = {"Authorization": f"Bearer {API}"}
        body = {"sql": "SELECT * FROM range(3)", "format": "rows"}
        monkeypatch.setattr(QueryProcess, "close", slowly)
        for _ in range(2):
            asking = site.public.stream("POST", "/v1/query", json=body, headers=headers)
            async with asking as answer:
                async for line in answer.aiter_lines():
                    if line.startswith('{"end"'):
                        break
        ending.set()
        assert (await site.query("SELECT 1 AS n")).text == "n\n1\n"

    at_site(story)
