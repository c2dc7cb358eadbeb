-- One task as people look at it: for penstock.dispatcher.views.jobs.

-- name: about_task
-- What it was made of, and what keeps it from running, if it waits.
SELECT definition.runtime, definition.max_attempts,
       definition.timeout_ms / 1000.0::double precision AS timeout_seconds,
       task.cancel_asked, task.backfill_id, penstock_now() AS now,
       task.event_seq, event.dedupe AS event_id, event.received_at AS event_at,
       event.task_id AS event_task, told.name AS event_dataset,
       -- All outputs of a job move together; a job without outputs has none.
       (SELECT min(generation.state) FROM generation WHERE generation.version = task.generation)
           AS generation_state,
       EXISTS (
           SELECT FROM dag_current JOIN dag_job USING (dag_version_id)
           WHERE dag_job.job_id = task.job_id) AS is_in_dag,
       EXISTS (
           SELECT FROM dag_current JOIN dag_job USING (dag_version_id)
           WHERE dag_job.job_id = task.job_id AND dag_job.definition_id = task.definition_id)
           AS is_in_force,
       ARRAY(
           SELECT pause.reason FROM pause
           WHERE pause.job_id = task.job_id
             AND (pause.scope = 'all' OR task.priority = 'bulk')
           ORDER BY pause.cause) AS paused,
       (SELECT operator.in_flight_max FROM operator WHERE operator.name = task.operator)
           AS operator_max,
       (SELECT job.max_concurrency FROM job WHERE job.id = task.job_id) AS job_max,
       penstock_room(task.operator) <= 0 AS is_operator_full,
       penstock_job_room(task.job_id) <= 0 AS is_job_full,
       (SELECT count(*) FROM worker
        WHERE worker.last_seen_at > penstock_now() - interval '90 seconds'
          AND task.operator = ANY (worker.operators)) AS workers,
       -- Another task that has made this partition since, or will.
       later.id AS later_task, later.status AS later_status
FROM task
JOIN job_definition AS definition ON definition.id = task.definition_id
LEFT JOIN event ON event.seq = task.event_seq
LEFT JOIN dataset AS told ON told.id = event.dataset_id
LEFT JOIN LATERAL (
    SELECT other.id, other.status
    FROM task AS other
    WHERE other.payload ->> 'partition_key' = task.payload ->> 'partition_key'
      AND other.id > task.id AND other.job_id = task.job_id
      AND other.generation = task.generation AND other.status <> 'cancelled'
    ORDER BY other.id DESC
    LIMIT 1
) AS later ON true
WHERE task.id = %(task)s

-- name: is_worker_of_host
-- One that is not known any more is where all are that are known.
SELECT coalesce(
    (SELECT about -> 'about' ->> 'host' = %(host)s FROM worker WHERE name = %(worker)s),
    EXISTS (SELECT FROM worker)
    AND NOT EXISTS (SELECT FROM worker WHERE about -> 'about' ->> 'host' IS DISTINCT FROM %(host)s)
) AS is_here

-- name: inputs_of_task
-- What is published now of what it reads: its own partition, or the whole, or how many of several.
SELECT reading.input, dataset.name AS dataset, writer.name AS writer, reading.reads,
       reading.is_trigger,
       -- Sources that run nothing tell of something and have no data.
       coalesce(writing.runtime NOT IN ('', 'dispatcher'), true) AS has_data,
       own.partition_key, own.published_at, own.rows, own.bytes, own.task_id,
       CASE WHEN own.partition_key IS NULL THEN (
           SELECT count(*)
           FROM (
               SELECT
               FROM publication
               WHERE publication.dataset_id = reading.dataset_id
                 AND publication.generation = reading.generation
                 AND (reading.reads = 'all' OR (
                     publication.range_start >= penstock_shifted(
                         (task.payload ->> 'start')::bigint, -coalesce(reading.lookback, 0))
                     AND publication.range_start < (task.payload ->> 'end')::bigint
                     AND publication.range_end <= (task.payload ->> 'end')::bigint))
               LIMIT 1000) AS several)
       ELSE 1 END AS partitions,
       given.changed, given.missed, given.is_consumed
FROM task
CROSS JOIN LATERAL penstock_inputs(task.job_id, task.generation) AS reading
JOIN dataset ON dataset.id = reading.dataset_id
LEFT JOIN job AS writer ON writer.id = dataset.job_id
LEFT JOIN LATERAL (
    SELECT definition.runtime
    FROM dag_job
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE dag_job.generation = reading.generation
    ORDER BY dag_job.dag_version_id DESC
    LIMIT 1
) AS writing ON true
LEFT JOIN LATERAL (
    SELECT publication.partition_key, publication.published_at, publication.rows,
           publication.bytes, publication.task_id
    FROM publication
    WHERE reading.reads = 'partition' AND publication.dataset_id = reading.dataset_id
      AND publication.generation = reading.generation
      AND publication.partition_key IN ('', CASE
          WHEN reading.lookback IS NULL OR task.payload ->> 'start' IS NULL
          THEN coalesce(task.payload ->> 'partition_key', '') ELSE '' END)
    ORDER BY publication.partition_key DESC
    LIMIT 1
) AS own ON true
LEFT JOIN LATERAL (
    SELECT cardinality(consumption.partition_keys) - consumption.missed AS changed,
           consumption.missed, consumption.is_consumed
    FROM consumption
    WHERE consumption.task_id = task.id AND consumption.input = reading.input
    ORDER BY consumption.attempt DESC
    LIMIT 1
) AS given ON true
WHERE task.id = %(task)s
ORDER BY reading.input
LIMIT 100

-- name: outputs_of_task
-- What it writes, and by whom its partition was last made.
SELECT dataset.name AS dataset, dataset.id::text AS uuid, publication.published_at,
       publication.rows, publication.bytes, publication.task_id
FROM task
JOIN generation ON generation.version = task.generation
JOIN dataset ON dataset.id = generation.dataset_id
LEFT JOIN publication
    ON publication.dataset_id = dataset.id AND publication.generation = generation.version
    AND publication.partition_key = coalesce(task.payload ->> 'partition_key', '')
WHERE task.id = %(task)s
ORDER BY dataset.name
LIMIT 100

-- name: readers_of_task
-- The jobs of the DAG in force that read what it writes, and what has become of its partition there
-- since. Of a key that very many tasks have, the latest are looked at.
SELECT reader.name AS job, min(dataset.name) AS dataset, bool_or(edge.is_trigger) AS is_trigger,
       follows.id AS task_id, follows.status
FROM task
CROSS JOIN dag_current
JOIN generation ON generation.version = task.generation
JOIN dataset ON dataset.id = generation.dataset_id
JOIN edge
    ON edge.dag_version_id = dag_current.dag_version_id AND edge.dataset_id = dataset.id
JOIN job AS reader ON reader.id = edge.job_id
LEFT JOIN LATERAL (
    SELECT recent.id, recent.status
    FROM (
        SELECT other.id, other.status, other.job_id
        FROM task AS other
        WHERE other.payload ->> 'partition_key' = task.payload ->> 'partition_key'
          AND other.id > task.id
        ORDER BY other.id DESC
        LIMIT 1000
    ) AS recent
    WHERE recent.job_id = reader.id
    ORDER BY recent.id DESC
    LIMIT 1
) AS follows ON true
WHERE task.id = %(task)s
GROUP BY reader.name, follows.id, follows.status
ORDER BY reader.name
LIMIT 100
