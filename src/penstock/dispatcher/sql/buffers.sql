-- Batches of rows that are published into buffered datasets, for penstock.dispatcher.tasks.batches.

-- name: hold_publisher
-- Until the end of the transaction this attempt is not ended by anybody, and publishes one batch at a
-- time (BATCH-1). `counts` is whether its batches count although it may never complete.
SELECT task.job_id, definition.body -> 'source' ->> 'kind' IS NOT DISTINCT FROM 'always_on' AS counts,
       task.cancel_asked, penstock_now() AS now,
       penstock_has_grants(task.grants, task.attempt, %(grants)s) AS has_grants
FROM task
JOIN job_definition AS definition ON definition.id = task.definition_id
WHERE task.id = %(task)s AND task.attempt = %(attempt)s AND task.status = 'running'
FOR NO KEY UPDATE OF task

-- name: buffer_of_dataset
-- The sink of a dataset in the DAG in force, and why it is pressed, if it is.
SELECT dataset.id::text AS dataset, dataset.job_id, pressure.reason AS pressed
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN dataset ON dataset.job_id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
LEFT JOIN pressure ON pressure.job_id = dataset.job_id AND pressure.pressed
WHERE dataset.name = %(dataset)s
  AND EXISTS (
      SELECT
      FROM jsonb_array_elements(definition.body -> 'outputs') AS output(said)
      WHERE coalesce(said ->> 'dataset', said ->> 'name') = dataset.name
        AND said -> 'buffered' = 'true')

-- name: held_by_attempt
SELECT count(*) AS batches, coalesce(sum(bytes), 0)::bigint AS bytes
FROM buffer_batch
WHERE task_id = %(task)s AND attempt = %(attempt)s AND state = 'held'

-- name: accept_batch
-- One with its id is left alone (BATCH-2).
INSERT INTO buffer_batch (
    dataset_id, partition_key, task_id, attempt, batch_id, digest, format, location, place, bytes,
    rows, state, made_at, released_at)
VALUES (
    %(dataset)s::uuid, %(partition_key)s, %(task)s, %(attempt)s, %(batch)s, %(digest)s, %(format)s,
    %(location)s, %(place)s, %(bytes)s, %(rows)s, %(state)s,
    to_timestamp(%(made_at_ms)s::double precision / 1000),
    CASE WHEN %(state)s::text = 'released' THEN penstock_now() END)
ON CONFLICT (dataset_id, task_id, attempt, batch_id) DO NOTHING
RETURNING seq

-- name: accepted_batch
SELECT seq, digest, format, partition_key
FROM buffer_batch
WHERE dataset_id = %(dataset)s::uuid AND task_id = %(task)s AND attempt = %(attempt)s
  AND batch_id = %(batch)s

-- name: release_batches
-- Of attempts that have completed, in this transaction (BATCH-4).
UPDATE buffer_batch
SET state = 'released', released_at = penstock_now()
FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS done(task_id, attempt)
WHERE buffer_batch.task_id = done.task_id AND buffer_batch.attempt = done.attempt
  AND buffer_batch.state = 'held'
RETURNING buffer_batch.dataset_id::text AS dataset, buffer_batch.partition_key

-- name: drop_batches
-- Of attempts that have ended otherwise: the next attempt publishes its own (BATCH-4).
DELETE FROM buffer_batch
USING unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS ended(task_id, attempt)
WHERE buffer_batch.task_id = ended.task_id AND buffer_batch.attempt = ended.attempt
  AND buffer_batch.state = 'held'

-- name: taken_batches
SELECT seq AS sequence, batch_id AS batch, task_id AS task, format, location, digest
FROM buffer_batch
WHERE sink_task = %(task)s AND state = 'released'
ORDER BY seq

-- name: take_batches
-- For a task of a sink that is being claimed: what is there, in sequence, up to its limits, and one
-- batch at least (BATCH-5). What another takes now is passed by.
WITH available AS MATERIALIZED (
    SELECT seq, bytes, coalesce(rows, bytes / 64) AS rows
    FROM buffer_batch
    WHERE dataset_id = (SELECT id FROM dataset WHERE name = %(dataset)s)
      AND partition_key = %(partition_key)s AND state = 'released' AND sink_task IS NULL
    ORDER BY seq
    LIMIT %(batches_max)s
    FOR UPDATE SKIP LOCKED
), counted AS (
    SELECT seq, sum(bytes) OVER before AS bytes, sum(rows) OVER before AS rows
    FROM available
    WINDOW before AS (ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
UPDATE buffer_batch
SET sink_task = %(task)s
FROM counted
WHERE buffer_batch.seq = counted.seq
  AND coalesce(counted.bytes < %(bytes_max)s AND counted.rows < %(rows_max)s, true)

-- name: finish_batches
-- Of tasks of sinks that have completed, in this transaction (BATCH-6).
WITH done AS (
    UPDATE buffer_batch
    SET state = 'done', done_at = penstock_now()
    WHERE sink_task = ANY (%(tasks)s::bigint[]) AND state = 'released'
)
SELECT DISTINCT dataset.id::text AS dataset,
       coalesce(task.payload ->> 'partition_key', '') AS partition_key
FROM task
JOIN dataset ON dataset.name = task.payload #>> '{buffer,dataset}'
WHERE task.id = ANY (%(tasks)s::bigint[])

-- name: free_batches
-- Of tasks of sinks that were cancelled, by whomever: the next one gets them (BATCH-7).
UPDATE buffer_batch
SET sink_task = NULL
FROM task
WHERE task.id = buffer_batch.sink_task AND task.status = 'cancelled'
  AND buffer_batch.state = 'released'
  AND (%(tasks)s::bigint[] IS NULL OR task.id = ANY (%(tasks)s))
RETURNING buffer_batch.dataset_id::text AS dataset, buffer_batch.partition_key

-- name: give_up_sink_tasks
-- Dead ones, whose batches are for a task of the definition that is in force.
WITH held AS MATERIALIZED (
    SELECT id
    FROM task
    WHERE id = ANY (%(tasks)s::bigint[]) AND status = 'dead' AND payload ? 'buffer'
    ORDER BY id
    FOR NO KEY UPDATE
)
UPDATE task
SET status = 'cancelled', settled_at = penstock_now(), reason = %(reason)s
FROM held
WHERE task.id = held.id AND task.status = 'dead'
RETURNING task.id

-- name: waiting_lines
-- The datasets and partitions with batches that nobody has taken; first those without a task that waits.
WITH lines AS MATERIALIZED (
    SELECT DISTINCT dataset_id, partition_key
    FROM buffer_batch
    WHERE state = 'released' AND sink_task IS NULL
), waiting AS MATERIALIZED (
    SELECT DISTINCT generation.dataset_id,
           coalesce(task.payload ->> 'partition_key', '') AS partition_key
    FROM generation
    JOIN task ON task.generation = generation.version AND task.payload ? 'buffer'
        AND task.status = 'queued' AND task.attempt = 0
    WHERE generation.dataset_id IN (SELECT dataset_id FROM lines)
      AND generation.state IN ('current', 'building')
)
SELECT lines.dataset_id::text AS dataset, lines.partition_key
FROM lines
LEFT JOIN waiting USING (dataset_id, partition_key)
ORDER BY waiting.dataset_id IS NOT NULL
LIMIT %(limit)s

-- name: look_at_lines
-- What waits in each of these, for which definition of its sink, in the generation that readers read,
-- and whether a task waits that will take it. Where rows are merged one task runs at a time: two would
-- only have to merge again, and what gathers meanwhile is the next one's. Counted to a bound. `is_ours` is whether nobody else
-- makes a task for it now; the number is ours alone, "penw".
SELECT asked.dataset, asked.partition_key, dataset.name, sink.definition_id, sink.generation::text,
       sink.body, gathered.batches, gathered.rows, gathered.bytes, gathered.waited_ms,
       waiting.id AS waiting, waiting.is_early,
       waiting.id IS NULL
       AND NOT (sink.update_mode = 'merge' AND EXISTS (
           SELECT FROM task
           WHERE task.generation = sink.generation AND task.job_id = dataset.job_id
             AND task.status IN ('running', 'retrying')
             AND task.payload #>> '{buffer,dataset}' = dataset.name
             AND coalesce(task.payload ->> 'partition_key', '') = asked.partition_key))
       AND pg_try_advisory_xact_lock(
           1885695607, hashtext(asked.dataset || '/' || asked.partition_key)) AS is_ours
FROM unnest(%(datasets)s::text[], %(partitions)s::text[]) AS asked(dataset, partition_key)
JOIN dataset ON dataset.id = asked.dataset::uuid
CROSS JOIN LATERAL (
    SELECT dag_job.definition_id, generation.version AS generation, definition.body,
           definition.update_mode
    FROM generation
    JOIN dag_job ON dag_job.generation = generation.version AND dag_job.job_id = dataset.job_id
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE generation.dataset_id = dataset.id AND generation.state IN ('current', 'building')
    -- The version in force may be an earlier one, after a rollback.
    ORDER BY generation.state = 'current' DESC,
             dag_job.dag_version_id = (SELECT dag_version_id FROM dag_current) DESC,
             dag_job.dag_version_id DESC
    LIMIT 1
) AS sink
CROSS JOIN LATERAL (
    SELECT count(*) AS batches, coalesce(sum(first.rows), 0)::bigint AS rows,
           coalesce(sum(first.bytes), 0)::bigint AS bytes,
           coalesce(extract(epoch FROM penstock_now() - min(first.released_at)) * 1000, 0)::bigint
               AS waited_ms
    FROM (
        SELECT coalesce(batch.rows, batch.bytes / 64) AS rows, batch.bytes, batch.released_at
        FROM buffer_batch AS batch
        WHERE batch.dataset_id = dataset.id AND batch.partition_key = asked.partition_key
          AND batch.state = 'released' AND batch.sink_task IS NULL
        ORDER BY batch.seq
        LIMIT %(batches_max)s
    ) AS first
) AS gathered
LEFT JOIN LATERAL (
    SELECT task.id, task.due_at > penstock_now() AS is_early
    FROM task
    WHERE task.generation = sink.generation AND task.job_id = dataset.job_id
      AND task.status = 'queued' AND task.attempt = 0
      AND task.payload #>> '{buffer,dataset}' = dataset.name
      AND coalesce(task.payload ->> 'partition_key', '') = asked.partition_key
    ORDER BY task.id
    LIMIT 1
) AS waiting ON true
WHERE gathered.batches > 0
ORDER BY dataset.name, asked.partition_key

-- name: hasten_tasks
-- Tasks that need not wait for more; one that somebody has in hand is left for later.
WITH held AS MATERIALIZED (
    SELECT id
    FROM task
    WHERE id = ANY (%(tasks)s::bigint[]) AND status = 'queued' AND due_at > penstock_now()
    ORDER BY id
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE task
SET due_at = penstock_now()
FROM held
WHERE task.id = held.id
RETURNING task.id

-- name: show_buffers
-- The buffered datasets, or the one of a name, and what waits in each; counted to a bound.
SELECT dataset.name AS dataset, job.name AS job, aside.name AS rejected,
       coalesce(counted.held, 0) AS held, coalesce(counted.released, 0) AS waiting,
       coalesce(counted.taken, 0) AS taken, coalesce(counted.waited_seconds, 0) AS waited_seconds,
       coalesce(counted.rows, 0)::bigint AS rows, coalesce(counted.unknown, 0) AS unknown,
       counted.oldest_at, pressure.reason AS pressed
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
JOIN dataset ON dataset.job_id = job.id
    AND dataset.name = coalesce(output.said ->> 'dataset', output.said ->> 'name')
JOIN LATERAL (
    SELECT coalesce(other.said ->> 'dataset', other.said ->> 'name') AS name
    FROM jsonb_array_elements(definition.body -> 'outputs') AS other(said)
    WHERE NOT other.said ? 'buffered'
) AS aside ON true
LEFT JOIN pressure ON pressure.job_id = job.id AND pressure.pressed
LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE state = 'held') AS held,
           count(*) FILTER (WHERE state = 'released' AND sink_task IS NULL) AS released,
           count(*) FILTER (WHERE state = 'released' AND sink_task IS NOT NULL) AS taken,
           extract(epoch FROM penstock_now() - min(released_at))::double precision AS waited_seconds,
           sum(rows) AS rows, count(*) FILTER (WHERE rows IS NULL) AS unknown,
           min(released_at) AS oldest_at
    FROM (
        SELECT state, sink_task, released_at, rows
        FROM buffer_batch
        WHERE buffer_batch.dataset_id = dataset.id AND state <> 'done'
        LIMIT 10000
    ) AS first
) AS counted ON true
WHERE output.said -> 'buffered' = 'true'
  AND (%(dataset)s::text IS NULL OR dataset.name = %(dataset)s)
ORDER BY dataset.name

-- name: rejected_parts
-- What is published of rejected rows in the generation that readers read, the latest first.
SELECT part.location, part.manifest, part.rows, part.task_id
FROM dataset
JOIN generation ON generation.dataset_id = dataset.id AND generation.state = 'current'
JOIN part ON part.dataset_id = dataset.id AND part.generation = generation.version
WHERE dataset.name = %(dataset)s AND part.rows > 0
ORDER BY part.task_id DESC
LIMIT %(limit)s

-- name: marked_rows
SELECT sequence, place
FROM rejected_mark
WHERE dataset_id = %(dataset)s::uuid AND sequence = ANY (%(sequences)s::bigint[])

-- name: mark_rows
INSERT INTO rejected_mark (dataset_id, sequence, place, deed, batch_seq)
SELECT %(dataset)s::uuid, asked.sequence, asked.place, %(deed)s, %(batch_seq)s
FROM unnest(%(sequences)s::bigint[], %(places)s::bigint[]) AS asked(sequence, place)
ORDER BY asked.sequence, asked.place
ON CONFLICT DO NOTHING
RETURNING sequence, place

-- name: forget_batches
-- Those that were written a while ago, and whose ids nobody may use again: their tasks are settled, or
-- their rows are older than any that are accepted (BATCH-8).
WITH looked_at AS MATERIALIZED (
    SELECT batch.seq, batch.task_id, batch.state, batch.done_at, batch.made_at
    FROM buffer_batch AS batch
    WHERE batch.seq > %(after)s
    ORDER BY batch.seq
    LIMIT %(limit)s
), gone AS (
    DELETE FROM buffer_batch
    USING looked_at AS old
    LEFT JOIN task ON task.id = old.task_id
    WHERE buffer_batch.seq = old.seq AND old.state = 'done'
      AND old.done_at < penstock_now() - %(days)s * interval '1 day'
      AND CASE
          WHEN old.made_at IS NULL
          THEN coalesce(task.status, 'completed') NOT IN ('queued', 'retrying', 'running')
          ELSE old.made_at < penstock_now() - %(id_days)s * interval '1 day'
      END
    RETURNING buffer_batch.seq
)
SELECT (SELECT max(seq) FROM looked_at) AS reached,
       (SELECT count(*) = %(limit)s FROM looked_at) AS is_more,
       (SELECT count(*) FROM gone) AS gone
