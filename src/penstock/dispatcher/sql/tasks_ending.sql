-- The end of attempts and what follows from it, for penstock.dispatcher.tasks.completion and lifecycle.

-- name: hold_outputs
-- What has to be known of completions before anything ends: one look for all of them. There is a row
-- for each dataset that they say to have written, with its columns so far, and at least one.
-- Until the end of the transaction nobody removes partitions of these generations: the number is ours
-- alone, "pent". Read without a lock on the columns: they only grow, and what they allow they go on to.
-- `guarded` has those of the tasks whose jobs merge, and what they may write, those that were given
-- changes, those that maintain what is published, and those of whose outputs the columns are declared:
-- mostly none.
WITH guarded AS MATERIALIZED (
    SELECT task.id AS task_id, kinds.is_merging, kinds.is_consuming, kinds.is_maintaining,
           -- By dataset its generation.
           (SELECT coalesce(jsonb_object_agg(generation.dataset_id, generation.version), '{}')
            FROM dataset
            JOIN generation
                ON generation.dataset_id = dataset.id AND generation.version = task.generation
            WHERE kinds.is_merging AND dataset.job_id = task.job_id) AS written,
           CASE WHEN task.payload ? 'buffer' THEN penstock_aside(definition.body) END AS aside,
           -- By dataset what its output says.
           (SELECT jsonb_object_agg(
                definition.body -> 'datasets' ->> coalesce(said ->> 'dataset', said ->> 'name'), said)
            FROM jsonb_array_elements(definition.body -> 'outputs') AS said
            WHERE kinds.is_declaring AND said ? 'columns') AS declared
    FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS asked(task_id, attempt)
    -- By its number, whatever is known of the table: where that is little, Postgres would rather go
    -- through all tasks, here, or those of the job for each output, below.
    CROSS JOIN LATERAL (SELECT task.* FROM task WHERE task.id = asked.task_id OFFSET 0) AS task
    JOIN job_definition AS definition ON definition.id = task.definition_id
    CROSS JOIN LATERAL (
        SELECT definition.update_mode = 'merge' AND NOT task.payload ? 'maintain' AS is_merging,
               task.payload ? 'maintain' AS is_maintaining,
               EXISTS (
                   SELECT FROM consumption
                   WHERE consumption.task_id = asked.task_id
                     AND consumption.attempt = asked.attempt) AS is_consuming,
               jsonb_path_exists(definition.body, '$.outputs[*].columns') AS is_declaring
    ) AS kinds
    WHERE kinds.is_merging OR kinds.is_consuming OR kinds.is_maintaining OR kinds.is_declaring
), held AS MATERIALIZED (
    SELECT generation.dataset_id::text AS dataset, generation.version::text AS generation,
           array_agg(DISTINCT task.id) AS tasks
    FROM unnest(%(output_tasks)s::bigint[], %(output_datasets)s::uuid[])
        AS asked(task_id, dataset_id)
    CROSS JOIN LATERAL (
        SELECT task.id, task.job_id, task.generation FROM task WHERE task.id = asked.task_id OFFSET 0
    ) AS task
    JOIN dataset ON dataset.id = asked.dataset_id AND dataset.job_id = task.job_id
    JOIN generation
        ON generation.dataset_id = dataset.id AND generation.version = task.generation
    GROUP BY generation.dataset_id, generation.version
)
SELECT held.dataset, held.generation, held.tasks, generation_schema.columns,
       (SELECT jsonb_agg(guarded) FROM guarded) AS guarded,
       pg_advisory_xact_lock_shared(1885695604, hashtext(held.generation))
FROM (SELECT) AS one
LEFT JOIN held ON true
LEFT JOIN generation_schema
    ON generation_schema.dataset_id = held.dataset::uuid
    AND generation_schema.version = held.generation::uuid

-- name: replacing_tasks
SELECT task.id AS task_id
FROM task
JOIN job_definition AS definition ON definition.id = task.definition_id
WHERE task.id = ANY (%(tasks)s::bigint[]) AND definition.update_mode <> 'append'

-- name: hold_attempts
-- Those of these that may still end, until the end of the transaction. Also those that were asked to
-- stop: nobody takes that back meanwhile.
SELECT task.id AS task_id, task.cancel_asked
FROM task
JOIN unnest(%(tasks)s::bigint[], %(attempts)s::integer[], %(tokens)s::text[])
    AS asked(task_id, attempt, lease_token)
    ON task.id = asked.task_id AND task.attempt = asked.attempt
    AND task.lease_token = asked.lease_token
WHERE task.status = 'running'
ORDER BY task.id
FOR NO KEY UPDATE OF task

-- name: make_schemas
INSERT INTO generation_schema (dataset_id, version, columns)
SELECT dataset_id, version, '[]'
FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]) AS asked(dataset_id, version)
ORDER BY dataset_id, version
ON CONFLICT DO NOTHING

-- name: lock_schemas
SELECT dataset_id::text AS dataset, version::text AS generation, columns
FROM generation_schema
WHERE (dataset_id, version) IN (
    SELECT * FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]))
ORDER BY dataset_id, version
FOR NO KEY UPDATE

-- name: grow_schemas
-- For rows that this transaction has locked.
UPDATE generation_schema
SET columns = asked.columns, changed_at = penstock_now()
FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[], %(columns)s::jsonb[])
    AS asked(dataset_id, version, columns)
WHERE generation_schema.dataset_id = asked.dataset_id
  AND generation_schema.version = asked.version

-- name: misplaced_outputs
-- Outputs that the job of the task does not write, or not in the task's generation.
SELECT asked.task_id, asked.dataset_id::text AS dataset
FROM unnest(%(output_tasks)s::bigint[], %(output_datasets)s::uuid[])
    AS asked(task_id, dataset_id)
JOIN task ON task.id = asked.task_id
LEFT JOIN dataset ON dataset.id = asked.dataset_id AND dataset.job_id = task.job_id
LEFT JOIN generation
    ON generation.dataset_id = dataset.id AND generation.version = task.generation
WHERE generation.version IS NULL

-- name: end_tasks
-- The fence and the change are one statement: whoever is not the current attempt changes nothing
-- (FENCE-1).
-- What is handed back is queued again and not counted, a bounded number of times; beyond that it is a
-- failure. So it is, with a bound of its own, of what was lost with its worker before it began; what
-- was lost while it ran is a failure that is tried again without a pause. A source that is always on begins to count anew when an attempt has run for a while.
-- Who is to run alone from now on, and was to before, has had the one death that is not counted.
-- A task of a sink whose rows nobody would read is cancelled, so that another writes its batches
-- (BATCH-6).
WITH asked AS (
    SELECT *
    FROM unnest(
        %(tasks)s::bigint[], %(attempts)s::integer[], %(tokens)s::text[], %(succeeded)s::boolean[],
        %(retried)s::boolean[], %(released)s::boolean[], %(delayed)s::boolean[],
        %(alone)s::boolean[], %(lost)s::boolean[], %(reasons)s::text[], %(grants)s::text[])
        AS asked(task_id, attempt, lease_token, succeeded, retried, released, delayed, alone,
                 lost, reason, grants)
), misplaced AS MATERIALIZED (
    SELECT outputs.task_id
    FROM unnest(%(output_tasks)s::bigint[], %(output_datasets)s::uuid[])
        AS outputs(task_id, dataset_id)
    JOIN task ON task.id = outputs.task_id
    LEFT JOIN dataset ON dataset.id = outputs.dataset_id AND dataset.job_id = task.job_id
    LEFT JOIN generation
        ON generation.dataset_id = dataset.id AND generation.version = task.generation
    WHERE generation.version IS NULL
), served AS MATERIALIZED (
    -- Generations of sinks that are served or built until the end of the transaction.
    SELECT generation.version
    FROM asked
    JOIN task ON task.id = asked.task_id AND task.payload ? 'buffer'
    JOIN generation ON generation.version = task.generation
        AND generation.state IN ('current', 'building')
    ORDER BY generation.dataset_id, generation.version
    FOR KEY SHARE OF generation
), held AS MATERIALIZED (
    SELECT task.id, task.claimed_at, asked.delayed, asked.alone, asked.lost, asked.released,
           before.releases, least(task.losses, before.releases) AS losses,
           asked.reason || CASE WHEN NOT asked.released OR task.cancel_asked THEN ''
                                WHEN asked.alone AND task.runs_alone THEN %(died_before)s
                                WHEN before.releases >= %(releases_max)s THEN %(released_out)s
                                WHEN asked.lost AND least(task.losses, before.releases)
                                    >= %(losses_max)s THEN %(lost_out)s
                                ELSE '' END AS reason,
           CASE
               WHEN task.cancel_asked OR moot.why IS NOT NULL THEN 'cancelled'
               WHEN asked.succeeded THEN 'completed'
               WHEN asked.released AND before.releases < %(releases_max)s
                   AND NOT (asked.alone AND task.runs_alone)
                   AND NOT (asked.lost
                            AND least(task.losses, before.releases) >= %(losses_max)s) THEN 'queued'
               WHEN asked.retried AND task.attempt < task.attempt_limit THEN 'retrying'
               ELSE 'dead'
           END AS status,
           moot.why AS moot
    FROM task
    JOIN asked ON task.id = asked.task_id AND task.attempt = asked.attempt
        AND task.lease_token = asked.lease_token
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN NOT task.payload ? 'buffer' THEN NULL
            WHEN task.generation NOT IN (SELECT version FROM served)
            THEN 'Its generation is not served any more; its batches are written by another task.'
            WHEN EXISTS (
                SELECT
                FROM dataset
                JOIN removed ON removed.dataset_id = dataset.id
                WHERE dataset.job_id = task.job_id
                  AND removed.generation = task.generation AND removed.task_id >= task.id
                  AND removed.partition_key = coalesce(task.payload ->> 'partition_key', ''))
            THEN 'Its partition was removed meanwhile; its batches are written by another task.'
        END AS why
    ) AS moot
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN NOT asked.released
                OR task.claimed_at > penstock_now() - %(steady_seconds)s * interval '1 second'
                THEN task.releases
            WHEN (SELECT definition.body -> 'source' ->> 'kind' = 'always_on'
                  FROM job_definition AS definition
                  WHERE definition.id = task.definition_id) THEN 0
            ELSE task.releases
        END AS releases
    ) AS before
    WHERE task.status = 'running' AND task.id NOT IN (SELECT task_id FROM misplaced)
      AND penstock_has_grants(task.grants, task.attempt, asked.grants)
    ORDER BY task.id
    FOR NO KEY UPDATE OF task
)
UPDATE task
SET status = held.status,
    attempt_limit = task.attempt_limit + (held.status = 'queued')::integer,
    releases = held.releases + (held.status = 'queued')::integer,
    losses = held.losses + (held.status = 'queued' AND held.lost)::integer,
    runs_alone = task.runs_alone OR held.alone,
    due_at = CASE
        WHEN held.status = 'queued' AND held.delayed THEN penstock_now() + penstock_backoff(
            %(release_first_ms)s, %(release_max_ms)s, 2, held.releases + 1, random())
        WHEN held.status = 'queued' THEN penstock_now()
        WHEN held.status = 'retrying' AND held.lost AND NOT held.released THEN penstock_now()
        WHEN held.status = 'retrying' THEN penstock_now() + penstock_backoff(
            definition.retry_first_ms, definition.retry_max_ms, definition.retry_backoff,
            task.attempt - (task.attempt_limit - definition.max_attempts), random())
        ELSE task.due_at
    END,
    settled_at = CASE WHEN held.status IN ('queued', 'retrying') THEN NULL ELSE penstock_now() END,
    reason = CASE held.status
        WHEN 'cancelled' THEN coalesce(task.reason, held.moot) WHEN 'completed' THEN NULL ELSE held.reason END,
    lease_token = NULL, lease_expires_at = NULL, worker = NULL, claimed_at = NULL
FROM held, job_definition AS definition
WHERE task.id = held.id AND task.status = 'running' AND definition.id = task.definition_id
RETURNING task.id AS task_id, task.attempt, task.status,
          CASE WHEN task.status IN ('queued', 'retrying') THEN task.due_at END AS due_at,
          task.generation::text, task.dedupe_key, definition.update_mode, held.reason AS told,
          task.payload ? 'maintain' AS is_maintaining,
          definition.body ? 'buffers' AS is_buffering, task.payload ? 'buffer' AS is_sinking,
          -- Of a sink that merges, the dataset of rejected rows, which are appended.
          CASE WHEN task.payload ? 'buffer' THEN penstock_aside(definition.body) END AS aside,
          task.payload ->> 'partition_key' AS own_key, task.payload -> 'start' AS own_start,
          task.payload -> 'end' AS own_end,
          (SELECT job.name FROM job WHERE job.id = task.job_id) AS job,
          extract(epoch FROM penstock_now() - held.claimed_at)::double precision AS ran_seconds,
          EXISTS (SELECT FROM job
                  WHERE job.id = task.job_id AND job.max_concurrency IS NOT NULL)
          OR EXISTS (SELECT FROM operator
                     WHERE operator.name = task.operator AND operator.in_flight_max IS NOT NULL)
          AS is_limited

-- name: close_attempts
UPDATE attempt
SET ended_at = penstock_now(), outcome = asked.outcome, reason = asked.reason, said = asked.said,
    answer = asked.answer, log = asked.log,
    metrics = penstock_bounded(asked.metrics, %(bytes_max)s)
FROM unnest(
    %(tasks)s::bigint[], %(attempts)s::integer[], %(outcomes)s::text[], %(reasons)s::text[],
    %(said)s::text[], %(answers)s::jsonb[], %(logs)s::text[], %(metrics)s::jsonb[])
    AS asked(task_id, number, outcome, reason, said, answer, log, metrics)
WHERE attempt.task_id = asked.task_id AND attempt.number = asked.number
  AND attempt.ended_at IS NULL

-- name: earlier_answers
-- What an attempt that is over was told when it ended, if this is the attempt that asks.
SELECT attempt.task_id, attempt.said, attempt.answer
FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[], %(tokens)s::text[])
    AS asked(task_id, number, lease_token)
JOIN attempt USING (task_id, number, lease_token)
WHERE attempt.said IS NOT NULL

-- name: ended_lately
-- Of attempts, those that their own holders have ended not long ago; not what was taken from them.
SELECT attempt.task_id
FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[], %(tokens)s::text[])
    AS asked(task_id, number, lease_token)
JOIN attempt USING (task_id, number, lease_token)
WHERE attempt.said IS NOT NULL
  AND attempt.ended_at >= penstock_now() - %(seconds)s * interval '1 second'

-- name: publish
-- Moves partitions to what completed tasks have made, and makes events of what has moved. To
-- replace, only a later task than the one that is there (PUBLISH-2); to append, only with a new key
-- (PUBLISH-3); to merge, what was found to be merged with what is there (PUBLISH-5): see refuse_moved
-- in penstock.dispatcher.tasks.completion. What was removed comes back only by a later task than all
-- that had made it (PUBLISH-4): not by a bit of it that is late.
-- Of a partition that is appended to, the publication has the place of the latest part and the sums
-- of all.
WITH asked AS MATERIALIZED (
    SELECT asked.*, removed.revision AS removed_revision,
           coalesce(removed.task_id >= asked.task_id, false) AS is_late
    FROM jsonb_to_recordset(%(outputs)s) AS asked(
        task_id bigint, place integer, attempt integer, dataset_id uuid, generation uuid,
        mode text, partition_key text, range_start bigint, range_end bigint, cursor bigint,
        append_key text, location text, files bigint, rows bigint, bytes bigint, manifest text,
        news text)
    LEFT JOIN removed ON (removed.dataset_id, removed.generation, removed.partition_key)
        = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''))
), parts AS (
    INSERT INTO appended (
        dataset_id, generation, partition_key, append_key, task_id, attempt, location, files, rows,
        bytes, manifest, news)
    -- What is merged is only named: its rows are in what is published.
    SELECT asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''), asked.append_key,
           asked.task_id, asked.attempt, piece.*, asked.news
    FROM asked
    CROSS JOIN LATERAL (
        SELECT asked.location, asked.files, asked.rows, asked.bytes, asked.manifest
        WHERE asked.mode = 'append'
        UNION ALL
        SELECT 'merged:', NULL, NULL, NULL, NULL WHERE asked.mode = 'merge'
    ) AS piece
    WHERE NOT asked.is_late
    ORDER BY dataset_id, generation, partition_key, append_key, task_id
    ON CONFLICT DO NOTHING
    RETURNING dataset_id, generation, partition_key, append_key, task_id
), heads AS (
    -- Two tasks of one call may have made the same partition: the later one counts.
    -- A sum of what is not all known is not known either.
    SELECT DISTINCT ON (dataset_id, generation, coalesce(partition_key, '')) asked.*,
           CASE WHEN mode <> 'append' THEN files
                WHEN count(files) OVER same = count(*) OVER same THEN sum(files) OVER same
           END AS all_files,
           CASE WHEN mode <> 'append' THEN rows
                WHEN count(rows) OVER same = count(*) OVER same THEN sum(rows) OVER same
           END AS all_rows,
           CASE WHEN mode <> 'append' THEN bytes
                WHEN count(bytes) OVER same = count(*) OVER same THEN sum(bytes) OVER same
           END AS all_bytes
    FROM asked
    WHERE mode <> 'append' OR EXISTS (
        SELECT FROM parts
        WHERE (parts.dataset_id, parts.generation, parts.partition_key, parts.append_key,
               parts.task_id)
            = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''),
               asked.append_key, asked.task_id))
    WINDOW same AS (PARTITION BY dataset_id, generation, coalesce(partition_key, ''))
    ORDER BY dataset_id, generation, coalesce(partition_key, ''), task_id DESC
), moved AS (
    INSERT INTO publication AS held (
        dataset_id, generation, partition_key, range_start, range_end, mode, task_id, attempt,
        location, files, rows, bytes, manifest, revision)
    SELECT heads.dataset_id, heads.generation, coalesce(heads.partition_key, ''),
           heads.range_start, heads.range_end, heads.mode, heads.task_id, heads.attempt,
           heads.location, heads.all_files, heads.all_rows, heads.all_bytes, heads.manifest,
           coalesce(heads.removed_revision, 0) + 1
    FROM heads
    WHERE NOT heads.is_late
    ORDER BY heads.dataset_id, heads.generation, coalesce(heads.partition_key, '')
    ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
    SET range_start = excluded.range_start, range_end = excluded.range_end, mode = excluded.mode,
        task_id = greatest(held.task_id, excluded.task_id),
        attempt = CASE WHEN held.task_id > excluded.task_id THEN held.attempt
                       ELSE excluded.attempt END,
        location = excluded.location, manifest = excluded.manifest,
        files = CASE WHEN excluded.mode = 'append' THEN held.files + excluded.files
                     ELSE excluded.files END,
        rows = CASE WHEN excluded.mode = 'append' THEN held.rows + excluded.rows
                    ELSE excluded.rows END,
        bytes = CASE WHEN excluded.mode = 'append' THEN held.bytes + excluded.bytes
                     ELSE excluded.bytes END,
        revision = held.revision + 1, published_at = excluded.published_at
    WHERE held.task_id < excluded.task_id OR excluded.mode <> 'replace'
    RETURNING dataset_id, generation, partition_key, task_id, revision
), judged AS MATERIALIZED (
    SELECT asked.*, moved.revision,
           CASE
               WHEN asked.is_late THEN 'superseded'
               WHEN asked.mode = 'append' AND parts.task_id IS NULL THEN 'duplicate'
               WHEN asked.mode = 'replace' AND moved.task_id IS DISTINCT FROM asked.task_id
                   THEN 'superseded'
               ELSE 'published'
           END AS outcome
    FROM asked
    LEFT JOIN moved ON (moved.dataset_id, moved.generation, moved.partition_key)
        = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''))
    LEFT JOIN parts
        ON (parts.dataset_id, parts.generation, parts.partition_key, parts.append_key,
            parts.task_id)
         = (asked.dataset_id, asked.generation, coalesce(asked.partition_key, ''),
            asked.append_key, asked.task_id)
), told AS (
    INSERT INTO event (
        dataset_id, generation, cursor, partition_key, range_start, range_end, dedupe, task_id,
        revision, routed)
    SELECT dataset_id, generation,
           CASE WHEN partition_key IS NULL THEN coalesce(cursor, task_id) END,
           partition_key, range_start, range_end,
           'publication:' || task_id || ':' || place, task_id, revision,
           -- Where a table follows, nobody is told before it has the rows.
           CASE WHEN penstock_is_hot(dataset_id, generation) THEN 'applying' ELSE 'pending' END
    FROM judged
    WHERE outcome = 'published'
    ORDER BY task_id, place
    RETURNING seq, task_id, dedupe, routed
)
SELECT judged.task_id, judged.place, judged.dataset_id::text AS dataset, judged.partition_key,
       judged.outcome, CASE WHEN judged.outcome = 'published' THEN judged.revision END AS revision,
       told.seq AS event_seq, coalesce(told.routed = 'applying', false) AS is_applying
FROM judged
LEFT JOIN told ON told.dedupe = 'publication:' || judged.task_id || ':' || judged.place
ORDER BY judged.task_id, judged.place

-- name: watch_reaper
-- Say that a reaper runs. If none has for a while, though something has run all the time, workers
-- could not say that they live either: all reapers hold still for the longest time that a worker may
-- be silent (FENCE-6). Where nothing runs there is no need to say so. Attempts that nobody has
-- acknowledged have less time, so a shorter gap counts for them.
UPDATE reaper
SET ran_at = greatest(reaper.ran_at, penstock_now()),
    quiet_until = CASE
        WHEN reaper.ran_at + %(outage_seconds)s * interval '1 second' < penstock_now()
            AND (reaper.ran_at = '-infinity' OR EXISTS (
                SELECT
                FROM task
                WHERE status = 'running'
                  AND claimed_at < reaper.ran_at + %(outage_seconds)s * interval '1 second'))
        THEN penstock_now() + coalesce(
            (SELECT max(definition.heartbeat_ms)
             FROM task
             JOIN job_definition AS definition ON definition.id = task.definition_id
             WHERE task.status = 'running'), 0) * interval '1 millisecond'
        ELSE reaper.quiet_until
    END,
    spares_until = CASE
        WHEN reaper.ran_at + %(unheard_seconds)s * interval '1 second' < penstock_now()
        THEN penstock_now() + %(unacknowledged_seconds)s * interval '1 second'
        ELSE reaper.spares_until
    END
RETURNING quiet_until, quiet_until > penstock_now() AS is_quiet

-- name: reap
-- A claim that nobody has acknowledged is taken back, and not counted as often as what was lost with
-- its worker is not: its answer was lost, or its worker killed before it had read it (FENCE-20). Where
-- it may not have been heard it is spared once more for as long.
WITH over AS MATERIALIZED (
    SELECT task.id, task.worker, task.claimed_at, task.claim_id IS NOT NULL AS is_unread,
           CASE
               WHEN task.cancel_asked THEN 'cancelled'
               WHEN task.claim_id IS NOT NULL AND task.releases < %(releases_max)s
                   AND least(task.losses, task.releases) < %(losses_max)s THEN 'queued'
               WHEN task.attempt < task.attempt_limit THEN 'retrying'
               ELSE 'dead'
           END AS status
    FROM task
    WHERE task.status = 'running' AND task.lease_expires_at <= penstock_now()
      AND (task.claim_id IS NULL
           OR (SELECT spares_until FROM reaper) <= penstock_now()
           OR task.lease_expires_at
              <= penstock_now() - %(unacknowledged_seconds)s * interval '1 second')
    ORDER BY task.lease_expires_at
    LIMIT %(limit)s
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE task
SET status = over.status,
    attempt_limit = task.attempt_limit + (over.status = 'queued')::integer,
    releases = task.releases + (over.status = 'queued')::integer,
    losses = least(task.losses, task.releases) + (over.status = 'queued')::integer,
    due_at = CASE
        WHEN over.status = 'queued' THEN penstock_now()
        WHEN over.status = 'retrying' THEN penstock_now() + penstock_backoff(
            definition.retry_first_ms, definition.retry_max_ms, definition.retry_backoff,
            task.attempt - (task.attempt_limit - definition.max_attempts), random())
        ELSE task.due_at
    END,
    settled_at = CASE WHEN over.status IN ('queued', 'retrying') THEN NULL ELSE penstock_now() END,
    reason = CASE
        WHEN over.status = 'cancelled' THEN task.reason
        WHEN over.is_unread THEN 'The worker ' || over.worker || ' has not acknowledged its claim.'
        ELSE 'The worker ' || over.worker || ' was not heard of in time.' END,
    lease_token = NULL, lease_expires_at = NULL, worker = NULL, claimed_at = NULL
FROM over, job_definition AS definition
WHERE task.id = over.id AND task.status = 'running' AND definition.id = task.definition_id
RETURNING task.id AS task_id, task.attempt, task.status, task.due_at, task.reason, over.worker,
          definition.body ? 'buffers' AS is_buffering, task.payload ? 'buffer' AS is_sinking,
          (SELECT job.name FROM job WHERE job.id = task.job_id) AS job,
          extract(epoch FROM penstock_now() - over.claimed_at)::double precision AS ran_seconds
