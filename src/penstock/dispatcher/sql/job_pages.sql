-- One job as people look at it: for penstock.dispatcher.views.jobs. Nothing is counted without an end:
-- 10,000 stands for "many".

-- name: about_job
-- A job as the DAG in force has it, or as the last one had it that did; and what keeps it from running.
SELECT job.id AS job_id, job.name, named.dag_version_id AS version,
       named.is_in_force, named.generation::text,
       -- All outputs of a job move together; a job without outputs has none.
       (SELECT min(generation.state) FROM generation WHERE generation.version = named.generation)
           AS generation_state,
       definition.body - 'lineage' AS body, definition.runtime, definition.operator,
       definition.priority, definition.update_mode, definition.max_attempts,
       definition.timeout_ms / 1000.0::double precision AS timeout_seconds,
       definition.heartbeat_ms / 1000.0::double precision AS heartbeat_seconds,
       definition.retry_first_ms / 1000.0::double precision AS retry_first_seconds,
       definition.retry_max_ms / 1000.0::double precision AS retry_max_seconds,
       definition.retry_backoff, job.max_concurrency, penstock_now() AS now,
       (SELECT operator.in_flight_max FROM operator WHERE operator.name = definition.operator)
           AS operator_max,
       penstock_room(definition.operator) <= 0 AS is_operator_full,
       penstock_job_room(job.id) <= 0 AS is_job_full,
       (SELECT count(*) FROM worker
        WHERE worker.last_seen_at > penstock_now() - interval '90 seconds'
          AND definition.operator = ANY (worker.operators)) AS workers
FROM job
CROSS JOIN LATERAL (
    (SELECT dag_job.*, true AS is_in_force
     FROM dag_current
     JOIN dag_job USING (dag_version_id)
     WHERE dag_job.job_id = job.id)
    UNION ALL
    (SELECT dag_job.*, false
     FROM dag_job
     WHERE dag_job.job_id = job.id
     ORDER BY dag_job.dag_version_id DESC
     LIMIT 1)
    ORDER BY is_in_force DESC
    LIMIT 1
) AS named
JOIN job_definition AS definition ON definition.id = named.definition_id
WHERE job.name = %(job)s

-- name: tasks_of_job
-- How many there are of what is not over; also of what waits for an operator that the job had before.
WITH had AS MATERIALIZED (
    SELECT DISTINCT operator FROM job_definition WHERE job_id = %(job)s
), waiting AS MATERIALIZED (
    SELECT task.status, task.due_at
    FROM had
    JOIN task ON task.operator = had.operator AND task.job_id = %(job)s
        AND task.status IN ('queued', 'retrying')
    LIMIT 10000
)
SELECT (SELECT count(*) FROM waiting WHERE status = 'queued') AS queued,
       (SELECT count(*) FROM waiting WHERE status = 'retrying') AS retrying,
       (SELECT count(*)
        FROM (SELECT FROM task WHERE job_id = %(job)s AND status = 'running' LIMIT 10000) AS few)
           AS running,
       (SELECT count(*)
        FROM (SELECT FROM task
              WHERE task.job_id = %(job)s AND task.status = 'dead'
                AND NOT EXISTS (SELECT FROM generation
                                WHERE generation.version = task.generation
                                  AND generation.state IN ('retired', 'abandoned'))
              LIMIT 10000) AS few) AS dead,
       -- Of very many that wait, this is of those that were counted.
       greatest(0, coalesce(extract(epoch FROM penstock_now() - (
           SELECT min(due_at) FROM waiting WHERE due_at <= penstock_now())), 0))::double precision
           AS oldest_seconds,
       (SELECT min(due_at) FROM waiting WHERE due_at > penstock_now()) AS next_due_at

-- name: inputs_of_job
SELECT edge.input, dataset.name AS dataset, writer.name AS writer, edge.is_trigger, edge.reads,
       -- Sources that run nothing tell of something and publish nothing.
       definition.runtime = '' AS is_told,
       EXISTS (SELECT FROM pause WHERE pause.job_id = writer.id) AS is_writer_paused,
       (SELECT count(*)
        FROM (SELECT FROM task
              WHERE task.job_id = writer.id AND task.status = 'dead'
                AND NOT EXISTS (SELECT FROM generation
                                WHERE generation.version = task.generation
                                  AND generation.state IN ('retired', 'abandoned'))
              LIMIT 10000) AS few) AS writer_dead,
       (SELECT publication.published_at
        FROM publication
        WHERE publication.dataset_id = dataset.id AND publication.generation = dag_job.generation
        ORDER BY publication.published_at DESC
        LIMIT 1) AS published_at
FROM edge
JOIN dataset ON dataset.id = edge.dataset_id
JOIN dag_job ON dag_job.dag_version_id = edge.dag_version_id
JOIN generation ON generation.dataset_id = dataset.id AND generation.version = dag_job.generation
JOIN job AS writer ON writer.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE edge.dag_version_id = %(version)s AND edge.job_id = %(job)s
ORDER BY edge.input
LIMIT 100

-- name: written_by_job
-- What it writes, what is there of it, and who reads it.
SELECT dataset.name AS dataset, generation.state,
       (SELECT count(*)
        FROM (SELECT FROM publication
              WHERE publication.dataset_id = dataset.id
                AND publication.generation = generation.version
              LIMIT 10000) AS few) AS partitions,
       (SELECT publication.published_at
        FROM publication
        WHERE publication.dataset_id = dataset.id AND publication.generation = generation.version
        ORDER BY publication.published_at DESC
        LIMIT 1) AS published_at,
       ARRAY(
           SELECT DISTINCT reader.name
           FROM edge
           JOIN job AS reader ON reader.id = edge.job_id
           WHERE edge.dag_version_id = %(version)s AND edge.dataset_id = dataset.id
           ORDER BY reader.name) AS readers
FROM generation
JOIN dataset ON dataset.id = generation.dataset_id
WHERE generation.version = %(generation)s::uuid
ORDER BY dataset.name
LIMIT 100

-- name: endings_of_job
-- What has ended of it in the last hour: by time, by how long it took, and in all. Of all jobs some
-- thousand of the newest attempts are looked at; `reaches_to` says how far back that goes.
WITH recent AS MATERIALIZED (
    SELECT attempt.task_id, attempt.outcome, attempt.ended_at,
           extract(epoch FROM attempt.ended_at - attempt.started_at)::double precision AS seconds
    FROM attempt
    WHERE attempt.ended_at > penstock_now() - interval '1 hour'
    ORDER BY attempt.ended_at DESC
    LIMIT %(window)s
), ours AS (
    SELECT recent.outcome, recent.seconds,
           floor(extract(epoch FROM recent.ended_at) / %(slice_seconds)s)::bigint AS slice,
           width_bucket(recent.seconds, %(lengths)s::double precision[]) AS length
    FROM recent
    JOIN task ON task.id = recent.task_id
    WHERE task.job_id = %(job)s
)
SELECT slice, length,
       count(*) FILTER (WHERE outcome = 'completed') AS completed,
       count(*) FILTER (WHERE outcome = 'failed') AS failed,
       count(*) FILTER (WHERE outcome = 'expired') AS expired,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS middle_seconds,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) AS most_seconds,
       max(seconds) AS longest_seconds,
       (SELECT count(*) FROM recent) AS looked_at,
       (SELECT min(ended_at) FROM recent) AS reaches_to
FROM ours
GROUP BY GROUPING SETS ((slice), (length), ())

-- name: failures_of_job
-- Why attempts of it have failed in the last hour, by the first line of the reason; the latest first.
-- Reasons that differ in the partition or in figures alone are one, which the latest stands for.
WITH recent AS MATERIALIZED (
    SELECT attempt.task_id, attempt.number, attempt.outcome, attempt.reason, attempt.ended_at
    FROM attempt
    WHERE attempt.ended_at > penstock_now() - interval '1 hour'
    ORDER BY attempt.ended_at DESC
    LIMIT %(window)s
), ours AS (
    SELECT recent.*, left(split_part(coalesce(recent.reason, ''), E'\n', 1), 300) AS cause,
           nullif(task.payload ->> 'partition_key', '') AS partition_key
    FROM recent
    JOIN task ON task.id = recent.task_id
    WHERE task.job_id = %(job)s AND recent.outcome IN ('failed', 'expired')
)
SELECT (array_agg(cause ORDER BY ended_at DESC))[1] AS cause,
       count(DISTINCT cause) > 1 AS is_alike,
       count(*) AS times, count(DISTINCT task_id) AS tasks, max(ended_at) AS last_at,
       (array_agg(task_id ORDER BY ended_at DESC))[1] AS task_id,
       (array_agg(number ORDER BY ended_at DESC))[1] AS attempt,
       (array_agg(outcome ORDER BY ended_at DESC))[1] AS outcome
FROM ours
GROUP BY regexp_replace(
    replace(cause, coalesce(partition_key, E'\n'), '#'), '[0-9]+', '#', 'g')
ORDER BY last_at DESC
LIMIT %(limit)s
