-- What of an input with `read: changes` tasks are given and have consumed, for
-- penstock.dispatcher.tasks.consumption.

-- name: hold_positions
-- Before anything is given: until the end of the transaction nobody decides which parts of these inputs
-- are put together. The number is ours alone, "penv".
SELECT pg_advisory_xact_lock_shared(1885695606, hashtext(held.generation))
FROM (
    SELECT DISTINCT inputs.generation::text AS generation
    FROM task
    CROSS JOIN LATERAL penstock_inputs(task.job_id, task.generation) AS inputs
    WHERE task.id = ANY (%(tasks)s::bigint[]) AND inputs.reads = 'changes'
    ORDER BY 1
    OFFSET 0
) AS held

-- name: give_changes
-- For attempts that this transaction is about to begin; of those whose claim is repeated it says whether
-- they would be given the same (`is_same`), and notes nothing. Which partitions a task reads is as ever: its own, or
-- the dataset without partitions, or those within its range; without a partition, all of them. Of those
-- it is given what has a later revision than the one that its job has consumed; a backfill that
-- somebody asked for reads everything again. What was removed before it was read is only counted, and
-- once: by who has consumed something before.
WITH reading AS MATERIALIZED (
    SELECT task.id AS task_id, task.attempt + (task.status <> 'running')::integer AS attempt,
           task.job_id, task.generation,
           inputs.input, inputs.dataset_id, inputs.generation AS fed,
           task.payload ->> 'partition_key' AS key,
           (task.payload ->> 'start')::bigint AS range_start,
           (task.payload ->> 'end')::bigint AS range_end,
           task.payload ? 'backfill' AS is_again,
           (SELECT publication.partition_key
            FROM publication
            WHERE publication.dataset_id = inputs.dataset_id
              AND publication.generation = inputs.generation
              AND publication.partition_key IN ('', task.payload ->> 'partition_key')
            ORDER BY publication.partition_key DESC
            LIMIT 1) AS own,
           EXISTS (
               SELECT FROM consumed
               WHERE consumed.job_id = task.job_id AND consumed.generation = task.generation
                 AND consumed.input = inputs.input AND consumed.fed = inputs.generation) AS has_begun
    FROM task
    CROSS JOIN LATERAL penstock_inputs(task.job_id, task.generation) AS inputs
    WHERE task.id = ANY (%(tasks)s::bigint[]) AND inputs.reads = 'changes'
), heads AS MATERIALIZED (
    SELECT reading.task_id, reading.input, publication.dataset_id, publication.generation,
           publication.partition_key, publication.range_start, publication.range_end,
           publication.mode, publication.location, publication.manifest, publication.rows,
           publication.bytes, publication.revision, coalesce(consumed.revision, 0) AS after,
           CASE WHEN reading.is_again THEN 0 ELSE coalesce(consumed.revision, 0) END AS past
    FROM reading
    JOIN publication ON publication.dataset_id = reading.dataset_id
        AND publication.generation = reading.fed
        AND (reading.key IS NULL OR publication.partition_key = reading.own
             OR reading.own IS NULL AND publication.range_start >= reading.range_start
                AND publication.range_end <= reading.range_end)
    LEFT JOIN consumed ON (consumed.job_id, consumed.generation, consumed.input, consumed.fed,
                           consumed.partition_key)
        = (reading.job_id, reading.generation, reading.input, reading.fed,
           publication.partition_key)
    WHERE NOT starts_with(publication.location, 'range:')
      AND (reading.is_again OR publication.revision > coalesce(consumed.revision, 0))
), gaps AS MATERIALIZED (
    SELECT reading.task_id, reading.input, removed.partition_key, removed.revision,
           coalesce(consumed.revision, 0) AS after
    FROM reading
    JOIN removed ON removed.dataset_id = reading.dataset_id AND removed.generation = reading.fed
        AND (reading.key IS NULL OR removed.partition_key = reading.key)
    LEFT JOIN consumed ON (consumed.job_id, consumed.generation, consumed.input, consumed.fed,
                           consumed.partition_key)
        = (reading.job_id, reading.generation, reading.input, reading.fed, removed.partition_key)
    WHERE reading.has_begun AND removed.revision - 1 > coalesce(consumed.revision, 0)
      AND NOT EXISTS (
          SELECT FROM publication
          WHERE (publication.dataset_id, publication.generation, publication.partition_key)
              = (removed.dataset_id, removed.generation, removed.partition_key))
), pieces AS MATERIALIZED (
    SELECT heads.task_id, heads.input,
           jsonb_agg(
               jsonb_strip_nulls(jsonb_build_object(
                   'location', coalesce(piece.location, heads.location),
                   'partition_key', nullif(heads.partition_key, ''),
                   'start', heads.range_start, 'end', heads.range_end,
                   'revision', coalesce(piece.revision, heads.revision),
                   'append_key', piece.append_key,
                   'manifest', CASE WHEN piece.location IS NULL THEN heads.manifest
                                    ELSE piece.manifest END,
                   'rows', CASE WHEN piece.location IS NULL THEN heads.rows ELSE piece.rows END,
                   'bytes', CASE WHEN piece.location IS NULL THEN heads.bytes ELSE piece.bytes END))
               ORDER BY heads.range_start, heads.partition_key COLLATE "C", piece.revision,
                        piece.appended_at, piece.task_id, piece.append_key) AS parts
    FROM heads
    LEFT JOIN LATERAL (
        SELECT part.*
        FROM part
        WHERE heads.mode = 'append' AND part.dataset_id = heads.dataset_id
          AND part.generation = heads.generation
          AND part.partition_key = heads.partition_key AND part.revision > heads.past
        OFFSET 0
    ) AS piece ON true
    WHERE heads.mode <> 'append' OR piece.location IS NOT NULL
    GROUP BY heads.task_id, heads.input
), moves AS MATERIALIZED (
    SELECT task_id, input, array_agg(partition_key ORDER BY partition_key) AS keys,
           array_agg(after ORDER BY partition_key) AS after,
           array_agg(revision ORDER BY partition_key) AS upto, sum(is_gap) AS missed
    FROM (
        SELECT task_id, input, partition_key, after, revision, 0 AS is_gap FROM heads
        UNION ALL
        SELECT task_id, input, partition_key, after, revision, 1 FROM gaps
    ) AS moved
    GROUP BY task_id, input
), noted AS (
    INSERT INTO consumption (
        task_id, attempt, input, fed, partition_keys, after, upto, parts, missed)
    SELECT reading.task_id, reading.attempt, reading.input, reading.fed, coalesce(moves.keys, '{}'),
           coalesce(moves.after, '{}'), coalesce(moves.upto, '{}'),
           coalesce(jsonb_array_length(pieces.parts), 0), coalesce(moves.missed, 0)
    FROM reading
    LEFT JOIN moves USING (task_id, input)
    LEFT JOIN pieces USING (task_id, input)
    ON CONFLICT (task_id, attempt, input) DO NOTHING
)
SELECT reading.task_id, reading.input, coalesce(pieces.parts, '[]') AS parts,
       coalesce(moves.missed, 0)::integer AS missed,
       NOT EXISTS (
           SELECT FROM consumption
           WHERE (consumption.task_id, consumption.attempt, consumption.input)
               = (reading.task_id, reading.attempt, reading.input)
             AND (consumption.fed, consumption.partition_keys, consumption.after, consumption.upto,
                  consumption.parts, consumption.missed)
               IS DISTINCT FROM
                 (reading.fed, coalesce(moves.keys, '{}'), coalesce(moves.after, '{}'),
                  coalesce(moves.upto, '{}'), coalesce(jsonb_array_length(pieces.parts), 0),
                  coalesce(moves.missed, 0))) AS is_same,
       -- Who reads nothing knows by these what it would be.
       coalesce((SELECT generation_schema.columns FROM generation_schema
                 WHERE generation_schema.dataset_id = reading.dataset_id
                   AND generation_schema.version = reading.fed), '[]') AS columns
FROM reading
LEFT JOIN moves USING (task_id, input)
LEFT JOIN pieces USING (task_id, input)

-- name: hold_consumers
-- Of these attempts, those that were given changes. Until the end of the transaction nobody else
-- consumes for their jobs: the number is ours alone, "pens".
SELECT held.tasks, pg_advisory_xact_lock(1885695603, held.place)
FROM (
    SELECT hashtext(task.job_id || ':' || task.generation) AS place,
           array_agg(DISTINCT task.id) AS tasks
    FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS asked(task_id, attempt)
    JOIN consumption USING (task_id, attempt)
    JOIN task ON task.id = consumption.task_id
    GROUP BY 1
    ORDER BY 1
    OFFSET 0
) AS held

-- name: overtaken
-- After the locks: whose changes, or some of them, somebody else has consumed since they were given.
SELECT DISTINCT given.task_id
FROM (
    SELECT consumption.task_id, moved.after, consumed.revision,
           row_number() OVER (
               PARTITION BY task.job_id, task.generation, consumption.input, consumption.fed,
                            moved.partition_key
               ORDER BY consumption.task_id) AS place
    FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS asked(task_id, attempt)
    JOIN consumption USING (task_id, attempt)
    JOIN task ON task.id = consumption.task_id
    CROSS JOIN LATERAL unnest(consumption.partition_keys, consumption.after)
        AS moved(partition_key, after)
    LEFT JOIN consumed ON (consumed.job_id, consumed.generation, consumed.input, consumed.fed,
                           consumed.partition_key)
        = (task.job_id, task.generation, consumption.input, consumption.fed, moved.partition_key)
) AS given
WHERE coalesce(given.revision, 0) <> given.after OR given.place > 1

-- name: consume
-- For attempts that this transaction has completed, and whose outputs count.
WITH given AS MATERIALIZED (
    UPDATE consumption
    SET is_consumed = true
    FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS asked(task_id, attempt)
    WHERE consumption.task_id = asked.task_id AND consumption.attempt = asked.attempt
    RETURNING consumption.*
)
INSERT INTO consumed (job_id, generation, input, fed, partition_key, revision)
SELECT task.job_id, task.generation, given.input, given.fed, moved.partition_key, moved.upto
FROM given
JOIN task ON task.id = given.task_id
CROSS JOIN LATERAL unnest(given.partition_keys, given.upto) AS moved(partition_key, upto)
ORDER BY 1, 2, 3, 4, 5
ON CONFLICT (job_id, generation, input, fed, partition_key) DO UPDATE
SET revision = excluded.revision

-- name: consumption_of_task
-- What its latest attempt was given of what had changed.
SELECT consumption.input, consumption.attempt, cardinality(consumption.partition_keys)
           - consumption.missed AS partitions,
       consumption.parts, consumption.missed, consumption.is_consumed,
       consumption.partition_keys[1:10] AS keys
FROM consumption
WHERE consumption.task_id = %(task)s AND consumption.attempt = (
    SELECT max(latest.attempt) FROM consumption AS latest WHERE latest.task_id = %(task)s)
ORDER BY consumption.input
