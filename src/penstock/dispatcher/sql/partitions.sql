-- Datasets and their partitions as people look at them: for penstock.dispatcher.views.datasets.
-- Everything has a bound, and what is bounded is told as such by whoever shows it.

-- name: partition_datasets
-- All datasets, each by the generation that readers read, or else the one that is built first.
SELECT dataset.name, job.name AS job, named.generation IS NOT NULL AS is_written,
       coalesce(definition.body ->> 'activation' = 'source' AND definition.operator = '', false)
           AS is_told,
       coalesce(definition.runtime = 'dispatcher', false) AS is_ranges,
       shown.state,
       EXISTS (SELECT FROM generation
               WHERE generation.dataset_id = dataset.id AND generation.state = 'building')
           AS is_building,
       (SELECT count(*)
        FROM (SELECT FROM publication
              WHERE publication.dataset_id = dataset.id AND publication.generation = shown.version
              LIMIT 10000) AS counted) AS partitions,
       (SELECT publication.published_at
        FROM publication
        WHERE publication.dataset_id = dataset.id AND publication.generation = shown.version
        ORDER BY publication.published_at DESC
        LIMIT 1) AS published_at
FROM dataset
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN (
    SELECT dag_job.job_id, dag_job.definition_id, dag_job.generation
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
) AS named ON named.job_id = dataset.job_id AND EXISTS (
    SELECT FROM generation
    WHERE generation.dataset_id = dataset.id AND generation.version = named.generation)
LEFT JOIN job_definition AS definition ON definition.id = named.definition_id
LEFT JOIN LATERAL (
    SELECT generation.version, generation.state
    FROM generation
    WHERE generation.dataset_id = dataset.id AND generation.state IN ('current', 'building')
    ORDER BY generation.state DESC
    LIMIT 1
) AS shown ON true
WHERE strpos(dataset.name, %(text)s) > 0
ORDER BY named.generation IS NULL, dataset.name
LIMIT %(limit)s

-- name: partition_place
-- A dataset and one of its generations: the one that was asked for, or the one that readers read,
-- or the one that is built first, or the last that was; and how that is made.
SELECT dataset.id::text AS dataset, dataset.name, dataset.job_id, job.name AS job,
       shown.version::text AS generation, shown.state, shown.created_at, shown.changed_at,
       coalesce(made.body ->> 'activation' = 'source' AND made.operator = '', false) AS is_told,
       coalesce(made.runtime = 'dispatcher', false) AS is_ranges,
       coalesce(made.body ->> 'execution', 'per_partition') = 'per_partition' AS is_per_partition,
       coalesce(made.body ->> 'when', 'any') = 'all' AS is_all,
       coalesce(made.update_mode, 'replace') AS mode,
       EXISTS (
           SELECT FROM dag_current
           JOIN dag_job USING (dag_version_id)
           WHERE dag_job.job_id = dataset.job_id AND dag_job.generation = shown.version)
           AS is_in_force
FROM dataset
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN LATERAL (
    SELECT generation.*
    FROM generation
    WHERE generation.dataset_id = dataset.id
      AND (%(generation)s::uuid IS NULL OR generation.version = %(generation)s::uuid)
    ORDER BY generation.state NOT IN ('current', 'building'), generation.state DESC,
             generation.changed_at DESC, generation.version
    LIMIT 1
) AS shown ON true
LEFT JOIN LATERAL (
    SELECT definition.*
    FROM dag_job
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE dag_job.generation = shown.version AND dag_job.job_id = dataset.job_id
    ORDER BY dag_job.dag_version_id DESC
    LIMIT 1
) AS made ON true
WHERE dataset.name = %(name)s

-- name: partition_generations
SELECT generation.version::text, generation.state, generation.created_at, generation.changed_at,
       generation.state = 'abandoned' AND generation.dropped_at = generation.changed_at
           IS TRUE AS is_dropped,
       (SELECT count(*)
        FROM (SELECT FROM publication
              WHERE publication.dataset_id = generation.dataset_id
                AND publication.generation = generation.version
              LIMIT 10000) AS counted) AS partitions
FROM generation
WHERE generation.dataset_id = %(dataset)s::uuid
ORDER BY generation.state NOT IN ('current', 'building'), generation.state DESC,
         generation.changed_at DESC, generation.version
LIMIT 10

-- name: partition_sums
SELECT count(*) AS partitions, coalesce(sum(held.files), 0)::bigint AS files,
       coalesce(sum(held.rows), 0)::bigint AS rows, coalesce(sum(held.bytes), 0)::bigint AS bytes,
       count(*) FILTER (WHERE held.rows IS NULL) AS unknown,
       (SELECT publication.published_at
        FROM publication
        WHERE publication.dataset_id = %(dataset)s::uuid
          AND publication.generation = %(generation)s::uuid
        ORDER BY publication.published_at DESC
        LIMIT 1) AS published_at
FROM (
    SELECT publication.files, publication.rows, publication.bytes
    FROM publication
    WHERE publication.dataset_id = %(dataset)s::uuid
      AND publication.generation = %(generation)s::uuid
    LIMIT %(limit)s
) AS held

-- name: partition_work
-- How many tasks of a generation are in which state, of those that are not well.
SELECT counted.status, count(*) AS tasks, max(counted.id) AS latest
FROM (
    (SELECT task.status, task.id
     FROM task
     WHERE task.generation = %(generation)s::uuid AND task.job_id = %(job)s
       AND task.status IN ('queued', 'retrying', 'running')
     LIMIT %(limit)s)
    UNION ALL
    (SELECT task.status, task.id
     FROM task
     WHERE task.job_id = %(job)s AND task.status = 'dead'
       AND task.generation = %(generation)s::uuid
     LIMIT %(limit)s)
) AS counted
GROUP BY counted.status

-- name: partition_tasks
-- Tasks that stand between a partition and what it should be: those that wait and run, and dead
-- ones of partitions that nothing later has published.
SELECT found.*
FROM (
    (SELECT task.payload ->> 'partition_key' AS partition_key,
            (task.payload ->> 'start')::bigint AS start, (task.payload ->> 'end')::bigint AS end,
            task.id, task.status, task.attempt,
            left(split_part(task.reason, E'\n', 1), 300) AS reason
     FROM task
     WHERE task.generation = %(generation)s::uuid AND task.job_id = %(job)s
       AND task.status IN ('queued', 'retrying', 'running')
       AND NOT task.payload ? 'maintain'
     ORDER BY task.id DESC
     LIMIT %(limit)s)
    UNION ALL
    (SELECT task.payload ->> 'partition_key', (task.payload ->> 'start')::bigint,
            (task.payload ->> 'end')::bigint, task.id, task.status, task.attempt,
            left(split_part(task.reason, E'\n', 1), 300)
     FROM task
     WHERE task.job_id = %(job)s AND task.status = 'dead'
       AND task.generation = %(generation)s::uuid AND NOT task.payload ? 'maintain'
       AND NOT EXISTS (
           SELECT FROM publication
           WHERE publication.dataset_id = %(dataset)s::uuid
             AND publication.generation = %(generation)s::uuid
             AND publication.partition_key = coalesce(task.payload ->> 'partition_key', '')
             AND publication.task_id > task.id)
     ORDER BY task.settled_at DESC
     LIMIT %(limit)s)
) AS found
ORDER BY found.status <> 'dead', found.id DESC

-- name: partition_cells
-- The newest by their ranges, then the last by their keys.
SELECT newest.*
FROM (
    (SELECT publication.partition_key, publication.range_start AS start,
            publication.range_end AS end, publication.rows, publication.published_at
     FROM publication
     WHERE publication.dataset_id = %(dataset)s::uuid
       AND publication.generation = %(generation)s::uuid AND publication.range_start IS NOT NULL
     ORDER BY publication.range_start DESC
     LIMIT %(limit)s)
    UNION ALL
    (SELECT publication.partition_key, NULL, NULL, publication.rows, publication.published_at
     FROM publication
     WHERE publication.dataset_id = %(dataset)s::uuid
       AND publication.generation = %(generation)s::uuid AND publication.range_start IS NULL
     ORDER BY publication.partition_key DESC
     LIMIT %(limit)s)
) AS newest

-- name: partition_told
-- What a source has told of: it publishes nothing itself. Of very many events, some.
SELECT DISTINCT ON (told.partition_key) told.partition_key, told.start, told.end,
       NULL::bigint AS rows, told.published_at
FROM (
    SELECT event.partition_key, event.range_start AS start, event.range_end AS end,
           event.received_at AS published_at
    FROM event
    WHERE event.dataset_id = %(dataset)s::uuid AND event.generation = %(generation)s::uuid
      AND event.partition_key IS NOT NULL
    LIMIT %(limit)s
) AS told
ORDER BY told.partition_key DESC, told.published_at DESC

-- name: partition_told_sums
SELECT count(*) AS events, max(counted.received_at) AS received_at
FROM (
    SELECT event.received_at
    FROM event
    WHERE event.dataset_id = %(dataset)s::uuid AND event.generation = %(generation)s::uuid
    LIMIT %(limit)s
) AS counted

-- name: partition_missing
-- Keys that inputs have, that their filters let pass, and that are neither published here nor have
-- a task, with the inputs that have nothing for them. So many of each input are looked at.
WITH inputs AS MATERIALIZED (
    SELECT fed.input, fed.dataset_id, fed.generation, fed.filter, dataset.name
    FROM penstock_inputs(%(job)s, %(generation)s::uuid) AS fed
    JOIN dataset ON dataset.id = fed.dataset_id
    WHERE fed.is_trigger
), offered AS MATERIALIZED (
    SELECT inputs.filter, held.*
    FROM inputs
    CROSS JOIN LATERAL (
        SELECT publication.partition_key, publication.range_start, publication.range_end
        FROM publication
        WHERE publication.dataset_id = inputs.dataset_id
          AND publication.generation = inputs.generation AND publication.partition_key <> ''
        ORDER BY publication.partition_key DESC
        LIMIT %(looked)s
    ) AS held
    UNION ALL
    SELECT inputs.filter, told.*
    FROM inputs
    CROSS JOIN LATERAL (
        SELECT event.partition_key, event.range_start, event.range_end
        FROM event
        WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
          AND event.partition_key IS NOT NULL AND event.revision IS NULL
        LIMIT %(looked)s
    ) AS told
), absent AS MATERIALIZED (
    SELECT offered.*
    FROM offered
    WHERE NOT EXISTS (
        SELECT FROM publication
        WHERE publication.dataset_id = %(dataset)s::uuid
          AND publication.generation = %(generation)s::uuid
          AND publication.partition_key = offered.partition_key)
), lacking AS MATERIALIZED (
    SELECT DISTINCT ON (absent.partition_key) absent.partition_key, absent.range_start,
           absent.range_end
    FROM absent
    -- OFFSET 0: few are looked up, however many tasks there are.
    WHERE NOT EXISTS (
        SELECT FROM task
        WHERE task.payload ->> 'partition_key' = absent.partition_key
          AND task.job_id = %(job)s AND task.generation = %(generation)s::uuid
        OFFSET 0)
      AND (absent.filter IS NULL OR penstock_passes(
          absent.filter, absent.partition_key, absent.range_start, absent.range_end, NULL))
    ORDER BY absent.partition_key DESC
    LIMIT %(limit)s
)
SELECT lacking.partition_key, lacking.range_start AS start, lacking.range_end AS end,
       ARRAY (
           SELECT inputs.name
           FROM inputs
           WHERE NOT EXISTS (
                   SELECT FROM publication
                   WHERE publication.dataset_id = inputs.dataset_id
                     AND publication.generation = inputs.generation
                     AND publication.partition_key IN (lacking.partition_key, ''))
             AND NOT EXISTS (
                   SELECT FROM event
                   WHERE event.dataset_id = inputs.dataset_id
                     AND event.generation = inputs.generation
                     AND event.partition_key = lacking.partition_key)
             -- A cursor is there for all partitions.
             AND NOT EXISTS (
                   SELECT FROM event
                   WHERE event.dataset_id = inputs.dataset_id
                     AND event.generation = inputs.generation AND event.cursor IS NOT NULL)
           ORDER BY inputs.name) AS inputs
FROM lacking

-- name: partition_recent
-- What was published last.
SELECT publication.partition_key, publication.task_id, publication.attempt, publication.revision,
       publication.published_at, publication.files, publication.rows, publication.bytes
FROM publication
WHERE publication.dataset_id = %(dataset)s::uuid AND publication.generation = %(generation)s::uuid
-- What one task has published came at the same time: the last of that first, too.
ORDER BY publication.published_at DESC, publication.range_start DESC NULLS LAST,
         publication.partition_key DESC
LIMIT %(limit)s

-- name: partition_lineage
-- All of who reads and writes what, in the DAG in force.
SELECT job.name AS job, dataset.name AS dataset, true AS is_written, true AS is_trigger
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN generation ON generation.version = dag_job.generation
JOIN dataset ON dataset.id = generation.dataset_id AND dataset.job_id = job.id
UNION ALL
SELECT job.name, dataset.name, false, edge.is_trigger
FROM dag_current
JOIN edge USING (dag_version_id)
JOIN job ON job.id = edge.job_id
JOIN dataset ON dataset.id = edge.dataset_id
ORDER BY is_written DESC, job, dataset

-- name: partition_one
SELECT publication.partition_key, publication.range_start AS start, publication.range_end AS end,
       publication.mode, publication.task_id, publication.attempt, publication.location,
       publication.revision, publication.published_at, publication.files, publication.rows,
       publication.bytes, publication.manifest,
       publication.projected >= publication.edition AS is_projected,
       attempt.worker, attempt.started_at, attempt.ended_at
FROM publication
LEFT JOIN attempt ON attempt.task_id = publication.task_id
    AND attempt.number = publication.attempt
WHERE publication.dataset_id = %(dataset)s::uuid AND publication.generation = %(generation)s::uuid
  AND publication.partition_key = %(key)s

-- name: partition_pieces
-- What was appended, the latest first; parts that were put together are one.
SELECT append_key, task_id, attempt, location, appended_at, files, rows, bytes, manifest
FROM part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND partition_key = %(key)s AND location <> 'merged:'
ORDER BY appended_at DESC, task_id DESC, append_key
LIMIT %(limit)s

-- name: partition_removed
SELECT removed_at
FROM removed
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND partition_key = %(key)s

-- name: partition_inputs
-- What a task of this partition would read now, of each input.
SELECT fed.input, dataset.name AS dataset, fed.generation::text, fed.is_trigger, fed.reads,
       held.revision, jsonb_array_length(held.parts) AS parts,
       CASE WHEN jsonb_array_length(held.parts) = 1
            THEN coalesce(held.parts -> 0 ->> 'partition_key', '') END AS partition_key,
       coalesce(fed.filter IS NULL OR penstock_passes(
           fed.filter, nullif(%(key)s, ''), %(start)s::bigint, %(end)s::bigint, NULL), false)
           AS is_passed,
       EXISTS (
           SELECT FROM event
           WHERE event.dataset_id = fed.dataset_id AND event.generation = fed.generation
             AND event.partition_key = nullif(%(key)s, '')) AS is_told
FROM penstock_inputs(%(job)s, %(generation)s::uuid) AS fed
JOIN dataset ON dataset.id = fed.dataset_id
LEFT JOIN LATERAL penstock_parts(
    CASE WHEN fed.reads = 'partition' THEN fed.dataset_id END, fed.generation, fed.reads,
    CASE WHEN fed.lookback IS NULL OR %(start)s::bigint IS NULL THEN nullif(%(key)s, '') END,
    penstock_shifted(%(start)s::bigint, -coalesce(fed.lookback, 0)), %(end)s::bigint)
    AS held ON true
ORDER BY fed.input

-- name: partition_history
-- The tasks of the job for this partition, the latest first.
SELECT task.id, task.status, task.attempt, task.attempt_limit,
       left(split_part(task.reason, E'\n', 1), 300) AS reason, task.created_at,
       task.settled_at, task.generation::text, task.backfill_id,
       task.generation = %(generation)s::uuid AS is_shown
FROM task
WHERE task.payload ->> 'partition_key' = %(key)s AND task.job_id = %(job)s
ORDER BY task.id DESC
LIMIT %(limit)s

-- name: partition_history_whole
-- The same of what has no partitions.
SELECT task.id, task.status, task.attempt, task.attempt_limit,
       left(split_part(task.reason, E'\n', 1), 300) AS reason, task.created_at,
       task.settled_at, task.generation::text, task.backfill_id,
       task.generation = %(generation)s::uuid AS is_shown
FROM task
WHERE task.job_id = %(job)s
ORDER BY task.id DESC
LIMIT %(limit)s
