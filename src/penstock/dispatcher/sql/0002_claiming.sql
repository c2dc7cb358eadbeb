-- What several statements of the task lifecycle have to agree on.

-- The pause before the next attempt: exponential, bounded, and a quarter longer or shorter by luck,
-- which goes from 0 to 1.
CREATE FUNCTION penstock_backoff(
    first_ms bigint, max_ms bigint, factor double precision, failures integer,
    luck double precision
) RETURNS interval LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT least(
        max_ms,
        least(max_ms, first_ms * power(factor, least(failures - 1, 60))) * (0.75 + luck / 2)
    ) * interval '1 millisecond'
$$;

-- How many more tasks of this operator may run now.
CREATE FUNCTION penstock_room(wanted_operator text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT greatest(0, operator.in_flight_max - (
             SELECT count(*) FROM task
             WHERE task.operator = wanted_operator AND task.status = 'running'))
         FROM operator
         WHERE operator.name = wanted_operator AND operator.in_flight_max IS NOT NULL),
        2147483647)
$$;

CREATE FUNCTION penstock_job_room(wanted_job integer) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN job.max_concurrency IS NULL THEN 2147483647
        ELSE greatest(0, job.max_concurrency - (
            SELECT count(*) FROM task
            WHERE task.job_id = wanted_job AND task.status = 'running'))
        END
    FROM job WHERE job.id = wanted_job
$$;

CREATE FUNCTION penstock_is_paused(wanted_job integer, wanted_priority text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM pause
        WHERE pause.job_id = wanted_job AND (pause.scope = 'all' OR wanted_priority = 'bulk'))
$$;

-- The jobs that have something to claim: due, not paused, and with room. One probe of the index a
-- job, so that the many tasks of a paused job cost nothing. Written out, not in terms of the
-- functions above, so that the planner can make it part of the statement that asks.
CREATE FUNCTION penstock_claimable(wanted_operator text, wanted_priority text)
RETURNS TABLE (job_id integer, room bigint, due_at timestamptz) LANGUAGE sql STABLE AS $$
    SELECT job.id, capacity.room, oldest.due_at
    FROM job
    CROSS JOIN LATERAL (
        SELECT task.due_at
        FROM task
        WHERE task.operator = wanted_operator AND task.job_id = job.id
          AND task.priority = wanted_priority AND task.status IN ('queued', 'retrying')
          AND task.due_at <= penstock_now()
        ORDER BY task.due_at, task.id
        LIMIT 1
    ) AS oldest
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN job.max_concurrency IS NULL THEN 2147483647
            ELSE job.max_concurrency - (
                SELECT count(*) FROM task
                WHERE task.job_id = job.id AND task.status = 'running')
            END AS room
    ) AS capacity
    WHERE job.id IN (
            SELECT definition.job_id FROM job_definition AS definition
            WHERE definition.operator = wanted_operator)
      AND NOT EXISTS (
            SELECT FROM pause
            WHERE pause.job_id = job.id AND (pause.scope = 'all' OR wanted_priority = 'bulk'))
      AND capacity.room > 0
$$;
