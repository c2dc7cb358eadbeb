-- What a rebuild of a job that appends has to make again, and whether it has. What is appended is judged
-- part by part: each was made by a task, and what was made of the same news in another generation
-- stands for it.

-- The task of the earlier generation that a position of a plan repeats.
ALTER TABLE backfill_key ADD COLUMN task_id bigint;
CREATE INDEX backfill_key_task ON backfill_key (task_id) WHERE task_id IS NOT NULL;

-- When something of an earlier generation was made part of one that was being built.
ALTER TABLE generation ADD COLUMN kept_at timestamptz;

-- Of an event that is routed again for generations that are back, those generations: all others that
-- read it have had it. Null for what reaches all.
ALTER TABLE event ADD COLUMN replayed_to uuid[];

-- What a part was made of: the name of its task, which outlives the task.
ALTER TABLE appended ADD COLUMN news text;
UPDATE appended SET news = task.dedupe_key FROM task WHERE task.id = appended.task_id;
CREATE INDEX appended_news ON appended (news, generation);

-- What is being built of a job that appends, of the latest event of each partition alone, is to have
-- the others too. What was made is not made again.
UPDATE backfill
SET state = CASE backfill.state WHEN 'done' THEN 'running' ELSE backfill.state END,
    settled_at = NULL, partitions = 0, position = 0, walked = 0, counted = 0
FROM job_definition AS definition
WHERE definition.id = backfill.definition_id AND definition.update_mode = 'append'
  AND definition.runtime <> 'dispatcher' AND backfill.plan ->> 'kind' = 'rebuild'
  AND backfill.state <> 'cancelled'
  AND backfill.generation IN (SELECT version FROM generation WHERE generation.state = 'building');

-- The tasks of a generation that were made of the same news as a task of another generation of their
-- job: of the same event; of an event of the task upstream that stands for the one that made the
-- event; or by a plan that repeats the task. Tasks and events may be gone: what they were called is
-- enough where the inputs are the same.
CREATE FUNCTION penstock_counterparts(old_task bigint, wanted uuid) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    old task;
    repeated bigint;
    seqs bigint[];
    names text[];
BEGIN
    RETURN QUERY
        SELECT made.id
        FROM backfill_key AS plan
        JOIN backfill ON backfill.id = plan.backfill_id AND backfill.generation = wanted
        JOIN job_definition AS definition ON definition.id = backfill.definition_id
        JOIN task AS made ON made.job_id = definition.job_id AND made.generation = wanted
            AND made.dedupe_key = 'backfill:' || plan.backfill_id || ':' || plan.position
        WHERE plan.task_id = old_task;
    SELECT * INTO old FROM task WHERE task.id = old_task;
    IF old.id IS NULL THEN
        RETURN;
    END IF;
    IF old.generation = wanted THEN
        RETURN NEXT old.id;
        RETURN;
    END IF;
    IF starts_with(old.dedupe_key, 'backfill:') THEN
        SELECT plan.task_id INTO repeated
        FROM backfill_key AS plan
        WHERE plan.backfill_id = old.backfill_id
          AND plan.position = split_part(old.dedupe_key, ':', 3)::bigint;
        IF repeated IS NOT NULL THEN
            RETURN QUERY SELECT penstock_counterparts(repeated, wanted);
        END IF;
        RETURN;
    END IF;
    seqs := ARRAY(
        SELECT old.event_seq WHERE old.event_seq IS NOT NULL
        UNION
        SELECT coalesced.event_seq FROM coalesced WHERE coalesced.task_id = old_task);
    names := ARRAY(
        SELECT old.dedupe_key
        UNION
        SELECT 'event:' || seq FROM unnest(seqs) AS seq
        UNION
        SELECT 'task:' || event.task_id || ':' || event.partition_key
        FROM event
        WHERE event.seq = ANY (seqs) AND event.revision IS NOT NULL
          AND event.partition_key IS NOT NULL);
    -- What upstream has made anew.
    WITH told AS MATERIALIZED (
        SELECT event.task_id, event.partition_key, event.dataset_id, event.generation
        FROM event
        WHERE event.seq = ANY (seqs) AND event.revision IS NOT NULL
        UNION
        SELECT split_part(old.dedupe_key, ':', 2)::bigint,
               substr(old.dedupe_key, length(split_part(old.dedupe_key, ':', 2)) + 7), NULL, NULL
        WHERE starts_with(old.dedupe_key, 'task:')
          AND NOT EXISTS (SELECT FROM event WHERE event.seq = old.event_seq)
    ), upstream AS MATERIALIZED (
        SELECT DISTINCT inputs.dataset_id, inputs.generation, told.partition_key, made.id
        FROM told
        JOIN penstock_inputs(old.job_id, wanted) AS inputs
            ON inputs.is_trigger AND inputs.dataset_id = coalesce(told.dataset_id, inputs.dataset_id)
            AND inputs.generation IS DISTINCT FROM told.generation
        CROSS JOIN LATERAL penstock_counterparts(told.task_id, inputs.generation) AS made(id)
    ), anew AS (
        SELECT event.seq, upstream.id, upstream.partition_key
        FROM upstream
        JOIN event ON event.dataset_id = upstream.dataset_id
            AND event.generation = upstream.generation AND event.task_id = upstream.id
            AND event.partition_key = upstream.partition_key
        UNION
        SELECT event.seq, upstream.id, NULL
        FROM upstream
        -- A task makes few outputs without a partition, and these are called by their places.
        JOIN event ON event.dataset_id = upstream.dataset_id
            AND event.generation = upstream.generation AND event.dedupe = ANY (ARRAY (
                SELECT 'publication:' || upstream.id || ':' || place
                FROM generate_series(0, 15) AS place))
        WHERE upstream.partition_key IS NULL
        UNION
        SELECT NULL, upstream.id, upstream.partition_key FROM upstream
    )
    SELECT seqs || coalesce(array_agg(anew.seq) FILTER (WHERE anew.seq IS NOT NULL), '{}'),
           names || coalesce(array_agg('event:' || anew.seq) FILTER (WHERE anew.seq IS NOT NULL), '{}')
               || coalesce(array_agg('task:' || anew.id || ':' || anew.partition_key)
                           FILTER (WHERE anew.partition_key IS NOT NULL), '{}')
    INTO seqs, names
    FROM anew;
    RETURN QUERY
        SELECT made.id FROM task AS made
        WHERE made.job_id = old.job_id AND made.generation = wanted
          AND made.dedupe_key = ANY (names)
        UNION
        SELECT coalesced.task_id FROM coalesced
        WHERE coalesced.event_seq = ANY (seqs) AND coalesced.job_id = old.job_id
          AND coalesced.generation = wanted;
END
$$;

-- What one generation of a dataset has published since a moment, or ever, and another has nothing for: of
-- a partition that is appended to each part, of others the partition. Ranges that are told of have no
-- data, and count by partitions.
CREATE FUNCTION penstock_lacking(
    of_dataset uuid, old_version uuid, new_version uuid, since timestamptz
) RETURNS TABLE (partition_key text, append_key text, task_id bigint) LANGUAGE sql STABLE AS $$
    SELECT old.partition_key, piece.append_key, coalesce(piece.task_id, old.task_id)
    FROM publication AS old
    LEFT JOIN appended AS piece
        ON old.mode = 'append' AND NOT starts_with(old.location, 'range:')
        AND piece.dataset_id = old.dataset_id AND piece.generation = old.generation
        AND piece.partition_key = old.partition_key
    WHERE old.dataset_id = of_dataset AND old.generation = old_version
      AND (since IS NULL OR coalesce(piece.appended_at, old.published_at) >= since)
      AND CASE
          WHEN piece.append_key IS NULL THEN NOT EXISTS (
              SELECT FROM publication AS new
              WHERE new.dataset_id = of_dataset AND new.generation = new_version
                AND new.partition_key = old.partition_key)
          ELSE NOT EXISTS (
              SELECT FROM appended AS same
              WHERE same.dataset_id = of_dataset AND same.generation = new_version
                AND same.partition_key = old.partition_key
                AND same.append_key = piece.append_key)
          AND NOT EXISTS (
              SELECT FROM appended AS same
              WHERE same.dataset_id = of_dataset AND same.generation = new_version
                AND same.partition_key = old.partition_key AND same.news = piece.news
                -- Others are called so within their generation.
                AND split_part(piece.news, ':', 1) IN ('event', 'task', 'backfill'))
          AND NOT EXISTS (
              SELECT
              FROM penstock_counterparts(piece.task_id, new_version) AS made(id)
              JOIN task ON task.id = made.id
              CROSS JOIN LATERAL (
                  SELECT new.dataset_id, new.partition_key
                  FROM appended AS new
                  WHERE new.news = task.dedupe_key AND new.generation = new_version
                    AND new.task_id = task.id
                  UNION ALL
                  -- What a release has published that does not know of news.
                  SELECT new.dataset_id, new.partition_key
                  FROM appended AS new
                  WHERE new.dataset_id = of_dataset AND new.generation = new_version
                    AND new.partition_key = old.partition_key
                    AND new.append_key = 'task:' || task.id
              ) AS new
              WHERE new.dataset_id = of_dataset AND new.partition_key = old.partition_key)
      END
$$;

-- Whether a job that appends has to make a task of an event to be built anew. Not of what is published of a
-- partition that was replaced since, or removed: what it told of is not there any more. Not of what was
-- only kept of an earlier generation, for what the job had made of that is kept too; nor of what the
-- job itself has kept a part of. And of updates that were merged into one task, the last stands for all.
CREATE FUNCTION penstock_is_news(
    said event, reading_job integer, reading_generation uuid, is_merging boolean
) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF said.revision IS NOT NULL AND (said.dedupe LIKE '%:kept:%' OR NOT EXISTS (
        SELECT FROM publication AS head
        WHERE head.dataset_id = said.dataset_id AND head.generation = said.generation
          AND head.partition_key = coalesce(said.partition_key, '')
          AND (head.revision = said.revision
               OR head.mode = 'append' AND NOT starts_with(head.location, 'range:')))) THEN
        RETURN false;
    END IF;
    IF EXISTS (
        SELECT FROM appended
        WHERE appended.generation = reading_generation AND appended.news IN (
            'event:' || said.seq, 'task:' || said.task_id || ':' || said.partition_key)) THEN
        RETURN false;
    END IF;
    RETURN NOT is_merging OR NOT EXISTS (
        SELECT FROM coalesced
        WHERE coalesced.event_seq = said.seq AND coalesced.job_id = reading_job
          AND coalesced.generation = reading_generation)
    AND NOT EXISTS (
        SELECT
        FROM generation AS next
        JOIN generation AS served
            ON served.dataset_id = next.dataset_id AND served.state = 'current'
        CROSS JOIN LATERAL (
            SELECT coalesced.task_id
            FROM coalesced
            WHERE coalesced.event_seq = said.seq AND coalesced.job_id = reading_job
              AND coalesced.generation = served.version
            UNION ALL
            SELECT task.id
            FROM task
            WHERE task.job_id = reading_job AND task.generation = served.version
              AND task.dedupe_key IN (
                  'event:' || said.seq, 'task:' || said.task_id || ':' || said.partition_key)
        ) AS merged
        JOIN task ON task.id = merged.task_id
        WHERE next.version = reading_generation AND next.state = 'building'
          AND (task.event_seq > said.seq OR EXISTS (
              SELECT FROM coalesced AS later
              WHERE later.task_id = task.id AND later.event_seq > said.seq)));
END
$$;

-- Whether what a task has appended cannot be made again when these generations are replaced: its event was
-- removed, or what that told of is not there any more.
CREATE FUNCTION penstock_is_lost(old_task bigint, replaced uuid[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    old task;
    is_appending boolean;
BEGIN
    SELECT * INTO old FROM task WHERE task.id = old_task;
    IF old.id IS NULL THEN
        RETURN true;
    END IF;
    IF starts_with(old.dedupe_key, 'backfill:') THEN
        RETURN false;
    END IF;
    SELECT definition.update_mode = 'append' AND definition.runtime <> 'dispatcher'
    INTO is_appending
    FROM job_definition AS definition
    WHERE definition.id = old.definition_id;
    RETURN NOT EXISTS (
        SELECT
        FROM event
        WHERE event.seq IN (
            SELECT old.event_seq
            UNION
            SELECT coalesced.event_seq FROM coalesced WHERE coalesced.task_id = old_task)
          -- As for a generation that has nothing yet.
          AND (NOT is_appending OR penstock_is_news(event, old.job_id, NULL, false))
          AND CASE
              WHEN event.generation <> ALL (replaced) THEN true
              WHEN event.revision IS NULL THEN false
              ELSE NOT penstock_is_lost(event.task_id, replaced)
          END);
END
$$;

-- Whether everything that rebuilds have led to until a moment is over in what is being built, and in all
-- that it is built of: the tasks, what these have published and is held, and the tasks of that. Where
-- one job reads the next, their tasks are made when those upstream end, which may be after the moment.
CREATE FUNCTION penstock_has_caught_up(root uuid, feeding uuid[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    upto timestamptz := since;
BEGIN
    FOR level IN 2 .. greatest(2, cardinality(feeding)) LOOP
        IF EXISTS (
            SELECT
            FROM task
            WHERE task.generation = ANY (feeding) AND task.status IN ('queued', 'retrying', 'running')
              AND (task.created_at <= upto OR EXISTS (
                  SELECT FROM event
                  WHERE event.seq = task.event_seq AND event.received_at <= upto
              ) OR EXISTS (
                  SELECT
                  FROM coalesced
                  JOIN event ON event.seq = coalesced.event_seq
                  WHERE coalesced.task_id = task.id AND event.received_at <= upto)))
        OR EXISTS (
            SELECT
            FROM generation
            JOIN event ON event.dataset_id = generation.dataset_id
                AND event.generation = generation.version
            WHERE generation.version = ANY (feeding) AND generation.version <> root
              AND event.routed = 'held' AND event.received_at <= upto) THEN
            RETURN false;
        END IF;
        EXIT WHEN level >= cardinality(feeding);
        upto := greatest(upto, (
            SELECT max(task.settled_at)
            FROM task
            LEFT JOIN event ON event.seq = task.event_seq
            WHERE task.generation = ANY (feeding) AND task.settled_at > upto
              AND least(task.created_at, event.received_at) <= upto));
    END LOOP;
    RETURN true;
END
$$;
