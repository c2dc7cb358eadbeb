-- Plans of partitions to compute, for penstock.dispatcher.backfills.
-- Whoever moves a backfill holds the deployment's lock, shared, and then the row of the backfill.

-- name: find_backfill_job
SELECT dag_job.job_id, dag_job.definition_id, dag_job.generation::text, definition.runtime,
       definition.body -> 'source' ->> 'kind' AS source,
       ARRAY (
           SELECT DISTINCT inputs.dataset_id::text
           FROM penstock_inputs(dag_job.job_id, dag_job.generation) AS inputs
           WHERE inputs.is_trigger) AS inputs,
       EXISTS (
           SELECT FROM penstock_inputs(dag_job.job_id, dag_job.generation) AS inputs
           WHERE inputs.lookback IS NOT NULL) AS looks_back,
       ARRAY (
           SELECT dataset_id::text FROM generation
           WHERE generation.version = dag_job.generation) AS outputs
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE job.name = %(job)s

-- name: write_backfill
INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max, request_id)
SELECT %(definition)s, %(generation)s::uuid, %(plan)s, %(partitions)s, %(concurrency)s, %(request)s
-- So that a request that is repeated takes no number.
WHERE NOT EXISTS (SELECT FROM backfill WHERE request_id = %(request)s)
ON CONFLICT (request_id) DO NOTHING
RETURNING id

-- name: write_backfill_keys
INSERT INTO backfill_key (backfill_id, position, partition_key, range_start, range_end)
SELECT %(backfill)s, listed.place - 1, listed.partition_key, listed.range_start, listed.range_end
FROM unnest(%(keys)s::text[], %(starts)s::bigint[], %(ends)s::bigint[])
    WITH ORDINALITY AS listed(partition_key, range_start, range_end, place)

-- name: unranged_keys
-- Those of which neither the job nor its inputs know a range: see make_keys.
WITH places AS MATERIALIZED (
    SELECT inputs.dataset_id, inputs.generation
    FROM penstock_inputs(%(job)s, %(generation)s::uuid) AS inputs
    UNION
    SELECT generation.dataset_id, generation.version
    FROM dataset
    JOIN generation ON generation.dataset_id = dataset.id
    WHERE dataset.job_id = %(job)s
)
SELECT wanted.partition_key
FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS wanted(partition_key, place)
WHERE NOT EXISTS (
    SELECT
    FROM places
    CROSS JOIN LATERAL (
        SELECT event.range_start
        FROM event
        WHERE event.dataset_id = places.dataset_id AND event.generation = places.generation
          AND event.partition_key = wanted.partition_key
        ORDER BY event.seq DESC
        LIMIT 20
    ) AS found
    WHERE found.range_start IS NOT NULL)
ORDER BY wanted.place

-- name: find_request
SELECT id FROM backfill WHERE request_id = %(request)s

-- name: show_backfills
SELECT backfill.id, job.name AS job, coalesce(backfill.plan ->> 'kind', '') AS kind,
       backfill.state, backfill.partitions, backfill.position AS planned,
       (SELECT count(*) FROM task
        WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
          AND task.status IN ('queued', 'retrying', 'running')) AS open,
       (SELECT count(*) FROM task
        WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
          AND task.status = 'dead') + backfill.dead_gone AS dead,
       (SELECT count(*) FROM task
        WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
          AND task.status = 'cancelled') + backfill.cancelled_gone AS cancelled,
       backfill.concurrency_max AS concurrency, backfill.created_at
FROM backfill
JOIN job_definition AS definition ON definition.id = backfill.definition_id
JOIN job ON job.id = definition.job_id
WHERE %(backfill)s::bigint IS NULL OR backfill.id = %(backfill)s
ORDER BY backfill.id DESC
LIMIT %(limit)s

-- name: lock_backfill
-- Waits for whoever is making tasks of it, and then sees what they have made of it.
SELECT state FROM backfill WHERE id = %(backfill)s FOR NO KEY UPDATE

-- name: move_backfill
UPDATE backfill
SET state = %(to)s,
    settled_at = CASE WHEN %(to)s = 'cancelled' THEN penstock_now() END
WHERE id = %(backfill)s

-- name: cancel_backfill_tasks
WITH held AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.backfill_id = %(backfill)s AND task.backfill_id IS NOT NULL
      AND task.status IN ('queued', 'retrying', 'running') AND NOT task.cancel_asked
    ORDER BY task.id
    FOR NO KEY UPDATE
)
UPDATE task
SET status = CASE WHEN task.status = 'running' THEN 'running' ELSE 'cancelled' END,
    cancel_asked = task.status = 'running',
    settled_at = CASE WHEN task.status = 'running' THEN NULL ELSE penstock_now() END,
    reason = %(reason)s
FROM held
WHERE task.id = held.id AND task.status IN ('queued', 'retrying', 'running')

-- name: running_backfills
-- What runs, and whether there is something to do for it now: room for tasks, or the end. A
-- rebuild waits for those of its inputs, so that its tasks find what they read.
SELECT backfill.id,
       (open.count = 0 OR NOT counts.is_planned AND open.count < backfill.concurrency_max)
       AND NOT EXISTS (
           SELECT
           FROM job_definition AS definition
           CROSS JOIN LATERAL penstock_inputs(definition.job_id, backfill.generation) AS inputs
           JOIN backfill AS upstream ON upstream.generation = inputs.generation
           WHERE definition.id = backfill.definition_id AND backfill.plan ->> 'kind' = 'rebuild'
             AND upstream.plan ->> 'kind' = 'rebuild' AND upstream.state IN ('running', 'paused'))
       AS is_movable
FROM backfill
CROSS JOIN LATERAL (
    SELECT count(*) FROM task
    WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
      AND task.status IN ('queued', 'retrying', 'running')
) AS open
CROSS JOIN LATERAL (
    SELECT CASE backfill.plan ->> 'kind'
        WHEN 'rebuild' THEN backfill.walked >= (backfill.plan ->> 'upto')::bigint
        ELSE backfill.position = backfill.partitions
    END AS is_planned
) AS counts
WHERE backfill.state = 'running' AND backfill.state IN ('running', 'paused')
  AND backfill.plan ->> 'kind' IN ('ranges', 'keys', 'rebuild')
ORDER BY backfill.id
LIMIT %(limit)s

-- name: hold_backfill
SELECT FROM backfill
WHERE id = %(backfill)s AND state = 'running'
FOR NO KEY UPDATE SKIP LOCKED

-- name: backfill_room
-- After the lock, so that all that was made before it is counted.
SELECT backfill.id, backfill.definition_id, backfill.plan ->> 'kind' AS kind,
       (backfill.plan ->> 'upto')::bigint AS upto,
       backfill.generation::text, backfill.partitions, backfill.position, backfill.walked,
       backfill.counted, backfill.concurrency_max,
       (SELECT count(*) FROM task
        WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
          AND task.status IN ('queued', 'retrying', 'running')) AS open
FROM backfill
WHERE id = %(backfill)s

-- name: make_ranges
WITH plan AS MATERIALIZED (
    SELECT backfill.id, backfill.position, backfill.generation, definition.job_id,
           definition.id AS definition_id, definition.operator, definition.max_attempts,
           (backfill.plan ->> 'start')::numeric AS first, (backfill.plan ->> 'end')::numeric AS last,
           (backfill.plan ->> 'step')::numeric AS step,
           coalesce(definition.body ->> 'merge_updates', 'false') = 'true' AS is_merging,
           (SELECT coalesce(jsonb_agg(name ORDER BY name), '[]')
            FROM (
                SELECT coalesce(said ->> 'as', said ->> 'from') AS name
                FROM jsonb_array_elements(definition.body -> 'inputs') AS said) AS named
           ) AS inputs
    FROM backfill
    JOIN job_definition AS definition ON definition.id = backfill.definition_id
    WHERE backfill.id = %(backfill)s
), partitions AS (
    SELECT plan.*, place, plan.first + place * plan.step AS from_number,
           least(plan.last, plan.first + (place + 1) * plan.step) AS to_number
    FROM plan
    CROSS JOIN LATERAL generate_series(plan.position, plan.position + %(count)s - 1) AS place
), moved AS (
    UPDATE backfill SET position = position + %(count)s WHERE id = %(backfill)s
)
INSERT INTO task (
    job_id, definition_id, generation, dedupe_key, operator, priority, payload, attempt_limit,
    due_at, backfill_id, coalesce_key)
SELECT job_id, definition_id, generation, 'backfill:' || id || ':' || place, operator, 'bulk',
       jsonb_build_object(
           'backfill', id, 'inputs', inputs, 'partition_key', from_number || '-' || to_number,
           'start', from_number, 'end', to_number),
       max_attempts, penstock_now(), id,
       CASE WHEN is_merging THEN 'partition:' || from_number || '-' || to_number END
FROM partitions
ORDER BY place
ON CONFLICT (job_id, generation, dedupe_key) DO NOTHING
RETURNING id

-- name: make_keys
-- A key that the job or one of its inputs has as a range is a range for the task as well, also if
-- the last of its events have lost it. One that was never seen has the range that its key implies.
WITH plan AS MATERIALIZED (
    SELECT backfill.id, backfill.position, backfill.generation, definition.job_id,
           definition.id AS definition_id, definition.operator, definition.max_attempts,
           coalesce(definition.body ->> 'merge_updates', 'false') = 'true' AS is_merging,
           (SELECT coalesce(jsonb_agg(name ORDER BY name), '[]')
            FROM (
                SELECT coalesce(said ->> 'as', said ->> 'from') AS name
                FROM jsonb_array_elements(definition.body -> 'inputs') AS said) AS named
           ) AS inputs
    FROM backfill
    JOIN job_definition AS definition ON definition.id = backfill.definition_id
    WHERE backfill.id = %(backfill)s
), places AS MATERIALIZED (
    SELECT inputs.dataset_id, inputs.generation
    FROM plan
    CROSS JOIN LATERAL penstock_inputs(plan.job_id, plan.generation) AS inputs
    UNION
    -- What the job itself has made of the partition, in whichever generation, knows its range too.
    SELECT generation.dataset_id, generation.version
    FROM plan
    JOIN dataset ON dataset.job_id = plan.job_id
    JOIN generation ON generation.dataset_id = dataset.id
), partitions AS (
    SELECT plan.*, listed.position AS place, listed.partition_key,
           coalesce(known.range_start, listed.range_start) AS range_start,
           coalesce(known.range_end, listed.range_end) AS range_end
    FROM plan
    JOIN backfill_key AS listed
        ON listed.backfill_id = plan.id AND listed.position >= plan.position
        AND listed.position < plan.position + %(count)s
    LEFT JOIN LATERAL (
        SELECT found.range_start, found.range_end
        FROM places
        CROSS JOIN LATERAL (
            SELECT event.seq, event.range_start, event.range_end
            FROM event
            WHERE event.dataset_id = places.dataset_id AND event.generation = places.generation
              AND event.partition_key = listed.partition_key
            ORDER BY event.seq DESC
            LIMIT 20
        ) AS found
        WHERE found.range_start IS NOT NULL
        ORDER BY found.seq DESC
        LIMIT 1
    ) AS known ON true
), moved AS (
    UPDATE backfill SET position = position + %(count)s WHERE id = %(backfill)s
)
INSERT INTO task (
    job_id, definition_id, generation, dedupe_key, operator, priority, payload, attempt_limit,
    due_at, backfill_id, coalesce_key)
SELECT job_id, definition_id, generation, 'backfill:' || id || ':' || place, operator, 'bulk',
       jsonb_strip_nulls(jsonb_build_object(
           'backfill', id, 'inputs', inputs, 'partition_key', partition_key,
           'start', range_start, 'end', range_end)),
       max_attempts, penstock_now(), id,
       CASE WHEN is_merging THEN 'partition:' || partition_key END
FROM partitions
ORDER BY place
ON CONFLICT (job_id, generation, dedupe_key) DO NOTHING
RETURNING id

-- name: end_backfill
UPDATE backfill
SET state = 'done', settled_at = penstock_now(), partitions = position
WHERE id = %(backfill)s

-- name: count_rebuild
-- How many of the next events there are tasks to make of.
WITH plan AS MATERIALIZED (
    SELECT backfill.id, backfill.generation, definition.job_id, backfill.counted AS past,
           least((backfill.plan ->> 'upto')::bigint, backfill.counted + %(most)s) AS upto,
           coalesce(definition.body ->> 'execution', 'per_partition') = 'per_partition'
               AS is_per_partition,
           -- Each event of a job with `partition_by` may have made other partitions.
           definition.update_mode = 'replace' AND NOT jsonb_path_exists(
               definition.body, '$.outputs[*].partition_by') AS is_replacing,
           definition.update_mode <> 'replace' AND definition.runtime <> 'dispatcher'
               AS is_appending,
           definition.update_mode = 'merge' AS takes_kept,
           coalesce(definition.body ->> 'merge_updates', 'false') = 'true' AS is_merging,
           EXISTS (
               SELECT FROM generation
               WHERE generation.version = backfill.generation AND generation.kept_at IS NOT NULL
           ) AS has_kept
    FROM backfill
    JOIN job_definition AS definition ON definition.id = backfill.definition_id
    WHERE backfill.id = %(backfill)s
), inputs AS MATERIALIZED (
    SELECT inputs.dataset_id, inputs.generation, bool_and(inputs.filter IS NULL) AS is_whole,
           (SELECT max(event.seq) FROM event
            WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
              AND event.cursor IS NOT NULL) AS newest_cursor
    FROM plan
    CROSS JOIN LATERAL penstock_inputs(plan.job_id, plan.generation) AS inputs
    WHERE inputs.is_trigger
    GROUP BY inputs.dataset_id, inputs.generation
), found AS (
    SELECT count(*)
    FROM plan
    JOIN event ON event.seq > plan.past AND event.seq <= plan.upto
    JOIN inputs ON inputs.dataset_id = event.dataset_id AND inputs.generation = event.generation
    WHERE NOT (plan.is_per_partition AND plan.is_replacing AND inputs.is_whole
               AND event.cursor IS NOT NULL AND event.seq < inputs.newest_cursor)
      AND CASE
          -- As penstock_is_news says, which takes longer.
          WHEN plan.is_appending AND NOT plan.is_merging AND NOT plan.has_kept
          THEN event.revision IS NULL OR (plan.takes_kept OR position(':kept:' in event.dedupe) = 0)
              AND EXISTS (
              SELECT FROM publication AS head
              WHERE head.dataset_id = event.dataset_id AND head.generation = event.generation
                AND head.partition_key = coalesce(event.partition_key, '')
                AND (head.revision = event.revision
                     OR head.mode = 'append' AND NOT starts_with(head.location, 'range:')))
          WHEN plan.is_appending
          THEN penstock_is_news(
              event, plan.job_id, plan.generation, plan.is_merging, plan.takes_kept)
          ELSE NOT (plan.is_per_partition AND event.partition_key IS NOT NULL AND EXISTS (
              SELECT FROM event AS later
              WHERE later.dataset_id = event.dataset_id AND later.generation = event.generation
                AND later.partition_key = event.partition_key AND later.seq > event.seq
                AND (later.range_start, later.range_end)
                    IS NOT DISTINCT FROM (event.range_start, event.range_end)))
      END
)
UPDATE backfill
SET partitions = backfill.partitions + found.count, counted = plan.upto
FROM plan, found
WHERE backfill.id = plan.id

-- name: pick_rebuild
-- The next events to make tasks of. An edge's filter decides by the key and the range alone, so of
-- events that have both in common the latest stands for all; so does the latest cursor, where no
-- filter could let an earlier one pass. A job that appends has a publication of every event.
WITH plan AS MATERIALIZED (
    SELECT backfill.generation, definition.job_id, backfill.walked AS past,
           least(backfill.counted, backfill.walked + %(most)s) AS upto,
           coalesce(definition.body ->> 'execution', 'per_partition') = 'per_partition'
               AS is_per_partition,
           -- Each event of a job with `partition_by` may have made other partitions.
           definition.update_mode = 'replace' AND NOT jsonb_path_exists(
               definition.body, '$.outputs[*].partition_by') AS is_replacing,
           definition.update_mode <> 'replace' AND definition.runtime <> 'dispatcher'
               AS is_appending,
           definition.update_mode = 'merge' AS takes_kept,
           coalesce(definition.body ->> 'merge_updates', 'false') = 'true' AS is_merging,
           EXISTS (
               SELECT FROM generation
               WHERE generation.version = backfill.generation AND generation.kept_at IS NOT NULL
           ) AS has_kept
    FROM backfill
    JOIN job_definition AS definition ON definition.id = backfill.definition_id
    WHERE backfill.id = %(backfill)s
), inputs AS MATERIALIZED (
    SELECT inputs.dataset_id, inputs.generation, bool_and(inputs.filter IS NULL) AS is_whole,
           (SELECT max(event.seq) FROM event
            WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
              AND event.cursor IS NOT NULL) AS newest_cursor
    FROM plan
    CROSS JOIN LATERAL penstock_inputs(plan.job_id, plan.generation) AS inputs
    WHERE inputs.is_trigger
    GROUP BY inputs.dataset_id, inputs.generation
)
SELECT event.seq, event.dataset_id::text AS dataset, event.generation::text,
       coalesce(event.partition_key, '') AS partition_key,
       event.revision IS NOT NULL AS is_published
FROM plan
JOIN event ON event.seq > plan.past AND event.seq <= plan.upto
JOIN inputs ON inputs.dataset_id = event.dataset_id AND inputs.generation = event.generation
WHERE NOT (plan.is_per_partition AND plan.is_replacing AND inputs.is_whole
           AND event.cursor IS NOT NULL AND event.seq < inputs.newest_cursor)
  AND (%(among)s::bigint[] IS NULL OR event.seq = ANY (%(among)s::bigint[]))
  AND CASE
      -- As penstock_is_news says, which takes longer.
      WHEN plan.is_appending AND NOT plan.is_merging AND NOT plan.has_kept
      THEN event.revision IS NULL OR (plan.takes_kept OR position(':kept:' in event.dedupe) = 0)
          AND EXISTS (
          SELECT FROM publication AS head
          WHERE head.dataset_id = event.dataset_id AND head.generation = event.generation
            AND head.partition_key = coalesce(event.partition_key, '')
            AND (head.revision = event.revision
                 OR head.mode = 'append' AND NOT starts_with(head.location, 'range:')))
      WHEN plan.is_appending
      THEN penstock_is_news(
          event, plan.job_id, plan.generation, plan.is_merging, plan.takes_kept)
      ELSE NOT (plan.is_per_partition AND event.partition_key IS NOT NULL AND EXISTS (
          SELECT FROM event AS later
          WHERE later.dataset_id = event.dataset_id AND later.generation = event.generation
            AND later.partition_key = event.partition_key AND later.seq > event.seq
            AND (later.range_start, later.range_end)
                IS NOT DISTINCT FROM (event.range_start, event.range_end)))
  END
ORDER BY event.seq
LIMIT %(limit)s

-- name: move_rebuild
UPDATE backfill
SET walked = %(walked)s, position = position + %(taken)s,
    partitions = greatest(partitions, position + %(taken)s)
WHERE id = %(backfill)s
