-- Measuring queues, and pausing what feeds them, for penstock.dispatcher.backpressure.

-- name: take_pressure_lock
-- Until the end of the transaction; whoever does not get it leaves the measuring to who has. The
-- number is ours alone: "pressure" in letters.
SELECT pg_try_advisory_xact_lock(8102650226125664869) AS is_ours

-- name: measure_queues
-- All jobs of a version of the DAG; those with limits are counted, each to its own bound. Tasks of a
-- backfill, or of maintenance, are not counted: they wait because they may.
SELECT job.name, job.id AS job_id, counted.depth,
       greatest(0, coalesce(extract(epoch FROM penstock_now() - oldest.due_at), 0))::double precision
           AS oldest_seconds,
       shed.has_bulk
FROM dag_job
JOIN job ON job.id = dag_job.job_id
LEFT JOIN unnest(%(jobs)s::text[], %(depths_max)s::bigint[]) AS asked(name, depth_max)
    ON asked.name = job.name
CROSS JOIN LATERAL (
    SELECT array_agg(DISTINCT definition.operator) AS operators
    FROM job_definition AS definition
    WHERE definition.job_id = job.id
) AS served
CROSS JOIN LATERAL (
    SELECT count(*) AS depth
    FROM (
        SELECT
        FROM task
        WHERE task.operator = ANY (served.operators) AND task.job_id = job.id
          AND task.status IN ('queued', 'retrying') AND task.backfill_id IS NULL
          AND NOT task.payload ? 'maintain'
        UNION ALL
        -- Of a sink what nobody has taken, too: one task stands for many batches.
        SELECT
        FROM dataset
        JOIN buffer_batch AS batch ON batch.dataset_id = dataset.id
        WHERE dataset.job_id = job.id AND batch.state = 'released' AND batch.sink_task IS NULL
        LIMIT coalesce(asked.depth_max, 0)
    ) AS waiting
) AS counted
CROSS JOIN LATERAL (
    SELECT min(first.due_at) AS due_at
    FROM unnest(served.operators) AS named(operator)
    CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    CROSS JOIN LATERAL (
        SELECT task.due_at
        FROM task
        WHERE task.operator = named.operator AND task.job_id = job.id
          AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
          AND task.backfill_id IS NULL AND NOT task.payload ? 'maintain'
          AND task.due_at <= penstock_now()
        ORDER BY task.due_at, task.id
        LIMIT 1
    ) AS first
    WHERE asked.name IS NOT NULL
) AS oldest
CROSS JOIN LATERAL (
    SELECT EXISTS (
        SELECT
        FROM task
        WHERE task.operator = ANY (served.operators) AND task.job_id = job.id
          AND task.priority = 'bulk' AND task.status IN ('queued', 'retrying')
          AND NOT task.payload ? 'maintain')
    OR EXISTS (
        SELECT
        FROM task
        WHERE task.job_id = job.id AND task.status = 'running' AND task.priority = 'bulk'
          AND NOT task.payload ? 'maintain')
        AS has_bulk
) AS shed
WHERE dag_job.dag_version_id = %(version)s

-- name: pressure_before
SELECT job.name, pressure.scope, pressure.reason
FROM pressure
JOIN job ON job.id = pressure.job_id

-- name: write_pressure
INSERT INTO pressure AS held (job_id, pressed, scope, depth, oldest_seconds, reason)
SELECT asked.job_id, asked.scope IS NOT NULL, asked.scope, asked.depth, asked.oldest_seconds,
       asked.reason
FROM unnest(
    %(jobs)s::integer[], %(scopes)s::text[], %(depths)s::bigint[],
    %(ages)s::double precision[], %(reasons)s::text[])
    AS asked(job_id, scope, depth, oldest_seconds, reason)
ORDER BY asked.job_id
ON CONFLICT (job_id) DO UPDATE
SET pressed = excluded.pressed, scope = excluded.scope, depth = excluded.depth,
    oldest_seconds = excluded.oldest_seconds, reason = excluded.reason,
    measured_at = excluded.measured_at,
    since = CASE WHEN held.pressed = excluded.pressed THEN held.since ELSE excluded.since END

-- name: forget_pressure
-- Jobs that have left the DAG, or have no limits any more.
DELETE FROM pressure WHERE job_id <> ALL (%(jobs)s::integer[])

-- name: write_pauses
INSERT INTO pause AS held (job_id, cause, scope, reason)
SELECT asked.job_id, asked.cause, asked.scope, asked.reason
FROM unnest(%(jobs)s::integer[], %(causes)s::text[], %(scopes)s::text[], %(reasons)s::text[])
    AS asked(job_id, cause, scope, reason)
ORDER BY asked.job_id, asked.cause
ON CONFLICT (job_id, cause) DO UPDATE
SET scope = excluded.scope, reason = excluded.reason
WHERE (held.scope, held.reason) IS DISTINCT FROM (excluded.scope, excluded.reason)

-- name: end_pauses
-- Those that pressure has made and that it does not want any more.
DELETE FROM pause
WHERE starts_with(pause.cause, 'pressure:') AND NOT EXISTS (
    SELECT
    FROM unnest(%(jobs)s::integer[], %(causes)s::text[]) AS kept(job_id, cause)
    WHERE kept.job_id = pause.job_id AND kept.cause = pause.cause)
RETURNING pause.job_id

-- name: pause_job
-- By a person. A job that is paused already keeps the time, and takes the new reason.
INSERT INTO pause (job_id, cause, scope, reason)
SELECT job.id, 'operator', 'all', %(reason)s
FROM job
WHERE job.name = %(job)s
ON CONFLICT (job_id, cause) DO UPDATE SET scope = excluded.scope, reason = excluded.reason
RETURNING job_id

-- name: resume_job
DELETE FROM pause
USING job
WHERE job.name = %(job)s AND pause.job_id = job.id AND pause.cause = 'operator'
RETURNING pause.job_id

-- name: job_of_name
SELECT id FROM job WHERE name = %(job)s

-- name: wake_jobs
-- Tell of what can be claimed of these jobs now: after a statement that has made it so. Functions
-- are invoked for the oldest tasks; the reconciler sees to the rest. As in `announce`, the caller
-- tells of it after the commit, with the number of tasks, unless that is to be done by rows.
WITH served AS (
    SELECT DISTINCT definition.operator, definition.job_id, definition.runtime
    FROM job_definition AS definition
    WHERE definition.job_id = ANY (%(jobs)s::integer[])
), claimable AS MATERIALIZED (
    SELECT operators.operator, tier.priority, found.job_id
    FROM (SELECT DISTINCT operator FROM served) AS operators
    CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    CROSS JOIN LATERAL penstock_claimable(operators.operator, tier.priority) AS found
    WHERE found.job_id = ANY (%(jobs)s::integer[]) AND penstock_room(operators.operator) > 0
), waiting AS MATERIALIZED (
    SELECT claimable.operator, claimable.priority, task.id,
           definition.runtime = 'lambda' AS is_invoked
    FROM claimable
    CROSS JOIN LATERAL (
        SELECT task.id, task.definition_id
        FROM task
        WHERE task.operator = claimable.operator AND task.job_id = claimable.job_id
          AND task.priority = claimable.priority AND task.status IN ('queued', 'retrying')
          AND task.due_at <= penstock_now()
        ORDER BY task.due_at, task.id
        LIMIT 1000
    ) AS task
    JOIN job_definition AS definition ON definition.id = task.definition_id
), written AS (
    INSERT INTO outbox (kind, target, body)
    SELECT DISTINCT 'wake', claimable.operator || '/' || claimable.priority,
           jsonb_build_object('operator', claimable.operator, 'priority', claimable.priority)
    FROM claimable
    JOIN served USING (operator, job_id)
    WHERE served.runtime <> 'lambda' AND %(by_rows)s
    UNION ALL
    SELECT 'invoke', operator, jsonb_build_object('task_id', id)
    FROM waiting
    WHERE is_invoked AND %(by_rows)s
)
SELECT operator, priority, count(*) AS tasks
FROM waiting
WHERE NOT %(by_rows)s
GROUP BY operator, priority

-- name: shown_pressure
SELECT job.name AS job, pressure.pressed, pressure.depth, pressure.oldest_seconds, pressure.reason,
       pressure.since,
       (SELECT count(*)
        FROM (
            SELECT
            FROM (
                SELECT DISTINCT edge.dataset_id
                FROM dag_current
                JOIN edge USING (dag_version_id)
                WHERE edge.job_id = job.id AND edge.is_trigger) AS inputs
            JOIN event ON event.routed = 'held' AND event.dataset_id = inputs.dataset_id
            WHERE job.max_queue_depth IS NOT NULL
            LIMIT 10000) AS waiting) AS held
FROM pressure
JOIN job ON job.id = pressure.job_id
ORDER BY job.name

-- name: shown_pauses
SELECT job.name AS job, pause.cause, pause.scope, pause.reason, pause.since
FROM pause
JOIN job ON job.id = pause.job_id
ORDER BY job.name, pause.cause
LIMIT %(limit)s
