-- Backfills as people look at them. For penstock.dispatcher.views.backfills.

-- name: about_backfill
SELECT backfill.plan, backfill.settled_at, backfill.request_id, definition.update_mode,
       definition.runtime, penstock_now() AS now,
       (SELECT generation.state FROM generation
        WHERE generation.version = backfill.generation
        LIMIT 1) AS generation_state,
       (SELECT coalesce(jsonb_agg(dataset.name ORDER BY dataset.name), '[]')
        FROM generation
        JOIN dataset ON dataset.id = generation.dataset_id
        WHERE generation.version = backfill.generation) AS outputs,
       (SELECT count(*) FROM task
        WHERE task.backfill_id = backfill.id AND task.backfill_id IS NOT NULL
          AND task.status IN ('queued', 'retrying', 'running')
          AND task.status = 'running') AS running,
       (SELECT listed.partition_key FROM backfill_key AS listed
        WHERE listed.backfill_id = backfill.id ORDER BY listed.position LIMIT 1) AS first_key,
       (SELECT listed.partition_key FROM backfill_key AS listed
        WHERE listed.backfill_id = backfill.id ORDER BY listed.position DESC LIMIT 1) AS last_key,
       (SELECT coalesce(jsonb_agg(pause.reason ORDER BY pause.cause), '[]')
        FROM pause WHERE pause.job_id = definition.job_id) AS paused
FROM backfill
JOIN job_definition AS definition ON definition.id = backfill.definition_id
WHERE backfill.id = %(backfill)s

-- name: dead_of_backfill
SELECT task.id, task.payload ->> 'partition_key' AS partition_key, task.attempt, task.reason,
       task.settled_at
FROM task
WHERE task.backfill_id = %(backfill)s AND task.backfill_id IS NOT NULL AND task.status = 'dead'
ORDER BY task.id
LIMIT %(limit)s

-- name: running_of_backfill
SELECT task.id, task.payload ->> 'partition_key' AS partition_key, task.attempt, task.worker,
       task.claimed_at
FROM task
WHERE task.backfill_id = %(backfill)s AND task.backfill_id IS NOT NULL
  AND task.status IN ('queued', 'retrying', 'running') AND task.status = 'running'
ORDER BY task.id
LIMIT %(limit)s

-- name: backfill_place
-- What a backfill of a job would write, and what is known of the job.
SELECT dag_job.generation::text, definition.update_mode, definition.runtime, definition.operator,
       coalesce(definition.body ->> 'execution', 'per_partition') AS execution,
       (SELECT generation.state FROM generation
        WHERE generation.version = dag_job.generation
        LIMIT 1) AS generation_state,
       (SELECT coalesce(jsonb_agg(dataset.name ORDER BY dataset.name), '[]')
        FROM generation
        JOIN dataset ON dataset.id = generation.dataset_id
        WHERE generation.version = dag_job.generation) AS outputs,
       (SELECT coalesce(jsonb_agg(pause.reason ORDER BY pause.cause), '[]')
        FROM pause WHERE pause.job_id = job.id) AS paused
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE job.name = %(job)s

-- name: count_keys_there
-- How many of these partitions all outputs of a job have.
SELECT count(*) AS there
FROM unnest(%(keys)s::text[]) AS wanted(partition_key)
WHERE EXISTS (SELECT FROM generation WHERE generation.version = %(generation)s::uuid)
  AND NOT EXISTS (
      SELECT
      FROM generation
      WHERE generation.version = %(generation)s::uuid
        AND NOT EXISTS (
            SELECT
            FROM publication
            WHERE publication.dataset_id = generation.dataset_id
              AND publication.generation = generation.version
              AND publication.partition_key = wanted.partition_key))

-- name: keys_without_input
-- Which of these partitions have nothing published of an input that their tasks would read. Of a key
-- that is known as a range anywhere, other partitions may be read: nothing is said of it.
WITH fed AS MATERIALIZED (
    SELECT inputs.dataset_id, inputs.generation, dataset.name, inputs.reads = 'partition'
        -- Sources that run nothing, and ranges, have no data to read.
        AND coalesce(writing.runtime NOT IN ('', 'dispatcher'), true) AS is_needed
    FROM job
    CROSS JOIN LATERAL penstock_inputs(job.id, %(generation)s::uuid) AS inputs
    JOIN dataset ON dataset.id = inputs.dataset_id
    LEFT JOIN dag_current ON true
    LEFT JOIN dag_job ON dag_job.dag_version_id = dag_current.dag_version_id
        AND dag_job.job_id = dataset.job_id
    LEFT JOIN job_definition AS writing ON writing.id = dag_job.definition_id
    WHERE job.name = %(job)s
), places AS MATERIALIZED (
    SELECT fed.dataset_id, fed.generation FROM fed
    UNION
    SELECT generation.dataset_id, generation.version
    FROM job
    JOIN dataset ON dataset.job_id = job.id
    JOIN generation ON generation.dataset_id = dataset.id
    WHERE job.name = %(job)s
), lacking AS (
    SELECT wanted.partition_key, wanted.place, array_agg(DISTINCT fed.name) AS names
    FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS wanted(partition_key, place)
    JOIN fed ON fed.is_needed AND NOT EXISTS (
        SELECT
        FROM publication
        WHERE publication.dataset_id = fed.dataset_id AND publication.generation = fed.generation
          AND publication.partition_key IN ('', wanted.partition_key))
    WHERE NOT EXISTS (
        SELECT
        FROM places
        JOIN event ON event.dataset_id = places.dataset_id
            AND event.generation = places.generation
            AND event.partition_key = wanted.partition_key
        WHERE event.range_start IS NOT NULL)
    GROUP BY wanted.partition_key, wanted.place
)
SELECT (SELECT count(*) FROM lacking) AS count,
       ARRAY(SELECT partition_key FROM lacking ORDER BY place LIMIT %(limit)s) AS keys,
       ARRAY(SELECT DISTINCT unnest(names) AS name FROM lacking ORDER BY name LIMIT %(limit)s) AS inputs

-- name: count_ranges_there
-- How many of the partitions from start to end by step all outputs of a job have; of very many, so many.
SELECT count(*) AS there
FROM (
    SELECT
    FROM publication
    WHERE publication.generation = %(generation)s::uuid
      AND publication.dataset_id IN (
          SELECT dataset_id FROM generation WHERE version = %(generation)s::uuid)
      AND publication.range_start >= %(start)s AND publication.range_start < %(end)s
      AND (publication.range_start - %(start)s::numeric) %% %(step)s = 0
      AND publication.range_end = least(%(end)s, publication.range_start + %(step)s::numeric)
    GROUP BY publication.partition_key, publication.range_start, publication.range_end
    HAVING count(*) = (SELECT count(*) FROM generation WHERE version = %(generation)s::uuid)
    LIMIT %(limit)s
) AS found
