-- Events and the tasks that they become, for penstock.dispatcher.router. The locks that come before
-- are in routing_order.sql.

-- name: take_pending
-- What another router has in hand is passed by, and so is what a paused source has sent: no tasks
-- are made of that until it is resumed.
SELECT seq, dataset_id::text AS dataset, generation::text,
       coalesce(partition_key, '') AS partition_key, revision IS NOT NULL AS is_published
FROM event
WHERE routed = 'pending'
  AND (revision IS NOT NULL OR dataset_id NOT IN (SELECT penstock_paused_datasets()))
ORDER BY seq
LIMIT %(limit)s
FOR NO KEY UPDATE SKIP LOCKED

-- name: route
-- Events to tasks and wake-ups, and what was done written to the events: all that routing is. With
-- `only` it is a rebuild: whatever the events have become before, they reach this generation alone,
-- by the same keys, as tasks of a backfill. `status` is what the events are: pending, or held.
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
    SELECT edge.dataset_id, fed.version AS generation, edge.input, edge.filter, edge.lookback,
           live.job_id,
           live.generation AS task_generation, definition.id AS definition_id,
           definition.operator, definition.priority, definition.runtime, definition.max_attempts,
           coalesce(definition.body ->> 'execution', 'per_partition') = 'per_partition'
               AS is_per_partition,
           coalesce(definition.body ->> 'merge_updates', 'false') = 'true' AS is_merging,
           coalesce(definition.body ->> 'when', 'any') = 'all' AS is_all,
           definition.update_mode <> 'replace' AS is_appending
    FROM live
    CROSS JOIN LATERAL (
        SELECT edge.dataset_id, edge.input, edge.filter, edge.lookback
        FROM edge
        WHERE edge.dag_version_id = live.dag_version_id AND edge.job_id = live.job_id
          -- What is only read makes nothing run.
          AND edge.is_trigger
        OFFSET 0
    ) AS edge
    JOIN fed ON fed.dag_version_id = live.dag_version_id AND fed.dataset_id = edge.dataset_id
    JOIN job_definition AS definition ON definition.id = live.definition_id
    WHERE %(only)s::uuid IS NULL OR live.generation = %(only)s
), in_hand AS MATERIALIZED (
    -- What another router has taken of what sources have sent: what comes later of the same partition
    -- waits, for its task has to have the higher number. What is held is in order whoever has sent it.
    SELECT dataset_id, generation, coalesce(partition_key, '') AS partition_key, min(seq) AS seq
    FROM event
    WHERE routed = 'pending' AND (revision IS NULL OR %(status)s::text = 'held')
      AND %(only)s::uuid IS NULL
      AND seq < (
          SELECT max(asked.seq) FROM event AS asked
          WHERE asked.seq = ANY (%(events)s::bigint[])
            AND (asked.revision IS NULL OR %(status)s::text = 'held'))
      AND seq <> ALL (%(events)s::bigint[])
    GROUP BY dataset_id, generation, coalesce(partition_key, '')
    UNION ALL
    -- What another router has held since these were picked.
    SELECT earlier.dataset_id, earlier.generation, coalesce(earlier.partition_key, ''),
           min(earlier.seq)
    FROM (
        SELECT dataset_id, max(seq) AS upto FROM event
        WHERE seq = ANY (%(events)s::bigint[])
        GROUP BY dataset_id
    ) AS asked
    JOIN event AS earlier ON earlier.routed = 'held' AND earlier.dataset_id = asked.dataset_id
        AND earlier.seq < asked.upto AND earlier.seq <> ALL (%(events)s::bigint[])
    WHERE %(status)s::text = 'held'
    GROUP BY earlier.dataset_id, earlier.generation, coalesce(earlier.partition_key, '')
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
      AND (event.routed = %(status)s::text OR %(only)s::uuid IS NOT NULL)
      AND NOT ((event.revision IS NULL OR %(status)s::text = 'held') AND EXISTS (
          SELECT FROM in_hand
          WHERE in_hand.dataset_id = event.dataset_id AND in_hand.generation = event.generation
            AND in_hand.partition_key = coalesce(event.partition_key, '')
            AND in_hand.seq < event.seq))
), arrived AS MATERIALIZED (
    -- What has come for jobs that wait for all of their inputs: a partition, or the whole.
    SELECT DISTINCT judged.seq, judged.dataset_id, judged.generation, judged.partition_key,
           judged.cursor, edges.job_id, edges.task_generation, edges.is_per_partition,
           edges.is_appending
    FROM judged
    JOIN edges USING (dataset_id, generation)
    WHERE edges.is_all AND judged.reason IS NULL
      AND (judged.replayed_to IS NULL OR edges.task_generation = ANY (judged.replayed_to)
           OR %(only)s::uuid IS NOT NULL)
      AND (edges.filter IS NULL OR penstock_passes(
          edges.filter, judged.partition_key, judged.range_start, judged.range_end, judged.cursor))
), opening AS MATERIALIZED (
    -- The first that an input lets pass of what has come without a partition.
    SELECT arrived.*, edges.filter
    FROM arrived
    JOIN edges USING (dataset_id, generation, job_id, task_generation)
    WHERE arrived.partition_key IS NULL AND %(only)s::uuid IS NULL
      AND (edges.filter IS NULL OR penstock_passes(edges.filter, NULL, NULL, NULL, arrived.cursor))
      AND NOT EXISTS (
          SELECT FROM event AS earlier
          WHERE earlier.dataset_id = arrived.dataset_id
            AND earlier.generation = arrived.generation AND earlier.partition_key IS NULL
            AND (earlier.routed = 'routed' OR earlier.seq < arrived.seq
                 AND earlier.seq IN (SELECT seq FROM judged WHERE reason IS NULL))
            AND (edges.filter IS NULL OR penstock_passes(
                edges.filter, NULL, NULL, NULL, earlier.cursor)))
), freed AS MATERIALIZED (
    -- It lets all partitions go on that have waited for it, each by its latest event; of several
    -- that come at once it is the last that does. A rebuild comes by those anyway.
    SELECT DISTINCT ON (opening.job_id, opening.task_generation, there.partition_key)
           opening.seq AS upto, opening.job_id, opening.task_generation, there.seq,
           there.partition_key
    FROM opening
    JOIN edges AS other
        ON other.job_id = opening.job_id AND other.task_generation = opening.task_generation
        AND other.dataset_id <> opening.dataset_id
    JOIN event AS there
        ON there.dataset_id = other.dataset_id AND there.generation = other.generation
        AND there.partition_key IS NOT NULL
    WHERE (there.routed = 'routed' OR there.seq < opening.seq
           AND there.seq IN (SELECT seq FROM judged WHERE reason IS NULL))
      AND (other.filter IS NULL OR penstock_passes(
          other.filter, there.partition_key, there.range_start, there.range_end, there.cursor))
      AND NOT EXISTS (
          SELECT FROM event AS own
          WHERE own.dataset_id = opening.dataset_id AND own.generation = opening.generation
            AND own.partition_key = there.partition_key
            AND (own.routed = 'routed' OR own.seq < opening.seq
                 AND own.seq IN (SELECT seq FROM judged WHERE reason IS NULL))
            AND (opening.filter IS NULL OR penstock_passes(
                opening.filter, own.partition_key, own.range_start, own.range_end, own.cursor)))
    ORDER BY opening.job_id, opening.task_generation, there.partition_key, there.seq DESC, upto DESC
), complete AS MATERIALIZED (
    -- Those of both for which every input has something: the partition or the whole. What is not
    -- routed yet does not count, so the last that is routed, and it alone, finds all others; the
    -- locks above see to that.
    SELECT wanted.seq, wanted.job_id, wanted.task_generation, wanted.is_freed
    FROM (
        SELECT seq, seq AS upto, partition_key, job_id, task_generation, false AS is_freed FROM arrived
        UNION ALL
        SELECT seq, upto, partition_key, job_id, task_generation, true FROM freed
    ) AS wanted
    WHERE NOT EXISTS (
        SELECT
        FROM edges AS other
        WHERE other.job_id = wanted.job_id AND other.task_generation = wanted.task_generation
          AND NOT EXISTS (
              SELECT FROM event AS there
              WHERE there.dataset_id = other.dataset_id AND there.generation = other.generation
                AND there.partition_key = wanted.partition_key
                AND (there.routed = 'routed' OR there.seq <= wanted.upto
                     AND there.seq IN (SELECT seq FROM judged WHERE reason IS NULL))
                AND (other.filter IS NULL OR penstock_passes(
                    other.filter, there.partition_key, there.range_start, there.range_end,
                    there.cursor))
              OFFSET 0)
          AND NOT EXISTS (
              SELECT FROM event AS there
              WHERE there.dataset_id = other.dataset_id AND there.generation = other.generation
                AND there.partition_key IS NULL
                AND (there.routed = 'routed' OR there.seq <= wanted.upto
                     AND there.seq IN (SELECT seq FROM judged WHERE reason IS NULL))
                AND (other.filter IS NULL OR penstock_passes(
                    other.filter, NULL, NULL, NULL, there.cursor))
              OFFSET 0)
        OFFSET 0)
      -- A rebuild comes by each input's latest event, of which the last is enough. One that appends
      -- comes by all events, and those made a task for which the other inputs were there before.
      AND NOT (%(only)s::uuid IS NOT NULL AND EXISTS (
          SELECT
          FROM arrived
          JOIN edges AS other
              ON other.job_id = arrived.job_id AND other.task_generation = arrived.task_generation
          WHERE arrived.seq = wanted.seq AND arrived.job_id = wanted.job_id
            AND arrived.task_generation = wanted.task_generation
            AND other.dataset_id <> arrived.dataset_id
            AND CASE
                WHEN arrived.is_appending THEN NOT EXISTS (
                    SELECT FROM event AS there
                    WHERE there.dataset_id = other.dataset_id AND there.generation = other.generation
                      AND there.routed = 'routed'
                      AND (there.partition_key IS NULL
                           OR there.partition_key = arrived.partition_key AND there.seq < arrived.seq)
                      AND (other.filter IS NULL OR penstock_passes(
                          other.filter, there.partition_key, there.range_start, there.range_end,
                          there.cursor)))
                ELSE arrived.is_per_partition AND EXISTS (
                    SELECT FROM event AS later
                    WHERE later.dataset_id = other.dataset_id AND later.generation = other.generation
                      AND later.partition_key = arrived.partition_key AND later.seq > arrived.seq
                      AND later.routed = 'routed'
                      AND (other.filter IS NULL OR penstock_passes(
                          other.filter, later.partition_key, later.range_start, later.range_end,
                          later.cursor)))
            END))
), told AS MATERIALIZED (
    -- What is to become tasks, and of which job alone, if not of all that read it.
    SELECT judged.*, NULL::integer AS freed_job, NULL::uuid AS freed_generation
    FROM judged
    WHERE judged.reason IS NULL
    UNION ALL
    SELECT event.*, NULL, complete.job_id, complete.task_generation
    FROM complete
    JOIN event ON event.seq = complete.seq
    WHERE complete.is_freed
), looked_at AS MATERIALIZED (
    -- What later partitions read too. A rebuild makes all of them, of what is there.
    SELECT judged.seq, judged.dataset_id, judged.generation, judged.revision, judged.range_start,
           judged.range_end, edges.job_id, edges.task_generation, edges.definition_id,
           edges.operator, edges.priority, edges.max_attempts, max(edges.lookback) AS lookback,
           jsonb_agg(edges.input ORDER BY edges.input) AS inputs
    FROM judged
    JOIN edges USING (dataset_id, generation)
    WHERE judged.reason IS NULL AND edges.lookback IS NOT NULL AND %(only)s::uuid IS NULL
      AND (judged.replayed_to IS NULL OR edges.task_generation = ANY (judged.replayed_to))
      AND (edges.filter IS NULL OR penstock_passes(
          edges.filter, judged.partition_key, judged.range_start, judged.range_end, judged.cursor))
    GROUP BY judged.seq, judged.dataset_id, judged.generation, judged.revision,
             judged.range_start, judged.range_end, edges.job_id, edges.task_generation,
             edges.definition_id, edges.operator, edges.priority, edges.max_attempts
), late AS MATERIALIZED (
    -- It is late for the partitions that there is a task of already and whose window has it: each of
    -- them is made again, as its latest task says what it is.
    SELECT looked_at.seq, looked_at.job_id, looked_at.task_generation, looked_at.definition_id,
           looked_at.operator, looked_at.priority, looked_at.max_attempts,
           'late:' || looked_at.seq || ':' || (there.payload ->> 'partition_key') AS dedupe_key,
           there.payload - '{backfill,revision}'::text[] || jsonb_strip_nulls(jsonb_build_object(
               'event', looked_at.seq, 'dataset', looked_at.dataset_id,
               'generation', looked_at.generation, 'inputs', looked_at.inputs,
               'revision', looked_at.revision)) AS payload,
           there.coalesce_key
    FROM looked_at
    CROSS JOIN LATERAL (
        SELECT DISTINCT ON (task.coalesce_key) task.coalesce_key, task.payload
        FROM task
        WHERE task.job_id = looked_at.job_id AND task.generation = looked_at.task_generation
          AND task.coalesce_key IS NOT NULL AND task.status <> 'cancelled'
          AND (task.payload ->> 'start')::bigint > looked_at.range_start
          AND (task.payload ->> 'start')::bigint
              <= penstock_shifted(looked_at.range_start, looked_at.lookback)
          AND (task.payload ->> 'end')::bigint >= looked_at.range_end
        ORDER BY task.coalesce_key, task.id DESC
        OFFSET 0
    ) AS there
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
               WHEN NOT edges.is_merging THEN NULL
               WHEN judged.partition_key IS NOT NULL THEN 'partition:' || judged.partition_key
               ELSE 'cursor:' || judged.dataset_id
           END AS coalesce_key
    FROM told AS judged
    JOIN edges USING (dataset_id, generation)
    WHERE (edges.filter IS NULL OR penstock_passes(
        edges.filter, judged.partition_key, judged.range_start, judged.range_end, judged.cursor))
      AND (judged.replayed_to IS NULL OR edges.task_generation = ANY (judged.replayed_to)
           OR judged.freed_job IS NOT NULL OR %(only)s::uuid IS NOT NULL)
      AND CASE
          WHEN judged.freed_job IS NOT NULL
          THEN (edges.job_id, edges.task_generation) = (judged.freed_job, judged.freed_generation)
          WHEN edges.is_all
          THEN (judged.seq, edges.job_id, edges.task_generation) IN (
              SELECT seq, job_id, task_generation FROM complete WHERE NOT is_freed)
          ELSE true
      END
    GROUP BY judged.seq, judged.dataset_id, judged.generation, judged.partition_key,
             judged.range_start, judged.range_end, judged.cursor, judged.revision, judged.task_id,
             judged.payload,
             edges.job_id, edges.task_generation, edges.definition_id, edges.operator,
             edges.priority, edges.max_attempts, edges.is_per_partition, edges.is_merging
    UNION ALL
    SELECT seq, job_id, task_generation, definition_id, operator, priority, max_attempts,
           dedupe_key, payload, coalesce_key
    FROM late
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
      AND (seq, job_id, task_generation, coalesce_key) NOT IN (
          SELECT coalesced.event_seq, coalesced.job_id, coalesced.generation, task.coalesce_key
          FROM coalesced
          JOIN task ON task.id = coalesced.task_id AND task.coalesce_key IS NOT NULL
          WHERE coalesced.event_seq = ANY (%(events)s::bigint[]))
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
    WHERE %(by_rows)s AND definition.runtime NOT IN ('lambda', 'dispatcher')
    UNION ALL
    SELECT 'invoke', made.operator, jsonb_build_object('task_id', made.id)
    FROM made
    JOIN job_definition AS definition ON definition.id = made.definition_id
    WHERE %(by_rows)s AND definition.runtime = 'lambda'
), marked AS (
    UPDATE event
    SET routed = CASE WHEN judged.reason IS NULL THEN 'routed' ELSE 'audited' END,
        why_not = judged.reason, replayed_to = NULL
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
       (SELECT count(*) FROM made) AS tasks,
       -- What is told after the commit, if that is not by rows.
       (SELECT coalesce(jsonb_agg(jsonb_build_array(operator, priority, tasks)), '[]')
        FROM (SELECT operator, priority, count(*) AS tasks
              FROM made
              WHERE NOT %(by_rows)s
              GROUP BY operator, priority) AS each) AS woken
