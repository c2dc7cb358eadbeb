-- Events that wait until a queue with a limit has room, for penstock.dispatcher.router.

-- name: hold_events
-- Of these datasets, which a job with a limit reads, after the generations are locked.
UPDATE event
SET routed = 'held'
WHERE seq = ANY (%(events)s::bigint[]) AND routed = 'pending'
  AND dataset_id = ANY (%(datasets)s::uuid[])
RETURNING seq

-- name: is_held
SELECT EXISTS (SELECT FROM event WHERE routed = 'held') AS is_held

-- name: take_window_lock
-- Until the end of the transaction; whoever does not get it leaves the windows to who has. The number
-- is ours alone: "windowed" in letters.
SELECT pg_try_advisory_xact_lock(8604529940713923940) AS is_ours

-- name: queue_rooms
-- How many more tasks may wait for each job whose input is held. The last count is good for most of
-- its room, and a long queue is not counted all the time: counting goes by its length.
SELECT job.id AS job_id, job.max_queue_depth, counted.is_new,
       CASE WHEN counted.is_new
            THEN penstock_depth_max(job.max_queue_depth) - waiting.depth
            ELSE queue_room.room END AS room
FROM job
LEFT JOIN queue_room
    ON queue_room.job_id = job.id AND queue_room.max_queue_depth = job.max_queue_depth
CROSS JOIN LATERAL (
    -- One event may need room for two: see pick_held.
    SELECT queue_room.job_id IS NULL
        OR (queue_room.room < 2
            OR 4 * queue_room.room < penstock_depth_max(job.max_queue_depth))
            AND queue_room.counted_at < clock_timestamp()
                - least(200000, job.max_queue_depth) * interval '10 microseconds' AS is_new
) AS counted
CROSS JOIN LATERAL (
    SELECT count(*) AS depth
    FROM (
        SELECT
        FROM (SELECT DISTINCT operator FROM job_definition WHERE job_id = job.id) AS served
        JOIN task ON task.operator = served.operator AND task.job_id = job.id
            AND task.status IN ('queued', 'retrying') AND task.backfill_id IS NULL
            AND NOT task.payload ? 'maintain'
        WHERE counted.is_new
        LIMIT penstock_depth_max(job.max_queue_depth)
    ) AS listed
) AS waiting
WHERE job.max_queue_depth IS NOT NULL AND EXISTS (
    SELECT
    FROM edge
    CROSS JOIN LATERAL (
        SELECT FROM event
        WHERE event.routed = 'held' AND event.dataset_id = edge.dataset_id
        LIMIT 1
    ) AS one
    WHERE edge.job_id = job.id AND edge.is_trigger
    OFFSET 0)
ORDER BY job.id

-- name: pick_held
-- The next events, as many of each dataset as all jobs with limits that read it have room for; what
-- was held of a dataset before goes before. An event is at most a task in each generation of a job.
-- A job that was not counted, because nothing was held for it then or its limit was another, has no
-- room.
WITH RECURSIVE datasets AS (
    (SELECT dataset_id FROM event WHERE routed = 'held' ORDER BY dataset_id LIMIT 1)
    UNION ALL
    SELECT (
        SELECT event.dataset_id FROM event
        WHERE event.routed = 'held' AND event.dataset_id > datasets.dataset_id
        ORDER BY event.dataset_id
        LIMIT 1)
    FROM datasets
    WHERE datasets.dataset_id IS NOT NULL
), versions AS MATERIALIZED (
    SELECT dag_version_id FROM dag_current
    UNION
    SELECT max(dag_job.dag_version_id)
    FROM generation AS next
    JOIN generation AS served
        ON served.dataset_id = next.dataset_id AND served.state = 'current'
    JOIN dag_job ON dag_job.generation = served.version
    WHERE next.state = 'building'
    GROUP BY dag_job.generation
), readers AS MATERIALIZED (
    SELECT DISTINCT edge.dataset_id, edge.job_id, edge.filter, dag_job.generation,
           coalesce(asked.room, 0) AS room
    FROM datasets
    JOIN edge ON edge.dataset_id = datasets.dataset_id AND edge.is_trigger
        AND edge.dag_version_id IN (SELECT dag_version_id FROM versions)
    JOIN dag_job USING (dag_version_id, job_id)
    JOIN job ON job.id = edge.job_id AND job.max_queue_depth IS NOT NULL
    LEFT JOIN unnest(%(jobs)s::integer[], %(limits)s::bigint[], %(rooms)s::bigint[])
        AS asked(job_id, max_queue_depth, room)
        ON asked.job_id = job.id AND asked.max_queue_depth = job.max_queue_depth
), candidates AS MATERIALIZED (
    SELECT listed.*
    FROM datasets
    CROSS JOIN LATERAL (
        SELECT event.*
        FROM event
        WHERE event.routed = 'held' AND event.dataset_id = datasets.dataset_id
        ORDER BY event.seq
        LIMIT %(limit)s
    ) AS listed
    WHERE datasets.dataset_id NOT IN (SELECT dataset_id FROM readers WHERE room <= 0)
      AND (listed.revision IS NOT NULL
           OR datasets.dataset_id NOT IN (SELECT penstock_paused_datasets()))
), weighed AS MATERIALIZED (
    SELECT candidate.seq, candidate.dataset_id, readers.job_id, readers.room,
           least(2, count(DISTINCT readers.generation) FILTER (
               WHERE readers.filter IS NULL OR penstock_passes(
                   readers.filter, candidate.partition_key, candidate.range_start,
                   candidate.range_end, candidate.cursor))) AS weight
    FROM candidates AS candidate
    JOIN readers USING (dataset_id)
    GROUP BY candidate.seq, candidate.dataset_id, readers.job_id, readers.room
), first AS MATERIALIZED (
    -- What there is no room for in one dataset takes none from the others.
    SELECT weighed.*,
           bool_or(upto > room) OVER (PARTITION BY seq) AS is_over
    FROM (
        SELECT *, sum(weight) OVER (PARTITION BY job_id, dataset_id ORDER BY seq) AS upto
        FROM weighed
    ) AS weighed
), shared AS MATERIALIZED (
    SELECT seq, job_id, room, weight, sum(weight) OVER (PARTITION BY job_id ORDER BY seq) AS upto
    FROM first
    WHERE NOT is_over
), weights AS MATERIALIZED (
    SELECT seq, jsonb_object_agg(job_id, weight) AS weights
    FROM shared
    GROUP BY seq
    HAVING bool_and(upto <= room)
)
SELECT candidate.seq, candidate.dataset_id::text AS dataset, candidate.generation::text,
       coalesce(candidate.partition_key, '') AS partition_key,
       candidate.revision IS NOT NULL AS is_published, coalesce(weights.weights, '{}') AS weights
FROM candidates AS candidate
LEFT JOIN weights USING (seq)
WHERE weights.seq IS NOT NULL
   OR candidate.dataset_id NOT IN (SELECT dataset_id FROM readers)
ORDER BY candidate.seq
LIMIT %(limit)s

-- name: write_rooms
INSERT INTO queue_room AS held (job_id, max_queue_depth, room, counted_at)
SELECT asked.job_id, asked.max_queue_depth, asked.room, clock_timestamp()
FROM unnest(%(jobs)s::integer[], %(limits)s::bigint[], %(rooms)s::bigint[])
    AS asked(job_id, max_queue_depth, room)
ON CONFLICT (job_id) DO UPDATE
SET max_queue_depth = excluded.max_queue_depth, room = excluded.room,
    counted_at = CASE WHEN held.job_id = ANY (%(counted)s::integer[]) THEN excluded.counted_at
                      ELSE held.counted_at END

-- name: release_held
-- The limits are as the DAG has them from now on, and what is held is looked at again under them.
-- Comes after the locks of all generations, so that no router has any of it in hand.
WITH limits AS (
    UPDATE job
    SET max_queue_depth = wanted.max_queue_depth
    FROM (
        SELECT job.id, (definition.body ->> 'max_queue_depth')::bigint AS max_queue_depth
        FROM job
        LEFT JOIN (dag_current JOIN dag_job USING (dag_version_id)) ON dag_job.job_id = job.id
        LEFT JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    ) AS wanted
    WHERE wanted.id = job.id AND job.max_queue_depth IS DISTINCT FROM wanted.max_queue_depth
)
UPDATE event SET routed = 'pending' WHERE routed = 'held'
