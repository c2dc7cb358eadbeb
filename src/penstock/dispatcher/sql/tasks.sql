-- Making, claiming, cancelling and replaying tasks, for penstock.dispatcher.tasks.
-- Several rows are always locked in the order of their ids (FENCE-10).

-- name: create_tasks
-- Set-based; a task whose key is there already is left alone.
WITH asked AS (
    SELECT asked.*
    FROM jsonb_to_recordset(%(tasks)s) AS asked(
        place integer, definition_id bigint, generation uuid, dedupe_key text, priority text,
        payload jsonb, delay_ms bigint, event_seq bigint, backfill_id bigint)
), made AS (
    INSERT INTO task (
        job_id, definition_id, generation, dedupe_key, operator, priority, payload,
        attempt_limit, due_at, event_seq, backfill_id)
    SELECT definition.job_id, definition.id, asked.generation, asked.dedupe_key,
           definition.operator, coalesce(asked.priority, definition.priority), asked.payload,
           definition.max_attempts, penstock_now() + asked.delay_ms * interval '1 millisecond',
           asked.event_seq, asked.backfill_id
    FROM asked
    JOIN job_definition AS definition ON definition.id = asked.definition_id
    ORDER BY definition.job_id, asked.generation, asked.dedupe_key, asked.place
    ON CONFLICT (job_id, generation, dedupe_key) DO NOTHING
    RETURNING id, definition_id, generation, dedupe_key
)
SELECT DISTINCT ON (asked.place) asked.place, made.id, definition.id IS NOT NULL AS is_known
FROM asked
LEFT JOIN job_definition AS definition ON definition.id = asked.definition_id
LEFT JOIN made USING (definition_id, generation, dedupe_key)
ORDER BY asked.place

-- name: announce
-- Tell of what has become claimable, or will be: an operator's queue hears that there is work, a
-- function is invoked for each task. Tasks that are due in the same second share a wake-up, which
-- comes with the last of them. What is due now is told by the caller after its commit, unless that
-- is to be done by rows.
WITH waiting AS MATERIALIZED (
    SELECT task.id, task.operator, task.priority, task.due_at,
           definition.runtime = 'lambda' AS is_invoked,
           %(by_rows)s OR task.due_at > penstock_now() AS is_row
    FROM task
    JOIN job_definition AS definition ON definition.id = task.definition_id
    WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.status IN ('queued', 'retrying')
), written AS (
    INSERT INTO outbox (kind, target, body, due_at)
    SELECT 'wake', operator || '/' || priority,
           jsonb_build_object('operator', operator, 'priority', priority), max(due_at)
    FROM waiting
    WHERE is_row AND NOT is_invoked
    GROUP BY operator, priority, ceil(extract(epoch FROM due_at))
    UNION ALL
    SELECT 'invoke', operator, jsonb_build_object('task_id', id), due_at
    FROM waiting
    WHERE is_row AND is_invoked
)
SELECT operator, priority, count(*) AS tasks FROM waiting WHERE NOT is_row GROUP BY operator, priority

-- name: wake_remainder
-- A claim that leaves claimable tasks behind passes the word on.
WITH found AS MATERIALIZED (
    SELECT %(operator)s::text AS operator, tier.priority
    FROM unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    WHERE penstock_room(%(operator)s) > 0
      AND EXISTS (SELECT FROM penstock_claimable(%(operator)s, tier.priority))
), written AS (
    INSERT INTO outbox (kind, target, body)
    SELECT 'wake', operator || '/' || priority,
           jsonb_build_object('operator', operator, 'priority', priority)
    FROM found
    WHERE %(by_rows)s
)
SELECT operator, priority, 1 AS tasks FROM found WHERE NOT %(by_rows)s

-- name: wake_freed
-- Where a limit kept tasks waiting, the end of a running one makes room for the next.
WITH found AS MATERIALIZED (
    SELECT freed.operator, tier.priority
    FROM (
        SELECT DISTINCT task.operator
        FROM task
        JOIN job ON job.id = task.job_id
        LEFT JOIN operator ON operator.name = task.operator
        WHERE task.id = ANY (%(tasks)s::bigint[])
          AND (job.max_concurrency IS NOT NULL OR operator.in_flight_max IS NOT NULL)
    ) AS freed
    CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    WHERE penstock_room(freed.operator) > 0
      AND EXISTS (SELECT FROM penstock_claimable(freed.operator, tier.priority))
), written AS (
    INSERT INTO outbox (kind, target, body)
    SELECT 'wake', operator || '/' || priority,
           jsonb_build_object('operator', operator, 'priority', priority)
    FROM found
    WHERE %(by_rows)s
)
SELECT operator, priority, 1 AS tasks FROM found WHERE NOT %(by_rows)s

-- name: lock_limits
-- Claims under a limit come one after the other (FENCE-4): what runs is counted by the next
-- statement, which sees all that was committed before this lock was given.
SELECT
    (SELECT count(*) FROM (
        SELECT FROM operator
        WHERE name = %(operator)s AND in_flight_max IS NOT NULL
        FOR NO KEY UPDATE) AS operators),
    (SELECT count(*) FROM (
        SELECT FROM job
        WHERE max_concurrency IS NOT NULL AND id IN (
            SELECT job_id FROM job_definition WHERE operator = %(operator)s)
        ORDER BY id
        FOR NO KEY UPDATE) AS jobs)

-- name: find_operator
SELECT operator FROM task WHERE id = %(task)s

-- name: pick_next
-- The first of these tiers first, oldest first, the job with the oldest first. The outer limit stops
-- the inner selects, so that no more rows are locked than are taken. Under a limit that is in force for
-- the operator or the job, what runs has to be counted after `lock_limits`, one tier at a time.
-- If a claim of one of these ids has begun something already, which nobody has acknowledged, that is all
-- that is said, and nothing is picked (FENCE-20).
WITH repeated AS MATERIALIZED (
    SELECT
    FROM task
    WHERE task.claim_id = ANY (%(claim_ids)s::text[]) AND task.status = 'running'
    LIMIT 1
)
SELECT NULL AS id, NULL AS job_id, NULL AS definition_id, NULL AS generation, NULL AS partition_key,
       NULL AS is_fresh, NULL AS batch_max, NULL AS is_limited
FROM repeated
UNION ALL
(SELECT found.id, found.job_id, found.definition_id, found.generation::text, found.partition_key,
       found.is_fresh, definition.batch_max,
       job.max_concurrency IS NOT NULL OR EXISTS (
           SELECT FROM operator
           WHERE operator.name = %(operator)s AND operator.in_flight_max IS NOT NULL) AS is_limited
FROM (
    SELECT claimable.job_id, claimable.room, tier.priority
    FROM unnest(%(tiers)s::text[]) WITH ORDINALITY AS tier(priority, place)
    CROSS JOIN LATERAL penstock_claimable(%(operator)s, tier.priority) AS claimable
    WHERE (%(job)s::integer IS NULL OR claimable.job_id = %(job)s)
      AND NOT EXISTS (SELECT FROM repeated)
    ORDER BY tier.place, claimable.due_at, claimable.job_id
) AS jobs
CROSS JOIN LATERAL (
    SELECT task.id, task.job_id, task.definition_id, task.generation,
           task.payload ->> 'partition_key' AS partition_key,
           task.attempt = task.releases AND NOT task.runs_alone AS is_fresh
    FROM task
    WHERE task.operator = %(operator)s AND task.job_id = jobs.job_id
      AND task.priority = jobs.priority AND task.status IN ('queued', 'retrying')
      AND task.due_at <= penstock_now()
    ORDER BY task.due_at, task.id
    LIMIT least(jobs.room, %(limit)s)
    FOR NO KEY UPDATE SKIP LOCKED
) AS found
JOIN job_definition AS definition ON definition.id = found.definition_id
JOIN job ON job.id = found.job_id
LIMIT least(%(limit)s, penstock_room(%(operator)s)))

-- name: begun_by_claim
-- What a claim of this id has begun for this worker, if that is not acknowledged: the same attempts go
-- on. Those of a batch are joined as they were picked: by what they were before.
SELECT task.id, task.job_id, task.definition_id, task.generation::text,
       task.payload ->> 'partition_key' AS partition_key,
       task.attempt - 1 = task.releases AND NOT task.runs_alone AS is_fresh, definition.batch_max
FROM task
JOIN job_definition AS definition ON definition.id = task.definition_id
WHERE task.claim_id = %(claim_id)s AND task.status = 'running' AND task.worker = %(worker)s
ORDER BY task.id
FOR NO KEY UPDATE OF task

-- name: repeat_attempts
-- For attempts that `begun_by_claim` has locked: their worker has as long as before to acknowledge them,
-- but no longer in all than the heartbeat. One that would grant anything else by now is not repeated:
-- if it has begun, its token holds; if not, it is taken back (FENCE-20).
UPDATE task
SET lease_expires_at = greatest(task.lease_expires_at, least(
        penstock_now() + %(unacknowledged_ms)s * interval '1 millisecond',
        task.claimed_at + definition.heartbeat_ms * interval '1 millisecond'))
FROM unnest(%(tasks)s::bigint[], %(grants)s::text[]) AS asked(task_id, grants),
     job_definition AS definition
WHERE task.id = asked.task_id AND task.status = 'running' AND definition.id = task.definition_id
  AND coalesce(asked.grants, task.grants) IS NOT DISTINCT FROM task.grants
RETURNING task.id

-- name: pick_more
-- More of what was picked, to be run as one with it: partitions of the same definition and
-- generation whose attempts, if any, were all handed back. What is picked is not begun, and so not counted as running.
SELECT task.id, task.payload ->> 'partition_key' AS partition_key
FROM task
WHERE task.operator = %(operator)s AND task.job_id = %(job)s
  AND task.priority = %(priority)s AND task.status = 'queued'
  AND task.due_at <= penstock_now()
  AND task.definition_id = %(definition)s AND task.generation = %(generation)s::uuid
  AND task.attempt = task.releases AND NOT task.runs_alone
  AND task.payload ->> 'partition_key' <> ALL (%(keys)s::text[])
ORDER BY task.due_at, task.id
LIMIT greatest(0, least(
    %(limit)s,
    penstock_job_room(%(job)s) - %(picked_of_job)s,
    penstock_room(%(operator)s) - %(picked)s))
FOR NO KEY UPDATE SKIP LOCKED

-- name: pick_task
-- Waits for whoever has it in hand, and then sees what they have made of it.
SELECT task.attempt
FROM task
WHERE task.id = %(task)s AND task.status IN ('queued', 'retrying')
  AND task.due_at <= penstock_now()
  AND NOT penstock_is_paused(task.job_id, task.priority)
  AND penstock_job_room(task.job_id) > 0
  AND penstock_room(task.operator) > 0
FOR NO KEY UPDATE

-- name: begin_attempts
-- For tasks that this transaction has picked, and so holds (FENCE-3): the fence, the grants that it
-- proves, and the attempt, in one statement. What it says of itself was read by `read_attempts`. The
-- commit is not waited for to be on the disk (FENCE-13): decision 0076. Of an operator that is named
-- it passes the word on, as `wake_remainder` does, if it leaves claimable tasks behind.
-- A lease with the id of its claim is short, until it is acknowledged (FENCE-20).
WITH asked AS (
    SELECT *
    FROM unnest(
        %(tasks)s::bigint[], %(tokens)s::text[], %(workers)s::text[], %(claim_ids)s::text[],
        %(grants)s::text[])
        AS asked(task_id, lease_token, worker, claim_id, grants)
), begun AS (
    UPDATE task
    SET status = 'running',
        attempt = task.attempt + 1,
        lease_token = asked.lease_token,
        lease_expires_at = penstock_now() + CASE
            WHEN asked.claim_id IS NULL THEN definition.heartbeat_ms
            ELSE least(definition.heartbeat_ms, %(unacknowledged_ms)s)
        END * interval '1 millisecond',
        claim_id = asked.claim_id,
        worker = asked.worker,
        claimed_at = penstock_now(),
        grants = coalesce(asked.grants, task.grants),
        reason = NULL
    FROM asked, job_definition AS definition
    WHERE task.id = asked.task_id AND task.status IN ('queued', 'retrying')
      AND definition.id = task.definition_id
    RETURNING task.id, task.attempt, task.worker, task.lease_token, task.claimed_at
), attempts AS (
    INSERT INTO attempt (task_id, number, worker, lease_token, started_at)
    SELECT id, attempt, worker, lease_token, claimed_at FROM begun
), left_behind AS MATERIALIZED (
    -- What is seen here has not begun yet.
    SELECT %(operator)s::text AS operator, tier.priority
    FROM unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    WHERE %(operator)s::text IS NOT NULL
      AND penstock_room(%(operator)s) > cardinality(%(tasks)s::bigint[])
      AND EXISTS (
          SELECT
          FROM penstock_claimable(%(operator)s, tier.priority) AS claimable
          WHERE claimable.room > (
                SELECT count(*)
                FROM task
                WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.job_id = claimable.job_id)
            AND EXISTS (
                SELECT
                FROM task
                WHERE task.operator = %(operator)s AND task.job_id = claimable.job_id
                  AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
                  AND task.due_at <= penstock_now() AND task.id <> ALL (%(tasks)s::bigint[])))
), written AS (
    INSERT INTO outbox (kind, target, body)
    SELECT 'wake', operator || '/' || priority,
           jsonb_build_object('operator', operator, 'priority', priority)
    FROM left_behind
    WHERE %(by_rows)s
)
SELECT set_config('synchronous_commit', 'off', true), left_behind.operator, left_behind.priority,
       1 AS tasks
FROM (VALUES (1)) AS always
LEFT JOIN left_behind ON NOT %(by_rows)s

-- name: read_attempts
-- What the next attempts of these tasks are to do, for who has picked them: nothing begins here. Of
-- those that run it is what their attempts are to do, for a claim that is repeated.
WITH claimed AS MATERIALIZED (
    SELECT task.*, definition.body, definition.heartbeat_ms, definition.timeout_ms,
           definition.runtime, definition.update_mode
    FROM task
    JOIN job_definition AS definition ON definition.id = task.definition_id
    WHERE task.id = ANY (%(tasks)s::bigint[])
), reading AS MATERIALIZED (
    -- What a generation of a job reads, and by which generations it is fed: those of the newest
    -- version of the DAG that names it.
    SELECT named.job_id, named.generation, edge.input, edge.dataset_id, dataset.name AS dataset,
           fed.version, edge.reads, edge.lookback, everything.location, everything.revision,
           everything.parts,
           -- Sources that run nothing, and ranges, tell of something and have no data.
           writing.runtime NOT IN ('', 'dispatcher') AS has_data
    FROM (SELECT DISTINCT job_id, generation FROM claimed) AS named
    CROSS JOIN LATERAL (
        SELECT max(dag_job.dag_version_id) AS dag_version_id
        FROM dag_job
        WHERE dag_job.generation = named.generation AND dag_job.job_id = named.job_id
    ) AS newest
    JOIN edge ON edge.dag_version_id = newest.dag_version_id AND edge.job_id = named.job_id
    JOIN dataset ON dataset.id = edge.dataset_id
    JOIN generation AS fed ON fed.dataset_id = edge.dataset_id
    JOIN dag_job AS writer
        ON writer.dag_version_id = newest.dag_version_id AND writer.generation = fed.version
    JOIN job_definition AS writing ON writing.id = writer.definition_id
    -- What is the same for all tasks is looked up once.
    CROSS JOIN LATERAL penstock_parts(
        edge.dataset_id, fed.version, nullif(edge.reads, 'partition'), NULL, NULL, NULL)
        AS everything
), written AS MATERIALIZED (
    -- What there is of columns in what a generation of a job writes, by the names of datasets.
    SELECT named.job_id, named.generation,
           jsonb_object_agg(dataset.name, generation_schema.columns) AS columns
    FROM (SELECT DISTINCT job_id, generation FROM claimed) AS named
    JOIN dataset ON dataset.job_id = named.job_id
    JOIN generation_schema ON generation_schema.dataset_id = dataset.id
        AND generation_schema.version = named.generation
    GROUP BY named.job_id, named.generation
)
SELECT claimed.id AS task_id,
       claimed.attempt + (claimed.status <> 'running')::integer AS attempt,
       coalesce(claimed.lease_token, replace(gen_random_uuid()::text, '-', '')) AS lease_token,
       penstock_now() + claimed.heartbeat_ms * interval '1 millisecond' AS lease_expires_at,
       claimed.heartbeat_ms, claimed.timeout_ms, claimed.payload, claimed.body AS definition,
       claimed.definition_id, claimed.runtime, claimed.operator, claimed.generation::text, job.name AS job,
       claimed.runs_alone, claimed.losses > 0 AS was_lost,
       greatest(0, extract(epoch FROM penstock_now() - claimed.due_at))::double precision
           AS waited_seconds,
       (SELECT coalesce(
            jsonb_object_agg(reading.input, jsonb_build_object(
                'dataset', reading.dataset, 'uuid', reading.dataset_id,
                'generation', reading.version, 'has_data', reading.has_data,
                'location', coalesce(found.location, reading.location),
                'revision', coalesce(found.revision, reading.revision),
                'parts', coalesce(found.parts, reading.parts, '[]'))), '{}')
        FROM reading
        CROSS JOIN LATERAL penstock_parts(
            reading.dataset_id, reading.version, nullif(reading.reads, 'all'),
            -- Who looks back reads by ranges, its own among them.
            CASE WHEN reading.lookback IS NULL OR claimed.payload ->> 'start' IS NULL
                 THEN claimed.payload ->> 'partition_key' END,
            penstock_shifted((claimed.payload ->> 'start')::bigint, -coalesce(reading.lookback, 0)),
            (claimed.payload ->> 'end')::bigint) AS found
        WHERE reading.job_id = claimed.job_id AND reading.generation = claimed.generation
       ) AS inputs,
       -- What there is of its own partition, by the names of its datasets, if it is to be merged.
       CASE WHEN claimed.update_mode = 'merge' THEN (
            SELECT coalesce(jsonb_object_agg(
                dataset.name, jsonb_build_array(penstock_head(publication))), '{}')
            FROM dataset
            JOIN publication ON publication.dataset_id = dataset.id
                AND publication.generation = claimed.generation
                AND publication.partition_key = coalesce(claimed.payload ->> 'partition_key', '')
            WHERE dataset.job_id = claimed.job_id
       ) END AS current,
       coalesce(written.columns, '{}') AS columns
FROM claimed
JOIN job ON job.id = claimed.job_id
LEFT JOIN written
    ON written.job_id = claimed.job_id AND written.generation = claimed.generation
ORDER BY array_position(%(tasks)s::bigint[], claimed.id)

-- name: heartbeat
WITH asked AS (
    SELECT *
    FROM unnest(
        %(tasks)s::bigint[], %(attempts)s::integer[], %(tokens)s::text[], %(grants)s::text[])
        AS asked(task_id, attempt, lease_token, grants)
), held AS MATERIALIZED (
    SELECT task.id
    FROM task
    JOIN asked ON task.id = asked.task_id AND task.attempt = asked.attempt
        AND task.lease_token = asked.lease_token
    WHERE task.status = 'running'
      AND penstock_has_grants(task.grants, task.attempt, asked.grants)
    ORDER BY task.id
    FOR NO KEY UPDATE OF task
)
UPDATE task
SET lease_expires_at = greatest(
        task.lease_expires_at,
        penstock_now() + definition.heartbeat_ms * interval '1 millisecond'),
    claim_id = NULL
FROM held, asked, job_definition AS definition
WHERE task.id = held.id AND task.id = asked.task_id AND task.attempt = asked.attempt
  AND task.lease_token = asked.lease_token AND task.status = 'running'
  AND definition.id = task.definition_id
RETURNING task.id AS task_id, task.attempt, task.lease_expires_at, task.cancel_asked

-- name: note_progress
-- For attempts whose leases this transaction has extended.
UPDATE attempt
SET progress = penstock_bounded(asked.progress, %(bytes_max)s)
FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[], %(progress)s::jsonb[])
    AS asked(task_id, number, progress)
WHERE attempt.task_id = asked.task_id AND attempt.number = asked.number
  AND attempt.ended_at IS NULL

-- name: cancel_tasks
-- A dead task of a sink, too: that gives its batches back.
WITH held AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.id = ANY (%(tasks)s::bigint[])
      AND (task.status IN ('queued', 'retrying', 'running')
           OR task.status = 'dead' AND task.payload ? 'buffer')
      AND NOT task.cancel_asked
    ORDER BY task.id
    FOR NO KEY UPDATE
)
UPDATE task
SET status = CASE WHEN task.status = 'running' THEN 'running' ELSE 'cancelled' END,
    cancel_asked = task.status = 'running',
    settled_at = CASE WHEN task.status = 'running' THEN NULL ELSE penstock_now() END,
    reason = %(reason)s
FROM held
WHERE task.id = held.id AND task.status IN ('queued', 'retrying', 'running', 'dead')
RETURNING task.id

-- name: replay_tasks
-- Those of sinks have been given up for others by then: see give_up_sink_tasks.
WITH held AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.status = 'dead'
    ORDER BY task.id
    FOR NO KEY UPDATE
)
UPDATE task
SET status = 'queued',
    attempt_limit = task.attempt + definition.max_attempts,
    releases = 0,
    losses = 0,
    due_at = penstock_now(),
    settled_at = NULL,
    reason = NULL
FROM held, job_definition AS definition
WHERE task.id = held.id AND task.status = 'dead' AND definition.id = task.definition_id
RETURNING task.id

-- name: task_states
SELECT task.id AS task_id, task.status, task.attempt, task.worker, task.lease_expires_at,
       task.due_at, task.cancel_asked, task.reason,
       task.due_at > penstock_now() AS is_early,
       penstock_is_paused(task.job_id, task.priority) AS is_paused
FROM task
WHERE task.id = ANY (%(tasks)s::bigint[])
