-- The locks of routing, for penstock.dispatcher.router: who waits for whom, so that tasks are numbered
-- in the order of their news. They are taken in this order: events, publications, generations by their
-- keys, then those of the jobs that read. Every statement that decides by a generation's state comes
-- after its lock.

-- name: share_generations
-- Whoever changes the DAG or cuts over waits for us, or we for them, and then see what they did.
SELECT FROM generation
WHERE (dataset_id, version) IN (
    SELECT * FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]))
ORDER BY dataset_id, version
FOR SHARE

-- name: share_generations_of_events
-- The same, of events that the transaction has made itself.
SELECT FROM generation
WHERE (dataset_id, version) IN (
    SELECT event.dataset_id, event.generation FROM event WHERE event.seq = ANY (%(events)s::bigint[]))
ORDER BY dataset_id, version
FOR SHARE

-- name: share_publications
-- Whoever is publishing one of these is waited for, and waits for us.
SELECT FROM publication
WHERE (dataset_id, generation, partition_key) IN (
    SELECT * FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[], %(keys)s::text[]))
ORDER BY dataset_id, generation, partition_key
FOR SHARE

-- name: lock_readers
-- Of two tasks for one partition the later one counts, so the later one has to see what led to the
-- earlier: their numbers must be given in the order in which their transactions are committed.
-- Where a job reads one dataset, the publications come one after the other. Where it reads several,
-- and for what sources send, the transactions do, by locks of which a job has 64. And a job's
-- backfills wait for all who route to it, and they for the backfill: the first lock, which all but
-- the backfill share. That holds also for what is read until the cut-over, as it was defined.
-- A job that waits for all of its inputs needs the order too, or two inputs that come at once would
-- both miss the other. What has no partition is the last that any partition may wait for, so whoever
-- routes it has the first lock alone. So has whoever routes to a job that looks back: what is new is
-- news for later partitions too, and must not miss one of them that is just being made.
-- Says of which datasets a job with a limit reads, for whose queue there may be no room.
SELECT CASE places.kind
           WHEN 1 THEN pg_advisory_xact_lock_shared(1885697108, places.place)
           WHEN 2 THEN pg_advisory_xact_lock(1885697108, places.place)
           ELSE pg_advisory_xact_lock(1885697107, places.place) END,
       places.limited
FROM (
    WITH versions AS MATERIALIZED (
        SELECT dag_version_id FROM dag_current
        UNION
        SELECT max(dag_job.dag_version_id)
        FROM generation AS next
        JOIN generation AS served
            ON served.dataset_id = next.dataset_id AND served.state = 'current'
        JOIN dag_job ON dag_job.generation = served.version
        WHERE next.state = 'building'
        GROUP BY dag_job.generation
    ), reached AS MATERIALIZED (
        SELECT DISTINCT edge.job_id, edge.dataset_id, hashtext(coalesce(event.partition_key, '')) & 63 AS place,
               event.revision IS NULL OR waits.is_all OR EXISTS (
                   SELECT FROM edge AS other
                   WHERE other.dag_version_id = edge.dag_version_id AND other.job_id = edge.job_id
                     AND other.is_trigger AND other.dataset_id <> edge.dataset_id) AS is_ordered,
               waits.is_all AND event.partition_key IS NULL OR edge.lookback IS NOT NULL AS is_alone
        FROM event
        JOIN edge ON edge.dataset_id = event.dataset_id AND edge.is_trigger
            AND edge.dag_version_id IN (SELECT dag_version_id FROM versions)
        JOIN dag_job USING (dag_version_id, job_id)
        JOIN job_definition AS definition ON definition.id = dag_job.definition_id
        CROSS JOIN LATERAL (
            SELECT coalesce(definition.body ->> 'when', 'any') = 'all' AS is_all
        ) AS waits
        WHERE event.seq = ANY (%(events)s::bigint[])
    )
    SELECT CASE WHEN bool_or(is_alone) THEN 2 ELSE 1 END AS kind, job_id AS place, 1 AS turn,
           CASE WHEN (SELECT max_queue_depth FROM job WHERE id = job_id) IS NOT NULL
                THEN array_agg(DISTINCT dataset_id::text) END AS limited
    FROM reached
    GROUP BY job_id
    UNION ALL
    SELECT DISTINCT 3, job_id * 64 + place, 2, NULL::text[] FROM reached WHERE is_ordered
    ORDER BY turn, place
    OFFSET 0
) AS places

-- name: lock_reader
-- Of one job, by a backfill that makes tasks for it: see above.
SELECT pg_advisory_xact_lock(1885697108, job_id) FROM job_definition WHERE id = %(definition)s
