-- Events as people look for them. For penstock.dispatcher.views.events.

-- name: events_floor
-- How far back one look goes: the events of one dataset have no index by time.
SELECT event.seq
FROM event
WHERE event.seq < %(before)s
ORDER BY event.seq DESC
OFFSET %(window)s - 1
LIMIT 1

-- name: latest_events
SELECT event.seq, dataset.name AS dataset, job.name AS job,
       generation.state AS generation_state, event.cursor,
       event.partition_key, event.range_start, event.range_end, event.dedupe, event.task_id,
       event.revision, CASE WHEN event.routed IN ('held', 'applying') THEN 'pending' ELSE event.routed END AS routed, event.why_not,
       event.received_at, left(event.payload::text, 2000) AS payload
FROM event
JOIN dataset ON dataset.id = event.dataset_id
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN generation
    ON generation.dataset_id = event.dataset_id AND generation.version = event.generation
WHERE event.seq < %(before)s AND event.seq >= %(floor)s
  AND (%(dataset)s::text IS NULL OR dataset.name = %(dataset)s)
ORDER BY event.seq DESC
LIMIT %(limit)s

-- name: events_of_partition
SELECT event.seq, dataset.name AS dataset, job.name AS job,
       generation.state AS generation_state, event.cursor,
       event.partition_key, event.range_start, event.range_end, event.dedupe, event.task_id,
       event.revision, CASE WHEN event.routed IN ('held', 'applying') THEN 'pending' ELSE event.routed END AS routed, event.why_not,
       event.received_at, left(event.payload::text, 2000) AS payload
FROM event
JOIN dataset ON dataset.id = event.dataset_id
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN generation
    ON generation.dataset_id = event.dataset_id AND generation.version = event.generation
WHERE event.partition_key = %(partition)s AND event.seq < %(before)s
  AND (%(dataset)s::text IS NULL OR dataset.name = %(dataset)s)
ORDER BY event.seq DESC
LIMIT %(limit)s

-- name: events_of_id
-- By what its source calls it, by the number of the event, or by the task that has published. One probe
-- of the unique index for each generation that there ever was.
WITH found AS (
    SELECT event.seq
    FROM generation
    JOIN event ON event.dataset_id = generation.dataset_id
        AND event.generation = generation.version
        AND event.dedupe IN ('source:' || %(id)s::text, %(id)s::text)
    UNION
    SELECT event.seq FROM event WHERE event.seq = %(number)s
)
SELECT event.seq, dataset.name AS dataset, job.name AS job,
       generation.state AS generation_state, event.cursor,
       event.partition_key, event.range_start, event.range_end, event.dedupe, event.task_id,
       event.revision, CASE WHEN event.routed IN ('held', 'applying') THEN 'pending' ELSE event.routed END AS routed, event.why_not,
       event.received_at, left(event.payload::text, 2000) AS payload
FROM found
JOIN event ON event.seq = found.seq
JOIN dataset ON dataset.id = event.dataset_id
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN generation
    ON generation.dataset_id = event.dataset_id AND generation.version = event.generation
WHERE event.seq < %(before)s
  AND (%(dataset)s::text IS NULL OR dataset.name = %(dataset)s)
  AND (%(partition)s::text IS NULL OR event.partition_key = %(partition)s)
ORDER BY event.seq DESC
LIMIT %(limit)s

-- name: tasks_of_events
-- What was made of these events: by the keys that routing gives to tasks, for the jobs that have read
-- their datasets in the latest versions of the DAG; and what they have become part of.
WITH told AS MATERIALIZED (
    SELECT event.seq, event.dataset_id, event.task_id, event.partition_key, event.revision
    FROM event
    WHERE event.seq = ANY (%(events)s::bigint[])
), versions AS MATERIALIZED (
    (SELECT id FROM dag_version ORDER BY id DESC LIMIT %(versions)s)
    UNION
    SELECT dag_version_id FROM dag_current
), readers AS MATERIALIZED (
    SELECT DISTINCT edge.dataset_id, edge.job_id, dag_job.generation
    FROM versions
    JOIN edge ON edge.dag_version_id = versions.id
        AND edge.dataset_id IN (SELECT dataset_id FROM told)
    JOIN dag_job ON dag_job.dag_version_id = edge.dag_version_id AND dag_job.job_id = edge.job_id
), made AS (
    SELECT told.seq, task.id AS task_id, false AS is_shared
    FROM told
    JOIN readers USING (dataset_id)
    JOIN task ON task.job_id = readers.job_id AND task.generation = readers.generation
        AND task.dedupe_key = 'event:' || told.seq
    UNION
    SELECT told.seq, task.id, false
    FROM told
    JOIN readers USING (dataset_id)
    JOIN task ON task.job_id = readers.job_id AND task.generation = readers.generation
        AND task.dedupe_key = 'task:' || told.task_id || ':' || told.partition_key
    WHERE told.revision IS NOT NULL AND told.partition_key IS NOT NULL
    UNION
    SELECT told.seq, coalesced.task_id, true
    FROM told
    JOIN coalesced ON coalesced.event_seq = told.seq
)
SELECT made.seq, made.task_id, job.name AS job, task.status, bool_and(made.is_shared) AS is_shared
FROM made
JOIN task ON task.id = made.task_id
JOIN job ON job.id = task.job_id
GROUP BY made.seq, made.task_id, job.name, task.status
ORDER BY made.seq DESC, made.task_id
LIMIT %(limit)s

-- name: names_of_datasets
SELECT name FROM dataset ORDER BY name LIMIT %(limit)s
