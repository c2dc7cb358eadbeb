-- Files that are rewritten in place: a partition keeps its rows, its revision and its task. See
-- penstock.dispatcher.tasks.rewrites.

ALTER TABLE publication
    -- How often the files of the partition were rewritten.
    ADD COLUMN rewrites bigint NOT NULL DEFAULT 0 CHECK (rewrites >= 0),
    -- The revision whose files were.
    ADD COLUMN rewritten bigint;
-- What readers without Postgres know a partition by: it grows with every revision and every rewriting,
-- so that nobody takes the files of one for those of the other.
ALTER TABLE publication
    ADD COLUMN edition bigint NOT NULL GENERATED ALWAYS AS (revision + rewrites) STORED;
DROP INDEX publication_unprojected;
CREATE INDEX publication_unprojected ON publication (dataset_id, generation, partition_key)
    WHERE projected < edition AND NOT starts_with(location, 'range:');

-- The tasks that maintain a dataset.
CREATE INDEX task_maintaining ON task ((payload #>> '{maintain,dataset}'), id)
    WHERE payload ? 'maintain';

-- As before; and files may be rewritten, if nothing else changes. `place` and `edition` are
-- generated, and not there yet.
CREATE OR REPLACE FUNCTION publication_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revision = OLD.revision AND NEW.rewrites = OLD.rewrites
        AND NEW.projected > OLD.projected AND NEW.projected <= NEW.revision + NEW.rewrites
        AND (NEW.task_id, NEW.attempt, NEW.location, NEW.mode, NEW.published_at)
            = (OLD.task_id, OLD.attempt, OLD.location, OLD.mode, OLD.published_at) THEN
        RETURN NEW;
    END IF;
    IF NEW.revision = OLD.revision AND OLD.range_start IS NULL AND NEW.range_start IS NOT NULL
        AND to_jsonb(NEW) - '{range_start,range_end,place,edition}'::text[]
            = to_jsonb(OLD) - '{range_start,range_end,place,edition}'::text[] THEN
        RETURN NEW;
    END IF;
    IF NEW.revision = OLD.revision AND NEW.rewrites = OLD.rewrites + 1
        AND NEW.rewritten = NEW.revision AND NEW.mode <> 'append' AND NEW.rows IS NOT NULL
        AND to_jsonb(NEW)
                - '{location,manifest,files,bytes,rewrites,rewritten,place,edition}'::text[]
            = to_jsonb(OLD)
                - '{location,manifest,files,bytes,rewrites,rewritten,place,edition}'::text[] THEN
        RETURN NEW;
    END IF;
    IF NEW.revision <= OLD.revision OR NEW.task_id < OLD.task_id
        OR (NEW.mode = 'replace' AND NEW.task_id = OLD.task_id)
        OR NEW.projected <> OLD.projected OR NEW.rewrites <> OLD.rewrites THEN
        RAISE EXCEPTION 'partition % of dataset % does not go back', OLD.partition_key,
            OLD.dataset_id USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;

-- As before, and files that were rewritten leave the folder that they were in.
CREATE OR REPLACE FUNCTION publication_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- What was only noted as written has its edition still, and editions only grow.
    IF (SELECT sum(edition) FROM old_rows) IS NOT DISTINCT FROM (
        SELECT sum(edition) FROM new_rows) THEN
        RETURN NULL;
    END IF;
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT moved.left_place, moved.dataset_id, moved.generation, moved.partition_key,
           moved.edition
    FROM (
        SELECT dataset_id, generation, partition_key, max(left_place) AS left_place,
               max(new_place) AS new_place, max(edition) AS edition
        FROM (
            -- What was appended stays.
            SELECT dataset_id, generation, partition_key, edition, NULL AS new_place,
                   CASE WHEN mode <> 'append' THEN place END AS left_place
            FROM old_rows
            UNION ALL
            SELECT dataset_id, generation, partition_key, edition, place, NULL
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

-- As before, by editions: what comes after a removal is later than all that readers were told.
CREATE OR REPLACE FUNCTION publication_left() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO removed (
        dataset_id, generation, partition_key, range_start, range_end, task_id, revision,
        projected)
    SELECT dataset_id, generation, partition_key, range_start, range_end, task_id, edition + 1,
           CASE WHEN starts_with(location, 'range:') THEN edition + 1 ELSE 0 END
    FROM gone
    ORDER BY dataset_id, generation, partition_key
    ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
    SET range_start = excluded.range_start, range_end = excluded.range_end,
        task_id = greatest(removed.task_id, excluded.task_id), revision = excluded.revision,
        projected = greatest(removed.projected, excluded.projected),
        removed_at = excluded.removed_at;
    WITH parts AS (
        DELETE FROM appended
        USING gone
        WHERE (appended.dataset_id, appended.generation, appended.partition_key)
            = (gone.dataset_id, gone.generation, gone.partition_key)
        RETURNING appended.place, appended.dataset_id, appended.generation,
                  appended.partition_key, gone.edition
    )
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT place, dataset_id, generation, partition_key, max(edition) + 1
    FROM (
        SELECT place, dataset_id, generation, partition_key, edition FROM gone
        UNION ALL
        SELECT * FROM parts
    ) AS leaving
    WHERE place IS NOT NULL
    GROUP BY place, dataset_id, generation, partition_key
    ORDER BY place, dataset_id, generation, partition_key
    ON CONFLICT (place, dataset_id, generation, partition_key) DO UPDATE
    SET revision = excluded.revision, left_at = excluded.left_at, confirmed_at = NULL;
    PERFORM penstock_project(array_agg(dataset_id), array_agg(generation))
    FROM (SELECT DISTINCT dataset_id, generation FROM gone
          WHERE NOT starts_with(location, 'range:')) AS moved
    HAVING count(*) > 0;
    RETURN NULL;
END
$$;

-- As before, and tasks that maintain a dataset read what is published of it.
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
                  AND (definition.update_mode = 'merge' OR task.payload ? 'maintain')
                  AND task.claimed_at <= departed.left_at + interval '10 minutes')))
$$;
