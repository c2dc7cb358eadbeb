-- Events and the tasks that they become, for penstock.dispatcher.routing.
-- Locks are taken in this order: events, publications, generations by their keys, then those of the
-- jobs that read. Every statement that decides by a generation's state comes after its lock.

-- name: share_generations
-- Whoever changes the DAG or cuts over waits for us, or we for them, and then see what they did.
SELECT FROM generation
WHERE (dataset_id, version) IN (
    SELECT * FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[]))
ORDER BY dataset_id, version
FOR SHARE

-- name: take_pending
-- What another router has in hand is passed by, and so is what a paused source has sent: no tasks
-- are made of that until it is resumed.
SELECT seq, dataset_id::text AS dataset, generation::text,
       coalesce(partition_key, '') AS partition_key, revision IS NOT NULL AS is_published
FROM event
WHERE routed = 'pending' AND (revision IS NOT NULL OR dataset_id NOT IN (
    SELECT dataset.id
    FROM pause
    JOIN dataset ON dataset.job_id = pause.job_id
    JOIN dag_job ON dag_job.job_id = pause.job_id
        AND dag_job.dag_version_id = (SELECT dag_version_id FROM dag_current)
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE definition.body ->> 'activation' = 'source'
      AND (pause.scope = 'all' OR definition.priority = 'bulk')))
ORDER BY seq
LIMIT %(limit)s
FOR NO KEY UPDATE SKIP LOCKED

-- name: datasets_of_events
SELECT DISTINCT dataset_id::text AS dataset, generation::text
FROM event
WHERE seq = ANY (%(events)s::bigint[])

-- name: lock_readers
-- Of two tasks for one partition the later one counts, so the later one has to see what led to the
-- earlier: their numbers must be given in the order in which their transactions are committed.
-- Where a job reads one dataset, the publications come one after the other. Where it reads several,
-- and for what sources send, the transactions do, by locks of which a job has 64. And a job's
-- backfills wait for all who route to it, and they for the backfill: the first lock, which all but
-- the backfill share. That holds also for what is read until the cut-over, as it was defined.
SELECT CASE WHEN places.is_shared
            THEN pg_advisory_xact_lock_shared(1885697108, places.place)
            ELSE pg_advisory_xact_lock(1885697107, places.place) END
FROM (
    WITH versions AS MATERIALIZED (
        SELECT dag_version_id FROM dag_current
        UNION
        SELECT max(dag_job.dag_version_id)
        FROM generation AS next
        JOIN generation AS served
            ON served.dataset_id = next.dataset_id AND served.state = 'current'
        JOIN dag_job ON dag_job.generation = served.version
        WHERE next.state = 'building'
        GROUP BY dag_job.generation
    ), reached AS MATERIALIZED (
        SELECT DISTINCT edge.job_id, hashtext(coalesce(event.partition_key, '')) & 63 AS place,
               event.revision IS NULL OR EXISTS (
                   SELECT FROM edge AS other
                   WHERE other.dag_version_id = edge.dag_version_id AND other.job_id = edge.job_id
                     AND other.dataset_id <> edge.dataset_id) AS is_ordered
        FROM event
        JOIN edge ON edge.dataset_id = event.dataset_id
            AND edge.dag_version_id IN (SELECT dag_version_id FROM versions)
        WHERE event.seq = ANY (%(events)s::bigint[])
    )
    SELECT DISTINCT true AS is_shared, job_id AS place FROM reached
    UNION ALL
    SELECT DISTINCT false, job_id * 64 + place FROM reached WHERE is_ordered
    ORDER BY is_shared DESC, place
    OFFSET 0
) AS places

-- name: lock_reader
-- Of one job, by a backfill that makes tasks for it: see above.
SELECT pg_advisory_xact_lock(1885697108, job_id) FROM job_definition WHERE id = %(definition)s

-- name: share_publications
-- Whoever is publishing one of these is waited for, and waits for us.
SELECT FROM publication
WHERE (dataset_id, generation, partition_key) IN (
    SELECT * FROM unnest(%(datasets)s::uuid[], %(generations)s::uuid[], %(keys)s::text[]))
ORDER BY dataset_id, generation, partition_key
FOR SHARE

-- name: route
-- Events to tasks and wake-ups, and what was done written to the events: all that routing is. With
-- `only` it is a rebuild: whatever the events have become before, they reach this generation alone,
-- by the same keys, as tasks of a backfill.
WITH in_force AS MATERIALIZED (
    SELECT dag_job.*
    FROM dag_job
    WHERE dag_job.dag_version_id = (SELECT dag_version_id FROM dag_current)
), replaced AS MATERIALIZED (
    -- Current until what the DAG names is built: served by the last version that names it.
    SELECT dag_job.generation, max(dag_job.dag_version_id) AS dag_version_id
    FROM generation AS next
    JOIN in_force ON in_force.generation = next.version
    JOIN generation AS served
        ON served.dataset_id = next.dataset_id AND served.state = 'current'
    JOIN dag_job ON dag_job.generation = served.version AND dag_job.job_id = in_force.job_id
    WHERE next.state = 'building'
      -- Of a job that has lost a dataset to another, nothing can be published as it was.
      AND NOT EXISTS (
          SELECT
          FROM generation AS output
          JOIN dataset ON dataset.id = output.dataset_id
          WHERE output.version = served.version AND dataset.job_id <> in_force.job_id)
    GROUP BY dag_job.generation
), live AS MATERIALIZED (
    SELECT dag_version_id, job_id, definition_id, generation FROM in_force
    UNION
    SELECT dag_job.dag_version_id, dag_job.job_id, dag_job.definition_id, dag_job.generation
    FROM replaced
    JOIN dag_job USING (dag_version_id, generation)
    UNION
    -- Jobs without an output have no generation to cut over. The earlier ones go on for as long
    -- as the ones that they follow.
    SELECT dag_job.dag_version_id, dag_job.job_id, dag_job.definition_id, dag_job.generation
    FROM (SELECT max(dag_version_id) AS dag_version_id FROM replaced) AS latest
    JOIN dag_job USING (dag_version_id)
    JOIN in_force
        ON in_force.job_id = dag_job.job_id AND in_force.generation <> dag_job.generation
    WHERE NOT EXISTS (SELECT FROM generation WHERE generation.version = dag_job.generation)
), fed AS MATERIALIZED (
    -- Which generation of a dataset is read in a version: the one of the job that writes it there.
    SELECT named.dag_version_id, generation.dataset_id, generation.version
    FROM (SELECT DISTINCT dag_version_id FROM live) AS named
    CROSS JOIN LATERAL (
        SELECT dag_job.generation
        FROM dag_job
        WHERE dag_job.dag_version_id = named.dag_version_id
        OFFSET 0
    ) AS writer
    JOIN generation ON generation.version = writer.generation
), edges AS MATERIALIZED (
    -- OFFSET 0 here and above: few rows of few versions are looked up, however many there are.
    SELECT edge.dataset_id, fed.version AS generation, edge.input, edge.filter, live.job_id,
           live.generation AS task_generation, definition.id AS definition_id,
           definition.operator, definition.priority, definition.runtime, definition.max_attempts,
           coalesce(definition.body ->> 'execution', 'per_partition') = 'per_partition'
               AS is_per_partition,
           coalesce(definition.body ->> 'coalesce', 'false') = 'true' AS is_coalescing
    FROM live
    CROSS JOIN LATERAL (
        SELECT edge.dataset_id, edge.input, edge.filter
        FROM edge
        WHERE edge.dag_version_id = live.dag_version_id AND edge.job_id = live.job_id
        OFFSET 0
    ) AS edge
    JOIN fed ON fed.dag_version_id = live.dag_version_id AND fed.dataset_id = edge.dataset_id
    JOIN job_definition AS definition ON definition.id = live.definition_id
    WHERE %(only)s::uuid IS NULL OR live.generation = %(only)s
), in_hand AS MATERIALIZED (
    -- What another router has taken of what sources have sent: what comes later of the same partition
    -- waits, for its task has to have the higher number.
    SELECT dataset_id, generation, coalesce(partition_key, '') AS partition_key, min(seq) AS seq
    FROM event
    WHERE routed = 'pending' AND revision IS NULL AND %(only)s::uuid IS NULL
      AND seq < (
          SELECT max(asked.seq) FROM event AS asked
          WHERE asked.seq = ANY (%(events)s::bigint[]) AND asked.revision IS NULL)
      AND seq <> ALL (%(events)s::bigint[])
    GROUP BY dataset_id, generation, coalesce(partition_key, '')
), judged AS MATERIALIZED (
    SELECT event.*,
           CASE
               WHEN generation.version IS NULL THEN 'This generation is not known.'
               WHEN generation.state NOT IN ('building', 'current')
                   THEN 'This generation is ' || generation.state || '.'
               WHEN NOT EXISTS (SELECT FROM in_force WHERE in_force.job_id = dataset.job_id)
                   THEN 'No job of the DAG writes this dataset.'
           END AS reason
    FROM event
    JOIN dataset ON dataset.id = event.dataset_id
    LEFT JOIN generation
        ON generation.dataset_id = event.dataset_id AND generation.version = event.generation
    WHERE event.seq = ANY (%(events)s::bigint[])
      AND (event.routed = 'pending' OR %(only)s::uuid IS NOT NULL)
      AND NOT (event.revision IS NULL AND EXISTS (
          SELECT FROM in_hand
          WHERE in_hand.dataset_id = event.dataset_id AND in_hand.generation = event.generation
            AND in_hand.partition_key = coalesce(event.partition_key, '')
            AND in_hand.seq < event.seq))
), matched AS MATERIALIZED (
    SELECT judged.seq, edges.job_id, edges.task_generation, edges.definition_id, edges.operator,
           CASE WHEN %(only)s::uuid IS NULL THEN edges.priority ELSE 'bulk' END AS priority,
           edges.max_attempts,
           -- What one task has published of one partition is one update of it, in however many
           -- datasets.
           CASE
               WHEN edges.is_per_partition AND judged.partition_key IS NOT NULL
                   AND judged.revision IS NOT NULL
               THEN 'task:' || judged.task_id || ':' || judged.partition_key
               ELSE 'event:' || judged.seq
           END AS dedupe_key,
           jsonb_strip_nulls(jsonb_build_object(
               'event', judged.seq, 'dataset', judged.dataset_id, 'generation', judged.generation,
               'inputs', jsonb_agg(edges.input ORDER BY edges.input),
               'partition_key', judged.partition_key, 'start', judged.range_start,
               'end', judged.range_end, 'cursor', judged.cursor, 'revision', judged.revision
           -- What came with the event is the user's: nulls in it stay.
           )) || CASE WHEN judged.payload IS NULL THEN '{}'
                      ELSE jsonb_build_object('payload', judged.payload) END AS payload,
           CASE
               WHEN NOT edges.is_coalescing THEN NULL
               WHEN judged.partition_key IS NOT NULL THEN 'partition:' || judged.partition_key
               ELSE 'cursor:' || judged.dataset_id
           END AS coalesce_key
    FROM judged
    JOIN edges USING (dataset_id, generation)
    WHERE judged.reason IS NULL AND (edges.filter IS NULL OR penstock_passes(
        edges.filter, judged.partition_key, judged.range_start, judged.range_end, judged.cursor))
    GROUP BY judged.seq, judged.dataset_id, judged.generation, judged.partition_key,
             judged.range_start, judged.range_end, judged.cursor, judged.revision, judged.task_id,
             judged.payload,
             edges.job_id, edges.task_generation, edges.definition_id, edges.operator,
             edges.priority, edges.max_attempts, edges.is_per_partition, edges.is_coalescing
), gathered AS MATERIALIZED (
    -- The updates of one partition that may become one task, but none that have been part of one.
    SELECT job_id, task_generation, definition_id, operator, priority, max_attempts, coalesce_key,
           array_agg(seq) AS seqs, max(seq) AS seq,
           (array_agg(dedupe_key ORDER BY seq DESC))[1] AS dedupe_key,
           (array_agg(payload ORDER BY (payload ->> 'cursor')::bigint DESC NULLS LAST, seq DESC))[1]
               AS payload,
           jsonb_path_query_array(jsonb_agg(payload -> 'inputs'), '$[*][*]') AS inputs
    FROM matched
    WHERE coalesce_key IS NOT NULL AND %(only)s::uuid IS NULL
      AND (seq, job_id, task_generation) NOT IN (
          SELECT event_seq, job_id, generation FROM coalesced
          WHERE event_seq = ANY (%(events)s::bigint[]))
    GROUP BY job_id, task_generation, definition_id, operator, priority, max_attempts,
             coalesce_key
), waiting AS MATERIALIZED (
    -- The task that may take them: the newest of all, if it was never attempted. The output of an
    -- older one would not count against what the newest has published.
    SELECT gathered.*, latest.id AS waiting_id
    FROM gathered
    LEFT JOIN LATERAL (
        SELECT task.id, task.status, task.attempt, task.backfill_id
        FROM task
        WHERE task.job_id = gathered.job_id AND task.generation = gathered.task_generation
          AND task.coalesce_key = gathered.coalesce_key
        ORDER BY task.id DESC
        LIMIT 1
    ) AS latest
        ON latest.status = 'queued' AND latest.attempt = 0 AND latest.backfill_id IS NULL
), held AS MATERIALIZED (
    -- Whoever is claiming one at this moment may have it as it is.
    SELECT task.id
    FROM task
    WHERE task.id = ANY (ARRAY (SELECT waiting_id FROM waiting WHERE waiting_id IS NOT NULL))
      AND task.status = 'queued' AND task.attempt = 0
    ORDER BY task.id
    FOR NO KEY UPDATE SKIP LOCKED
), chosen AS MATERIALIZED (
    -- NOT IN above, IS TRUE here and below: looked up by hash, whatever the planner expects.
    SELECT waiting.*, (waiting.waiting_id IN (SELECT id FROM held)) IS TRUE AS is_extended,
           nextval('task_id_seq') AS new_id
    FROM waiting
), extended AS (
    UPDATE task
    SET payload = CASE
            WHEN (task.payload ->> 'cursor')::bigint > (chosen.payload ->> 'cursor')::bigint
            THEN task.payload ELSE chosen.payload
        END || jsonb_build_object('inputs', penstock_union(task.payload -> 'inputs', chosen.inputs))
    FROM chosen
    WHERE chosen.is_extended AND task.id = chosen.waiting_id
), made AS (
    INSERT INTO task (
        id, job_id, definition_id, generation, dedupe_key, operator, priority, payload,
        attempt_limit, due_at, event_seq, backfill_id, coalesce_key)
    OVERRIDING SYSTEM VALUE
    SELECT id, job_id, definition_id, task_generation, dedupe_key, operator, priority, payload,
           max_attempts, penstock_now(), seq, %(backfill)s::bigint, coalesce_key
    FROM (
        -- Numbered in the order of the events: of two cursors the later one counts.
        SELECT coalesce(wanted.new_id, nextval('task_id_seq')) AS id, wanted.*
        FROM (
            SELECT NULL::bigint AS new_id, job_id, definition_id, task_generation, dedupe_key,
                   operator, priority, payload, max_attempts, seq, coalesce_key
            FROM matched
            WHERE coalesce_key IS NULL OR %(only)s::uuid IS NOT NULL
            UNION ALL
            SELECT new_id, job_id, definition_id, task_generation, dedupe_key, operator, priority,
                   payload || jsonb_build_object('inputs', penstock_union(inputs, '[]')),
                   max_attempts, seq, coalesce_key
            FROM chosen
            WHERE NOT is_extended
            ORDER BY seq
        ) AS wanted
        OFFSET 0
    ) AS numbered
    ORDER BY job_id, task_generation, dedupe_key, seq
    ON CONFLICT (job_id, generation, dedupe_key) DO NOTHING
    RETURNING id, definition_id, operator, priority
), taken AS MATERIALIZED (
    SELECT chosen.seqs, chosen.seq, chosen.job_id, chosen.task_generation, chosen.is_extended,
           CASE
               WHEN chosen.is_extended THEN chosen.waiting_id
               WHEN (chosen.new_id IN (SELECT id FROM made)) IS TRUE THEN chosen.new_id
           END AS task_id
    FROM chosen
), parts AS (
    INSERT INTO coalesced (event_seq, job_id, generation, task_id)
    SELECT part.seq, taken.job_id, taken.task_generation, taken.task_id
    FROM taken
    CROSS JOIN LATERAL unnest(taken.seqs) AS part(seq)
    WHERE taken.task_id IS NOT NULL AND (taken.is_extended OR part.seq <> taken.seq)
    ON CONFLICT DO NOTHING
), wakes AS (
    INSERT INTO outbox (kind, target, body)
    SELECT DISTINCT 'wake', made.operator || '/' || made.priority,
           jsonb_build_object('operator', made.operator, 'priority', made.priority)
    FROM made
    JOIN job_definition AS definition ON definition.id = made.definition_id
    WHERE definition.runtime NOT IN ('lambda', 'dispatcher')
    UNION ALL
    SELECT 'invoke', made.operator, jsonb_build_object('task_id', made.id)
    FROM made
    JOIN job_definition AS definition ON definition.id = made.definition_id
    WHERE definition.runtime = 'lambda'
), marked AS (
    UPDATE event
    SET routed = CASE WHEN judged.reason IS NULL THEN 'routed' ELSE 'audited' END,
        why_not = judged.reason
    FROM judged
    WHERE event.seq = judged.seq AND %(only)s::uuid IS NULL
      -- Where the newest of several updates has a task already, the others are looked at again.
      AND event.seq <> ALL (ARRAY (
          SELECT part.seq
          FROM taken
          CROSS JOIN LATERAL unnest(taken.seqs) AS part(seq)
          WHERE taken.task_id IS NULL AND part.seq <> taken.seq))
)
SELECT (SELECT count(*) FROM judged WHERE reason IS NULL) AS routed,
       (SELECT count(*) FROM judged WHERE reason IS NOT NULL) AS audited,
       (SELECT count(*) FROM made) AS tasks
