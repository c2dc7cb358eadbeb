-- Events that are brought, for penstock.dispatcher.routing.router: judged, kept, found again.

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
          AND (pause.scope = 'all' OR definition.priority = 'bulk')) AS paused
FROM (
    SELECT DISTINCT *
    FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]) AS asked(dataset_id, generation)
) AS asked
JOIN dataset ON dataset.id = asked.dataset_id
LEFT JOIN generation
    ON generation.dataset_id = asked.dataset_id AND generation.version = asked.generation

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
