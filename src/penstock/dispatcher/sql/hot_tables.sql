-- Statements of Postgres data, for penstock.dispatcher.datasets.hot_tables. Names in braces are put in
-- as identifiers and lists of such. `hot` has what readers read, `hot_store` all else.

-- name: hot_set_up
-- A lock first: two that make the same schema at once would fail.
SELECT pg_advisory_xact_lock(8098122302937395060)

-- name: hot_make_store
DO $$
BEGIN
    CREATE SCHEMA IF NOT EXISTS hot;
    CREATE SCHEMA IF NOT EXISTS hot_store;
    -- The last transaction that has changed a dataset, and the columns of its view, which a function
    -- of this number has.
    CREATE TABLE IF NOT EXISTS hot_store.dataset (
        dataset_id uuid PRIMARY KEY,
        name text NOT NULL UNIQUE,
        position text,
        columns jsonb NOT NULL DEFAULT '[]',
        shape integer NOT NULL DEFAULT 0
    );
    -- The generation that readers are sent to: the row that every query of a view looks at.
    CREATE TABLE IF NOT EXISTS hot_store.pointer (
        dataset_id uuid PRIMARY KEY,
        generation uuid NOT NULL
    );
    CREATE TABLE IF NOT EXISTS hot_store.relation (
        dataset_id uuid NOT NULL,
        generation uuid NOT NULL,
        name text NOT NULL UNIQUE,
        columns jsonb NOT NULL,
        keys jsonb NOT NULL,
        left_at timestamptz,
        PRIMARY KEY (dataset_id, generation)
    );
    CREATE TABLE IF NOT EXISTS hot_store.applied (
        dataset_id uuid NOT NULL,
        generation uuid NOT NULL,
        partition_key text NOT NULL,
        revision bigint NOT NULL,
        stamp text NOT NULL,
        position text NOT NULL,
        PRIMARY KEY (dataset_id, generation, partition_key)
    );
END
$$

-- name: hot_let_read
-- Whoever reads, and does nothing else, if there is such a role.
SELECT format(statement, %(reader)s::text) AS statement
FROM unnest(ARRAY[
    'GRANT USAGE ON SCHEMA hot, hot_store TO %%I',
    'GRANT SELECT ON ALL TABLES IN SCHEMA hot, hot_store TO %%I',
    'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA hot_store TO %%I',
    'ALTER DEFAULT PRIVILEGES IN SCHEMA hot, hot_store GRANT SELECT ON TABLES TO %%I',
    'ALTER DEFAULT PRIVILEGES IN SCHEMA hot_store GRANT EXECUTE ON FUNCTIONS TO %%I'])
    AS grants(statement)
WHERE EXISTS (SELECT FROM pg_roles WHERE rolname = %(reader)s)

-- name: hot_session
SELECT set_config('timezone', 'UTC', false), set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s, false),
       set_config('synchronous_commit', 'on', false),
       set_config('search_path', 'pg_catalog', false)

-- name: hot_take
-- Held until the connection lets it go, or ends: nobody else changes the tables of this dataset.
SELECT pg_try_advisory_lock(1885695605, hashtext(%(dataset)s)) AS is_taken

-- name: hot_let_go
SELECT pg_advisory_unlock(1885695605, hashtext(%(dataset)s))

-- name: hot_positions
SELECT dataset.dataset_id::text AS dataset, dataset.position, EXISTS (
    SELECT FROM hot_store.relation
    WHERE relation.dataset_id = dataset.dataset_id
      AND relation.left_at <= now() - %(grace_seconds)s * interval '1 second') AS is_left
FROM hot_store.dataset

-- name: hot_dataset
-- Made, if it is the first time. The name of another one is not taken: no row.
INSERT INTO hot_store.dataset (dataset_id, name) VALUES (%(dataset)s::uuid, %(name)s)
ON CONFLICT (dataset_id) DO UPDATE SET name = excluded.name
RETURNING position, columns, shape,
          (SELECT generation::text FROM hot_store.pointer WHERE dataset_id = %(dataset)s::uuid) AS served

-- name: hot_taken_name
SELECT FROM hot_store.dataset WHERE name = %(name)s AND dataset_id <> %(dataset)s::uuid

-- name: hot_relations
SELECT generation::text AS generation, name, columns, keys,
       to_regclass(format('hot_store.%%I', name)) IS NOT NULL AS is_there,
       left_at <= now() - %(grace_seconds)s * interval '1 second' AS is_over
FROM hot_store.relation
WHERE dataset_id = %(dataset)s::uuid
ORDER BY generation

-- name: hot_note_relation
INSERT INTO hot_store.relation (dataset_id, generation, name, columns, keys)
VALUES (%(dataset)s::uuid, %(generation)s::uuid, %(name)s, %(columns)s, %(keys)s)
ON CONFLICT (dataset_id, generation) DO UPDATE SET columns = excluded.columns

-- name: hot_leave
-- Generations that nobody needs any more, and those that are needed again.
UPDATE hot_store.relation
SET left_at = CASE WHEN generation = ANY (%(generations)s::uuid[]) THEN NULL ELSE now() END
WHERE dataset_id = %(dataset)s::uuid
  AND (left_at IS NULL) <> (generation = ANY (%(generations)s::uuid[]))

-- name: hot_make_table
CREATE TABLE {table} ({columns},
    _penstock_partition text NOT NULL DEFAULT current_setting('penstock.partition'))

-- name: hot_make_key
ALTER TABLE {table} ADD PRIMARY KEY ({keys}, _penstock_partition)

-- name: hot_make_index
CREATE INDEX ON {table} (_penstock_partition)

-- name: hot_drop_table
DROP TABLE IF EXISTS {table}

-- name: hot_add_column
ALTER TABLE {table} ADD COLUMN {column} {type}

-- name: hot_widen_column
ALTER TABLE {table} ALTER COLUMN {column} TYPE {type}

-- name: hot_forget_generations
WITH partitions AS (
    DELETE FROM hot_store.applied
    WHERE dataset_id = %(dataset)s::uuid AND generation = ANY (%(generations)s::uuid[])
)
DELETE FROM hot_store.relation
WHERE dataset_id = %(dataset)s::uuid AND generation = ANY (%(generations)s::uuid[])

-- name: hot_forget_dataset
WITH pointer AS (
    DELETE FROM hot_store.pointer WHERE dataset_id = %(dataset)s::uuid
)
DELETE FROM hot_store.dataset WHERE dataset_id = %(dataset)s::uuid

-- name: hot_applied
-- What is there of a dataset; with a position, what the transaction of that name has applied.
SELECT generation::text AS generation, partition_key, revision, stamp
FROM hot_store.applied
WHERE dataset_id = %(dataset)s::uuid
  AND (%(position)s::text IS NULL OR position = %(position)s)
ORDER BY generation, partition_key

-- name: hot_in_partition
-- The partition of the rows that this transaction copies.
SELECT set_config('penstock.partition', %(key)s, true)

-- name: hot_is_applied
SELECT FROM hot_store.applied
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND partition_key = %(key)s AND revision >= %(revision)s

-- name: hot_note_applied
INSERT INTO hot_store.applied (dataset_id, generation, partition_key, revision, stamp, position)
VALUES (%(dataset)s::uuid, %(generation)s::uuid, %(key)s, %(revision)s, %(stamp)s, %(position)s)
ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
SET revision = excluded.revision, stamp = excluded.stamp, position = excluded.position

-- name: hot_note_position
UPDATE hot_store.dataset SET position = %(position)s WHERE dataset_id = %(dataset)s::uuid

-- name: hot_forget_position
-- A name that the state does not know: whoever comes next compares all partitions.
UPDATE hot_store.dataset SET position = gen_random_uuid() WHERE dataset_id = %(dataset)s::uuid
RETURNING position

-- name: hot_has_rows
SELECT EXISTS (SELECT FROM {table} WHERE _penstock_partition = %(key)s) AS is_so

-- name: hot_empty
DELETE FROM {table} WHERE _penstock_partition = %(key)s

-- name: hot_copy
COPY {table} ({columns}) FROM STDIN (FORMAT csv)

-- name: hot_make_stage
CREATE TEMPORARY TABLE _penstock_stage ON COMMIT DROP AS SELECT {columns} FROM {table} WITH NO DATA

-- name: hot_copy_stage
COPY pg_temp._penstock_stage ({columns}) FROM STDIN (FORMAT csv)

-- name: hot_analyze_stage
ANALYZE pg_temp._penstock_stage

-- name: hot_drop_stage
DROP TABLE pg_temp._penstock_stage

-- name: hot_delete_missing
DELETE FROM {table} AS held
WHERE held._penstock_partition = %(key)s
  AND NOT EXISTS (SELECT FROM pg_temp._penstock_stage AS new WHERE ({new_keys}) = ({held_keys}))

-- name: hot_upsert
-- What is the same is not written.
INSERT INTO {table} AS held ({columns}, _penstock_partition)
SELECT {columns}, %(key)s FROM pg_temp._penstock_stage
ON CONFLICT ({keys}, _penstock_partition) DO UPDATE SET {changes}
WHERE ({held_columns}) IS DISTINCT FROM ({excluded_columns})

-- name: hot_point
INSERT INTO hot_store.pointer (dataset_id, generation)
VALUES (%(dataset)s::uuid, %(generation)s::uuid)
ON CONFLICT (dataset_id) DO UPDATE SET generation = excluded.generation
WHERE pointer.generation <> excluded.generation

-- name: hot_make_function
-- Its text is what a query of the view becomes: Postgres puts it in the place of the call. It names
-- every table that readers may be sent to, and one row says which; so nothing is changed that
-- somebody could be reading.
CREATE OR REPLACE FUNCTION {function}() RETURNS TABLE ({columns}) LANGUAGE sql STABLE ROWS 100000
    AS {body}

-- name: hot_select
SELECT {columns} FROM {table} AS held
WHERE (SELECT generation FROM hot_store.pointer WHERE dataset_id = {dataset}) = {generation}

-- name: hot_make_view
CREATE OR REPLACE VIEW {view} AS SELECT {columns} FROM {function}() AS held

-- name: hot_drop_view
DROP VIEW IF EXISTS {view}

-- name: hot_drop_function
DROP FUNCTION IF EXISTS {function}()

-- name: hot_note_view
UPDATE hot_store.dataset SET columns = %(columns)s, shape = %(shape)s
WHERE dataset_id = %(dataset)s::uuid
