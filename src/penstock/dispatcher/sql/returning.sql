-- What a change of the DAG brings back or begins to build, for penstock.dispatcher.deployment: after
-- the locks and moves of deployment.sql, in the same transaction.

-- name: resume_running
-- What was asked to stop because its generation had left, and still runs, may go on.
UPDATE task
SET cancel_asked = false, reason = NULL
WHERE task.generation = ANY (%(versions)s::uuid[]) AND task.status = 'running'
  AND task.cancel_asked AND task.reason = %(reason)s

-- name: forget_cancelled
-- What was cancelled because its generation had left can be made again of its event. After the
-- statement above, which has waited for those that were just ending. What was late for a partition
-- is routed again: its event has a task of its own, and would not be missed.
WITH gone AS (
    DELETE FROM task
    USING dag_job
    WHERE dag_job.dag_version_id = %(version)s AND dag_job.generation = ANY (%(versions)s::uuid[])
      AND task.job_id = dag_job.job_id AND task.generation = dag_job.generation
      AND task.status = 'cancelled' AND task.reason = %(reason)s AND task.event_seq IS NOT NULL
    RETURNING task.event_seq, task.generation, task.dedupe_key
)
UPDATE event
SET routed = 'pending', why_not = NULL,
    replayed_to = CASE WHEN event.routed = 'pending' THEN event.replayed_to ELSE '{}' END
        || late.generations
FROM (
    SELECT gone.event_seq, array_agg(DISTINCT gone.generation) AS generations
    FROM gone
    WHERE starts_with(gone.dedupe_key, 'late:')
    GROUP BY gone.event_seq
) AS late
WHERE event.seq = late.event_seq AND event.routed IN ('pending', 'routed')

-- name: replay_events
-- Have events routed again for generations that are back: those that were not routed because their
-- own generation had left, and those of the inputs that there is no task for, by the keys that
-- routing gives. What is rebuilt gets the latter from its rebuild. As there, of a partition that
-- came more than once the latest event is enough, if the job works by partitions and replaces them;
-- one that appends has a publication of every event. What has no output
-- was never built of what was there before it, and is not now. The latter reach no others: a job that
-- waits for all of its inputs, and has made its task of what came after, would make a second one.
WITH inputs AS MATERIALIZED (
    SELECT DISTINCT edge.dataset_id, fed.version AS generation, reader.job_id,
           reader.generation AS task_generation,
           coalesce(definition.body ->> 'execution', 'per_partition') = 'per_partition'
               AS is_per_partition,
           coalesce(definition.body ->> 'when', 'any') = 'all' AS is_all,
           definition.update_mode <> 'replace' AND definition.runtime <> 'dispatcher'
               AS is_appending,
           definition.update_mode = 'merge' AS takes_kept,
           CASE
               WHEN EXISTS (SELECT FROM generation WHERE version = reader.generation)
               THEN '-infinity'
               ELSE (
                   SELECT min(dag_version.created_at)
                   FROM dag_job AS named
                   JOIN dag_version ON dag_version.id = named.dag_version_id
                   WHERE named.generation = reader.generation)
           END AS since
    FROM dag_job AS reader
    JOIN job_definition AS definition ON definition.id = reader.definition_id
    JOIN edge ON edge.dag_version_id = reader.dag_version_id AND edge.job_id = reader.job_id
        AND edge.is_trigger
    JOIN dag_job AS writer ON writer.dag_version_id = edge.dag_version_id
    JOIN generation AS fed
        ON fed.dataset_id = edge.dataset_id AND fed.version = writer.generation
    WHERE reader.dag_version_id = %(version)s AND reader.generation = ANY (%(versions)s::uuid[])
      AND reader.generation <> ALL (%(rebuilt)s::uuid[])
), missed AS MATERIALIZED (
    -- OFFSET 0: a task is looked up for each event, however few of both the planner expects.
    SELECT event.seq, event.dataset_id, event.generation, event.partition_key, event.range_start,
           event.range_end, inputs.is_per_partition AND NOT inputs.is_appending AS is_per_partition,
           inputs.task_generation
    FROM event
    JOIN inputs USING (dataset_id, generation)
    WHERE event.routed <> 'applying'
      AND (event.routed <> 'pending' OR event.replayed_to IS NOT NULL)
      AND event.received_at >= inputs.since
      AND NOT EXISTS (
          SELECT
          FROM task
          WHERE task.job_id = inputs.job_id AND task.generation = inputs.task_generation
            AND task.dedupe_key IN (
                'event:' || event.seq,
                'task:' || event.task_id || ':' || event.partition_key)
          OFFSET 0)
      AND NOT EXISTS (
          SELECT
          FROM coalesced
          -- Not as what was late for another partition.
          JOIN task ON task.id = coalesced.task_id AND (
              event.partition_key IS NULL
              OR task.coalesce_key = 'partition:' || event.partition_key)
          WHERE coalesced.event_seq = event.seq AND coalesced.job_id = inputs.job_id
            AND coalesced.generation = inputs.task_generation
          OFFSET 0)
      -- Where one task waits for all inputs, it is that of whichever came last.
      AND NOT (inputs.is_all AND EXISTS (
          SELECT
          FROM task
          WHERE task.payload ->> 'partition_key' = event.partition_key
            AND task.job_id = inputs.job_id AND task.generation = inputs.task_generation
            AND task.event_seq > event.seq
          OFFSET 0))
      AND NOT (inputs.is_appending AND NOT penstock_is_news(
          event, inputs.job_id, inputs.task_generation, false, inputs.takes_kept))
), wanted AS MATERIALIZED (
    -- After the above, which leaves few: each of these is looked up.
    SELECT missed.seq, array_agg(DISTINCT missed.task_generation) AS generations
    FROM missed
    WHERE NOT (missed.is_per_partition AND missed.partition_key IS NOT NULL AND EXISTS (
        SELECT FROM event AS later
        WHERE later.dataset_id = missed.dataset_id AND later.generation = missed.generation
          AND later.partition_key = missed.partition_key AND later.seq > missed.seq
          AND (later.range_start, later.range_end)
              IS NOT DISTINCT FROM (missed.range_start, missed.range_end)
        OFFSET 0))
    GROUP BY missed.seq
), unrouted AS (
    UPDATE event
    SET routed = 'pending', why_not = NULL, replayed_to = NULL
    WHERE event.routed = 'audited' AND event.generation = ANY (%(versions)s::uuid[])
)
UPDATE event
SET routed = 'pending', why_not = NULL,
    -- What was to be routed again before, and is not yet, reaches both.
    replayed_to = CASE WHEN event.routed = 'pending' THEN event.replayed_to ELSE '{}' END
        || wanted.generations
FROM wanted
WHERE event.seq = wanted.seq
  AND NOT (event.routed = 'audited' AND event.generation = ANY (%(versions)s::uuid[]))

-- name: plan_rebuilds
-- What is being built is made of the events of its inputs up to now: later ones are routed to it
-- as they come. Where there are none yet, all will come by themselves. A plan is one row, however
-- many events there are.
INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)
SELECT reader.definition_id, reader.generation,
       jsonb_build_object('kind', 'rebuild', 'upto', (SELECT max(seq) FROM event)),
       0, %(concurrency)s
FROM dag_job AS reader
WHERE reader.dag_version_id = %(version)s AND reader.generation = ANY (%(versions)s::uuid[])
  AND EXISTS (
      SELECT
      FROM penstock_inputs(reader.job_id, reader.generation) AS inputs
      CROSS JOIN LATERAL (
          SELECT FROM event
          WHERE event.dataset_id = inputs.dataset_id AND event.generation = inputs.generation
          LIMIT 1
      ) AS found
      WHERE inputs.is_trigger)
ORDER BY reader.job_id

-- name: plan_leftovers
-- Partitions that somebody's backfill has made and no input ever told of are made again as well: no
-- rebuild finds them, and without them what is being built would never cover what readers have.
WITH replaced AS MATERIALIZED (
    SELECT reader.job_id, reader.definition_id, reader.generation, old.dataset_id, old.version,
           coalesce(definition.body ->> 'when', 'any') = 'all' AS is_all,
           definition.update_mode <> 'replace' AS is_appending
    FROM dag_job AS reader
    JOIN job_definition AS definition ON definition.id = reader.definition_id
    JOIN generation AS next ON next.version = reader.generation AND next.state = 'building'
    JOIN generation AS old ON old.dataset_id = next.dataset_id AND old.state = 'current'
    WHERE reader.dag_version_id = %(version)s AND reader.generation = ANY (%(versions)s::uuid[])
), told AS MATERIALIZED (
    SELECT named.job_id, named.version, inputs.dataset_id, inputs.generation
    FROM (SELECT DISTINCT job_id, version FROM replaced) AS named
    CROSS JOIN LATERAL penstock_inputs(named.job_id, named.version) AS inputs
    WHERE inputs.is_trigger
), keys AS MATERIALIZED (
    SELECT DISTINCT replaced.definition_id, replaced.generation, publication.partition_key,
           NULL::bigint AS task_id
    FROM replaced
    JOIN publication ON publication.dataset_id = replaced.dataset_id
        AND publication.generation = replaced.version
    JOIN task ON task.id = publication.task_id
    JOIN backfill ON backfill.id = task.backfill_id
        AND backfill.plan ->> 'kind' IN ('ranges', 'keys')
    WHERE publication.partition_key <> ''
      AND NOT (replaced.is_appending AND publication.mode <> 'replace') AND (
        NOT EXISTS (
            SELECT
            FROM told
            JOIN event ON event.partition_key = publication.partition_key
                AND event.dataset_id = told.dataset_id AND event.generation = told.generation
            WHERE told.job_id = replaced.job_id AND told.version = replaced.version)
        -- Of a job that waits for all of its inputs, a rebuild makes what all of them told of.
        OR replaced.is_all AND EXISTS (
            SELECT
            FROM told
            WHERE told.job_id = replaced.job_id AND told.version = replaced.version
              AND NOT EXISTS (
                  SELECT FROM event
                  WHERE event.partition_key = publication.partition_key
                    AND event.dataset_id = told.dataset_id AND event.generation = told.generation)
              AND NOT EXISTS (
                  SELECT FROM event
                  WHERE event.partition_key IS NULL
                    AND event.dataset_id = told.dataset_id
                    AND event.generation = told.generation)))
    UNION
    -- What backfills have appended is as many publications as they had tasks.
    SELECT replaced.definition_id, replaced.generation, task.payload ->> 'partition_key', task.id
    FROM replaced
    JOIN publication ON publication.dataset_id = replaced.dataset_id
        AND publication.generation = replaced.version AND publication.mode <> 'replace'
        AND NOT starts_with(publication.location, 'range:')
    JOIN appended ON appended.dataset_id = publication.dataset_id
        AND appended.generation = publication.generation
        AND appended.partition_key = publication.partition_key
    JOIN task ON task.id = appended.task_id AND starts_with(task.dedupe_key, 'backfill:')
    WHERE replaced.is_appending AND NOT EXISTS (
        SELECT
        FROM penstock_counterparts(task.id, replaced.generation) AS made(id)
        JOIN task AS repeated ON repeated.id = made.id AND repeated.status <> 'cancelled')
), plans AS (
    INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)
    SELECT definition_id, generation, '{"kind": "keys", "leftover": true}', count(*),
           %(concurrency)s
    FROM keys
    GROUP BY definition_id, generation
    RETURNING id, generation
)
INSERT INTO backfill_key (backfill_id, position, partition_key, task_id)
SELECT plans.id,
       row_number() OVER (PARTITION BY plans.id ORDER BY keys.partition_key, keys.task_id) - 1,
       keys.partition_key, keys.task_id
FROM keys
JOIN plans USING (generation)
