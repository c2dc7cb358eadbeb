-- Parts of what is appended that were put together in place: several parts, consecutive by their
-- revisions, in one folder. See penstock.dispatcher.tasks.rewrites.

-- The folders that have the rows of several parts, each under the task that has written it. The parts
-- stay in `appended`: they are what tasks have appended, by which these are known to be done and
-- rebuilds are judged. Only their files are not read any more.
CREATE TABLE compacted (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    task_id bigint NOT NULL,
    attempt integer NOT NULL,
    -- The revisions of its parts, all of which it has.
    first_revision bigint NOT NULL CHECK (first_revision >= 1),
    revision bigint NOT NULL,
    -- Of the latest of them.
    append_key text NOT NULL,
    appended_at timestamptz NOT NULL,
    location text NOT NULL,
    files bigint NOT NULL CHECK (files >= 0),
    rows bigint NOT NULL CHECK (rows >= 0),
    bytes bigint NOT NULL CHECK (bytes >= 0),
    manifest text NOT NULL,
    place text GENERATED ALWAYS AS (penstock_place(location)) STORED,
    PRIMARY KEY (dataset_id, generation, partition_key, task_id),
    FOREIGN KEY (dataset_id, generation) REFERENCES generation,
    CHECK (first_revision <= revision)
);
CREATE INDEX compacted_place ON compacted (place) WHERE place IS NOT NULL;

-- The task by which a part was put together with others; null for one that is read by itself.
ALTER TABLE appended ADD COLUMN compacted_by bigint;

-- What is read of partitions that are appended to.
CREATE VIEW part AS
SELECT dataset_id, generation, partition_key, append_key, task_id, attempt, location, appended_at,
       files, rows, bytes, manifest, place, revision AS first_revision, revision,
       false AS is_compacted
FROM appended
WHERE compacted_by IS NULL
UNION ALL
SELECT dataset_id, generation, partition_key, append_key, task_id, attempt, location, appended_at,
       files, rows, bytes, manifest, place, first_revision, revision, true
FROM compacted;

-- Up to which revisions others have consumed the partitions of a generation, or will have when the tasks
-- that run are completed: no two parts are put together of which one is up to such a revision
-- and the other after it.
CREATE FUNCTION penstock_cuts(wanted_generation uuid)
RETURNS TABLE (partition_key text, revision bigint) LANGUAGE sql STABLE AS $$
    SELECT consumed.partition_key, consumed.revision
    FROM consumed
    WHERE consumed.fed = wanted_generation
    UNION
    SELECT given.partition_key, given.revision
    FROM task
    JOIN consumption ON consumption.task_id = task.id AND consumption.attempt = task.attempt
        AND consumption.fed = wanted_generation
    CROSS JOIN LATERAL unnest(consumption.partition_keys, consumption.upto)
        AS given(partition_key, revision)
    WHERE task.status = 'running'
$$;

-- As before; and files of what is appended may be rewritten too.
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
        AND NEW.rewritten = NEW.revision
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

-- As before, and with what was put together.
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
        RETURNING CASE WHEN appended.compacted_by IS NULL THEN appended.place END AS place,
                  appended.dataset_id, appended.generation, appended.partition_key, gone.edition
    ), together AS (
        DELETE FROM compacted
        USING gone
        WHERE (compacted.dataset_id, compacted.generation, compacted.partition_key)
            = (gone.dataset_id, gone.generation, gone.partition_key)
        RETURNING compacted.place, compacted.dataset_id, compacted.generation,
                  compacted.partition_key, gone.edition
    )
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT place, dataset_id, generation, partition_key, max(edition) + 1
    FROM (
        SELECT place, dataset_id, generation, partition_key, edition FROM gone
        UNION ALL
        SELECT * FROM parts
        UNION ALL
        SELECT * FROM together
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

-- As before, and parts that were put together are one; and all of them are given, however many.
CREATE OR REPLACE FUNCTION penstock_parts(
    wanted_dataset uuid, wanted_generation uuid, wanted_reads text, wanted_key text,
    wanted_start bigint, wanted_end bigint
) RETURNS TABLE (location text, revision bigint, parts jsonb) LANGUAGE sql STABLE AS $$
    WITH own AS MATERIALIZED (
        SELECT publication.*
        FROM publication
        WHERE wanted_reads = 'partition' AND publication.dataset_id = wanted_dataset
          AND publication.generation = wanted_generation
          AND publication.partition_key IN ('', coalesce(wanted_key, ''))
        ORDER BY publication.partition_key DESC
        LIMIT 1
    ), heads AS (
        SELECT * FROM own
        UNION ALL
        SELECT publication.*
        FROM publication
        WHERE wanted_reads = 'partition' AND NOT EXISTS (SELECT FROM own)
          AND publication.dataset_id = wanted_dataset
          AND publication.generation = wanted_generation
          AND publication.range_start >= wanted_start AND publication.range_start < wanted_end
          AND publication.range_end <= wanted_end
        UNION ALL
        SELECT publication.*
        FROM publication
        WHERE wanted_reads = 'all' AND publication.dataset_id = wanted_dataset
          AND publication.generation = wanted_generation
    ), pieces AS (
        SELECT heads.partition_key, heads.range_start, heads.range_end, heads.revision,
               heads.location AS head, coalesce(piece.location, heads.location) AS location,
               piece.append_key, piece.appended_at, piece.task_id,
               CASE WHEN piece.location IS NULL THEN heads.manifest ELSE piece.manifest END
                   AS manifest,
               CASE WHEN piece.location IS NULL THEN heads.rows ELSE piece.rows END AS rows,
               CASE WHEN piece.location IS NULL THEN heads.bytes ELSE piece.bytes END AS bytes
        FROM heads
        LEFT JOIN LATERAL (
            SELECT part.*
            FROM part
            WHERE heads.mode = 'append' AND part.dataset_id = wanted_dataset
              AND part.generation = wanted_generation
              AND part.partition_key = heads.partition_key
            -- Looked up for each partition, and never for all of the dataset.
            OFFSET 0
        ) AS piece ON true
    )
    SELECT CASE WHEN count(DISTINCT pieces.partition_key) = 1 THEN min(pieces.head) END,
           CASE WHEN count(DISTINCT pieces.partition_key) = 1 THEN min(pieces.revision) END,
           jsonb_agg(
               jsonb_strip_nulls(jsonb_build_object(
                   'location', pieces.location,
                   'partition_key', nullif(pieces.partition_key, ''),
                   'start', pieces.range_start, 'end', pieces.range_end,
                   'revision', pieces.revision, 'append_key', pieces.append_key,
                   'manifest', pieces.manifest, 'rows', pieces.rows, 'bytes', pieces.bytes))
               ORDER BY pieces.range_start, pieces.partition_key COLLATE "C",
                        pieces.appended_at, pieces.task_id, pieces.append_key)
               FILTER (WHERE NOT starts_with(pieces.location, 'range:'))
    FROM pieces
$$;
