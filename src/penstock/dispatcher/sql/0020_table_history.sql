-- The history of what is published, by which every dataset is a table with snapshots. See
-- penstock.dispatcher.catalog.snapshots.

-- What was put in place and taken away, part by part, in the transactions that do so. `snapshot` is the
-- one that shows it first, and is given once; nothing else of a row ever changes. Within a
-- partition `id` is the order of commits: it is given under the lock of its publication.
CREATE TABLE publication_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    -- `current`: the generation is what readers read from here on.
    change text NOT NULL CHECK (change IN ('put', 'removed', 'current')),
    partition_key text CHECK ((partition_key IS NULL) = (change = 'current')),
    task_id bigint,
    location text CHECK ((location IS NULL) = (change = 'current')),
    manifest text,
    files bigint,
    rows bigint,
    bytes bigint,
    place text GENERATED ALWAYS AS (penstock_place(location)) STORED,
    logged_at timestamptz NOT NULL DEFAULT penstock_now(),
    snapshot bigint
);
CREATE INDEX publication_log_fresh ON publication_log (dataset_id, logged_at)
    WHERE snapshot IS NULL;
CREATE INDEX publication_log_held ON publication_log (place)
    WHERE snapshot IS NULL AND place IS NOT NULL;
CREATE INDEX publication_log_shown ON publication_log (dataset_id, snapshot)
    WHERE snapshot IS NOT NULL;

-- A part of a generation, and which snapshots show it: those from `came` on and before `gone`.
CREATE TABLE table_part (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    location text NOT NULL,
    task_id bigint,
    manifest text,
    files bigint,
    rows bigint,
    bytes bigint,
    place text GENERATED ALWAYS AS (penstock_place(location)) STORED,
    came bigint NOT NULL,
    gone bigint CHECK (gone > came),
    -- The manifests with its files that clients read who plan themselves, as of the snapshot of its
    -- generation that was written last.
    entries text[],
    PRIMARY KEY (dataset_id, generation, partition_key, location, came)
);
CREATE UNIQUE INDEX table_part_shown ON table_part (dataset_id, generation, partition_key, location)
    WHERE gone IS NULL;
CREATE INDEX table_part_gone ON table_part (dataset_id, generation, gone) WHERE gone IS NOT NULL;
CREATE INDEX table_part_place ON table_part (place) WHERE place IS NOT NULL;

-- Snapshots that are kept. The id is the time of the latest publication in milliseconds, made greater
-- than every other one of the dataset: so ids, sequence numbers and times are one number that only
-- grows, and a database that is brought back to an earlier time gives none out twice.
CREATE TABLE table_snapshot (
    dataset_id uuid NOT NULL REFERENCES dataset ON DELETE CASCADE,
    id bigint NOT NULL,
    generation uuid NOT NULL,
    branch text NOT NULL CHECK (branch IN ('main', 'building')),
    operation text NOT NULL CHECK (operation IN ('append', 'overwrite', 'delete')),
    schema_id integer NOT NULL,
    added bigint NOT NULL,
    removed bigint NOT NULL,
    partitions bigint NOT NULL,
    parts bigint NOT NULL,
    files bigint,
    rows bigint,
    bytes bigint,
    made_at timestamptz NOT NULL DEFAULT penstock_now(),
    -- The list of files that clients read who plan themselves, once it is written.
    manifest_list text,
    PRIMARY KEY (dataset_id, id)
);
CREATE INDEX table_snapshot_generation ON table_snapshot (dataset_id, generation, id);

-- The manifests that were written for clients who plan themselves, and which snapshots name them: from
-- `came` on and before `gone`.
CREATE TABLE table_manifest (
    dataset_id uuid NOT NULL REFERENCES dataset ON DELETE CASCADE,
    location text NOT NULL,
    generation uuid NOT NULL,
    came bigint NOT NULL,
    gone bigint,
    PRIMARY KEY (dataset_id, location)
);

-- What outlives the snapshots of a table: the latest id.
CREATE TABLE table_state (
    dataset_id uuid PRIMARY KEY REFERENCES dataset ON DELETE CASCADE,
    last_id bigint NOT NULL
);

-- The schemas of a table. A generation has a new one when its columns have changed.
CREATE TABLE table_schema (
    dataset_id uuid NOT NULL REFERENCES dataset ON DELETE CASCADE,
    id integer NOT NULL,
    generation uuid NOT NULL,
    columns jsonb NOT NULL,
    -- The column that tells the partition of a row, which is in no file; none without partitions.
    partition_column text,
    PRIMARY KEY (dataset_id, id)
);

-- Who may read which tables, and nothing else. No names are all of them.
CREATE TABLE read_token (
    name text PRIMARY KEY CHECK (name <> ''),
    digest text NOT NULL UNIQUE,
    datasets text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    expires_at timestamptz
);

-- By triggers for each statement, so that nothing that moves publications can forget it, and its cost is
-- one statement however many partitions have moved. What is appended is logged with its parts; ranges
-- that are told of have no data.
CREATE FUNCTION publication_put_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'put', partition_key, task_id, location, manifest, files,
           rows, bytes
    FROM came
    WHERE mode <> 'append' AND NOT starts_with(location, 'range:');
    RETURN NULL;
END
$$;
CREATE TRIGGER publication_put_logged AFTER INSERT ON publication
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION publication_put_logged();

CREATE FUNCTION publication_moved_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- What was only noted as written has its edition still, and editions only grow.
    IF (SELECT sum(edition) FROM old_rows) IS NOT DISTINCT FROM (
        SELECT sum(edition) FROM new_rows) THEN
        RETURN NULL;
    END IF;
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, manifest, files,
           rows, bytes
    FROM old_rows
    WHERE mode <> 'append' AND NOT starts_with(location, 'range:')
    UNION ALL
    SELECT dataset_id, generation, 'put', partition_key, task_id, location, manifest, files,
           rows, bytes
    FROM new_rows
    WHERE mode <> 'append' AND NOT starts_with(location, 'range:');
    RETURN NULL;
END
$$;
CREATE TRIGGER publication_moved_logged AFTER UPDATE ON publication
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION publication_moved_logged();

CREATE FUNCTION publication_left_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, manifest, files,
           rows, bytes
    FROM gone
    WHERE mode <> 'append' AND NOT starts_with(location, 'range:');
    RETURN NULL;
END
$$;
CREATE TRIGGER publication_left_logged AFTER DELETE ON publication
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION publication_left_logged();

-- Parts of what is appended; those that were merged are in the head.
CREATE FUNCTION appended_put_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'put', partition_key, task_id, location, manifest, files,
           rows, bytes
    FROM came
    WHERE compacted_by IS NULL AND location <> 'merged:';
    RETURN NULL;
END
$$;
CREATE TRIGGER appended_put_logged AFTER INSERT ON appended
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION appended_put_logged();

CREATE FUNCTION appended_moved_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Only those leave that are put together with others now.
    IF (SELECT count(*) FROM old_rows WHERE compacted_by IS NULL)
        = (SELECT count(*) FROM new_rows WHERE compacted_by IS NULL) THEN
        RETURN NULL;
    END IF;
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, manifest, files,
           rows, bytes
    FROM old_rows
    WHERE compacted_by IS NULL AND location <> 'merged:' AND NOT EXISTS (
        SELECT FROM new_rows AS kept
        WHERE kept.compacted_by IS NULL AND (kept.dataset_id, kept.generation) =
                (old_rows.dataset_id, old_rows.generation)
          AND (kept.partition_key, kept.append_key) =
                (old_rows.partition_key, old_rows.append_key));
    RETURN NULL;
END
$$;
CREATE TRIGGER appended_moved_logged AFTER UPDATE ON appended
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION appended_moved_logged();

CREATE FUNCTION appended_left_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, manifest, files,
           rows, bytes
    FROM gone
    WHERE compacted_by IS NULL AND location <> 'merged:';
    RETURN NULL;
END
$$;
CREATE TRIGGER appended_left_logged AFTER DELETE ON appended
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION appended_left_logged();

CREATE FUNCTION compacted_put_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'put', partition_key, task_id, location, manifest, files,
           rows, bytes
    FROM came
    WHERE true;
    RETURN NULL;
END
$$;
CREATE TRIGGER compacted_put_logged AFTER INSERT ON compacted
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION compacted_put_logged();

CREATE FUNCTION compacted_left_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, manifest, files,
           rows, bytes
    FROM gone
    WHERE true;
    RETURN NULL;
END
$$;
CREATE TRIGGER compacted_left_logged AFTER DELETE ON compacted
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION compacted_left_logged();

-- The current generation of a dataset is another.
CREATE FUNCTION generation_came_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (dataset_id, generation, change)
    SELECT dataset_id, version, 'current' FROM came WHERE state = 'current';
    RETURN NULL;
END
$$;
CREATE TRIGGER generation_came_logged AFTER INSERT ON generation
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION generation_came_logged();

CREATE FUNCTION generation_moved_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO publication_log (dataset_id, generation, change)
    SELECT dataset_id, version, 'current' FROM new_rows WHERE state = 'current'
      AND NOT EXISTS (
          SELECT FROM old_rows
          WHERE old_rows.version = new_rows.version AND old_rows.dataset_id = new_rows.dataset_id
            AND old_rows.state = 'current');
    RETURN NULL;
END
$$;
CREATE TRIGGER generation_moved_logged AFTER UPDATE ON generation
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION generation_moved_logged();

-- History begins here, with what is published.
INSERT INTO publication_log (dataset_id, generation, change)
SELECT dataset_id, version, 'current' FROM generation WHERE state = 'current';
INSERT INTO publication_log (
    dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
    bytes)
SELECT dataset_id, generation, 'put', partition_key, task_id, location, manifest, files,
       rows, bytes
FROM publication
WHERE mode <> 'append' AND NOT starts_with(location, 'range:');
INSERT INTO publication_log (
    dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
    bytes)
SELECT part.dataset_id, part.generation, 'put', part.partition_key, part.task_id, part.location,
       part.manifest, part.files, part.rows, part.bytes
FROM part
JOIN publication USING (dataset_id, generation, partition_key)
WHERE publication.mode = 'append' AND part.location <> 'merged:';

-- How long what was replaced can still be read as it was: while a snapshot that is kept shows it, or one is
-- still to be made that does.
CREATE FUNCTION penstock_is_shown(wanted_place text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM publication_log AS log WHERE log.place = wanted_place AND log.snapshot IS NULL
    ) OR EXISTS (
        SELECT
        FROM table_part AS held
        WHERE held.place = wanted_place AND (held.gone IS NULL OR EXISTS (
            SELECT FROM table_snapshot AS kept
            WHERE kept.dataset_id = held.dataset_id AND kept.generation = held.generation
              AND kept.id >= held.came AND kept.id < held.gone)))
$$;
