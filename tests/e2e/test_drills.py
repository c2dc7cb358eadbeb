"""The recoveries of docs/operations.md, drilled: what the page says to do, and what is there then.

One installation is used for all that can follow each other. Every drill leaves it whole.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.dispatcher.database.migrations import Migration, migrate, migrations
from penstock.kernel.entropy import new_id, system_entropy
from penstock.settings import Wakeups
from penstock.store.s3.local import LocalS3
from tests.e2e.drill_stage import ARCHIVING, DAG, MODULE, Line, Stage, facts_of
from tests.e2e.fleet import fleet_of
from tests.e2e.test_up import Up
from tests.e2e.test_up import _until as until_up
from tests.e2e.test_up import _up as up_on

Drill = Callable[[Stage], Coroutine[Any, Any, None]]
Run = Callable[[Drill], None]
PARTITIONS = ("p1", "p2", "p3")
LATER = """
    DO $$ BEGIN
        EXECUTE (
            SELECT string_agg(
                format('ALTER TABLE %I ADD COLUMN later text NOT NULL DEFAULT %L', tablename, 'x'),
                '; ')
            FROM pg_tables
            WHERE schemaname = 'public' AND tablename <> 'migration');
    END $$;
    CREATE TABLE later (n bigint PRIMARY KEY);
"""
"""What a later release may do: a column more in every table, and a table."""


@pytest.fixture(scope="module")
def run(local_s3: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs drills on one installation, which has three partitions of each dataset."""
    folder = tmp_path_factory.mktemp("drills")
    with asyncio.Runner() as runner:
        line = Line(urlsplit(local_s3.endpoint).port or 0)
        runner.run(line.join())
        root = f"s3://penstock/drills-{new_id(system_entropy(), characters=8)}"
        store = f"{root}?endpoint=http://127.0.0.1:{line.port}"
        keys = local_s3.credentials
        installation = fleet_of(
            folder,
            dispatchers=1,
            workers=1,
            modules={"drills.py": MODULE},
            told={"store": store, "worker_secret": "", "wakeups": Wakeups.BUCKET},
            variables={
                "AWS_ACCESS_KEY_ID": keys.access_key,
                "AWS_SECRET_ACCESS_KEY": keys.secret_key,
                "DRILL_STORE": store,
                "DRILL_KEYS": f"{keys.access_key}:{keys.secret_key}",
            },
            database=ARCHIVING,
        )
        fleet = runner.run(installation.__aenter__())
        stage = Stage(fleet, line, local_s3, root)
        try:
            runner.run(_ready(stage))
            yield lambda drill: runner.run(_drilled(stage, drill))
        finally:
            runner.run(stage.client.__aexit__(None, None, None))
            runner.run(installation.__aexit__(None, None, None))
            runner.run(line.cut())


async def _ready(stage: Stage) -> None:
    await stage.client.__aenter__()
    await stage.start()
    await stage.client.apply(DAG)
    await stage.trigger(*PARTITIONS)
    await stage.made(*PARTITIONS)


async def _drilled(stage: Stage, drill: Drill) -> None:
    """A drill, and what has to hold after each of them."""
    await drill(stage)
    for dataset in ("sales", "totals"):
        published = await stage.published(dataset)
        assert set(PARTITIONS) <= set(published)
        assert await stage.told(dataset) == published
        said = await stage.types("dataset", "verify", dataset)
        assert "all as they were written" in said
    rows = await stage.rows(
        "SELECT job.name, payload ->> 'partition_key' AS key, status, reason, task.id"
        " FROM task JOIN job ON job.id = job_id WHERE status <> 'completed'"
    )
    assert rows == []


@pytest.mark.timeout(600)
def test_the_keys_of_a_dispatcher_are_lost(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        await stage.trigger("held-keys")
        before = await stage.held("clean", "held-keys")
        keys = stage.fleet.folder / "data" / "keys"
        (old,) = keys.glob("*.pem")
        await stage.fleet.stop("dispatcher-0")
        shutil.rmtree(keys)
        await stage.start("dispatcher-0")
        # Work that has a token of the old key goes on, and ends.
        stage.let_go("held-keys")
        await stage.trigger("after-keys")
        await stage.made("held-keys", "after-keys")
        (row,) = await stage.rows(
            "SELECT number AS attempt, outcome FROM attempt WHERE task_id = %(task)s",
            task=before["id"],
        )
        assert row == {"attempt": before["attempt"], "outcome": "completed"}
        (new,) = keys.glob("*.pem")
        assert new.name != old.name
        listed = await stage.types("keys", "list")
        assert {old.stem, new.stem} <= set(listed.split())

    run(drill)


@pytest.mark.timeout(600)
def test_the_secret_of_workers_is_lost(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        await stage.trigger("held-secret")
        await stage.held("clean", "held-secret")
        (stage.fleet.folder / "data" / "worker.secret").unlink()
        await stage.fleet.stop("dispatcher-0")
        await stage.start("dispatcher-0")
        # A worker that has the old one claims nothing, and says so. What it runs is not lost: that
        # is proved by tokens of attempts.
        stage.let_go("held-secret")
        await stage.made("held-secret", jobs=("clean",))

        async def is_told() -> bool:
            return "PENSTOCK_WORKER_SECRET" in stage.fleet.said("worker-0")

        await stage.until(is_told)
        await stage.fleet.stop("worker-0")
        await stage.start("worker-0")
        await stage.trigger("after-secret")
        await stage.made("held-secret", "after-secret")

    run(drill)


@pytest.mark.timeout(600)
def test_files_of_a_dataset_are_lost(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        before = await stage.published("sales")
        lost = [f"{before['p1']}/part-0.parquet", f"{before['p2']}/_manifest.json"]
        stage.remove(*lost)
        said = await stage.types("dataset", "verify", "sales", code=1)
        named = [lost[0], f"The manifest {before['p2']}/"]
        assert [each in said for each in named] == [True, True]
        assert before["p3"] not in said
        keys = ("--key", "p1", "--key", "p2")
        await stage.types("backfill", "start", "clean", *keys, "--wait", "--timeout", "100")
        await stage.made("p1", "p2")
        after = await stage.published("sales")
        assert {key for key in after if after[key] != before.get(key)} == {"p1", "p2"}

    run(drill)


@pytest.mark.timeout(600)
def test_the_bucket_is_away_for_some_time(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        await stage.trigger("held-bucket")
        await stage.held("clean", "held-bucket")
        await stage.line.cut()
        # What is done is done, and what is asked is answered.
        await stage.trigger("away-1", "away-2")
        stage.let_go("held-bucket")

        async def is_failing() -> bool:
            return bool(await stage.rows("SELECT 1 FROM outbox WHERE tries > 0 AND kind = 'wake'"))

        await stage.until(is_failing)
        # A row is given up after twelve tries, which take some minutes.
        await stage.rows("UPDATE outbox SET tries = 11 WHERE tries > 0")

        async def is_parked() -> Any:
            return facts_of(await stage.types("outbox", "list", "--json"))["parked"]

        async def are_dead() -> bool:
            return len(await stage.rows("SELECT 1 FROM task WHERE status = 'dead'")) == 3

        # Workers look by themselves as well, and what they begin fails.
        await stage.until(are_dead)
        # Who is started now says why it ends.
        await stage.fleet.start("dispatcher-away")
        process = stage.fleet.live.pop("dispatcher-away")
        async with asyncio.timeout(90):
            assert await process.wait() == 1
        assert "cannot be reached" in stage.fleet.said("dispatcher-away")
        parked = await stage.until(is_parked)
        await stage.line.join()
        # One that was sent meanwhile, by another that says the same, is not there any more.
        await stage.types("outbox", "retry", *(str(each["id"]) for each in parked), code=None)
        for job in ("clean", "totals"):
            await stage.types("task", "replay", "--job", job, "--status", "dead", "--yes")
        await stage.made("held-bucket", "away-1", "away-2")

    run(drill)


@pytest.mark.timeout(900)
def test_postgres_is_brought_back_to_the_last_moment(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        backup = await stage.back_up()
        await stage.trigger("since-1", "held-last")
        await stage.made("since-1")
        running = await stage.held("clean", "held-last")
        await stage.fleet.kill("dispatcher-0")
        await stage.restore(backup)
        stage.let_go("held-last")
        await stage.start("dispatcher-0")
        await stage.trigger("since-2")
        await stage.made("since-1", "since-2", "held-last")
        # The attempt that ran has gone on.
        (row,) = await stage.rows(
            "SELECT number, outcome FROM attempt WHERE task_id = %(task)s", task=running["id"]
        )
        assert row == {"number": running["attempt"], "outcome": "completed"}

    run(drill)


@pytest.mark.timeout(900)
def test_postgres_is_brought_back_to_an_earlier_time(run: Run) -> None:
    async def drill(stage: Stage) -> None:
        backup = await stage.back_up()
        await stage.rows("SELECT pg_create_restore_point('earlier')")
        earlier = await stage.published("sales")
        # Published since: a partition that is new, and two that were computed again.
        await stage.trigger("new")
        keys = ("--key", "p1", "--key", "p2")
        await stage.types("backfill", "start", "clean", *keys, "--wait", "--timeout", "100")
        await stage.made("new", "p1", "p2")
        await stage.trigger("held-heart", "held-end")
        hearts = await stage.held("clean", "held-heart")
        ends = await stage.held("clean", "held-end")
        forgotten = await stage.published("sales")
        # Dispatchers are stopped; a worker is not, and holds two attempts. One of them ends.
        await stage.fleet.stop("dispatcher-0")
        await stage.restore(backup, point="earlier")
        stage.let_go("held-end")
        await stage.start("dispatcher-0")
        await _refused(stage, hearts, ends)
        # Readers without Postgres still find what was published since, and find it whole; the
        # dispatcher says what it knows.
        assert await stage.published("sales") == earlier
        assert await stage.told("sales") == forgotten
        await _computed_again(stage, forgotten)
        # What was not computed again is as it was then, for all readers, when they are told.
        await stage.types("dataset", "refresh", "sales")
        await stage.types("dataset", "refresh", "totals")
        assert (await stage.told("sales"))["p2"] == earlier["p2"]
        await stage.types("dataset", "sweep", "--grace", "0")
        assert await stage.is_there(earlier["p2"])

    run(drill)


@pytest.mark.timeout(600)
def test_a_database_that_a_later_release_has_migrated(run: Run) -> None:
    """A dispatcher that runs goes on beside it; one that starts says that it is too old."""

    async def drill(stage: Stage) -> None:
        steps = migrations()
        later = Migration(len(steps) + 1, f"{len(steps) + 1:04d}_later", LATER)
        assert await migrate(stage.fleet.postgres.dsn, [*steps, later]) == (later,)
        await stage.trigger("later-1")
        await stage.made("later-1")
        await stage.types("status")
        # Again, when every statement is one that was prepared before or after it.
        await stage.trigger(*(f"later-{number}" for number in range(2, 8)))
        await stage.made(*(f"later-{number}" for number in range(2, 8)))
        await stage.fleet.stop("dispatcher-0")
        said = stage.fleet.said("dispatcher-0")
        assert "cached plan" not in said
        assert "failed; retrying" not in said
        await stage.fleet.start("dispatcher-0")
        process = stage.fleet.live.pop("dispatcher-0")
        async with asyncio.timeout(60):
            assert await process.wait() == 1
        said = stage.fleet.said("dispatcher-0")
        assert f"The database is at migration {later.number} ({later.name})" in said
        assert "Upgrade Penstock" in said
        await stage.rows("DELETE FROM migration WHERE number = %(number)s", number=later.number)
        await stage.start("dispatcher-0")

    run(drill)


async def _refused(stage: Stage, *attempts: dict[str, Any]) -> None:
    """Attempts of a life that is forgotten are refused, whether they go on or end."""

    async def is_refused() -> bool:
        said = stage.fleet.said("worker-0")
        return all(f"task {each['id']}" in said and "lease was lost" in said for each in attempts)

    await stage.until(is_refused)


async def _computed_again(stage: Stage, forgotten: dict[str, str]) -> None:
    """Tell of what is missing again; readers are told of it, and lose nothing meanwhile."""
    await stage.types("dataset", "sweep", "--grace", "0")
    assert await stage.told("sales") == forgotten
    stage.let_go("held-heart")
    keys = ("--key", "p1")
    await stage.types("backfill", "start", "clean", *keys, "--wait", "--timeout", "100")
    await stage.trigger("new", "held-heart", "held-end")
    await stage.made("new", "held-heart", "held-end", "p1")
    published = await stage.published("sales")
    found = await stage.told("sales")
    for key in ("p1", "new", "held-heart", "held-end"):
        assert found[key] == published[key] != forgotten.get(key)
    # Numbers of tasks were given out again; what only the bucket names is kept all the same.
    await stage.types("dataset", "sweep", "--grace", "0")
    assert (await stage.told("sales"))["p2"] == forgotten["p2"]


@pytest.mark.timeout(600)
def test_a_machine_of_up_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "drills.py").write_text(MODULE)
    (code / "dag.yaml").write_text(DAG)
    monkeypatch.setenv("DRILL_STORE", (tmp_path / "data" / "store").as_uri())
    with up_on(tmp_path, str(code / "dag.yaml")) as up:
        _made(up, "p1")
        before = _location(up)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(90) == 0
    # Owners and modes go with it: Postgres insists on them.
    subprocess.run(["cp", "-a", up.data, tmp_path / "elsewhere"], check=True)
    shutil.rmtree(up.data)
    (tmp_path / "elsewhere").rename(up.data)
    with up_on(tmp_path, str(code / "dag.yaml")) as up:
        assert _location(up) == before
        for dataset in ("sales", "totals"):
            said = up.ask("dataset", "verify", dataset)
            assert said.startswith("1 file in 1 part, ")
        _made(up, "p2")


def _made(up: Up, key: str) -> None:
    """Tell of a partition, and wait until both of its tasks are completed."""
    up.ask("trigger", "ingest", "--partition", key)
    done = [(job, key, "completed") for job in ("clean", "totals")]

    def is_done() -> bool:
        found = [(each["job"], each["partition_key"], each["status"]) for each in up.tasks()]
        return set(done) <= set(found)

    until_up(is_done, up)


def _location(up: Up) -> str:
    found = json.loads(up.ask("dataset", "files", "sales", "--json"))
    (part,) = found["parts"]
    where: str = part["location"]
    return where
