-- What is old and of no use any more, for penstock.dispatcher.retention. Each statement looks at some
-- rows in the order of their numbers, and says how far it came.

-- name: forget_events
-- Not what is the latest of its partition and range, or the highest cursor: whatever is built anew begins
-- there. Not what a backfill may still read, or a task that is not over.
WITH looked_at AS MATERIALIZED (
    SELECT event.*
    FROM event
    WHERE event.seq > %(after)s
    ORDER BY event.seq
    LIMIT %(limit)s
), superseded AS MATERIALIZED (
    SELECT old.seq, old.dataset_id,
           ARRAY['event:' || old.seq, 'task:' || old.task_id || ':' || old.partition_key] AS keys
    FROM looked_at AS old
    WHERE old.received_at < penstock_now() - %(days)s * interval '1 day'
      AND old.routed NOT IN ('pending', 'held', 'applying')
      AND EXISTS (
          SELECT
          FROM event AS newer
          WHERE newer.dataset_id = old.dataset_id AND newer.generation = old.generation
            AND newer.partition_key = old.partition_key AND newer.seq > old.seq
            AND (newer.range_start, newer.range_end)
                IS NOT DISTINCT FROM (old.range_start, old.range_end)
          UNION ALL
          SELECT
          FROM event AS newer
          WHERE newer.dataset_id = old.dataset_id AND newer.generation = old.generation
            AND newer.cursor IS NOT NULL AND newer.cursor >= old.cursor
            AND (newer.cursor, newer.seq) > (old.cursor, old.seq))
      AND NOT EXISTS (
          SELECT
          FROM backfill
          JOIN job_definition AS definition ON definition.id = backfill.definition_id
          JOIN edge ON edge.job_id = definition.job_id
          WHERE backfill.state IN ('running', 'paused') AND edge.dataset_id = old.dataset_id)
      AND NOT EXISTS (
          SELECT
          FROM generation
          JOIN dataset ON dataset.id = generation.dataset_id
          JOIN edge ON edge.job_id = dataset.job_id
          WHERE generation.state = 'building' AND edge.dataset_id = old.dataset_id)
), readers AS MATERIALIZED (
    SELECT DISTINCT edge.dataset_id, dag_job.job_id, dag_job.generation
    FROM edge
    JOIN dag_job USING (dag_version_id, job_id)
    WHERE edge.dataset_id IN (SELECT superseded.dataset_id FROM superseded)
), useless AS MATERIALIZED (
    SELECT superseded.seq
    FROM superseded
    WHERE NOT EXISTS (
        SELECT
        FROM readers
        CROSS JOIN unnest(superseded.keys) AS named(dedupe_key)
        JOIN task ON task.job_id = readers.job_id AND task.generation = readers.generation
            AND task.dedupe_key = named.dedupe_key
        WHERE readers.dataset_id = superseded.dataset_id
          AND task.status NOT IN ('completed', 'cancelled')
          AND (task.status <> 'dead'
               OR task.settled_at >= penstock_now() - %(dead_days)s * interval '1 day'))
      AND NOT EXISTS (
        SELECT
        FROM coalesced
        JOIN task ON task.id = coalesced.task_id
        WHERE coalesced.event_seq = superseded.seq
          AND task.status IN ('queued', 'retrying', 'running'))
), gone AS (
    DELETE FROM event
    USING useless
    WHERE event.seq = useless.seq AND event.routed NOT IN ('pending', 'held', 'applying')
    RETURNING event.seq
)
SELECT (SELECT max(seq) FROM looked_at) AS reached,
       (SELECT count(*) = %(limit)s
            AND max(received_at) < penstock_now() - %(days)s * interval '1 day'
        FROM looked_at) AS is_more,
       (SELECT count(*) FROM gone) AS gone

-- name: forget_tasks
-- Not before every event that it was made of is gone: an event without a task would be routed again
-- by a rollback. Not the latest task of a source that is always on: the next one is counted from it.
WITH looked_at AS MATERIALIZED (
    SELECT task.*
    FROM task
    WHERE task.id > %(after)s
    ORDER BY task.id
    LIMIT %(limit)s
), useless AS MATERIALIZED (
    SELECT old.id
    FROM looked_at AS old
    WHERE old.settled_at < penstock_now() - interval '1 day' * CASE
            WHEN old.status = 'dead' THEN %(dead_days)s::double precision
            ELSE %(days)s::double precision END
      AND NOT EXISTS (
          SELECT FROM backfill
          WHERE backfill.id = old.backfill_id AND backfill.state IN ('running', 'paused'))
      AND NOT EXISTS (SELECT FROM event WHERE event.seq = old.event_seq)
      AND NOT EXISTS (
          SELECT
          FROM generation
          JOIN dataset ON dataset.id = generation.dataset_id
          WHERE generation.state = 'building' AND dataset.job_id = old.job_id)
      AND NOT EXISTS (
          SELECT
          FROM coalesced
          JOIN event ON event.seq = coalesced.event_seq
          WHERE coalesced.task_id = old.id)
      -- One task for what another has published of a partition in several datasets.
      AND NOT (starts_with(old.dedupe_key, 'task:') AND EXISTS (
          SELECT
          FROM generation
          JOIN event ON event.dataset_id = generation.dataset_id
              AND event.generation = generation.version
          WHERE generation.version::text = old.payload ->> 'generation'
            AND event.partition_key = old.payload ->> 'partition_key'
            AND event.task_id::text = split_part(old.dedupe_key, ':', 2)))
      AND NOT (starts_with(old.dedupe_key, 'source:') AND NOT EXISTS (
          SELECT
          FROM task AS newer
          WHERE newer.job_id = old.job_id AND newer.id > old.id
            AND newer.generation = old.generation AND starts_with(newer.dedupe_key, 'source:')))
), gone AS (
    DELETE FROM task
    USING useless
    WHERE task.id = useless.id AND task.status IN ('completed', 'cancelled', 'dead')
    RETURNING task.id
)
SELECT (SELECT max(id) FROM looked_at) AS reached,
       (SELECT count(*) = %(limit)s
            AND max(created_at) < penstock_now() - %(days)s * interval '1 day'
        FROM looked_at) AS is_more,
       (SELECT count(*) FROM gone) AS gone

-- name: forget_workers
DELETE FROM worker WHERE last_seen_at < penstock_now() - %(days)s * interval '1 day'

-- name: forget_audit
WITH looked_at AS MATERIALIZED (
    SELECT id, last_at
    FROM audit
    WHERE id > %(after)s
    ORDER BY id
    LIMIT %(limit)s
), gone AS (
    DELETE FROM audit
    USING looked_at
    WHERE audit.id = looked_at.id
      AND audit.last_at < penstock_now() - %(days)s * interval '1 day'
    RETURNING audit.id
)
SELECT (SELECT max(id) FROM looked_at) AS reached,
       (SELECT count(*) = %(limit)s
            AND max(last_at) < penstock_now() - %(days)s * interval '1 day'
        FROM looked_at) AS is_more,
       (SELECT count(*) FROM gone) AS gone
