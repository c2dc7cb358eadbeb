"""What the schema itself refuses, whatever the code above it does."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import psycopg
import pytest

from tests.integration.dispatcher.world import Play, World, done

STATUSES = ("queued", "running", "retrying", "completed", "dead", "cancelled")
ALLOWED = {
    ("queued", "running"),
    ("queued", "cancelled"),
    ("retrying", "running"),
    ("retrying", "cancelled"),
    ("running", "completed"),
    ("running", "queued"),
    ("running", "retrying"),
    ("running", "dead"),
    ("running", "cancelled"),
    ("dead", "queued"),
}
LEASE = "lease_token = 't', lease_expires_at = now(), worker = 'w', claimed_at = now()"
NO_LEASE = "lease_token = NULL, lease_expires_at = NULL, worker = NULL, claimed_at = NULL"


def columns_of(status: str) -> str:
    """A setting of all columns that a status needs, but for the attempt."""
    lease = LEASE if status == "running" else NO_LEASE
    over = "now()" if status in ("completed", "dead", "cancelled") else "NULL"
    return f"status = '{status}', {lease}, settled_at = {over}, reason = 'x'"


async def task_with(world: World, status: str) -> None:
    """The world's only task, put into a status with the guard asleep."""
    await world.rows("ALTER TABLE task DISABLE TRIGGER task_guard")
    await world.rows(f"UPDATE task SET {columns_of(status)}, attempt = 1")
    await world.rows("ALTER TABLE task ENABLE TRIGGER task_guard")


def test_only_the_transitions_of_the_table_are_possible(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("one")
        for before, after in product(STATUSES, STATUSES):
            if before == after:
                continue
            await task_with(world, before)
            grown = int(after == "running")
            change = f"UPDATE task SET {columns_of(after)}, attempt = attempt + {grown}"
            if (before, after) in ALLOWED:
                await world.rows(change)
            else:
                with pytest.raises(psycopg.errors.CheckViolation, match="cannot go from"):
                    await world.rows(change)

    play(story)


NONSENSE = [
    ("queued", "attempt = 2"),
    ("queued", "generation = gen_random_uuid()"),
    ("queued", "dedupe_key = 'other'"),
    ("queued", "worker = 'w'"),
    ("queued", "settled_at = now()"),
    ("queued", "cancel_asked = true"),
    ("queued", "status = 'running', attempt = 2"),
    ("queued", f"status = 'running', {LEASE}"),
    ("queued", f"status = 'running', {LEASE}, attempt = 3"),
    ("running", "lease_token = NULL"),
    ("running", "lease_token = 'other'"),
    ("running", "worker = 'other'"),
    ("running", "lease_expires_at = NULL"),
    ("running", "attempt = 2"),
    ("running", "status = 'dead', settled_at = now()"),
    ("running", f"status = 'retrying', reason = NULL, {NO_LEASE}"),
    ("running", f"status = 'completed', {NO_LEASE}"),
    ("completed", "reason = 'other'"),
    ("dead", "reason = 'other'"),
    ("cancelled", "due_at = now() + interval '1 hour'"),
]


def test_a_row_that_makes_no_sense_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("one")
        for status, change in NONSENSE:
            await task_with(world, status)
            with pytest.raises(psycopg.errors.CheckViolation):
                await world.rows(f"UPDATE task SET {change}")

    play(story)


def test_attempts_that_are_over_and_publications_do_not_change(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        with pytest.raises(psycopg.errors.UniqueViolation):
            await world.rows(
                "INSERT INTO attempt (task_id, number, worker, lease_token, started_at)"
                " SELECT id, 2, 'w', 't', now() FROM task"
            )
        await world.tasks.complete(done(claimed.fence, job.output()))
        for change in (
            "UPDATE attempt SET reason = 'x'",
            "UPDATE publication SET revision = 1",
            "UPDATE publication SET revision = 2, task_id = task_id - 1",
            "UPDATE publication SET revision = 2",
        ):
            with pytest.raises(psycopg.errors.CheckViolation):
                await world.rows(change)

    play(story)


def test_a_dataset_has_one_current_and_one_building_generation(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        for state in ("building", "retired", "retired", "abandoned", "abandoned"):
            await world.rows(
                "INSERT INTO generation VALUES (%s, gen_random_uuid(), %s, 'x')", job.dataset, state
            )
        for state in ("building", "current"):
            with pytest.raises(psycopg.errors.UniqueViolation):
                await world.rows(
                    "INSERT INTO generation VALUES (%s, gen_random_uuid(), %s, 'x')",
                    job.dataset,
                    state,
                )

    play(story)


NO_EVENTS = [
    ("dedupe", "'x'"),
    ("dedupe, cursor, partition_key", "'x', 1, 'p'"),
    ("dedupe, partition_key, range_start", "'x', 'p', 1"),
    ("dedupe, partition_key, range_start, range_end", "'x', 'p', 2, 2"),
    ("dedupe, cursor, range_start, range_end", "'x', 1, 1, 2"),
    ("dedupe, cursor, routed", "'x', 1, 'audited'"),
    ("dedupe, cursor, why_not", "'x', 1, 'late'"),
    ("dedupe, cursor", "'publication:1:0', 1"),
]


def test_an_event_is_a_cursor_or_a_partition(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        for columns, values in NO_EVENTS:
            with pytest.raises(psycopg.errors.CheckViolation):
                await world.rows(
                    f"INSERT INTO event (dataset_id, generation, {columns})"
                    f" VALUES (%s, %s, {values})",
                    job.dataset,
                    job.generation,
                )

    play(story)


def test_time_is_the_databases_and_moves_only_in_tests(play: Play) -> None:
    async def story(world: World) -> None:
        world.later(90.5)
        assert await world.value("SELECT penstock_now() = timestamptz '2030-01-01 00:01:30.5+00'")
        # A connection that nobody has given an offset, and one whose transaction is over.
        async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
            for offset in ("unset", "90 s"):
                if offset != "unset":
                    await connection.execute(b"SELECT set_config('penstock.offset', '90 s', true)")
                    found = await connection.execute(b"SELECT penstock_now() - now()")
                    assert await found.fetchone() == (timedelta(seconds=90),)
                    await connection.commit()
                found = await connection.execute(b"SELECT penstock_now() = now()")
                assert await found.fetchone() == (True,)

    play(story)
