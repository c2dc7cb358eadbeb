-- Maintenance of datasets: which partitions are due, and files that are put in the place of others.
-- For penstock.dispatcher.datasets.maintainer and penstock.dispatcher.tasks.rewrites.

-- name: maintain_rules
-- What the DAG in force says of datasets whose generation readers read: not of one that is being
-- built, or replaced by one that is.
SELECT dataset.id::text AS dataset, dataset.name, dag_job.job_id, dag_job.definition_id,
       generation.version::text AS generation, output.said -> 'maintain' AS maintain
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
JOIN dataset ON dataset.name = coalesce(output.said ->> 'dataset', output.said ->> 'name')
    AND dataset.job_id = dag_job.job_id
JOIN generation ON generation.dataset_id = dataset.id AND generation.version = dag_job.generation
    AND generation.state = 'current'
WHERE jsonb_typeof(output.said -> 'maintain') = 'object' AND definition.update_mode <> 'append'
ORDER BY dataset.name

-- name: lock_maintenance
-- Until the end of the transaction; the number is ours alone, "penu".
SELECT pg_advisory_xact_lock(1885695605, hashtext(%(name)s))

-- name: is_maintained
-- After the lock: whether a task for it waits or runs.
SELECT EXISTS (
    SELECT FROM task
    WHERE task.payload ? 'maintain' AND task.payload #>> '{maintain,dataset}' = %(name)s
      AND task.status IN ('queued', 'retrying', 'running')) AS is_maintained

-- name: due_for_maintenance
-- Partitions that have many files which are small, or that are to be clustered, those with the most
-- files first. What was rewritten at its revision is as it can be. Or, if somebody asks for it, all
-- that have several files. A task that was made for this edition is not made again, however it has
-- ended.
SELECT publication.partition_key, publication.range_start AS start, publication.range_end AS end,
       publication.revision, made.dedupe_key
FROM publication
CROSS JOIN LATERAL (
    SELECT concat_ws(':', 'maintain', publication.dataset_id, publication.edition,
                     publication.partition_key) AS dedupe_key
) AS made
WHERE publication.dataset_id = %(dataset)s::uuid
  AND publication.generation = %(generation)s::uuid
  AND publication.mode <> 'append' AND publication.manifest IS NOT NULL AND publication.rows > 0
  AND (%(partition_key)s::text IS NULL OR publication.partition_key = %(partition_key)s)
  AND publication.files > 1
  AND (%(is_asked)s
       OR publication.rewritten IS DISTINCT FROM publication.revision
          AND publication.published_at
              <= penstock_now() - %(after_ms)s::bigint * interval '1 millisecond'
          AND (%(is_clustered)s
               OR publication.files >= %(files)s::bigint
                  AND publication.bytes < publication.files * %(below)s::bigint))
  AND NOT EXISTS (
      SELECT FROM task
      WHERE task.job_id = %(job)s AND task.generation = publication.generation
        AND task.dedupe_key = made.dedupe_key)
ORDER BY publication.files DESC, publication.partition_key
LIMIT %(limit)s

-- name: maintained_parts
-- What is published of the partitions that these tasks rewrite, if it is what they were made for.
SELECT task.id AS task_id, penstock_head(publication) AS part
FROM task
JOIN dataset ON dataset.job_id = task.job_id
    AND dataset.name = task.payload #>> '{maintain,dataset}'
JOIN publication ON publication.dataset_id = dataset.id
    AND publication.generation = task.generation
    AND publication.partition_key = coalesce(task.payload #>> '{maintain,partition_key}', '')
    AND publication.revision = (task.payload #>> '{maintain,revision}')::bigint
WHERE task.id = ANY (%(tasks)s::bigint[])

-- name: rewritten_partitions
-- Which partition each of these tasks may rewrite, and what is published of it.
SELECT task.id AS task_id, dataset.id::text AS dataset,
       coalesce(task.payload #>> '{maintain,partition_key}', '') AS partition_key,
       publication.revision, publication.rows
FROM task
JOIN dataset ON dataset.job_id = task.job_id
    AND dataset.name = task.payload #>> '{maintain,dataset}'
LEFT JOIN publication ON publication.dataset_id = dataset.id
    AND publication.generation = task.generation
    AND publication.partition_key = coalesce(task.payload #>> '{maintain,partition_key}', '')
WHERE task.id = ANY (%(tasks)s::bigint[])

-- name: rewrite
-- Puts files in the place of others that have the same rows. Who published the partition meanwhile
-- has another revision, and wins: whoever waits here for one that publishes finds its revision.
WITH asked AS MATERIALIZED (
    SELECT *
    FROM jsonb_to_recordset(%(outputs)s) AS asked(
        task_id bigint, dataset_id uuid, generation uuid, partition_key text, location text,
        files bigint, rows bigint, bytes bigint, manifest text, base_revision bigint)
), held AS MATERIALIZED (
    SELECT asked.*
    FROM asked
    JOIN publication ON (publication.dataset_id, publication.generation, publication.partition_key)
        = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''))
    ORDER BY publication.dataset_id, publication.generation, publication.partition_key,
             asked.task_id
    FOR NO KEY UPDATE OF publication
), moved AS (
    UPDATE publication
    SET location = held.location, manifest = held.manifest, files = held.files,
        bytes = held.bytes, rewrites = publication.rewrites + 1, rewritten = publication.revision
    FROM held
    WHERE (publication.dataset_id, publication.generation, publication.partition_key)
        = (held.dataset_id, held.generation, coalesce(held.partition_key, ''))
      AND publication.mode <> 'append' AND publication.revision = held.base_revision
      AND publication.rows = held.rows
    RETURNING held.task_id, publication.revision
)
SELECT asked.task_id, asked.dataset_id::text AS dataset, asked.partition_key,
       CASE WHEN moved.task_id IS NULL THEN 'superseded' ELSE 'rewritten' END AS outcome,
       moved.revision
FROM asked
LEFT JOIN moved USING (task_id)
ORDER BY asked.task_id
