-- Jobs that merge: the rows that a task has made take the place of those with the same key, in what was
-- published when it read it. See penstock.dispatcher.tasks.merging.

ALTER TABLE job_definition DROP CONSTRAINT job_definition_update_mode_check;
ALTER TABLE job_definition ADD CONSTRAINT job_definition_update_mode_check
    CHECK (update_mode IN ('replace', 'append', 'merge')) NOT VALID;
ALTER TABLE publication DROP CONSTRAINT publication_mode_check;
ALTER TABLE publication ADD CONSTRAINT publication_mode_check
    CHECK (mode IN ('replace', 'append', 'merge')) NOT VALID;

-- How often an attempt has found that what it had merged with was not what is published any more.
ALTER TABLE attempt ADD COLUMN conflicts integer NOT NULL DEFAULT 0;

-- Whose turn it is to merge into a partition, while that attempt runs: a row of one that has ended
-- says nothing. Only attempts that were too late several times take one.
CREATE TABLE merge_lease (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    task_id bigint NOT NULL REFERENCES task ON DELETE CASCADE,
    attempt integer NOT NULL,
    PRIMARY KEY (dataset_id, generation, partition_key)
);
CREATE INDEX merge_lease_task ON merge_lease (task_id);

-- A partition as the one part that it is: see penstock.runtimes.base.Part.
CREATE FUNCTION penstock_head(held publication) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'location', held.location, 'partition_key', nullif(held.partition_key, ''),
        'start', held.range_start, 'end', held.range_end, 'revision', held.revision,
        'manifest', held.manifest, 'rows', held.rows, 'bytes', held.bytes))
$$;

-- What was merged is in `appended` as well, by its task and the name of that, so that a rebuild can
-- be judged by it; its location there is 'merged:', for its rows are in what is published.

-- As before, and what is merged leaves the folder that it was merged with.
CREATE OR REPLACE FUNCTION publication_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- What was only noted as written has its revision still, and revisions only grow.
    IF (SELECT sum(revision) FROM old_rows) IS NOT DISTINCT FROM (
        SELECT sum(revision) FROM new_rows) THEN
        RETURN NULL;
    END IF;
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT moved.left_place, moved.dataset_id, moved.generation, moved.partition_key,
           moved.revision
    FROM (
        SELECT dataset_id, generation, partition_key, max(left_place) AS left_place,
               max(new_place) AS new_place, max(revision) AS revision
        FROM (
            -- What was appended stays.
            SELECT dataset_id, generation, partition_key, revision, NULL AS new_place,
                   CASE WHEN mode <> 'append' THEN place END AS left_place
            FROM old_rows
            UNION ALL
            SELECT dataset_id, generation, partition_key, revision, place, NULL
            FROM new_rows
        ) AS sides
        GROUP BY dataset_id, generation, partition_key
    ) AS moved
    WHERE moved.left_place IS NOT NULL AND moved.left_place IS DISTINCT FROM moved.new_place
    ORDER BY 1, 2, 3, 4
    ON CONFLICT (place, dataset_id, generation, partition_key) DO UPDATE
    SET revision = excluded.revision, left_at = excluded.left_at, confirmed_at = NULL;
    PERFORM penstock_project(array_agg(dataset_id), array_agg(generation))
    FROM (SELECT DISTINCT dataset_id, generation FROM new_rows
          WHERE NOT starts_with(location, 'range:')) AS moved
    HAVING count(*) > 0;
    RETURN NULL;
END
$$;

-- As before, and what is merged is judged task by task, as what is appended.
CREATE OR REPLACE FUNCTION penstock_lacking(
    of_dataset uuid, old_version uuid, new_version uuid, since timestamptz
) RETURNS TABLE (partition_key text, append_key text, task_id bigint) LANGUAGE sql STABLE AS $$
    SELECT old.partition_key, piece.append_key, coalesce(piece.task_id, old.task_id)
    FROM publication AS old
    LEFT JOIN appended AS piece
        ON old.mode <> 'replace' AND NOT starts_with(old.location, 'range:')
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

-- As before, and what was kept of an earlier generation is news for a job that merges (`takes_kept`):
-- nothing of what it had merged is kept, and a row that is merged again is the same row.
DROP FUNCTION penstock_is_news(event, integer, uuid, boolean);
CREATE FUNCTION penstock_is_news(
    said event, reading_job integer, reading_generation uuid, is_merging boolean,
    takes_kept boolean DEFAULT false
) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF said.revision IS NOT NULL AND (
        NOT takes_kept AND said.dedupe LIKE '%:kept:%' OR NOT EXISTS (
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

CREATE OR REPLACE FUNCTION penstock_is_lost(old_task bigint, replaced uuid[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    old task;
    is_appending boolean;
    is_merged boolean;
BEGIN
    SELECT * INTO old FROM task WHERE task.id = old_task;
    IF old.id IS NULL THEN
        RETURN true;
    END IF;
    IF starts_with(old.dedupe_key, 'backfill:') THEN
        RETURN false;
    END IF;
    SELECT definition.update_mode <> 'replace' AND definition.runtime <> 'dispatcher',
           definition.update_mode = 'merge'
    INTO is_appending, is_merged
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
          AND (NOT is_appending OR penstock_is_news(event, old.job_id, NULL, false, is_merged))
          AND CASE
              WHEN event.generation <> ALL (replaced) THEN true
              WHEN event.revision IS NULL THEN false
              ELSE NOT penstock_is_lost(event.task_id, replaced)
          END);
END
$$;

-- As before, and tasks that merge read what is published of their own dataset.
CREATE OR REPLACE FUNCTION penstock_is_read(wanted_place text, grace_seconds double precision)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT
        FROM departed
        WHERE departed.place = wanted_place AND (
            departed.confirmed_at IS NULL
            OR departed.confirmed_at > penstock_now() - grace_seconds * interval '1 second'
            OR EXISTS (
                SELECT
                FROM task
                JOIN edge ON edge.job_id = task.job_id
                WHERE task.status = 'running' AND edge.dataset_id = departed.dataset_id
                  AND task.claimed_at <= departed.left_at + interval '10 minutes')
            OR EXISTS (
                SELECT
                FROM task
                JOIN dataset ON dataset.job_id = task.job_id
                JOIN job_definition AS definition ON definition.id = task.definition_id
                WHERE task.status = 'running' AND dataset.id = departed.dataset_id
                  AND definition.update_mode = 'merge'
                  AND task.claimed_at <= departed.left_at + interval '10 minutes')))
$$;
