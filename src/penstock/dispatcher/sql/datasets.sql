-- Datasets as files: what readers without Postgres are told, what may be swept, what is kept. For
-- penstock.dispatcher.datasets.

-- name: unprojected_partitions
-- Of a generation, by key: what is published or was removed, and is not known to be written. What
-- readers are told as the revision is the edition.
SELECT dataset.name AS dataset, found.partition_key, found.range_start AS start,
       found.range_end AS end, found.revision,
       CASE
           WHEN found.mode = 'append' THEN (
               SELECT coalesce(jsonb_agg(jsonb_build_object(
                          'location', part.location, 'manifest', part.manifest,
                          'rows', part.rows, 'bytes', part.bytes)
                      ORDER BY part.appended_at, part.task_id, part.append_key), '[]')
               FROM part
               WHERE part.dataset_id = dataset.id
                 AND part.generation = %(generation)s::uuid
                 AND part.partition_key = found.partition_key)
           WHEN found.mode IS NOT NULL THEN jsonb_build_array(jsonb_build_object(
               'location', found.location, 'manifest', found.manifest, 'rows', found.rows,
               'bytes', found.bytes))
           ELSE '[]'
       END AS parts
FROM dataset
CROSS JOIN LATERAL (
    (SELECT partition_key, range_start, range_end, edition AS revision, mode, location, manifest,
            rows, bytes
     FROM publication
     WHERE publication.dataset_id = dataset.id
       AND publication.generation = %(generation)s::uuid
       AND projected < edition AND NOT starts_with(location, 'range:')
       AND (%(after)s::text IS NULL OR partition_key > %(after)s)
     ORDER BY partition_key
     LIMIT %(limit)s)
    UNION ALL
    (SELECT partition_key, range_start, range_end, revision, NULL, NULL, NULL, NULL, NULL
     FROM removed
     WHERE removed.dataset_id = dataset.id AND removed.generation = %(generation)s::uuid
       AND projected < revision AND (%(after)s::text IS NULL OR partition_key > %(after)s)
       AND NOT EXISTS (
           SELECT FROM publication
           WHERE (publication.dataset_id, publication.generation, publication.partition_key)
               = (removed.dataset_id, removed.generation, removed.partition_key))
     ORDER BY partition_key
     LIMIT %(limit)s)
) AS found
WHERE dataset.id = %(dataset)s::uuid
ORDER BY found.partition_key
LIMIT %(limit)s

-- name: confirm_partitions
-- These revisions, at least, are written: readers are sent to nothing that had left before them.
-- What is forgotten with the server is found and written down again.
WITH asked AS MATERIALIZED (
    SELECT *, set_config('synchronous_commit', 'off', true)
    FROM unnest(%(keys)s::text[], %(revisions)s::bigint[]) AS asked(partition_key, revision)
), published AS (
    UPDATE publication
    SET projected = least(asked.revision, publication.edition)
    FROM asked
    WHERE publication.dataset_id = %(dataset)s::uuid
      AND publication.generation = %(generation)s::uuid
      AND publication.partition_key = asked.partition_key
      AND publication.projected < least(asked.revision, publication.edition)
), emptied AS (
    UPDATE removed
    SET projected = least(asked.revision, removed.revision)
    FROM asked
    WHERE removed.dataset_id = %(dataset)s::uuid
      AND removed.generation = %(generation)s::uuid
      AND removed.partition_key = asked.partition_key
      AND removed.projected < least(asked.revision, removed.revision)
)
UPDATE departed
SET confirmed_at = penstock_now()
FROM asked
WHERE departed.dataset_id = %(dataset)s::uuid
  AND departed.generation = %(generation)s::uuid
  AND departed.partition_key = asked.partition_key
  AND departed.revision <= asked.revision AND departed.confirmed_at IS NULL

-- name: project_again
-- There is more to write of a generation than one delivery may take.
SELECT penstock_project(ARRAY[%(dataset)s::uuid], ARRAY[%(generation)s::uuid]),
       set_config('synchronous_commit', 'off', true)

-- name: unprojected_dataset
SELECT dataset.name AS dataset, dataset.revision, generation.version::text AS generation
FROM dataset
LEFT JOIN generation ON generation.dataset_id = dataset.id AND generation.state = 'current'
WHERE dataset.id = %(dataset)s::uuid AND dataset.projected < dataset.revision

-- name: confirm_dataset
UPDATE dataset
SET projected = least(%(revision)s, revision), projected_at = penstock_now()
WHERE id = %(dataset)s::uuid AND projected < least(%(revision)s, revision)
RETURNING set_config('synchronous_commit', 'off', true)

-- name: gone_places
-- Of these folders those that nobody needs any more: no publication names them, nobody can still be
-- reading them, and their attempts are over since a while. What a task was that is not known any
-- more is over, if its number was given out at all: a later one is of another life of the database.
SELECT asked.place
FROM unnest(%(places)s::text[], %(tasks)s::bigint[], %(attempts)s::bigint[])
    AS asked(place, task_id, attempt)
LEFT JOIN task ON task.id = asked.task_id
LEFT JOIN attempt ON attempt.task_id = asked.task_id AND attempt.number = asked.attempt
WHERE CASE
          WHEN task.id IS NULL THEN asked.task_id <= (SELECT last_value FROM task_id_seq)
          ELSE attempt.ended_at <= penstock_now() - %(grace_seconds)s * interval '1 second'
      END
  AND NOT EXISTS (SELECT FROM publication WHERE publication.place = asked.place)
  AND NOT EXISTS (SELECT FROM part WHERE part.place = asked.place)
  AND NOT EXISTS (
      SELECT FROM buffer_batch
      WHERE buffer_batch.place = asked.place AND buffer_batch.state <> 'done')
  AND NOT penstock_is_read(asked.place, %(grace_seconds)s)
  AND NOT penstock_is_shown(asked.place)

-- name: forget_departed
-- Those that were left long ago: that nobody names them is enough to know from now on.
WITH old AS MATERIALIZED (
    SELECT place, dataset_id, generation, partition_key
    FROM departed
    WHERE confirmed_at <= penstock_now() - %(days)s * interval '1 day'
    ORDER BY confirmed_at
    LIMIT %(limit)s
)
DELETE FROM departed
USING old
WHERE (departed.place, departed.dataset_id, departed.generation, departed.partition_key)
    = (old.place, old.dataset_id, old.generation, old.partition_key)
  AND NOT penstock_is_read(departed.place, 86400)

-- name: keep_rules
-- What the DAG in force says of how much is kept, by dataset.
SELECT dataset.id::text AS dataset, dataset.name, output.said -> 'keep' AS keep
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
JOIN dataset ON dataset.name = coalesce(output.said ->> 'dataset', output.said ->> 'name')
    AND dataset.job_id = dag_job.job_id
WHERE jsonb_typeof(output.said -> 'keep') = 'object'
ORDER BY dataset.name

-- name: hold_current
-- The generation that readers read. Until the end of the transaction nobody publishes in it: see
-- hold_outputs.
SELECT generation.version::text AS generation,
       pg_advisory_xact_lock(1885695604, hashtext(generation.version::text))
FROM generation
WHERE generation.dataset_id = %(dataset)s::uuid AND generation.state = 'current'

-- name: partitions_to_drop
-- After the lock. Those of ranges are counted by their ranges, others by when they were published.
-- Not what has no key, for that is all there is. Not what waits to be routed, or what a task reads that
-- waits or runs, and nothing at all while a backfill may read it.
WITH readers AS MATERIALIZED (
    SELECT DISTINCT dag_job.generation, edge.reads, edge.lookback
    FROM edge
    JOIN dag_job USING (dag_version_id, job_id)
    WHERE edge.dataset_id = %(dataset)s::uuid
), reading AS MATERIALIZED (
    SELECT DISTINCT readers.reads, task.payload ->> 'partition_key' AS partition_key,
           penstock_shifted((task.payload ->> 'start')::bigint, -coalesce(readers.lookback, 0))
               AS range_start,
           (task.payload ->> 'end')::bigint AS range_end
    FROM readers
    JOIN task ON task.generation = readers.generation
        AND task.status IN ('queued', 'retrying', 'running')
), counted AS MATERIALIZED (
    SELECT partition_key, range_start, range_end, published_at,
           row_number() OVER (
               ORDER BY range_end DESC NULLS LAST, published_at DESC, partition_key DESC) AS place
    FROM publication
    WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
      AND partition_key <> ''
)
SELECT counted.partition_key
FROM counted
JOIN generation ON generation.dataset_id = %(dataset)s::uuid
    AND generation.version = %(generation)s::uuid AND generation.state = 'current'
WHERE (counted.place > %(partitions)s::bigint
       OR counted.published_at < penstock_now() - %(age_ms)s::bigint * interval '1 millisecond')
  AND NOT EXISTS (
      SELECT FROM reading
      WHERE reading.reads IN ('all', 'changes') OR reading.partition_key = counted.partition_key
         OR (reading.range_start <= counted.range_start
             AND counted.range_end <= reading.range_end))
  AND NOT EXISTS (
      SELECT FROM event
      WHERE event.dataset_id = %(dataset)s::uuid AND event.generation = %(generation)s::uuid
        AND event.partition_key = counted.partition_key
        AND event.routed IN ('pending', 'held', 'applying'))
  AND NOT EXISTS (
      SELECT FROM backfill
      WHERE backfill.state IN ('running', 'paused')
        AND backfill.generation IN (SELECT readers.generation FROM readers))
ORDER BY counted.place DESC
LIMIT %(limit)s

-- name: drop_partition_events
-- What is built anew is built of what there is.
DELETE FROM event
WHERE event.dataset_id = %(dataset)s::uuid AND event.generation = %(generation)s::uuid
  AND event.partition_key = ANY (%(keys)s::text[]) AND event.revision IS NOT NULL

-- name: drop_partitions
DELETE FROM publication
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND partition_key = ANY (%(keys)s::text[])

-- name: generations_to_drop
-- Those that have left for a while, of which every dataset has had enough by its rule. Nothing that
-- is live reads them, or a task that waits or runs, and none of those is theirs; and readers without
-- Postgres are told since a while that another is current. With the lock of the deployment, what is
-- seen here stays so.
WITH rules AS MATERIALIZED (
    SELECT * FROM unnest(
        %(datasets)s::uuid[], %(generations)s::bigint[], %(ages_ms)s::bigint[])
        AS rules(dataset_id, generations, age_ms)
), counted AS MATERIALIZED (
    SELECT generation.*,
           row_number() OVER (
               PARTITION BY generation.dataset_id
               ORDER BY generation.state = 'current' DESC, generation.changed_at DESC,
                        generation.version) AS place
    FROM generation
    WHERE generation.state <> 'building'
      AND generation.dropped_at IS DISTINCT FROM generation.changed_at
), live AS MATERIALIZED (
    SELECT dataset.job_id, generation.version AS generation
    FROM generation
    JOIN dataset ON dataset.id = generation.dataset_id
    WHERE generation.state IN ('current', 'building')
    UNION
    SELECT dag_job.job_id, dag_job.generation
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    UNION
    SELECT DISTINCT task.job_id, task.generation
    FROM task
    WHERE task.status IN ('queued', 'retrying', 'running')
), needed AS MATERIALIZED (
    SELECT live.generation FROM live
    UNION
    SELECT inputs.generation
    FROM live
    CROSS JOIN LATERAL penstock_inputs(live.job_id, live.generation) AS inputs
    UNION
    SELECT backfill.generation FROM backfill WHERE backfill.state IN ('running', 'paused')
)
SELECT counted.version::text AS version
FROM counted
JOIN dataset ON dataset.id = counted.dataset_id
LEFT JOIN rules ON rules.dataset_id = counted.dataset_id
WHERE counted.version NOT IN (SELECT needed.generation FROM needed)
GROUP BY counted.version
HAVING bool_and(coalesce(
    counted.state IN ('retired', 'abandoned')
    AND counted.changed_at <= penstock_now() - %(grace_seconds)s * interval '1 second'
    AND dataset.projected = dataset.revision
    AND dataset.projected_at <= penstock_now() - %(grace_seconds)s * interval '1 second'
    AND (counted.place > rules.generations
         OR counted.changed_at < penstock_now() - rules.age_ms * interval '1 millisecond'), false))
ORDER BY counted.version
LIMIT %(limit)s

-- name: drop_generations
-- What comes back after this is built anew.
UPDATE generation
SET state = 'abandoned', changed_at = penstock_now(), dropped_at = penstock_now()
WHERE version = ANY (%(versions)s::uuid[]) AND state IN ('retired', 'abandoned')

-- name: dropped_generation
-- One of which something is left.
SELECT generation.dataset_id::text AS dataset, generation.version::text AS generation,
       pg_advisory_xact_lock(1885695604, hashtext(generation.version::text))
FROM generation
WHERE generation.state = 'abandoned' AND generation.dropped_at = generation.changed_at
  AND (EXISTS (
           SELECT FROM publication
           WHERE publication.dataset_id = generation.dataset_id
             AND publication.generation = generation.version)
       OR EXISTS (
           SELECT FROM generation_schema
           WHERE generation_schema.dataset_id = generation.dataset_id
             AND generation_schema.version = generation.version))
LIMIT 1

-- name: clear_generation_tasks
-- First: an event without a task is routed again if the generation comes back.
DELETE FROM task
WHERE task.id IN (
    SELECT old.id
    FROM (SELECT DISTINCT job_id FROM dag_job WHERE dag_job.generation = %(generation)s::uuid)
        AS writer
    JOIN task AS old ON old.job_id = writer.job_id AND old.generation = %(generation)s::uuid
    WHERE old.status IN ('completed', 'dead', 'cancelled')
    LIMIT %(limit)s)

-- name: clear_generation_events
-- Then: nobody is to be built of partitions that are not there. What sources have sent stays.
DELETE FROM event
WHERE event.seq IN (
    SELECT old.seq
    FROM event AS old
    WHERE old.dataset_id = %(dataset)s::uuid AND old.generation = %(generation)s::uuid
      AND old.revision IS NOT NULL
    LIMIT %(limit)s)

-- name: clear_generation
-- Last.
DELETE FROM publication
WHERE (dataset_id, generation, partition_key) IN (
    SELECT old.dataset_id, old.generation, old.partition_key
    FROM publication AS old
    WHERE old.dataset_id = %(dataset)s::uuid AND old.generation = %(generation)s::uuid
    ORDER BY old.partition_key
    LIMIT %(limit)s)

-- name: clear_generation_schema
DELETE FROM generation_schema
WHERE dataset_id = %(dataset)s::uuid AND version = %(generation)s::uuid

-- name: show_dataset
SELECT dataset.id::text AS uuid, dataset.name, job.name AS job, dataset.revision,
       dataset.projected = dataset.revision AS is_projected,
       rules.said -> 'keep' AS keep, rules.said -> 'maintain' AS maintain,
       (SELECT count(*)
        FROM (SELECT
              FROM generation
              JOIN publication ON publication.dataset_id = generation.dataset_id
                  AND publication.generation = generation.version
              WHERE generation.dataset_id = dataset.id AND generation.state = 'current'
                AND publication.projected < publication.edition
                AND NOT starts_with(publication.location, 'range:')
              LIMIT 10000) AS counted) AS unprojected
FROM dataset
LEFT JOIN job ON job.id = dataset.job_id
LEFT JOIN LATERAL (
    SELECT output.said
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
    WHERE dag_job.job_id = dataset.job_id
      AND coalesce(output.said ->> 'dataset', output.said ->> 'name') = dataset.name
    LIMIT 1
) AS rules ON true
WHERE dataset.name = %(name)s

-- name: show_generations
SELECT generation.version::text, generation.state, generation.created_at, generation.changed_at,
       generation.state = 'abandoned' AND generation.dropped_at = generation.changed_at
           IS TRUE AS is_dropped,
       held.*, coalesce(generation_schema.columns, '[]') AS columns
FROM generation
CROSS JOIN LATERAL (
    SELECT count(*) AS partitions, coalesce(sum(files), 0)::bigint AS files,
           coalesce(sum(rows), 0)::bigint AS rows, coalesce(sum(bytes), 0)::bigint AS bytes,
           count(*) FILTER (WHERE rows IS NULL AND NOT starts_with(location, 'range:')) AS unknown
    FROM publication
    WHERE publication.dataset_id = generation.dataset_id
      AND publication.generation = generation.version
) AS held
LEFT JOIN generation_schema ON generation_schema.dataset_id = generation.dataset_id
    AND generation_schema.version = generation.version
WHERE generation.dataset_id = %(dataset)s::uuid
ORDER BY generation.state NOT IN ('current', 'building'), generation.state DESC,
         generation.changed_at DESC, generation.version
LIMIT 10

-- name: snapshot
-- All parts of a generation in one statement, and so of one moment.
SELECT coalesce(piece.location, publication.location) AS location,
       nullif(publication.partition_key, '') AS partition_key,
       publication.range_start AS start, publication.range_end AS end, publication.revision,
       piece.append_key,
       CASE WHEN publication.mode = 'append' THEN piece.manifest ELSE publication.manifest END
           AS manifest,
       CASE WHEN publication.mode = 'append' THEN piece.files ELSE publication.files END AS files,
       CASE WHEN publication.mode = 'append' THEN piece.rows ELSE publication.rows END AS rows,
       CASE WHEN publication.mode = 'append' THEN piece.bytes ELSE publication.bytes END AS bytes
FROM publication
LEFT JOIN part AS piece ON publication.mode = 'append'
    AND piece.dataset_id = publication.dataset_id AND piece.generation = publication.generation
    AND piece.partition_key = publication.partition_key
WHERE publication.dataset_id = %(dataset)s::uuid
  AND publication.generation = %(generation)s::uuid
  AND (%(partition_key)s::text IS NULL OR publication.partition_key = %(partition_key)s)
  AND NOT starts_with(publication.location, 'range:')
ORDER BY publication.range_start, publication.partition_key COLLATE "C", piece.appended_at,
         piece.task_id, piece.append_key
LIMIT %(limit)s

-- name: columns_of_generation
SELECT columns
FROM generation_schema
WHERE dataset_id = %(dataset)s::uuid AND version = %(generation)s::uuid
