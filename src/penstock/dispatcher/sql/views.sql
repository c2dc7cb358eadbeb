-- What the API shows, and what workers and sources have to know: for penstock.dispatcher.views.
-- Nothing here is counted without an end: 10,000 stands for "many".

-- name: hear_workers
-- In the order of their names, as every dispatcher does. Another one may have heard of one later.
INSERT INTO worker (name, operators, about, last_seen_at)
SELECT heard.name, ARRAY(SELECT jsonb_array_elements_text(heard.operators)), heard.about,
       penstock_now() - heard.silent_seconds * interval '1 second'
FROM jsonb_to_recordset(%(workers)s)
    AS heard(name text, operators jsonb, about jsonb, silent_seconds double precision)
ORDER BY heard.name
ON CONFLICT (name) DO UPDATE
SET operators = excluded.operators, about = excluded.about, last_seen_at = excluded.last_seen_at
WHERE worker.last_seen_at <= excluded.last_seen_at

-- name: operators_to_serve
-- Of the DAG in force, or of an earlier one that tasks still wait for: one probe of the index for
-- each job and operator that there ever was. There is a row with the time if there is nothing.
SELECT DISTINCT definition.operator AS name, definition.runtime, penstock_now() AS now
FROM (SELECT) AS one
LEFT JOIN job_definition AS definition ON definition.runtime = ANY (%(runtimes)s::text[]) AND (
    EXISTS (
        SELECT
        FROM dag_current
        JOIN dag_job USING (dag_version_id)
        WHERE dag_job.definition_id = definition.id)
    OR EXISTS (
        SELECT
        FROM task
        WHERE task.operator = definition.operator AND task.job_id = definition.job_id
          AND task.status IN ('queued', 'retrying')))
ORDER BY definition.operator, definition.runtime

-- name: what_time
SELECT penstock_now() AS now

-- name: find_job
SELECT id FROM job WHERE name = %(name)s

-- name: live_generations
-- The generations that events of these datasets, by name, are for.
SELECT dataset.name, dataset.id::text AS dataset, generation.version::text AS generation
FROM dataset
JOIN generation ON generation.dataset_id = dataset.id
WHERE dataset.name = ANY (%(names)s::text[]) AND generation.state IN ('building', 'current')
  AND (NOT %(of_webhooks)s OR EXISTS (
      SELECT
      FROM dag_current
      JOIN dag_job USING (dag_version_id)
      JOIN job_definition AS definition ON definition.id = dag_job.definition_id
      WHERE dag_job.job_id = dataset.job_id
        AND definition.body -> 'source' ->> 'kind' = 'webhook'))
ORDER BY dataset.name, generation.state DESC

-- name: trigger_targets
-- What a job of the DAG in force writes, or one dataset of it, in all generations that are live.
SELECT job.name AS job, definition.body ->> 'activation' = 'source' AS is_source,
       dataset.id::text AS dataset, generation.version::text AS generation,
       floor(extract(epoch FROM penstock_now()) * 1000)::bigint AS now_ms
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
LEFT JOIN dataset
    ON dataset.job_id = job.id
    AND (%(dataset)s::text IS NULL OR dataset.name = %(dataset)s)
    -- Not what the job has written in earlier versions only.
    AND EXISTS (
        SELECT FROM generation
        WHERE generation.dataset_id = dataset.id AND generation.version = dag_job.generation)
LEFT JOIN generation
    ON generation.dataset_id = dataset.id AND generation.state IN ('building', 'current')
WHERE (%(job)s::text IS NULL OR job.name = %(job)s)
  AND (%(dataset)s::text IS NULL OR dataset.id IS NOT NULL)
  AND num_nonnulls(%(job)s::text, %(dataset)s::text) > 0
ORDER BY dataset.name, generation.state DESC

-- name: hold_attempt
-- Until the end of the transaction, this attempt is not ended by anybody.
SELECT task.job_id, task.generation::text,
       penstock_has_grants(task.grants, task.attempt, %(grants)s) AS has_grants
FROM task
WHERE task.id = %(task)s AND task.attempt = %(attempt)s AND task.lease_token = %(token)s
  AND task.status = 'running'
FOR SHARE

-- name: outputs_of_job
SELECT dataset.name, dataset.id::text AS dataset
FROM dataset
JOIN generation ON generation.dataset_id = dataset.id
WHERE dataset.job_id = %(job)s AND generation.version = %(generation)s::uuid

-- name: sources_in_force
SELECT job.name AS job, definition.body -> 'source' AS source,
       (SELECT coalesce(jsonb_object_agg(dataset.name, dataset.id), '{}')
        FROM generation
        JOIN dataset ON dataset.id = generation.dataset_id
        WHERE generation.version = dag_job.generation) AS datasets,
       (SELECT max(highest.cursor)
        FROM dataset
        JOIN generation ON generation.dataset_id = dataset.id
        CROSS JOIN LATERAL (
            SELECT event.cursor
            FROM event
            WHERE event.dataset_id = dataset.id AND event.generation = generation.version
              AND event.cursor IS NOT NULL
              -- What somebody else has told of a cron source says nothing of its times.
              AND (definition.body -> 'source' ->> 'kind' <> 'cron'
                   OR starts_with(event.dedupe, 'source:cron:'))
            ORDER BY event.cursor DESC
            LIMIT 1
        ) AS highest
        WHERE dataset.job_id = job.id) AS last_cursor,
       -- Of intervals, where the last one ends: what else was told of the source is none of them.
       (SELECT max(latest.range_end)
        FROM dataset
        JOIN generation ON generation.dataset_id = dataset.id
        CROSS JOIN LATERAL (
            SELECT event.range_end
            FROM event
            WHERE event.dataset_id = dataset.id AND event.generation = generation.version
              AND event.range_end IS NOT NULL AND starts_with(event.dedupe, 'source:cron:')
            ORDER BY event.range_end DESC
            LIMIT 1
        ) AS latest
        WHERE dataset.job_id = job.id AND definition.body -> 'source' ->> 'kind' = 'cron')
           AS last_end,
       (SELECT string_agg(pause.reason, ' ' ORDER BY pause.cause)
        FROM pause
        WHERE pause.job_id = job.id
          AND (pause.scope = 'all' OR definition.priority = 'bulk')) AS paused
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE definition.body ->> 'activation' = 'source'
ORDER BY job.name

-- name: jobs_in_force
SELECT job.name, coalesce(definition.body ->> 'activation', 'reactive') AS activation,
       definition.runtime, definition.operator, definition.priority,
       dag_job.generation::text,
       EXISTS (SELECT FROM generation
               WHERE generation.version = dag_job.generation AND generation.state = 'building')
           AS is_building,
       (SELECT coalesce(jsonb_agg(dataset.name ORDER BY dataset.name), '[]')
        FROM generation
        JOIN dataset ON dataset.id = generation.dataset_id
        WHERE generation.version = dag_job.generation) AS outputs,
       -- Also what waits for an operator that the job had in an earlier version.
       (SELECT count(*)
        FROM (SELECT
              FROM (SELECT DISTINCT operator FROM job_definition WHERE job_id = job.id) AS had
              JOIN task ON task.operator = had.operator AND task.job_id = job.id
                  AND task.status IN ('queued', 'retrying')
              LIMIT 10000) AS pending) AS queued,
       (SELECT count(*)
        FROM (SELECT FROM task WHERE task.job_id = job.id AND task.status = 'running'
              LIMIT 10000) AS pending) AS running,
       (SELECT count(*)
        FROM (SELECT FROM task WHERE task.job_id = job.id AND task.status = 'dead'
                -- Of a generation that nothing uses any more, nobody misses it.
                AND NOT EXISTS (SELECT FROM generation
                                WHERE generation.version = task.generation
                                  AND generation.state IN ('retired', 'abandoned'))
              LIMIT 10000) AS pending) AS dead,
       coalesce(extract(epoch FROM penstock_now() - (
           SELECT min(oldest.due_at)
           FROM (SELECT DISTINCT operator FROM job_definition WHERE job_id = job.id) AS had
           CROSS JOIN (VALUES ('normal'), ('bulk')) AS tier(priority)
           CROSS JOIN LATERAL (
               SELECT task.due_at
               FROM task
               WHERE task.operator = had.operator AND task.job_id = job.id
                 AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
                 AND task.due_at <= penstock_now()
               ORDER BY task.due_at, task.id
               LIMIT 1
           ) AS oldest)), 0)::double precision AS oldest_seconds,
       (SELECT coalesce(jsonb_agg(pause.reason ORDER BY pause.cause), '[]')
        FROM pause WHERE pause.job_id = job.id) AS paused,
       -- Of the last to be due, among which are those that wait after they were handed back.
       coalesce((
           SELECT few.reason
           FROM (VALUES ('normal'), ('bulk')) AS tier(priority)
           CROSS JOIN LATERAL (
               SELECT task.reason, task.releases
               FROM task
               WHERE task.operator = definition.operator AND task.job_id = job.id
                 AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
               ORDER BY task.due_at DESC, task.id DESC
               LIMIT 20
           ) AS few
           WHERE few.releases > 0 AND few.reason IS NOT NULL
           LIMIT 1), '') AS handed_back,
       definition.runtime NOT IN ('', 'dispatcher', 'lambda')
       AND NOT EXISTS (
           SELECT FROM worker
           WHERE worker.last_seen_at > penstock_now() - interval '90 seconds'
             AND definition.operator = ANY (worker.operators)) AS is_unserved
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
ORDER BY job.name

-- name: overall
SELECT (SELECT dag_version_id FROM dag_current) AS dag_version, penstock_now() AS now,
       (SELECT count(*) FROM (
            (SELECT FROM event WHERE routed = 'pending' LIMIT 10000)
            UNION ALL (SELECT FROM event WHERE routed = 'held' LIMIT 10000)
            UNION ALL (SELECT FROM event WHERE routed = 'applying' LIMIT 10000)
            LIMIT 10000) AS pending) AS events_pending,
       (SELECT count(*) FROM worker
        WHERE last_seen_at > penstock_now() - interval '90 seconds'
          AND about -> 'has_left' IS NULL) AS workers

-- name: job_pauses
SELECT job.name AS job, pause.cause, pause.scope, pause.reason, pause.since
FROM pause
JOIN job ON job.id = pause.job_id
WHERE job.name = %(job)s
ORDER BY pause.cause

-- name: list_tasks
-- One branch a status, of which one is taken, so that each can have its own index.
WITH found AS (
    (SELECT task.id FROM task
     WHERE %(status)s::text IS NULL AND task.id < %(before)s
       AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
     ORDER BY task.id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT task.id FROM task
     WHERE %(status)s = 'running' AND task.status = 'running' AND task.id < %(before)s
       AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
     ORDER BY task.id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT task.id FROM task
     WHERE %(status)s = 'dead' AND task.status = 'dead' AND task.id < %(before)s
       AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
       AND NOT EXISTS (SELECT FROM generation
                       WHERE generation.version = task.generation
                         AND generation.state IN ('retired', 'abandoned'))
     ORDER BY task.id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT task.id FROM task
     WHERE %(status)s IN ('queued', 'retrying') AND task.status IN ('queued', 'retrying')
       AND task.status = %(status)s AND task.id < %(before)s
       AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
     ORDER BY task.id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT task.id FROM task
     WHERE %(status)s IN ('completed', 'cancelled') AND task.status = %(status)s
       AND task.id < %(before)s AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
     ORDER BY task.id DESC LIMIT %(limit)s)
)
SELECT task.id, job.name AS job, task.operator, task.generation::text, task.status,
       task.priority, task.attempt, task.attempt_limit, task.releases, task.runs_alone,
       task.payload ->> 'partition_key' AS partition_key, task.worker, task.reason,
       task.created_at, task.due_at, task.settled_at
FROM found
JOIN task ON task.id = found.id
JOIN job ON job.id = task.job_id
ORDER BY task.id DESC

-- name: list_tasks_of_partition
SELECT task.id, job.name AS job, task.operator, task.generation::text, task.status,
       task.priority, task.attempt, task.attempt_limit, task.releases, task.runs_alone,
       task.payload ->> 'partition_key' AS partition_key, task.worker, task.reason,
       task.created_at, task.due_at, task.settled_at
FROM task
JOIN job ON job.id = task.job_id
WHERE task.payload ->> 'partition_key' = %(partition)s AND task.id < %(before)s
  AND (%(status)s::text IS NULL OR task.status = %(status)s)
  AND (%(job)s::integer IS NULL OR task.job_id = %(job)s)
ORDER BY task.id DESC
LIMIT %(limit)s

-- name: one_task
SELECT task.id, job.name AS job, task.operator, task.generation::text, task.status,
       task.priority, task.attempt, task.attempt_limit, task.releases, task.runs_alone,
       task.payload ->> 'partition_key' AS partition_key, task.worker, task.reason,
       task.created_at, task.due_at, task.settled_at, task.payload
FROM task
JOIN job ON job.id = task.job_id
WHERE task.id = %(task)s

-- name: attempts_of_task
SELECT number, worker, started_at, ended_at, outcome, reason, progress, log, metrics,
       (SELECT jsonb_agg(one || jsonb_build_object('dataset', dataset.name) ORDER BY place)
        FROM jsonb_array_elements(answer -> 'published') WITH ORDINALITY AS told (one, place)
        JOIN dataset ON dataset.id = (one ->> 'dataset')::uuid
        WHERE outcome = 'completed') AS published,
       coalesce((answer ->> 'omitted')::integer, 0) AS omitted
FROM attempt
WHERE task_id = %(task)s
ORDER BY number DESC
LIMIT 100

-- name: list_datasets
-- All generations that are live, and the last of those that were.
SELECT dataset.name, dataset.id::text AS uuid, job.name AS job,
       coalesce(
           (SELECT jsonb_agg(jsonb_build_object(
                'version', few.version, 'state', few.state, 'created_at', few.created_at,
                'partitions', (
                    SELECT count(*)
                    FROM (SELECT FROM publication
                          WHERE publication.dataset_id = dataset.id
                            AND publication.generation = few.version
                          LIMIT 10000) AS counted))
                ORDER BY few.place)
            FROM (
                SELECT generation.version, generation.state, generation.created_at,
                       row_number() OVER (
                           ORDER BY generation.state NOT IN ('current', 'building'),
                                    generation.state DESC, generation.changed_at DESC,
                                    generation.version) AS place
                FROM generation
                WHERE generation.dataset_id = dataset.id
                ORDER BY place
                LIMIT 10
            ) AS few),
           '[]') AS generations
FROM dataset
LEFT JOIN job ON job.id = dataset.job_id
ORDER BY dataset.name
LIMIT 10000

-- name: find_generation
-- The one that was asked for, or the one that readers read, or the one that is built first.
SELECT dataset.id::text AS dataset, found.version::text AS generation
FROM dataset
LEFT JOIN LATERAL (
    SELECT generation.version
    FROM generation
    WHERE generation.dataset_id = dataset.id
      AND CASE
          WHEN %(generation)s::uuid IS NULL THEN generation.state IN ('current', 'building')
          ELSE generation.version = %(generation)s::uuid
          END
    ORDER BY generation.state DESC
    LIMIT 1
) AS found ON true
WHERE dataset.name = %(name)s

-- name: list_partitions
SELECT partition_key, range_start AS start, range_end AS end, location, task_id, attempt, revision,
       published_at, files, rows, bytes
FROM publication
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND (%(after)s::text IS NULL OR partition_key > %(after)s)
ORDER BY partition_key
LIMIT %(limit)s
