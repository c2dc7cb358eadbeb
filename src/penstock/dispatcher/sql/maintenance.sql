-- Maintenance of datasets: which partitions are due, and files that are put in the place of others.
-- For penstock.dispatcher.datasets.maintainer and penstock.dispatcher.tasks.rewrites.

-- name: maintain_rules
-- What the DAG in force says of datasets whose generation readers read: not of one that is being
-- built, or replaced by one that is.
SELECT dataset.id::text AS dataset, dataset.name, dag_job.job_id, dag_job.definition_id,
       generation.version::text AS generation, output.said -> 'maintain' AS maintain,
       definition.update_mode = 'append' AS is_appended
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
JOIN dataset ON dataset.name = coalesce(output.said ->> 'dataset', output.said ->> 'name')
    AND dataset.job_id = dag_job.job_id
JOIN generation ON generation.dataset_id = dataset.id AND generation.version = dag_job.generation
    AND generation.state = 'current'
WHERE jsonb_typeof(output.said -> 'maintain') = 'object'
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

-- name: hold_runs
-- Until the end of the transaction no task is given changes of this generation; all that were are seen
-- by the next statement. The number is ours alone, "penv": see hold_positions.
SELECT pg_advisory_xact_lock(1885695606, hashtext(%(generation)s))

-- name: runs_to_compact
-- Of partitions that are appended to: runs of parts, consecutive by their revisions, that are worth
-- to be put together, those with the most files first. What has one revision is one unit, and so is
-- what was put together before. A run ends where a unit is unfit, where a consumer is, and where it
-- becomes large. It is worth it by the files that are new: each run takes so many of them in, and
-- what was put together is taken in again only as long as it is less than a file is to have. Or, if
-- somebody asks for it, whatever is in several files. The key names what the run begins with, and
-- the power of two of its units: if its task is dead, it is tried again when it has grown twofold.
WITH units AS MATERIALIZED (
    SELECT partition_key, part.first_revision, part.revision, part.is_compacted,
           sum(part.files) AS files, sum(part.bytes) AS bytes, count(*) AS parts,
           min(part.task_id) AS task_id,
           bool_and(part.manifest IS NOT NULL AND part.rows IS NOT NULL AND part.files IS NOT NULL
                    AND part.bytes IS NOT NULL)
           AND (%(is_asked)s
                OR max(part.appended_at)
                       <= penstock_now() - %(after_ms)s::bigint * interval '1 millisecond'
                   AND sum(part.bytes) < %(below)s::bigint
                       * CASE WHEN part.is_compacted THEN 1 ELSE greatest(sum(part.files), 1) END)
               AS is_fit
    FROM publication
    JOIN part USING (dataset_id, generation, partition_key)
    WHERE publication.dataset_id = %(dataset)s::uuid
      AND publication.generation = %(generation)s::uuid
      AND publication.mode = 'append' AND NOT starts_with(publication.location, 'range:')
      AND (%(partition_key)s::text IS NULL OR partition_key = %(partition_key)s)
      AND coalesce(publication.files, %(files)s) >= CASE WHEN %(is_asked)s THEN 2 ELSE %(files)s END
    GROUP BY partition_key, part.first_revision, part.revision, part.is_compacted
), followed AS (
    SELECT units.*, lag(revision) OVER sequence AS before,
           coalesce(lag(is_fit) OVER sequence, false) AS is_after_fit
    FROM units
    WINDOW sequence AS (PARTITION BY partition_key ORDER BY revision)
), joined AS (
    SELECT followed.*,
           count(*) FILTER (WHERE NOT is_after_fit OR EXISTS (
               SELECT FROM penstock_cuts(%(generation)s::uuid) AS cuts
               WHERE cuts.partition_key = followed.partition_key
                 AND cuts.revision >= followed.before
                 AND cuts.revision < followed.first_revision))
               OVER (PARTITION BY partition_key ORDER BY revision) AS run
    FROM followed
    WHERE is_fit
), bounded AS (
    SELECT joined.*,
           div(sum(parts) OVER upto - 1, %(parts_max)s) AS by_parts,
           div(sum(bytes) OVER upto - bytes, %(bytes_max)s) AS by_bytes
    FROM joined
    WINDOW upto AS (PARTITION BY partition_key, run ORDER BY revision)
), runs AS (
    SELECT partition_key, min(first_revision) AS first_revision, max(revision) AS revision,
           sum(files) AS files,
           (array_agg(task_id ORDER BY revision))[1] || '+' || floor(log(2, count(*))) AS name
    FROM bounded
    GROUP BY partition_key, run, by_parts, by_bytes
    HAVING CASE WHEN %(is_asked)s THEN sum(files) > 1
                ELSE coalesce(sum(files) FILTER (WHERE NOT is_compacted), 0) >= %(files)s END
)
SELECT runs.partition_key, publication.range_start AS start, publication.range_end AS end,
       runs.first_revision, runs.revision, made.dedupe_key
FROM runs
JOIN publication ON publication.dataset_id = %(dataset)s::uuid
    AND publication.generation = %(generation)s::uuid
    AND publication.partition_key = runs.partition_key
CROSS JOIN LATERAL (
    SELECT concat_ws(':', 'compact', publication.dataset_id, runs.name, runs.partition_key)
        AS dedupe_key
) AS made
WHERE NOT EXISTS (
    SELECT FROM task
    WHERE task.job_id = %(job)s AND task.generation = publication.generation
      AND task.dedupe_key = made.dedupe_key)
ORDER BY runs.files DESC, runs.partition_key, runs.revision
LIMIT %(limit)s

-- name: maintained_parts
-- What is published of the partitions that these tasks rewrite, if it is what they were made for. Of a
-- run of parts these are all of it, with the number of rewritings as their revision.
SELECT task.id AS task_id, jsonb_build_array(penstock_head(publication)) AS parts
FROM task
JOIN dataset ON dataset.job_id = task.job_id
    AND dataset.name = task.payload #>> '{maintain,dataset}'
JOIN publication ON publication.dataset_id = dataset.id
    AND publication.generation = task.generation
    AND publication.partition_key = coalesce(task.payload #>> '{maintain,partition_key}', '')
    AND publication.revision = (task.payload #>> '{maintain,revision}')::bigint
WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.payload #> '{maintain,first}' IS NULL
UNION ALL
SELECT task.id, jsonb_agg(
           jsonb_strip_nulls(jsonb_build_object(
               'location', part.location, 'partition_key', nullif(part.partition_key, ''),
               'start', publication.range_start, 'end', publication.range_end,
               'revision', publication.rewrites, 'append_key', part.append_key,
               'manifest', part.manifest, 'rows', part.rows, 'bytes', part.bytes))
           ORDER BY part.revision, part.appended_at, part.task_id, part.append_key)
FROM task
JOIN dataset ON dataset.job_id = task.job_id
    AND dataset.name = task.payload #>> '{maintain,dataset}'
CROSS JOIN LATERAL (
    SELECT (task.payload #>> '{maintain,first}')::bigint AS first,
           (task.payload #>> '{maintain,revision}')::bigint AS last
) AS run
JOIN publication ON publication.dataset_id = dataset.id
    AND publication.generation = task.generation
    AND publication.partition_key = coalesce(task.payload #>> '{maintain,partition_key}', '')
JOIN part ON part.dataset_id = publication.dataset_id AND part.generation = publication.generation
    AND part.partition_key = publication.partition_key
    AND part.revision >= run.first AND part.first_revision <= run.last
WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.payload #> '{maintain,first}' IS NOT NULL
GROUP BY task.id
HAVING bool_and(part.first_revision >= run.first AND part.revision <= run.last)

-- name: rewritten_partitions
-- Which partition each of these tasks may rewrite, and what is published of it: of a run of parts how
-- often the partition was rewritten, and the rows of the run.
SELECT task.id AS task_id, dataset.id::text AS dataset,
       coalesce(task.payload #>> '{maintain,partition_key}', '') AS partition_key,
       CASE WHEN run.first IS NULL THEN publication.revision ELSE publication.rewrites END
           AS revision,
       CASE WHEN run.first IS NULL THEN publication.rows ELSE (
           SELECT sum(part.rows)::bigint
           FROM part
           WHERE part.dataset_id = publication.dataset_id
             AND part.generation = publication.generation
             AND part.partition_key = publication.partition_key
             AND part.first_revision >= run.first AND part.revision <= run.last) END AS rows
FROM task
JOIN dataset ON dataset.job_id = task.job_id
    AND dataset.name = task.payload #>> '{maintain,dataset}'
CROSS JOIN LATERAL (
    SELECT (task.payload #>> '{maintain,first}')::bigint AS first,
           (task.payload #>> '{maintain,revision}')::bigint AS last
) AS run
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

-- name: hold_rewritten
-- The partitions of these outputs, until the end of the transaction: who appends to one waits, and the next
-- statement sees what was appended.
SELECT
FROM jsonb_to_recordset(%(outputs)s) AS asked(
    dataset_id uuid, generation uuid, partition_key text)
JOIN publication ON (publication.dataset_id, publication.generation, publication.partition_key)
    = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''))
ORDER BY publication.dataset_id, publication.generation, publication.partition_key
FOR NO KEY UPDATE OF publication

-- name: rewrite_runs
-- After hold_rewritten: puts files in the place of those of runs of parts. Only if nobody has rewritten
-- something of the partition since the parts were given, they are all there, and no consumer is
-- between them. What was appended meanwhile is in none of the runs, and stays.
WITH asked AS MATERIALIZED (
    SELECT asked.*, (task.payload #>> '{maintain,first}')::bigint AS first,
           (task.payload #>> '{maintain,revision}')::bigint AS last
    FROM jsonb_to_recordset(%(outputs)s) AS asked(
        task_id bigint, attempt integer, dataset_id uuid, generation uuid, partition_key text,
        location text, files bigint, rows bigint, bytes bigint, manifest text,
        base_revision bigint)
    JOIN task ON task.id = asked.task_id
), given AS MATERIALIZED (
    SELECT DISTINCT ON (publication.dataset_id, publication.generation, publication.partition_key)
           asked.task_id, asked.attempt, publication.dataset_id, publication.generation,
           publication.partition_key, asked.first, asked.last, asked.location, asked.files,
           asked.rows, asked.bytes, asked.manifest, run.files AS old_files,
           run.bytes AS old_bytes, run.append_key, run.appended_at, run.is_latest
    FROM asked
    JOIN publication ON (publication.dataset_id, publication.generation, publication.partition_key)
        = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''))
    CROSS JOIN LATERAL (
        SELECT sum(part.files) AS files, sum(part.rows) AS rows, sum(part.bytes) AS bytes,
               bool_and(part.first_revision >= asked.first AND part.revision <= asked.last)
                   AS is_whole,
               bool_or(part.location = publication.location) AS is_latest,
               max(part.appended_at) AS appended_at,
               (array_agg(part.append_key
                    ORDER BY part.revision DESC, part.appended_at DESC, part.append_key))[1]
                   AS append_key
        FROM part
        WHERE part.dataset_id = publication.dataset_id
          AND part.generation = publication.generation
          AND part.partition_key = publication.partition_key
          AND part.revision >= asked.first AND part.first_revision <= asked.last
    ) AS run
    WHERE publication.mode = 'append' AND publication.rewrites = asked.base_revision
      AND run.is_whole AND run.rows = asked.rows
      AND NOT EXISTS (
          SELECT FROM penstock_cuts(asked.generation) AS cuts
          WHERE cuts.partition_key = publication.partition_key
            AND cuts.revision >= asked.first AND cuts.revision < asked.last)
    ORDER BY publication.dataset_id, publication.generation, publication.partition_key,
             asked.task_id
), covered AS (
    UPDATE appended
    SET compacted_by = given.task_id
    FROM given, appended AS old
    WHERE (appended.dataset_id, appended.generation, appended.partition_key)
        = (given.dataset_id, given.generation, given.partition_key)
      AND appended.revision BETWEEN given.first AND given.last
      AND (old.dataset_id, old.generation, old.partition_key, old.append_key)
        = (appended.dataset_id, appended.generation, appended.partition_key, appended.append_key)
    RETURNING given.task_id,
              CASE WHEN old.compacted_by IS NULL THEN appended.place END AS place
), replaced AS (
    DELETE FROM compacted
    USING given
    WHERE (compacted.dataset_id, compacted.generation, compacted.partition_key)
        = (given.dataset_id, given.generation, given.partition_key)
      AND compacted.first_revision >= given.first AND compacted.revision <= given.last
    RETURNING given.task_id, compacted.place
), made AS (
    INSERT INTO compacted (
        dataset_id, generation, partition_key, task_id, attempt, first_revision, revision,
        append_key, appended_at, location, files, rows, bytes, manifest)
    SELECT dataset_id, generation, partition_key, task_id, attempt, first, last, append_key,
           appended_at, location, files, rows, bytes, manifest
    FROM given
), moved AS (
    UPDATE publication
    SET location = CASE WHEN given.is_latest THEN given.location ELSE publication.location END,
        manifest = CASE WHEN given.is_latest THEN given.manifest ELSE publication.manifest END,
        files = publication.files - given.old_files + given.files,
        bytes = publication.bytes - given.old_bytes + given.bytes,
        rewrites = publication.rewrites + 1, rewritten = publication.revision
    FROM given
    WHERE (publication.dataset_id, publication.generation, publication.partition_key)
        = (given.dataset_id, given.generation, given.partition_key)
    RETURNING given.task_id, publication.dataset_id, publication.generation,
              publication.partition_key, publication.revision, publication.edition
), left_behind AS (
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT DISTINCT former.place, moved.dataset_id, moved.generation, moved.partition_key,
           moved.edition
    FROM (SELECT * FROM covered UNION ALL SELECT * FROM replaced) AS former
    JOIN moved USING (task_id)
    WHERE former.place IS NOT NULL
    ORDER BY 1, 2, 3, 4
    ON CONFLICT (place, dataset_id, generation, partition_key) DO UPDATE
    SET revision = excluded.revision, left_at = excluded.left_at, confirmed_at = NULL
)
SELECT asked.task_id, asked.dataset_id::text AS dataset, asked.partition_key,
       CASE WHEN moved.task_id IS NULL THEN 'superseded' ELSE 'rewritten' END AS outcome,
       moved.revision
FROM asked
LEFT JOIN moved USING (task_id)
ORDER BY asked.task_id
