-- Versions of the DAG and generations of datasets, for penstock.dispatcher.deployment.
-- Whoever changes the DAG holds the lock of the first statement, and then the generations that are
-- live, in the order of their keys. Backfills are moved under the same lock, shared.

-- name: take_deployment_lock
-- Until the end of the transaction. The number is ours alone: "penstocl".
SELECT pg_advisory_xact_lock(8098122302937395052)

-- name: share_deployment_lock
-- Of those who make tasks for what the DAG names, and must not be overtaken by a change of it.
SELECT pg_advisory_xact_lock_shared(8098122302937395052)

-- name: lock_live_generations
-- Routing holds the generation of its events FOR SHARE: what it has begun under the old DAG is
-- committed before the new one is.
SELECT FROM generation
WHERE state IN ('building', 'current')
ORDER BY dataset_id, version
FOR UPDATE

-- name: current_version
SELECT version.id, version.hash, version.created_at, version.source, version.files, current.since
FROM dag_current AS current
JOIN dag_version AS version ON version.id = current.dag_version_id

-- name: find_version
SELECT id, hash FROM dag_version WHERE hash = %(hash)s::text OR id = %(id)s::bigint

-- name: dag_versions
SELECT version.id, version.hash, version.created_at, current.single IS NOT NULL AS is_current,
       latest.since
FROM dag_version AS version
LEFT JOIN dag_current AS current ON current.dag_version_id = version.id
LEFT JOIN LATERAL (
    SELECT since FROM dag_in_force
    WHERE dag_in_force.dag_version_id = version.id
    ORDER BY seq DESC LIMIT 1
) AS latest ON true
ORDER BY version.id DESC
LIMIT %(limit)s

-- name: deployed_jobs
SELECT job.name, job.id AS job_id, dag_job.definition_id, dag_job.generation::text,
       coalesce(
           jsonb_object_agg(dataset.name, dataset.id) FILTER (WHERE dataset.id IS NOT NULL),
           '{}') AS outputs,
       coalesce(bool_or(generation.state = 'building'), false) AS is_building
FROM dag_job
JOIN job ON job.id = dag_job.job_id
LEFT JOIN generation ON generation.version = dag_job.generation
LEFT JOIN dataset ON dataset.id = generation.dataset_id
WHERE dag_job.dag_version_id = %(version)s
GROUP BY job.id, dag_job.definition_id, dag_job.generation
ORDER BY job.name

-- name: standing_jobs
SELECT job.name AS job, dag_job.generation::text, definition.body ->> 'lineage' AS lineage,
       -- What earlier releases asked of those that append.
       CASE WHEN definition.update_mode = 'append'
            THEN coalesce(definition.body -> 'unique_key', '[]') ELSE '[]' END AS old_key
FROM dag_job
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE dag_job.dag_version_id = %(version)s::bigint

-- name: known_queries
-- The texts of queries that lineages are of; first that which is in force, then the latest.
SELECT job.name AS job,
       coalesce(definition.body ->> 'defining_sql', definition.body -> 'config' ->> 'sql') AS sql
FROM job_definition AS definition
JOIN job ON job.id = definition.job_id
LEFT JOIN (dag_current JOIN dag_job USING (dag_version_id))
       ON dag_job.definition_id = definition.id
WHERE definition.body ->> 'operator' = 'spark.sql'
ORDER BY dag_job.definition_id IS NULL, definition.id DESC

-- name: written_datasets
-- Who wrote what in a version.
SELECT dataset.name AS dataset, job.name AS job
FROM dag_job
JOIN job ON job.id = dag_job.job_id
JOIN generation ON generation.version = dag_job.generation
JOIN dataset ON dataset.id = generation.dataset_id
WHERE dag_job.dag_version_id = %(version)s

-- name: held_generations
SELECT dataset.name AS dataset, job.name AS writer, generation.version::text, generation.state,
       generation.lineage
FROM generation
JOIN dataset ON dataset.id = generation.dataset_id
LEFT JOIN job ON job.id = dataset.job_id

-- name: retired_generations
-- Those that were current, with the generations that have fed them; what was left last comes first.
SELECT generation.version::text, job.name AS job, min(generation.lineage) AS lineage,
       ARRAY(SELECT DISTINCT inputs.generation::text
             FROM penstock_inputs(job.id, generation.version) AS inputs) AS fed
FROM generation
JOIN dataset ON dataset.id = generation.dataset_id
JOIN job ON job.id = dataset.job_id
GROUP BY generation.version, job.id
HAVING bool_and(generation.state = 'retired')
   AND count(*) = (SELECT count(*) FROM generation AS every WHERE every.version = generation.version)
ORDER BY max(generation.changed_at) DESC, generation.version

-- name: fed_jobs
-- Which jobs of a version read what which others write.
SELECT reader.name AS job, writer.name AS writer
FROM dag_job
JOIN job AS reader ON reader.id = dag_job.job_id
CROSS JOIN LATERAL penstock_feeders(dag_job.dag_version_id, dag_job.job_id) AS fed
JOIN job AS writer ON writer.id = fed.job_id
WHERE dag_job.dag_version_id = %(version)s

-- name: job_limits
SELECT id, max_concurrency FROM job

-- name: new_generations
SELECT gen_random_uuid()::text AS version FROM generate_series(1, %(count)s)

-- name: broken_work
-- What waits or runs for jobs that this change takes out, or for generations that nobody needs any
-- more. A rebuild is nobody's wish, but its tasks are work.
WITH gone AS (
    SELECT job.id
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job ON job.id = dag_job.job_id
    WHERE job.name <> ALL (%(jobs)s::text[])
), work AS (
    SELECT task.job_id, task.generation, task.status <> 'running' AS is_waiting,
           task.status = 'running' AS is_running, false AS is_backfill
    FROM task
    WHERE task.status IN ('queued', 'retrying', 'running') AND NOT task.cancel_asked
      -- What only rewrites files is no loss.
      AND NOT task.payload ? 'maintain'
      AND (task.generation = ANY (%(useless)s::uuid[]) OR task.job_id IN (SELECT id FROM gone))
    UNION ALL
    SELECT definition.job_id, backfill.generation, false, false, true
    FROM backfill
    JOIN job_definition AS definition ON definition.id = backfill.definition_id
    WHERE backfill.state IN ('running', 'paused')
      AND backfill.plan ->> 'kind' IS DISTINCT FROM 'rebuild'
      AND backfill.plan ->> 'leftover' IS NULL
      AND (backfill.generation = ANY (%(useless)s::uuid[])
           OR definition.job_id IN (SELECT id FROM gone))
)
SELECT job.name AS job, work.generation::text, count(*) FILTER (WHERE is_waiting) AS waiting,
       count(*) FILTER (WHERE is_running) AS running,
       count(*) FILTER (WHERE is_backfill) AS backfills
FROM work
JOIN job ON job.id = work.job_id
GROUP BY job.name, work.generation
ORDER BY job.name, work.generation

-- name: cancel_useless
-- What waits is cancelled, what runs is asked to stop. One that somebody has in hand at this moment
-- is left to them: to be asked is not worth waiting for while generations are locked.
WITH gone AS (
    SELECT job.id
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job ON job.id = dag_job.job_id
    WHERE job.name <> ALL (%(jobs)s::text[])
), plans AS (
    UPDATE backfill
    SET state = 'cancelled', settled_at = penstock_now()
    FROM job_definition AS definition
    WHERE definition.id = backfill.definition_id AND backfill.state IN ('running', 'paused')
      AND (backfill.generation = ANY (%(useless)s::uuid[])
           OR definition.job_id IN (SELECT id FROM gone))
), waiting AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.status IN ('queued', 'retrying')
      AND (task.generation = ANY (%(useless)s::uuid[]) OR task.job_id IN (SELECT id FROM gone))
    ORDER BY task.id
    FOR NO KEY UPDATE
), running AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.status = 'running' AND NOT task.cancel_asked
      AND (task.generation = ANY (%(useless)s::uuid[]) OR task.job_id IN (SELECT id FROM gone))
    ORDER BY task.id
    FOR NO KEY UPDATE SKIP LOCKED
), asked AS (
    UPDATE task SET cancel_asked = true, reason = %(reason)s
    FROM running
    WHERE task.id = running.id AND task.status = 'running'
), cancelled AS (
    UPDATE task SET status = 'cancelled', settled_at = penstock_now(), reason = %(reason)s
    FROM waiting
    WHERE task.id = waiting.id AND task.status IN ('queued', 'retrying')
    RETURNING task.id
)
SELECT count(*) AS cancelled FROM cancelled

-- name: write_jobs
INSERT INTO job (name, max_concurrency)
SELECT asked.name, asked.max_concurrency
FROM unnest(%(names)s::text[], %(limits)s::integer[]) AS asked(name, max_concurrency)
ORDER BY asked.name
ON CONFLICT (name) DO UPDATE SET max_concurrency = excluded.max_concurrency
WHERE job.max_concurrency IS DISTINCT FROM excluded.max_concurrency

-- name: write_datasets
INSERT INTO dataset (name, job_id)
SELECT asked.name, job.id
FROM unnest(%(datasets)s::text[], %(writers)s::text[]) AS asked(name, writer)
JOIN job ON job.name = asked.writer
ORDER BY asked.name
ON CONFLICT (name) DO UPDATE SET job_id = excluded.job_id
WHERE dataset.job_id IS DISTINCT FROM excluded.job_id

-- name: write_version
INSERT INTO dag_version (hash, source, files) VALUES (%(hash)s, %(source)s, %(files)s) RETURNING id

-- name: write_definitions
-- The datasets that a job reads and writes are added by their uuids: workers need those.
INSERT INTO job_definition (
    job_id, hash, body, runtime, operator, priority, update_mode, max_attempts, timeout_ms,
    heartbeat_ms, retry_first_ms, retry_max_ms, retry_backoff)
SELECT job.id, asked.hash,
       asked.body || jsonb_build_object('datasets', (
           SELECT coalesce(jsonb_object_agg(dataset.name, dataset.id), '{}')
           FROM dataset
           WHERE dataset.name IN (SELECT jsonb_array_elements_text(asked.datasets)))),
       asked.runtime, asked.operator, asked.priority, asked.update_mode, asked.max_attempts,
       asked.timeout_ms, asked.heartbeat_ms, asked.retry_first_ms, asked.retry_max_ms,
       asked.retry_backoff
FROM jsonb_to_recordset(%(jobs)s) AS asked(
    job text, hash text, body jsonb, datasets jsonb, runtime text, operator text, priority text,
    update_mode text, max_attempts integer, timeout_ms bigint, heartbeat_ms bigint,
    retry_first_ms bigint, retry_max_ms bigint, retry_backoff double precision)
JOIN job ON job.name = asked.job
ON CONFLICT (job_id, hash) DO NOTHING

-- name: write_dag_jobs
INSERT INTO dag_job (dag_version_id, job_id, definition_id, generation)
SELECT %(version)s, job.id, definition.id, asked.generation
FROM jsonb_to_recordset(%(jobs)s) AS asked(job text, hash text, generation uuid)
JOIN job ON job.name = asked.job
JOIN job_definition AS definition
    ON definition.job_id = job.id AND definition.hash = asked.hash

-- name: write_edges
INSERT INTO edge (dag_version_id, dataset_id, job_id, input, filter, is_trigger, reads, lookback)
SELECT %(version)s, dataset.id, job.id, asked.input, asked.filter, asked.is_trigger, asked.reads,
       asked.lookback
FROM jsonb_to_recordset(%(edges)s) AS asked(
    job text, dataset text, input text, filter jsonb, is_trigger boolean, reads text,
    lookback bigint)
JOIN job ON job.name = asked.job
JOIN dataset ON dataset.name = asked.dataset

-- name: move_generations
INSERT INTO generation (dataset_id, version, state, lineage)
SELECT dataset.id, asked.version, asked.state, asked.lineage
FROM unnest(
    %(datasets)s::text[], %(versions)s::uuid[], %(states)s::text[], %(lineages)s::text[])
    AS asked(dataset, version, state, lineage)
JOIN dataset ON dataset.name = asked.dataset
ORDER BY dataset.id, asked.version
ON CONFLICT (dataset_id, version) DO UPDATE
SET state = excluded.state, changed_at = penstock_now()

-- name: restore_version
-- What apply writes outside of versions, as an earlier version has it.
WITH jobs AS (
    UPDATE job
    SET max_concurrency = (definition.body ->> 'max_concurrency')::integer
    FROM dag_job
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE dag_job.dag_version_id = %(version)s AND job.id = dag_job.job_id
)
UPDATE dataset
SET job_id = dag_job.job_id
FROM dag_job
JOIN generation ON generation.version = dag_job.generation
WHERE dag_job.dag_version_id = %(version)s AND dataset.id = generation.dataset_id
  AND dataset.job_id IS DISTINCT FROM dag_job.job_id

-- name: previous_version
-- The one that was in force right before the one that is. Every change is to another version.
SELECT dag_version_id AS id FROM dag_in_force ORDER BY seq DESC OFFSET 1 LIMIT 1

-- name: version_source
SELECT source, files FROM dag_version WHERE id = %(id)s

-- name: point_at_version
WITH noted AS (
    INSERT INTO dag_in_force (dag_version_id) VALUES (%(version)s)
)
INSERT INTO dag_current (dag_version_id) VALUES (%(version)s)
ON CONFLICT (single) DO UPDATE SET dag_version_id = excluded.dag_version_id, since = penstock_now()

-- name: rows_of_sinks
-- Of the datasets that get one of these generations, those of which readers have another that a sink
-- writes, with rows or with batches that are to be rows: nothing makes them again.
SELECT dataset.name AS dataset, job.name AS job
FROM unnest(%(datasets)s::text[], %(versions)s::uuid[]) AS entering(name, version)
JOIN dataset ON dataset.name = entering.name
JOIN generation AS served ON served.dataset_id = dataset.id
    AND served.state = 'current' AND served.version <> entering.version
JOIN job ON job.id = dataset.job_id
WHERE EXISTS (
        SELECT
        FROM dag_job
        JOIN job_definition AS definition ON definition.id = dag_job.definition_id
        WHERE dag_job.job_id = job.id AND dag_job.generation = served.version
          AND definition.body ->> 'operator' = 'sink.write')
  AND (EXISTS (
          SELECT FROM publication
          WHERE publication.dataset_id = dataset.id AND publication.generation = served.version)
       OR EXISTS (
          SELECT FROM buffer_batch
          WHERE buffer_batch.dataset_id = dataset.id AND buffer_batch.state <> 'done'))
ORDER BY dataset.name
LIMIT 1

-- name: lock_cut_over
-- All outputs of the job that writes the dataset move together.
SELECT generation.dataset_id::text AS dataset, generation.version::text, generation.state
FROM dataset AS named
JOIN dataset AS output ON output.id = named.id OR output.job_id = named.job_id
JOIN generation
    ON generation.dataset_id = output.id AND generation.state IN ('building', 'current')
WHERE named.id = %(dataset)s
ORDER BY generation.dataset_id, generation.version
FOR UPDATE OF generation

-- name: is_dataset
SELECT FROM dataset WHERE id = %(dataset)s

-- name: cut_over_obstacles
-- After the lock, so that all that was published before it is seen. What is missing is looked for among what
-- was published since a moment, if all before it was looked at already. Upstream is everything of the
-- DAG in force that is being built too, and that this is built of: what is missing there is missing here.
WITH RECURSIVE upstream AS (
    SELECT dag_job.job_id, dag_job.generation
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    WHERE dag_job.generation = %(version)s::uuid
    UNION
    SELECT dag_job.job_id, dag_job.generation
    FROM upstream
    CROSS JOIN dag_current
    JOIN penstock_feeders(dag_current.dag_version_id, upstream.job_id) AS writer ON true
    JOIN dag_job ON dag_job.dag_version_id = dag_current.dag_version_id
        AND dag_job.job_id = writer.job_id
), pairs AS MATERIALIZED (
    SELECT next.dataset_id, served.version AS served, next.version AS next,
           next.version <> %(version)s::uuid AS is_upstream
    FROM generation AS next
    JOIN generation AS served ON served.dataset_id = next.dataset_id AND served.state = 'current'
    WHERE next.state = 'building'
      AND (next.version = %(version)s::uuid
           OR next.version IN (SELECT upstream.generation FROM upstream))
)
SELECT
    EXISTS (
        SELECT
        FROM pairs
        CROSS JOIN LATERAL penstock_lacking(
            pairs.dataset_id, pairs.served, pairs.next, %(since)s::timestamptz) AS lacking
        WHERE NOT pairs.is_upstream) AS is_uncovered,
    EXISTS (
        SELECT
        FROM pairs
        CROSS JOIN LATERAL penstock_lacking(
            pairs.dataset_id, pairs.served, pairs.next, %(since)s::timestamptz) AS lacking
        WHERE pairs.is_upstream)
    OR EXISTS (
        -- What was published by the thousand is routed a moment later.
        SELECT
        FROM pairs
        JOIN event ON event.dataset_id = pairs.dataset_id AND event.generation = pairs.next
            AND event.routed IN ('pending', 'applying') AND event.revision IS NOT NULL
        WHERE pairs.is_upstream) AS is_upstream_uncovered,
    EXISTS (
        SELECT FROM backfill
        WHERE backfill.generation = %(version)s::uuid AND backfill.state IN ('running', 'paused'))
    OR EXISTS (
        SELECT FROM task
        WHERE task.generation = %(version)s::uuid AND task.backfill_id IS NOT NULL
          AND task.status IN ('queued', 'retrying', 'running')) AS is_backfilled,
    EXISTS (
        SELECT
        FROM pairs
        JOIN backfill ON backfill.generation = pairs.next
            AND backfill.state IN ('running', 'paused')
        WHERE pairs.is_upstream)
    OR EXISTS (
        SELECT
        FROM pairs
        JOIN task ON task.generation = pairs.next AND task.backfill_id IS NOT NULL
            AND task.status IN ('queued', 'retrying', 'running')
        WHERE pairs.is_upstream) AS is_upstream_backfilled,
    penstock_now() AS judged_at

-- name: replaced_generations
-- Those that readers have until another is built, and the other.
SELECT DISTINCT served.version::text, next.version::text AS next
FROM generation AS served
JOIN generation AS next ON next.dataset_id = served.dataset_id AND next.state = 'building'
WHERE served.state = 'current'

-- name: foreseen_losses
-- Of each dataset that is appended to, how much of what these generations have published there is, and
-- how much of it could not be made again, and is not there in those that are built on.
SELECT held.dataset, held.job, count(*) AS publications, count(*) FILTER (WHERE held.is_lost) AS lost
FROM (
    SELECT dataset.name AS dataset, job.name AS job,
           penstock_is_lost(appended.task_id, %(versions)s::uuid[]) AND NOT EXISTS (
               SELECT FROM appended AS same
               WHERE same.news = appended.news AND same.generation = ANY (%(targets)s::uuid[])
                 AND same.dataset_id = appended.dataset_id
                 AND same.partition_key = appended.partition_key) AS is_lost
    FROM generation
    JOIN dataset ON dataset.id = generation.dataset_id
    JOIN job ON job.id = dataset.job_id
    JOIN publication ON publication.dataset_id = generation.dataset_id
        AND publication.generation = generation.version AND publication.mode <> 'replace'
        AND NOT starts_with(publication.location, 'range:')
    JOIN appended ON appended.dataset_id = publication.dataset_id
        AND appended.generation = publication.generation
        AND appended.partition_key = publication.partition_key
    WHERE generation.version = ANY (%(versions)s::uuid[]) AND generation.state = 'current'
    OFFSET 0
) AS held
GROUP BY held.dataset, held.job
HAVING bool_or(held.is_lost)
ORDER BY held.dataset

-- name: generations_behind
-- Of generations that were current once, those that lack something that readers have now: a part, a
-- partition, or what a partition was replaced by.
SELECT DISTINCT back.version::text
FROM generation AS back
JOIN generation AS served ON served.dataset_id = back.dataset_id AND served.state = 'current'
WHERE back.version = ANY (%(versions)s::uuid[]) AND back.state = 'retired'
  AND (EXISTS (
          SELECT FROM penstock_lacking(back.dataset_id, served.version, back.version, NULL))
       OR EXISTS (
          SELECT
          FROM publication AS head
          JOIN task ON task.id = head.task_id
          WHERE head.dataset_id = served.dataset_id AND head.generation = served.version
            AND head.mode = 'replace' AND NOT EXISTS (
                SELECT
                FROM penstock_counterparts(head.task_id, back.version) AS made(id)
                JOIN task AS done ON done.id = made.id AND done.status = 'completed')))

-- name: retire_generations
UPDATE generation
SET state = 'retired', changed_at = penstock_now()
FROM generation AS next
WHERE generation.dataset_id = ANY (%(datasets)s::uuid[]) AND generation.state = 'current'
  AND next.dataset_id = generation.dataset_id AND next.state = 'building'
RETURNING generation.version::text

-- name: promote_generations
UPDATE generation
SET state = 'current', changed_at = penstock_now()
WHERE dataset_id = ANY (%(datasets)s::uuid[]) AND state = 'building'

-- name: cancel_waiting
-- What runs may end: it takes the lock of its generation after that of its task, we the other way.
WITH waiting AS MATERIALIZED (
    SELECT task.id
    FROM task
    WHERE task.generation = ANY (%(versions)s::uuid[]) AND task.status IN ('queued', 'retrying')
    ORDER BY task.id
    FOR NO KEY UPDATE
)
UPDATE task SET status = 'cancelled', settled_at = penstock_now(), reason = %(reason)s
FROM waiting
WHERE task.id = waiting.id AND task.status IN ('queued', 'retrying')

-- name: forget_computed
-- What was computed of all of these datasets, or by looking into them, is to be computed again: no event
-- of a partition tells those who read it of what was kept.
DELETE FROM task
USING dag_current
JOIN edge USING (dag_version_id)
JOIN dag_job AS reader USING (dag_version_id, job_id)
JOIN job_definition AS definition ON definition.id = reader.definition_id
WHERE edge.dataset_id = ANY (%(datasets)s::uuid[]) AND (edge.reads = 'all' OR NOT edge.is_trigger)
  AND definition.update_mode = 'replace'
  AND task.job_id = reader.job_id AND task.generation = reader.generation
  AND task.status = 'completed' AND task.event_seq IS NOT NULL

-- name: find_building
-- What is being built of the outputs of the job that writes a dataset, and what it takes the place of. Until
-- the end of the transaction nobody removes partitions of either: see hold_outputs.
SELECT next.dataset_id::text AS dataset, next.version::text, served.version::text AS served,
       (SELECT columns FROM generation_schema AS said
        WHERE said.dataset_id = served.dataset_id AND said.version = served.version) AS columns,
       EXISTS (
           SELECT
           FROM dag_current
           JOIN dag_job USING (dag_version_id)
           JOIN edge USING (dag_version_id, job_id)
           JOIN job_definition AS definition ON definition.id = dag_job.definition_id
           WHERE dag_job.generation = next.version AND definition.update_mode = 'append'
             AND edge.reads = 'changes') AS appends_changes,
       pg_advisory_xact_lock_shared(1885695604, hashtext(next.version::text)),
       pg_advisory_xact_lock_shared(1885695604, hashtext(served.version::text))
FROM dataset AS named
JOIN dataset AS output ON output.id = named.id OR output.job_id = named.job_id
JOIN generation AS next ON next.dataset_id = output.id AND next.state = 'building'
JOIN generation AS served ON served.dataset_id = output.id AND served.state = 'current'
WHERE named.id = %(dataset)s
ORDER BY next.dataset_id

-- name: keep_publications
-- What readers have and nothing was made of in the generation that is being built, or only what was
-- cancelled, becomes part of that as it is: parts of partitions, or partitions. Its folders are named by both from then on. Not what a
-- job that replaces would have to be given in parts. The events are no news for jobs that append.
WITH pairs AS MATERIALIZED (
    SELECT next.dataset_id, served.version AS served, next.version AS next, definition.update_mode,
           jsonb_path_exists(definition.body, '$.outputs[*].partition_by') AS is_dividing
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    JOIN generation AS next ON next.version = dag_job.generation AND next.state = 'building'
    JOIN generation AS served ON served.dataset_id = next.dataset_id AND served.state = 'current'
    WHERE dag_job.generation = %(version)s::uuid
), lacked AS MATERIALIZED (
    -- Of a run of parts that were put together, the location is that of the run, and so are its files,
    -- counted with one of the parts.
    SELECT pairs.dataset_id, pairs.served, pairs.next, pairs.update_mode, head.mode,
           head.partition_key, head.range_start, head.range_end, head.published_at,
           coalesce(lacking.append_key, 'task:' || head.task_id) AS append_key,
           coalesce(piece.task_id, head.task_id) AS task_id,
           coalesce(piece.attempt, head.attempt) AS attempt,
           coalesce(run.location, piece.location, head.location) AS location,
           coalesce(piece.appended_at, head.published_at) AS appended_at,
           CASE WHEN piece.location IS NULL THEN head.files WHEN run.location IS NULL
               THEN piece.files WHEN piece.append_key = run.append_key THEN run.files ELSE 0
               END AS files,
           CASE WHEN piece.location IS NULL THEN head.rows ELSE piece.rows END AS rows,
           CASE WHEN piece.location IS NULL THEN head.bytes WHEN run.location IS NULL
               THEN piece.bytes WHEN piece.append_key = run.append_key THEN run.bytes ELSE 0
               END AS bytes,
           CASE WHEN piece.location IS NULL THEN head.manifest WHEN run.location IS NULL
               THEN piece.manifest ELSE run.manifest END AS manifest,
           coalesce(piece.news, task.dedupe_key) AS news, piece.compacted_by
    FROM pairs
    CROSS JOIN LATERAL penstock_lacking(pairs.dataset_id, pairs.served, pairs.next, NULL) AS lacking
    JOIN publication AS head ON head.dataset_id = pairs.dataset_id
        AND head.generation = pairs.served AND head.partition_key = lacking.partition_key
        AND NOT starts_with(head.location, 'range:')
    LEFT JOIN appended AS piece ON piece.dataset_id = pairs.dataset_id
        AND piece.generation = pairs.served AND piece.partition_key = lacking.partition_key
        AND piece.append_key = lacking.append_key
    LEFT JOIN compacted AS run ON run.dataset_id = pairs.dataset_id
        AND run.generation = pairs.served AND run.partition_key = lacking.partition_key
        AND run.task_id = piece.compacted_by
    LEFT JOIN task ON task.id = lacking.task_id
    -- Rows that were merged cannot be told apart any more, to be merged with others.
    -- And who finds partitions by itself may read its own generation only: see grants.
    WHERE head.mode <> 'merge' AND (pairs.update_mode = 'append' OR head.mode = 'replace')
      AND NOT (pairs.update_mode = 'merge' AND pairs.is_dividing)
      AND NOT EXISTS (
          SELECT
          FROM penstock_counterparts(lacking.task_id, pairs.next) AS made(id)
          JOIN task AS other ON other.id = made.id AND other.status <> 'cancelled')
), torn AS MATERIALIZED (
    -- Runs of which some parts were made anew: the rows of the others cannot be had without theirs.
    SELECT
    FROM lacked
    JOIN appended AS part ON part.dataset_id = lacked.dataset_id
        AND part.generation = lacked.served AND part.partition_key = lacked.partition_key
        AND part.compacted_by = lacked.compacted_by
    WHERE NOT EXISTS (
        SELECT FROM lacked AS same
        WHERE same.dataset_id = lacked.dataset_id AND same.partition_key = lacked.partition_key
          AND same.append_key = part.append_key)
    LIMIT 1
), lost AS MATERIALIZED (
    SELECT * FROM lacked WHERE NOT EXISTS (SELECT FROM torn)
), parts AS (
    INSERT INTO appended (
        dataset_id, generation, partition_key, append_key, task_id, attempt, location, appended_at,
        files, rows, bytes, manifest, news, compacted_by)
    -- What is to be merged with is only named, as what is merged: see publish.
    SELECT lost.dataset_id, lost.next, lost.partition_key, lost.append_key, lost.task_id,
           lost.attempt, piece.location, lost.appended_at, piece.files, piece.rows, piece.bytes,
           piece.manifest, lost.news, lost.compacted_by
    FROM lost
    CROSS JOIN LATERAL (
        SELECT lost.location, lost.files, lost.rows, lost.bytes, lost.manifest
        WHERE lost.update_mode = 'append'
        UNION ALL
        SELECT 'merged:', NULL, NULL, NULL, NULL WHERE lost.update_mode = 'merge'
    ) AS piece
    ORDER BY dataset_id, next, partition_key, append_key
), heads AS (
    INSERT INTO publication AS held (
        dataset_id, generation, partition_key, range_start, range_end, mode, task_id, attempt,
        location, manifest, files, rows, bytes, published_at, revision)
    SELECT kept.dataset_id, kept.next, kept.partition_key, kept.range_start, kept.range_end,
           kept.update_mode, kept.task_id, kept.attempt, kept.location, kept.manifest,
           kept.files, kept.rows, kept.bytes, kept.published_at, coalesce(removed.revision, 0) + 1
    FROM (
        SELECT dataset_id, next, partition_key, update_mode, max(task_id) AS task_id,
               min(range_start) AS range_start, min(range_end) AS range_end,
               max(published_at) AS published_at,
               (array_agg(attempt ORDER BY task_id DESC, append_key))[1] AS attempt,
               (array_agg(location ORDER BY task_id DESC, append_key))[1] AS location,
               (array_agg(manifest ORDER BY task_id DESC, append_key))[1] AS manifest,
               CASE WHEN count(files) = count(*) THEN sum(files) END AS files,
               CASE WHEN count(rows) = count(*) THEN sum(rows) END AS rows,
               CASE WHEN count(bytes) = count(*) THEN sum(bytes) END AS bytes
        FROM lost
        GROUP BY dataset_id, next, partition_key, update_mode
    ) AS kept
    LEFT JOIN removed ON (removed.dataset_id, removed.generation, removed.partition_key)
        = (kept.dataset_id, kept.next, kept.partition_key)
    ORDER BY kept.dataset_id, kept.next, kept.partition_key
    ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
    SET task_id = greatest(held.task_id, excluded.task_id), files = held.files + excluded.files,
        rows = held.rows + excluded.rows, bytes = held.bytes + excluded.bytes,
        revision = held.revision + 1
    WHERE held.mode = 'append'
    RETURNING dataset_id, generation, partition_key, range_start, range_end, revision
), together AS (
    -- Its parts came with one revision.
    INSERT INTO compacted (
        dataset_id, generation, partition_key, task_id, attempt, first_revision, revision,
        append_key, appended_at, location, files, rows, bytes, manifest)
    SELECT DISTINCT run.dataset_id, heads.generation, run.partition_key, run.task_id, run.attempt,
           heads.revision, heads.revision, run.append_key, run.appended_at, run.location, run.files,
           run.rows, run.bytes, run.manifest
    FROM lost
    JOIN compacted AS run ON run.dataset_id = lost.dataset_id AND run.generation = lost.served
        AND run.partition_key = lost.partition_key AND run.task_id = lost.compacted_by
    JOIN heads ON heads.dataset_id = lost.dataset_id AND heads.generation = lost.next
        AND heads.partition_key = lost.partition_key
), told AS (
    INSERT INTO event (
        dataset_id, generation, cursor, partition_key, range_start, range_end, dedupe, task_id,
        revision, routed)
    SELECT DISTINCT heads.dataset_id, heads.generation,
           CASE WHEN heads.partition_key = '' THEN lost.task_id END,
           nullif(heads.partition_key, ''), heads.range_start, heads.range_end,
           'publication:' || lost.task_id || ':kept:' || heads.partition_key, lost.task_id,
           heads.revision, 'routed'
    FROM heads
    JOIN lost ON lost.dataset_id = heads.dataset_id AND lost.next = heads.generation
        AND lost.partition_key = heads.partition_key
    ON CONFLICT (dataset_id, generation, dedupe) DO NOTHING
), noted AS (
    UPDATE generation SET kept_at = penstock_now()
    FROM heads
    WHERE generation.dataset_id = heads.dataset_id AND generation.version = heads.generation
)
SELECT count(*) AS kept, (
    SELECT array_agg(DISTINCT reader.generation::text)
    FROM dag_current
    JOIN edge USING (dag_version_id)
    JOIN dag_job AS reader USING (dag_version_id, job_id)
    JOIN generation ON generation.version = reader.generation
    JOIN pairs ON pairs.dataset_id = edge.dataset_id) AS readers,
    (SELECT dag_version_id FROM dag_current) AS version,
    EXISTS (SELECT FROM torn) AS is_torn
FROM lost
