-- Datasets as files: what is published of them, what readers see, and what is swept.

-- The folder of the attempt that a location lies in, however it is spelt: see datasets/layout.py.
CREATE FUNCTION penstock_place(location text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT substring(
        replace(replace(replace(replace(location, '%3D', '='), '%3d', '='), '%7E', '~'), '%7e', '~')
        FROM '/datasets/([^/]+/[^/]+/[^/]+/[0-9]+-[0-9]+-[0-9a-z]{24})(?:/|$)')
$$;

-- What manifests say of what is published; none for what has no manifest.
ALTER TABLE publication
    ADD COLUMN files bigint CHECK (files >= 0),
    ADD COLUMN rows bigint CHECK (rows >= 0),
    ADD COLUMN bytes bigint CHECK (bytes >= 0),
    ADD COLUMN manifest text,
    -- Up to which revision `current.json` is known to be written.
    ADD COLUMN projected bigint NOT NULL DEFAULT 0,
    ADD COLUMN place text GENERATED ALWAYS AS (penstock_place(location)) STORED;
CREATE INDEX publication_place ON publication (place) WHERE place IS NOT NULL;
CREATE INDEX publication_range ON publication (dataset_id, generation, range_start)
    WHERE range_start IS NOT NULL;

ALTER TABLE appended
    ADD COLUMN files bigint CHECK (files >= 0), ADD COLUMN rows bigint CHECK (rows >= 0),
    ADD COLUMN bytes bigint CHECK (bytes >= 0), ADD COLUMN manifest text,
    ADD COLUMN place text GENERATED ALWAYS AS (penstock_place(location)) STORED;
CREATE INDEX appended_place ON appended (place) WHERE place IS NOT NULL;

-- The schema that all partitions of a generation share; it only grows.
CREATE TABLE generation_schema (
    dataset_id uuid NOT NULL,
    version uuid NOT NULL,
    columns jsonb NOT NULL CHECK (jsonb_typeof(columns) = 'array'),
    changed_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, version),
    FOREIGN KEY (dataset_id, version) REFERENCES generation
);

-- What an attempt took: figures by name.
ALTER TABLE attempt ADD COLUMN metrics jsonb CHECK (jsonb_typeof(metrics) = 'object');

-- An input that is read, and does not make the job run; and one of which all partitions are read.
ALTER TABLE edge
    ADD COLUMN is_trigger boolean NOT NULL DEFAULT true,
    ADD COLUMN reads text NOT NULL DEFAULT 'partition' CHECK (reads IN ('partition', 'all'));

-- The language of DAGs, and routing by it --------------------------------------------------------

-- The texts of the files that a DAG names, by their names.
ALTER TABLE dag_version ADD COLUMN files jsonb NOT NULL DEFAULT '{}'
    CHECK (jsonb_typeof(files) = 'object');

-- What was called `coalesce` has the name `merge_updates`; `coalesce` is a count.
UPDATE job_definition
SET body = body - 'coalesce'
    || CASE WHEN body -> 'coalesce' = 'true' THEN '{"merge_updates": true}'::jsonb ELSE '{}' END
WHERE body ? 'coalesce';

-- As before, and whether an input makes the job run, and what is read of it.
DROP FUNCTION penstock_inputs(integer, uuid);
CREATE FUNCTION penstock_inputs(reading_job integer, reading_generation uuid)
RETURNS TABLE (
    input text, dataset_id uuid, generation uuid, filter jsonb, is_trigger boolean, reads text)
LANGUAGE sql STABLE AS $$
    SELECT edge.input, edge.dataset_id, fed.version, edge.filter, edge.is_trigger, edge.reads
    FROM edge
    JOIN dag_job AS writer ON writer.dag_version_id = edge.dag_version_id
    JOIN generation AS fed
        ON fed.dataset_id = edge.dataset_id AND fed.version = writer.generation
    WHERE edge.job_id = reading_job AND edge.dag_version_id = (
        SELECT max(dag_job.dag_version_id)
        FROM dag_job
        WHERE dag_job.generation = reading_generation AND dag_job.job_id = reading_job)
$$;

-- What claims give out ---------------------------------------------------------------------------

-- How many tasks of a definition may be claimed together, to be run as one. Before this was a
-- number, the field said whether updates are merged.
ALTER TABLE job_definition ADD COLUMN batch_max integer NOT NULL GENERATED ALWAYS AS (
    CASE WHEN jsonb_typeof(body -> 'coalesce') = 'number'
         THEN (body ->> 'coalesce')::integer ELSE 1 END) STORED;

-- What a task reads of an input: its own partition; else the dataset without partitions; else
-- the partitions whose ranges lie within its own. Or, with 'all', every partition there is. Of a
-- partition that is appended to it is every part of it. `location` is given where there is but one
-- partition. What is told of ranges alone ('range:') has nothing to read. With NULL it is nothing.
CREATE FUNCTION penstock_parts(
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
            SELECT appended.*
            FROM appended
            WHERE heads.mode = 'append' AND appended.dataset_id = wanted_dataset
              AND appended.generation = wanted_generation
              AND appended.partition_key = heads.partition_key
            -- Looked up for each partition, and never for all of the dataset.
            OFFSET 0
        ) AS piece ON true
        -- One more than a task may read, so that it can be told.
        LIMIT 10001
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

-- What readers without Postgres are told, and what they no longer are ----------------------------

-- How often the current generation of a dataset has moved, also back: the revision of its
-- `current.json`; and up to which of them that is known to be written, since when.
ALTER TABLE dataset
    ADD COLUMN revision bigint NOT NULL DEFAULT 0,
    ADD COLUMN projected bigint NOT NULL DEFAULT 0 CHECK (projected >= 0),
    ADD COLUMN projected_at timestamptz;
ALTER TABLE dataset ADD CHECK (projected <= revision);

-- When what a generation holds was given up. It counts while it equals `changed_at`: a generation
-- that is needed again after all is moved, and is built anew.
ALTER TABLE generation ADD COLUMN dropped_at timestamptz;

-- Partitions that were published and are not any more. What is published of them later has a higher
-- revision, and what replaces comes from a later task.
CREATE TABLE removed (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    range_start bigint,
    range_end bigint,
    task_id bigint NOT NULL,
    revision bigint NOT NULL,
    projected bigint NOT NULL DEFAULT 0 CHECK (projected <= revision),
    removed_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, generation, partition_key),
    FOREIGN KEY (dataset_id, generation) REFERENCES generation
);

-- Folders of attempts that a publication has named and names no more, and the first revision of
-- the partition that does not: until `current.json` has it, readers may still be sent there. Since
-- when it has is written down by whoever finds it written.
CREATE TABLE departed (
    place text NOT NULL,
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    revision bigint NOT NULL,
    left_at timestamptz NOT NULL DEFAULT penstock_now(),
    confirmed_at timestamptz,
    PRIMARY KEY (place, dataset_id, generation, partition_key)
);
CREATE INDEX departed_confirmed ON departed (confirmed_at);
CREATE INDEX departed_open ON departed (dataset_id, generation, partition_key)
    WHERE confirmed_at IS NULL;

-- What the relay has to write. It follows from the rows themselves: however many publications
-- there are, a transaction puts one row for each generation into the outbox.
CREATE INDEX publication_unprojected ON publication (dataset_id, generation, partition_key)
    WHERE projected < revision AND NOT starts_with(location, 'range:');
CREATE INDEX removed_unprojected ON removed (dataset_id, generation, partition_key)
    WHERE projected < revision;

-- Besides going forward, a publication may be noted as written for readers.
CREATE OR REPLACE FUNCTION publication_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revision = OLD.revision AND NEW.projected > OLD.projected
        AND NEW.projected <= NEW.revision
        AND (NEW.task_id, NEW.attempt, NEW.location, NEW.mode, NEW.published_at)
            = (OLD.task_id, OLD.attempt, OLD.location, OLD.mode, OLD.published_at) THEN
        RETURN NEW;
    END IF;
    IF NEW.revision <= OLD.revision OR NEW.task_id < OLD.task_id
        OR (NEW.mode = 'replace' AND NEW.task_id = OLD.task_id)
        OR NEW.projected <> OLD.projected THEN
        RAISE EXCEPTION 'partition % of dataset % does not go back', OLD.partition_key,
            OLD.dataset_id USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;

-- Have the relay write what has changed of a generation; of a dataset, if none is named.
CREATE FUNCTION penstock_project(wanted_datasets uuid[], wanted_generations uuid[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO outbox (kind, target, body)
    SELECT 'project', concat_ws('/', dataset.name, wanted.generation),
           jsonb_strip_nulls(jsonb_build_object(
               'dataset', wanted.dataset_id, 'generation', wanted.generation))
    FROM unnest(wanted_datasets, wanted_generations) AS wanted(dataset_id, generation)
    JOIN dataset ON dataset.id = wanted.dataset_id
    ORDER BY wanted.dataset_id, wanted.generation
$$;

CREATE FUNCTION publication_came() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM came JOIN removed USING (dataset_id, generation, partition_key)
        WHERE came.revision <= removed.revision) THEN
        RAISE EXCEPTION 'a partition that was removed does not go back'
            USING ERRCODE = 'check_violation';
    END IF;
    PERFORM penstock_project(array_agg(dataset_id), array_agg(generation))
    FROM (SELECT DISTINCT dataset_id, generation FROM came
          WHERE NOT starts_with(location, 'range:')) AS moved
    HAVING count(*) > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER publication_came AFTER INSERT ON publication
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION publication_came();

-- Old and new rows are brought together by grouping, never by a join: its plan is made for the few
-- rows of the first call and kept for the many of a later one.
CREATE FUNCTION publication_moved() RETURNS trigger LANGUAGE plpgsql AS $$
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
                   CASE WHEN mode = 'replace' THEN place END AS left_place
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
CREATE TRIGGER publication_moved AFTER UPDATE ON publication
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION publication_moved();

-- A partition that is removed goes with all that was appended to it.
CREATE FUNCTION publication_left() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO removed (
        dataset_id, generation, partition_key, range_start, range_end, task_id, revision,
        projected)
    SELECT dataset_id, generation, partition_key, range_start, range_end, task_id, revision + 1,
           CASE WHEN starts_with(location, 'range:') THEN revision + 1 ELSE 0 END
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
                  appended.partition_key, gone.revision
    )
    INSERT INTO departed (place, dataset_id, generation, partition_key, revision)
    SELECT place, dataset_id, generation, partition_key, max(revision) + 1
    FROM (
        SELECT place, dataset_id, generation, partition_key, revision FROM gone
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
CREATE TRIGGER publication_left AFTER DELETE ON publication
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION publication_left();

-- The current generation of a dataset is another, or there is none any more.
CREATE FUNCTION penstock_moved(moved uuid[]) RETURNS void LANGUAGE sql AS $$
    UPDATE dataset SET revision = revision + 1 WHERE id = ANY (moved);
    SELECT penstock_project(moved, array_fill(NULL::uuid, ARRAY[cardinality(moved)]));
$$;

CREATE FUNCTION generation_came() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock_moved(array_agg(dataset_id)) FROM came
    WHERE state = 'current' HAVING count(*) > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER generation_came AFTER INSERT ON generation
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION generation_came();

CREATE FUNCTION generation_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock_moved(array_agg(DISTINCT dataset_id))
    FROM old_rows
    JOIN new_rows USING (dataset_id, version)
    WHERE (old_rows.state = 'current') <> (new_rows.state = 'current')
    HAVING count(*) > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER generation_moved AFTER UPDATE ON generation
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION generation_moved();

-- What was published before readers were told of it.
UPDATE dataset
SET revision = 1
WHERE EXISTS (
    SELECT FROM generation
    WHERE generation.dataset_id = dataset.id AND generation.state = 'current');
SELECT penstock_project(array_agg(id), array_agg(NULL::uuid)) FROM dataset WHERE revision > 0
HAVING count(*) > 0;
SELECT penstock_project(array_agg(dataset_id), array_agg(generation))
FROM (SELECT DISTINCT dataset_id, generation FROM publication
      WHERE NOT starts_with(location, 'range:')) AS published
HAVING count(*) > 0;

-- Whether somebody may still read a folder that was published once: `current.json` may name it, or
-- has lately, or an attempt runs that could have been given it. A transaction that publishes may
-- be some minutes older than its end, and claims in between are given what it replaces.
CREATE FUNCTION penstock_is_read(wanted_place text, grace_seconds double precision)
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
                  AND task.claimed_at <= departed.left_at + interval '10 minutes')))
$$;
