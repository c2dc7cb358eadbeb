-- Events that are brought, for penstock.dispatcher.router: judged, given their ranges, kept, found
-- again.

-- name: judge_datasets
-- What is known of the datasets that events tell of, and who has paused their sources.
SELECT asked.dataset_id::text AS dataset, asked.generation::text,
       CASE
           WHEN generation.version IS NULL THEN 'This generation is not known.'
           WHEN generation.state NOT IN ('building', 'current')
               THEN 'This generation is ' || generation.state || '.'
           WHEN NOT EXISTS (
               SELECT
               FROM dag_current
               JOIN dag_job USING (dag_version_id)
               WHERE dag_job.job_id = dataset.job_id)
               THEN 'No job of the DAG writes this dataset.'
       END AS why_not,
       (SELECT string_agg(pause.reason, ' ' ORDER BY pause.cause)
        FROM dag_current
        JOIN dag_job USING (dag_version_id)
        JOIN job_definition AS definition ON definition.id = dag_job.definition_id
        JOIN pause ON pause.job_id = dag_job.job_id
        WHERE dag_job.job_id = dataset.job_id
          AND (pause.scope = 'all' OR definition.priority = 'bulk')) AS paused,
       -- Whether ranges are of any interest here, so that nobody else pays for them.
       EXISTS (
           SELECT
           FROM dag_current
           JOIN dag_job USING (dag_version_id)
           JOIN job_definition AS definition ON definition.id = dag_job.definition_id
           WHERE definition.runtime = 'dispatcher'
              OR dag_job.job_id = dataset.job_id
                  AND definition.body -> 'source' ->> 'emits' = 'interval')
       OR EXISTS (
           SELECT FROM dag_current JOIN edge USING (dag_version_id) WHERE edge.lookback IS NOT NULL)
       OR EXISTS (
           SELECT
           FROM generation AS live
           JOIN event ON event.generation::text = live.version::text
           WHERE live.dataset_id = asked.dataset_id AND live.state IN ('building', 'current')
             AND event.range_start IS NOT NULL) AS is_ranged
FROM (
    SELECT DISTINCT *
    FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]) AS asked(dataset_id, generation)
) AS asked
JOIN dataset ON dataset.id = asked.dataset_id
LEFT JOIN generation
    ON generation.dataset_id = asked.dataset_id AND generation.version = asked.generation

-- name: known_ranges
-- What is known of events that came without a range: the range that their partition has, by the
-- latest of its last events that had one, in their own generation or else in the other that is
-- live; and whether they are kept already.
SELECT asked.place, known.range_start AS start, known.range_end AS end,
       EXISTS (
           SELECT FROM event
           WHERE event.dataset_id = asked.dataset_id AND event.generation = asked.generation
             AND event.dedupe = asked.dedupe) AS is_kept
FROM jsonb_to_recordset(%(events)s) AS asked(
    place integer, dataset_id uuid, generation uuid, partition_key text, dedupe text)
LEFT JOIN LATERAL (
    SELECT lately.range_start, lately.range_end
    FROM generation
    CROSS JOIN LATERAL (
        SELECT event.seq, event.range_start, event.range_end
        FROM event
        WHERE event.partition_key = asked.partition_key
          AND event.dataset_id = asked.dataset_id AND event.generation = generation.version
        ORDER BY event.seq DESC
        LIMIT 20
    ) AS lately
    WHERE generation.dataset_id = asked.dataset_id AND generation.state IN ('building', 'current')
      AND lately.range_start IS NOT NULL
    ORDER BY generation.version = asked.generation DESC, lately.seq DESC
    LIMIT 1
) AS known ON true

-- name: range_readers
-- Of events without a range: what their job says as a source, and who works on ranges of those that
-- they lead to in the DAG in force: range operators, and jobs that look back. What a task of Spark makes has the partition of the task, and no other;
-- functions may publish ranges of their own, so that it is not sure what becomes of theirs. Neither
-- is it where a filter stops what has no range.
WITH RECURSIVE asked AS MATERIALIZED (
    SELECT *
    FROM jsonb_to_recordset(%(events)s) AS asked(
        place integer, dataset_id uuid, partition_key text, cursor bigint)
), in_force AS MATERIALIZED (
    SELECT dag_job.dag_version_id, dag_job.job_id, job.name, definition.runtime,
           definition.operator, definition.body,
           EXISTS (
               SELECT FROM edge
               WHERE edge.dag_version_id = dag_job.dag_version_id
                 AND edge.job_id = dag_job.job_id AND edge.lookback IS NOT NULL) AS looks_back
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job ON job.id = dag_job.job_id
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
), followed AS (
    SELECT asked.place, asked.partition_key, asked.cursor, NULL::integer AS job_id,
           asked.dataset_id, true AS is_sure
    FROM asked
    UNION
    SELECT followed.place, followed.partition_key, followed.cursor, reader.job_id, output.id,
           followed.is_sure AND edge.is_trigger
           AND (from_job.runtime = 'spark' OR followed.job_id IS NULL)
           AND (edge.filter IS NULL OR penstock_passes(
               edge.filter, followed.partition_key, NULL, NULL, followed.cursor))
    FROM followed
    LEFT JOIN in_force AS from_job ON from_job.job_id = followed.job_id
    -- What is only looked back at makes nothing run, and is found by its range all the same.
    JOIN edge ON edge.dataset_id = followed.dataset_id
        AND (edge.is_trigger OR edge.lookback IS NOT NULL)
        AND edge.dag_version_id = (SELECT dag_version_id FROM dag_current)
    JOIN in_force AS reader ON reader.job_id = edge.job_id
    LEFT JOIN dataset AS output
        ON output.job_id = reader.job_id AND reader.runtime <> 'dispatcher' AND edge.is_trigger
)
SELECT asked.place, source.body -> 'source' AS source, readers.readers
FROM asked
JOIN dataset ON dataset.id = asked.dataset_id
LEFT JOIN in_force AS source ON source.job_id = dataset.job_id
CROSS JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
               'job', found.name, 'operator', found.operator, 'size', found.size,
               'is_sure', found.is_sure) ORDER BY found.name) AS readers
    FROM (
        SELECT reader.name,
               CASE WHEN reader.looks_back THEN 'lookback' ELSE reader.operator END AS operator,
               CASE WHEN reader.looks_back THEN '"day"' ELSE reader.body -> 'config' -> 'size' END
                   AS size,
               bool_or(followed.is_sure) AS is_sure
        FROM followed
        JOIN in_force AS reader ON reader.job_id = followed.job_id
        WHERE followed.place = asked.place
          AND (reader.runtime = 'dispatcher' OR reader.looks_back)
        GROUP BY reader.name, reader.operator, reader.body, reader.looks_back
    ) AS found
) AS readers

-- name: looked_at
-- Datasets that jobs of the DAG in force look back at, and what leads to them.
WITH RECURSIVE led AS (
    SELECT edge.dataset_id
    FROM dag_current
    JOIN edge USING (dag_version_id)
    WHERE edge.lookback IS NOT NULL
    UNION
    SELECT edge.dataset_id
    FROM led
    JOIN dataset ON dataset.id = led.dataset_id
    CROSS JOIN dag_current
    JOIN dag_job
        ON dag_job.dag_version_id = dag_current.dag_version_id AND dag_job.job_id = dataset.job_id
    JOIN job_definition AS definition
        ON definition.id = dag_job.definition_id AND definition.runtime <> 'dispatcher'
    JOIN edge
        ON edge.dag_version_id = dag_current.dag_version_id AND edge.job_id = dataset.job_id
        AND edge.is_trigger
)
SELECT dataset_id FROM led

-- name: unranged_looked_at
-- Keys of theirs that look like parts of the calendar and have no range, a page at a time.
WITH live AS MATERIALIZED (
    SELECT dataset_id, version, dataset.job_id
    FROM generation
    JOIN dataset ON dataset.id = dataset_id
    WHERE state IN ('building', 'current') AND dataset_id = ANY (%(datasets)s::uuid[])
)
SELECT partition_key
FROM (
    SELECT publication.partition_key
    FROM live
    JOIN publication
        ON publication.dataset_id = live.dataset_id AND publication.generation = live.version
    WHERE publication.range_start IS NULL
    UNION
    SELECT event.partition_key
    FROM live
    JOIN event ON event.dataset_id = live.dataset_id AND event.generation = live.version
    WHERE event.range_start IS NULL
    UNION
    SELECT task.payload ->> 'partition_key'
    FROM live
    JOIN task ON task.job_id = live.job_id AND task.generation = live.version
    WHERE task.status IN ('queued', 'retrying', 'running') AND task.payload ->> 'start' IS NULL
) AS found
WHERE partition_key > %(after)s
  AND partition_key ~ '^[0-9]{4}(-W[0-9]{2}|-[0-9]{2}(-[0-9]{2})?)?$'
ORDER BY partition_key
LIMIT %(limit)s

-- name: range_looked_at
-- What is published, what is told of it, and what is still to be made: all of it has the range.
WITH live AS MATERIALIZED (
    SELECT dataset_id, version, dataset.job_id
    FROM generation
    JOIN dataset ON dataset.id = dataset_id
    WHERE state IN ('building', 'current') AND dataset_id = ANY (%(datasets)s::uuid[])
), implied AS MATERIALIZED (
    SELECT *
    FROM unnest(%(keys)s::text[], %(starts)s::bigint[], %(ends)s::bigint[])
        AS implied(partition_key, range_start, range_end)
), told AS (
    UPDATE event
    SET range_start = implied.range_start, range_end = implied.range_end
    FROM live
    CROSS JOIN implied
    WHERE event.dataset_id = live.dataset_id AND event.generation = live.version
      AND event.partition_key = implied.partition_key AND event.range_start IS NULL
), published AS (
    UPDATE publication
    SET range_start = implied.range_start, range_end = implied.range_end
    FROM live
    CROSS JOIN implied
    WHERE publication.dataset_id = live.dataset_id AND publication.generation = live.version
      AND publication.partition_key = implied.partition_key AND publication.range_start IS NULL
)
UPDATE task
SET payload = task.payload
    || jsonb_build_object('start', implied.range_start, 'end', implied.range_end)
FROM live
CROSS JOIN implied
WHERE task.job_id = live.job_id AND task.generation = live.version
  AND task.status IN ('queued', 'retrying', 'running')
  AND task.payload ->> 'partition_key' = implied.partition_key
  AND task.payload ->> 'start' IS NULL

-- name: keep_events
-- Numbered in the order in which they came, and kept in that of the unique key, so that two who
-- bring the same events never wait in a circle.
INSERT INTO event (
    seq, dataset_id, generation, cursor, partition_key, range_start, range_end, dedupe, task_id,
    routed, why_not, payload)
OVERRIDING SYSTEM VALUE
SELECT numbered.seq, numbered.dataset_id, numbered.generation, numbered.cursor,
       numbered.partition_key, numbered.range_start, numbered.range_end, numbered.dedupe,
       numbered.task_id, CASE WHEN numbered.why_not IS NULL THEN 'pending' ELSE 'audited' END,
       numbered.why_not, numbered.payload
FROM (
    SELECT nextval('event_seq_seq') AS seq, asked.*
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(events)s) AS said(
            place integer, dataset_id uuid, generation uuid, cursor bigint, partition_key text,
            range_start bigint, range_end bigint, dedupe text, task_id bigint, why_not text,
            payload jsonb)
        ORDER BY said.place
    ) AS asked
    OFFSET 0
) AS numbered
ORDER BY numbered.dataset_id, numbered.generation, numbered.dedupe, numbered.place
ON CONFLICT (dataset_id, generation, dedupe) DO NOTHING
RETURNING seq

-- name: find_events
SELECT asked.place, event.seq
FROM unnest(
    %(places)s::integer[], %(datasets)s::uuid[], %(generations)s::uuid[], %(dedupes)s::text[])
    AS asked(place, dataset_id, generation, dedupe)
JOIN event USING (dataset_id, generation, dedupe)
