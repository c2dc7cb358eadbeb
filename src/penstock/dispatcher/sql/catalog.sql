-- Datasets as tables: their snapshots, and who may read them. For penstock.dispatcher.catalog.

-- name: hold_table
-- One makes snapshots of a dataset at a time: the number is ours alone, "penu".
SELECT pg_try_advisory_xact_lock(1885695605, hashtext(%(dataset)s)) AS is_held

-- name: wait_for_table
-- The same, when the other is done.
SELECT pg_advisory_xact_lock(1885695605, hashtext(%(dataset)s))

-- name: is_snapshot_due
-- Whether something is in no snapshot yet, and the last one is old enough; not one of a later time.
SELECT EXISTS (
    SELECT FROM publication_log AS log
    WHERE log.dataset_id = %(dataset)s::uuid AND log.snapshot IS NULL
) AND NOT EXISTS (
    SELECT FROM table_snapshot AS made
    WHERE made.dataset_id = %(dataset)s::uuid AND made.made_at <= penstock_now()
      AND made.made_at > penstock_now() - %(seconds)s * interval '1 second') AS is_due

-- name: assign_snapshots
-- Gives all that is committed and in no snapshot yet to the next one of its branch, in one statement and
-- so of one moment. What commits later joins the next. What neither branch shows is noted with the
-- same number.
WITH fresh AS MATERIALIZED (
    SELECT * FROM publication_log WHERE dataset_id = %(dataset)s::uuid AND snapshot IS NULL
), base AS MATERIALIZED (
    SELECT greatest(
        coalesce((SELECT last_id FROM table_state WHERE dataset_id = %(dataset)s::uuid), 0) + 1,
        floor(extract(epoch FROM max(fresh.logged_at)) * 1000)::bigint) AS id
    FROM fresh
), served AS MATERIALIZED (
    SELECT generation
    FROM table_snapshot
    WHERE dataset_id = %(dataset)s::uuid AND branch = 'main'
    ORDER BY id DESC
    LIMIT 1
), due AS MATERIALIZED (
    SELECT live.version AS generation, live.branch, live.is_moved,
           base.id - 1 + row_number() OVER (ORDER BY live.branch DESC, live.version) AS id
    FROM (
        SELECT version, CASE state WHEN 'current' THEN 'main' ELSE 'building' END AS branch,
               state = 'current' AND version IS DISTINCT FROM (SELECT generation FROM served)
                   AS is_moved
        FROM generation
        WHERE dataset_id = %(dataset)s::uuid AND state IN ('current', 'building')
    ) AS live
    CROSS JOIN base
    WHERE live.is_moved OR EXISTS (
        SELECT FROM fresh
        WHERE fresh.generation = live.version AND fresh.change <> 'current')
), noted AS (
    UPDATE publication_log
    SET snapshot = coalesce(due.id, base.id)
    FROM fresh
    CROSS JOIN base
    LEFT JOIN due ON due.generation = fresh.generation
    WHERE publication_log.id = fresh.id
), folded AS MATERIALIZED (
    -- Within a partition the last word on a part counts.
    SELECT DISTINCT ON (fresh.generation, fresh.partition_key, fresh.location) fresh.*,
           coalesce(due.id, base.id) AS made
    FROM fresh
    CROSS JOIN base
    LEFT JOIN due ON due.generation = fresh.generation
    WHERE fresh.change <> 'current'
    ORDER BY fresh.generation, fresh.partition_key, fresh.location, fresh.id DESC
), came AS (
    INSERT INTO table_part (
        dataset_id, generation, partition_key, location, task_id, manifest, files, rows, bytes, came)
    SELECT dataset_id, generation, partition_key, location, task_id, manifest, files, rows, bytes,
           made
    FROM folded
    WHERE change = 'put'
    ON CONFLICT (dataset_id, generation, partition_key, location) WHERE gone IS NULL DO NOTHING
    RETURNING generation, partition_key, files, rows, bytes
), gone AS (
    UPDATE table_part
    SET gone = folded.made
    FROM folded
    WHERE folded.change = 'removed' AND table_part.gone IS NULL
      AND (table_part.dataset_id, table_part.generation, table_part.partition_key)
        = (folded.dataset_id, folded.generation, folded.partition_key)
      AND table_part.location = folded.location
    RETURNING table_part.generation, table_part.partition_key, table_part.files, table_part.rows,
              table_part.bytes
), changed AS MATERIALIZED (
    -- By partition. What is read of table_part in this statement is as it was before.
    SELECT generation, partition_key, count(*) FILTER (WHERE sign = 1) AS added,
           count(*) FILTER (WHERE sign = -1) AS removed, sum(sign * files)::bigint AS files,
           sum(sign * rows)::bigint AS rows, sum(sign * bytes)::bigint AS bytes,
           bool_and(rows IS NOT NULL) AS is_counted
    FROM (SELECT came.*, 1 AS sign FROM came UNION ALL SELECT gone.*, -1 FROM gone) AS one
    GROUP BY generation, partition_key
), former AS MATERIALIZED (
    -- The sums that the last snapshot of a generation has, if nothing has moved since.
    SELECT before.*
    FROM due
    CROSS JOIN LATERAL (
        SELECT made.id, made.generation, made.partitions, made.parts, made.files, made.rows,
               made.bytes
        FROM table_snapshot AS made
        WHERE made.dataset_id = %(dataset)s::uuid AND made.generation = due.generation
        ORDER BY made.id DESC
        LIMIT 1
    ) AS before
    WHERE (SELECT max(came) FROM table_part AS held
           WHERE held.dataset_id = %(dataset)s::uuid AND held.generation = due.generation
             AND held.came > 0) <= before.id
      AND coalesce((SELECT max(gone) FROM table_part AS held
           WHERE held.dataset_id = %(dataset)s::uuid AND held.generation = due.generation
             AND held.gone IS NOT NULL), 0) <= before.id
), counted AS (
    INSERT INTO table_state (dataset_id, last_id)
    SELECT %(dataset)s::uuid, greatest(base.id, (SELECT max(due.id) FROM due))
    FROM base
    WHERE EXISTS (SELECT FROM fresh)
    ON CONFLICT (dataset_id) DO UPDATE SET last_id = excluded.last_id
)
SELECT due.id, due.generation::text, due.branch,
       due.is_moved AND EXISTS (SELECT FROM served) AS is_moved,
       coalesce(moved.added, 0) AS added, coalesce(moved.removed, 0) AS removed,
       moved.is_same AND NOT EXISTS (
           -- Who rewrites files is a task for that, or the one whose rows these were before.
           SELECT FROM fresh
           WHERE fresh.generation = due.generation AND fresh.change = 'put'
             AND coalesce(
                 (SELECT task.payload ? 'maintain' FROM task WHERE task.id = fresh.task_id), false)
               IS FALSE
             AND coalesce((
                 SELECT true FROM table_part AS held
                 WHERE held.dataset_id = %(dataset)s::uuid AND held.generation = fresh.generation
                   AND held.partition_key = fresh.partition_key AND held.gone IS NULL
                   AND held.task_id = fresh.task_id
                 LIMIT 1), false) IS FALSE) IS TRUE AS is_rewritten,
       former.partitions + coalesce(moved.partitions, 0) AS partitions,
       former.parts + coalesce(moved.added - moved.removed, 0) AS parts,
       coalesce(former.files + moved.files, former.files, moved.files) AS files,
       coalesce(former.rows + moved.rows, former.rows, moved.rows) AS rows,
       coalesce(former.bytes + moved.bytes, former.bytes, moved.bytes) AS bytes
FROM due
LEFT JOIN former ON former.generation = due.generation
LEFT JOIN LATERAL (
    SELECT sum(added)::bigint AS added, sum(removed)::bigint AS removed,
           sum(changed.files)::bigint AS files, sum(changed.rows)::bigint AS rows,
           sum(changed.bytes)::bigint AS bytes,
           bool_and(added > 0 AND removed > 0 AND changed.rows = 0 AND is_counted) AS is_same,
           sum((added > 0 OR held.parts > removed)::integer - (held.parts > 0)::integer)::bigint
               AS partitions
    FROM changed
    CROSS JOIN LATERAL (
        SELECT count(*) AS parts
        FROM (
            SELECT FROM table_part AS one
            WHERE one.dataset_id = %(dataset)s::uuid AND one.generation = changed.generation
              AND one.partition_key = changed.partition_key AND one.gone IS NULL
            LIMIT changed.removed + 1
        ) AS few
    ) AS held
    WHERE changed.generation = due.generation
) AS moved ON true
WHERE EXISTS (SELECT FROM fresh)
ORDER BY due.id

-- name: count_parts
-- What a snapshot shows that goes on from none.
SELECT count(DISTINCT partition_key) AS partitions, count(*) AS parts, sum(files)::bigint AS files,
       sum(rows)::bigint AS rows, sum(bytes)::bigint AS bytes
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND came <= %(id)s AND gone IS NULL

-- name: schema_of_table
-- The columns of a generation now, and the last schema that the table has of it.
SELECT coalesce(generation_schema.columns, '[]') AS columns, held.id, held.columns AS held,
       held.partition_column, (
           SELECT max(table_schema.partition_column)
           FROM table_schema
           WHERE table_schema.dataset_id = %(dataset)s::uuid) AS known_column,
       EXISTS (
           SELECT FROM table_part
           WHERE table_part.dataset_id = %(dataset)s::uuid
             AND table_part.generation = %(generation)s::uuid AND partition_key > ''
       ) AS is_partitioned,
       (SELECT coalesce(max(id), -1) + 1 FROM table_schema WHERE dataset_id = %(dataset)s::uuid)
           AS next
FROM generation
LEFT JOIN generation_schema ON generation_schema.dataset_id = generation.dataset_id
    AND generation_schema.version = generation.version
LEFT JOIN LATERAL (
    SELECT table_schema.id, table_schema.columns, table_schema.partition_column
    FROM table_schema
    WHERE table_schema.dataset_id = generation.dataset_id
      AND table_schema.generation = generation.version
    ORDER BY table_schema.id DESC
    LIMIT 1
) AS held ON true
WHERE generation.dataset_id = %(dataset)s::uuid AND generation.version = %(generation)s::uuid

-- name: add_schema
INSERT INTO table_schema (dataset_id, id, generation, columns, partition_column)
VALUES (%(dataset)s::uuid, %(id)s, %(generation)s::uuid, %(columns)s, %(partition_column)s)

-- name: add_snapshot
INSERT INTO table_snapshot (
    dataset_id, id, generation, branch, operation, schema_id, added, removed, partitions, parts,
    files, rows, bytes)
VALUES (%(dataset)s::uuid, %(id)s, %(generation)s::uuid, %(branch)s, %(operation)s, %(schema)s,
        %(added)s, %(removed)s, %(partitions)s, %(parts)s, %(files)s, %(rows)s, %(bytes)s)

-- name: datasets_to_snapshot
-- Those of which something has been in no snapshot for a while; or waits since a later time than now.
SELECT DISTINCT dataset_id::text AS dataset
FROM publication_log
WHERE snapshot IS NULL AND (logged_at <= penstock_now() - %(seconds)s * interval '1 second'
                            OR logged_at > penstock_now())
LIMIT %(limit)s

-- name: forget_snapshots
-- Of each branch one a minute is kept after an hour, one an hour after a day, none after its time; and
-- the newest of each branch, and the last that `main` has of a generation that can come back. Others
-- are told of no more; what they show stays for a grace.
UPDATE table_snapshot
SET forgotten_at = penstock_now()
FROM (
    SELECT made.dataset_id, made.id, made.made_at,
           row_number() OVER (
               PARTITION BY made.dataset_id, made.branch, CASE
                   WHEN made.made_at > penstock_now() - interval '1 hour' THEN made.id::text
                   WHEN made.made_at > penstock_now() - interval '1 day'
                       THEN 'minute ' || date_trunc('minute', made.made_at)
                   ELSE 'hour ' || date_trunc('hour', made.made_at)
               END
               ORDER BY made.id DESC) AS place,
           row_number() OVER (
               PARTITION BY made.dataset_id, made.branch ORDER BY made.id DESC) = 1
               AND (made.branch = 'main' OR coalesce(generation.state = 'building', false))
           OR row_number() OVER (
               PARTITION BY made.dataset_id, made.branch, made.generation
               ORDER BY made.id DESC) = 1
               AND made.branch = 'main' AND coalesce(
                   generation.dropped_at IS DISTINCT FROM generation.changed_at, false)
           -- What is written next of a generation goes on from the last that was.
           OR made.manifest_list IS NOT NULL AND row_number() OVER (
               PARTITION BY made.dataset_id, made.generation, made.manifest_list IS NULL
               ORDER BY made.id DESC) = 1
               AND generation.state IN ('current', 'building')
           -- And is read until then.
           OR made.manifest_list IS NOT NULL AND made.branch = 'main' AND row_number() OVER (
               PARTITION BY made.dataset_id, made.branch, made.manifest_list IS NULL
               ORDER BY made.id DESC) = 1
           AS is_named,
           coalesce(rules.age_ms, %(age_ms)s::bigint) AS age_ms
    FROM table_snapshot AS made
    LEFT JOIN generation ON generation.dataset_id = made.dataset_id
        AND generation.version = made.generation
    LEFT JOIN unnest(%(datasets)s::uuid[], %(ages_ms)s::bigint[]) AS rules(dataset_id, age_ms)
        ON rules.dataset_id = made.dataset_id
    WHERE made.forgotten_at IS NULL
) AS ranked
WHERE (table_snapshot.dataset_id, table_snapshot.id) = (ranked.dataset_id, ranked.id)
  AND NOT ranked.is_named AND (ranked.place > 1 OR ranked.made_at
      <= penstock_now() - ranked.age_ms * interval '1 millisecond')

-- name: end_forgotten
-- Whose grace is over can be read no more, from a moment before anything of it goes.
UPDATE table_snapshot
SET forgotten_at = '-infinity'
WHERE forgotten_at <= penstock_now() - %(grace_seconds)s * interval '1 second'
  AND isfinite(forgotten_at)

-- name: is_snapshot_kept
-- Asked after its parts: if it is kept now, all of them were there.
SELECT EXISTS (
    SELECT FROM table_snapshot
    WHERE dataset_id = %(dataset)s::uuid AND id = %(snapshot)s
      AND (forgotten_at IS NULL OR isfinite(forgotten_at))) AS is_kept

-- name: forget_parts
-- Snapshots that can be read no more, with the parts that nothing shows but they: those that came
-- and went between two snapshots that stay. A snapshot goes when all its parts have gone.
WITH due AS MATERIALIZED (
    SELECT dataset_id, generation, id
    FROM table_snapshot
    WHERE forgotten_at = '-infinity'
    ORDER BY dataset_id, id
    LIMIT %(snapshots)s
), span AS MATERIALIZED (
    SELECT DISTINCT due.dataset_id, due.generation, coalesce(before.id, 0) AS low,
           coalesce(after.id, 9223372036854775807) AS high
    FROM due
    CROSS JOIN LATERAL (
        SELECT max(stays.id) AS id
        FROM table_snapshot AS stays
        WHERE stays.dataset_id = due.dataset_id AND stays.generation = due.generation
          AND stays.id < due.id AND (
              stays.forgotten_at IS NULL OR isfinite(stays.forgotten_at))
    ) AS before
    CROSS JOIN LATERAL (
        SELECT min(stays.id) AS id
        FROM table_snapshot AS stays
        WHERE stays.dataset_id = due.dataset_id AND stays.generation = due.generation
          AND stays.id > due.id AND (
              stays.forgotten_at IS NULL OR isfinite(stays.forgotten_at))
    ) AS after
), dropped AS (
    DELETE FROM table_part
    WHERE ctid = ANY (ARRAY(
        SELECT held.ctid
        FROM span
        CROSS JOIN LATERAL (
            SELECT part.ctid
            FROM table_part AS part
            WHERE part.dataset_id = span.dataset_id AND part.generation = span.generation
              AND part.gone > span.low AND part.gone <= span.high AND part.came > span.low
            LIMIT %(limit)s
        ) AS held
        LIMIT %(limit)s))
    RETURNING came
), over AS (
    DELETE FROM table_snapshot
    USING due
    WHERE (table_snapshot.dataset_id, table_snapshot.id) = (due.dataset_id, due.id)
      AND (SELECT count(*) FROM dropped) < %(limit)s
    RETURNING table_snapshot.id
)
SELECT (SELECT count(*) FROM dropped) AS parts, (SELECT count(*) FROM over) AS snapshots

-- name: forget_unshown
-- What has come and gone in a generation of which there is no snapshot any more.
DELETE FROM table_part
WHERE ctid = ANY (ARRAY(
    SELECT held.ctid
    FROM generation
    CROSS JOIN LATERAL (
        SELECT part.ctid
        FROM table_part AS part
        WHERE part.dataset_id = generation.dataset_id AND part.generation = generation.version
          AND part.gone IS NOT NULL
        LIMIT %(limit)s
    ) AS held
    WHERE NOT EXISTS (
        SELECT FROM table_snapshot AS kept
        WHERE kept.dataset_id = generation.dataset_id AND kept.generation = generation.version)
    LIMIT %(limit)s))

-- name: forget_log
-- What snapshots have had for a while; nobody asks for it.
DELETE FROM publication_log
WHERE id = ANY (ARRAY(
    SELECT log.id
    FROM publication_log AS log
    WHERE log.snapshot IS NOT NULL
      AND log.logged_at <= penstock_now() - %(log_seconds)s * interval '1 second'
    ORDER BY log.logged_at
    LIMIT %(limit)s))

-- name: find_table
SELECT dataset.id::text AS uuid, dataset.name,
       extract(epoch FROM penstock_now()) AS now_seconds,
       EXISTS (
           SELECT FROM generation
           WHERE generation.dataset_id = dataset.id AND generation.state = 'current') AS is_live
FROM dataset
WHERE dataset.name = %(name)s

-- name: table_names
-- Datasets that readers read, by name; with the schemas by which they may be tables, if nothing of them
-- is written yet: those of snapshots that are not known to be unfit, and of what is in none.
SELECT dataset.name, told.is_written, CASE WHEN NOT told.is_written THEN ARRAY(
           SELECT jsonb_build_object(
               'id', schema.id, 'columns', schema.columns,
               'partition_column', schema.partition_column)
           FROM table_schema AS schema
           WHERE schema.dataset_id = dataset.id AND EXISTS (
               SELECT FROM table_snapshot AS made
               WHERE made.dataset_id = dataset.id AND made.branch = 'main'
                 AND made.schema_id = schema.id AND made.forgotten_at IS NULL
                 AND made.unfit IS NULL)
           UNION ALL
           SELECT jsonb_build_object(
               'id', -1, 'columns', schema.columns, 'partition_column', (
                   SELECT max(known.partition_column) FROM table_schema AS known
                   WHERE known.dataset_id = dataset.id))
           FROM generation_schema AS schema
           WHERE schema.dataset_id = dataset.id AND schema.version = current.version
             AND EXISTS (
                 SELECT FROM publication_log AS log
                 WHERE log.dataset_id = dataset.id AND log.snapshot IS NULL)
       ) ELSE '{}' END AS schemas
FROM dataset
JOIN generation AS current ON current.dataset_id = dataset.id AND current.state = 'current'
CROSS JOIN LATERAL (
    SELECT EXISTS (
        SELECT FROM table_snapshot AS made
        WHERE made.dataset_id = dataset.id AND made.branch = 'main'
          AND made.manifest_list IS NOT NULL AND made.forgotten_at IS NULL) AS is_written
) AS told
WHERE dataset.name > %(after)s
  AND (%(only)s::text[] IS NULL OR dataset.name = ANY (%(only)s::text[]))
ORDER BY dataset.name
LIMIT %(limit)s

-- name: tables_to_sweep
SELECT dataset.name, dataset.id::text AS uuid
FROM dataset
WHERE dataset.name > %(after)s AND EXISTS (
    SELECT FROM table_schema WHERE table_schema.dataset_id = dataset.id)
ORDER BY dataset.name
LIMIT %(limit)s

-- name: table_schemas
SELECT id, columns, partition_column
FROM table_schema
WHERE dataset_id = %(dataset)s::uuid
ORDER BY id

-- name: table_snapshots
-- What is named and may be named next, the latest of the others, and the one that is asked for; newest
-- first, with what is to be known of their generations.
WITH named AS MATERIALIZED (
    -- Of each generation and branch the newest, and the newest with files for clients.
    SELECT newest.id
    FROM generation
    CROSS JOIN (VALUES ('main'), ('building')) AS every(branch)
    CROSS JOIN LATERAL (
        (SELECT id
         FROM table_snapshot AS made
         WHERE made.dataset_id = generation.dataset_id AND made.generation = generation.version
           AND made.branch = every.branch AND made.forgotten_at IS NULL
         ORDER BY made.id DESC
         LIMIT 1)
        UNION
        (SELECT id
         FROM table_snapshot AS made
         WHERE made.dataset_id = generation.dataset_id AND made.generation = generation.version
           AND made.branch = every.branch AND made.forgotten_at IS NULL
           AND made.manifest_list IS NOT NULL
         ORDER BY made.id DESC
         LIMIT 1)
    ) AS newest
    WHERE generation.dataset_id = %(dataset)s::uuid
    UNION
    SELECT id FROM table_snapshot
    WHERE dataset_id = %(dataset)s::uuid AND id = %(asked)s::bigint
      AND (forgotten_at IS NULL OR isfinite(forgotten_at))
), told AS (
    SELECT id FROM named
    UNION
    (SELECT id
     FROM table_snapshot AS made
     WHERE made.dataset_id = %(dataset)s::uuid AND made.forgotten_at IS NULL
     ORDER BY made.id DESC
     LIMIT greatest(0, %(limit)s - (SELECT count(*) FROM named)))
)
SELECT made.id, made.generation::text, made.branch, made.operation, made.schema_id, made.added,
       made.removed, made.partitions, made.parts, made.files, made.rows, made.bytes, made.made_at,
       made.manifest_list, made.unfit, generation.state,
       generation.dropped_at IS NOT DISTINCT FROM generation.changed_at AS is_dropped
FROM told
JOIN table_snapshot AS made ON made.dataset_id = %(dataset)s::uuid AND made.id = told.id
JOIN generation ON generation.dataset_id = made.dataset_id AND generation.version = made.generation
ORDER BY made.id DESC

-- name: parts_of_snapshot
-- What a snapshot shows, by partition. After a part, if one is named. Within a span of keys, which
-- clients compare by code points, if it has an end.
SELECT partition_key, location, manifest, task_id, files, rows, bytes, came,
       coalesce(entries, '{}') AS entries
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND came <= %(snapshot)s AND (gone IS NULL OR gone > %(snapshot)s)
  AND (partition_key = ''
       OR ((%(low)s::text IS NULL OR partition_key COLLATE "C" >= %(low)s::text)
           AND (%(high)s::text IS NULL OR partition_key COLLATE "C" <= %(high)s::text)))
  AND (partition_key, location) > (%(after_key)s, %(after_location)s)
ORDER BY partition_key, location
LIMIT %(limit)s

-- name: parts_of_partitions
-- The same of some partitions, by their keys.
SELECT partition_key, location, manifest, task_id, files, rows, bytes, came,
       coalesce(entries, '{}') AS entries
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND partition_key = ANY (%(keys)s::text[])
  AND came <= %(snapshot)s AND (gone IS NULL OR gone > %(snapshot)s)
  AND (partition_key, location) > (%(after_key)s, %(after_location)s)
ORDER BY partition_key, location
LIMIT %(limit)s

-- name: find_reader
SELECT name, datasets
FROM read_token
WHERE digest = %(digest)s AND (expires_at IS NULL OR expires_at > penstock_now())

-- name: add_reader
INSERT INTO read_token (name, digest, datasets, expires_at)
VALUES (%(name)s, %(digest)s, %(datasets)s::text[], penstock_now() + %(seconds)s * interval '1 second')
ON CONFLICT (name) DO NOTHING
RETURNING name

-- name: list_readers
SELECT name, datasets, created_at, expires_at, expires_at <= penstock_now() IS TRUE AS is_over
FROM read_token
ORDER BY name
LIMIT %(limit)s

-- name: remove_reader
DELETE FROM read_token WHERE name = %(name)s RETURNING name

-- name: parts_added
-- What a snapshot shows and an earlier one of its generation does not; none shows less than all.
SELECT partition_key, location, manifest, task_id, files, rows, bytes, came,
       coalesce(entries, '{}') AS entries
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND came <= %(snapshot)s AND (gone IS NULL OR gone > %(snapshot)s) AND came > %(base)s
  AND came > 0
ORDER BY partition_key, location
LIMIT %(limit)s

-- name: parts_removed
-- What an earlier snapshot of the generation shows, and a snapshot does not.
SELECT partition_key, location, manifest, task_id, files, rows, bytes, came,
       coalesce(entries, '{}') AS entries
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND came <= %(base)s AND gone > %(base)s AND gone <= %(snapshot)s
ORDER BY partition_key, location
LIMIT %(limit)s

-- name: note_written
-- The first who has written the files of a snapshot is heard.
UPDATE table_snapshot
SET manifest_list = %(manifest_list)s
WHERE dataset_id = %(dataset)s::uuid AND id = %(snapshot)s AND manifest_list IS NULL
  AND NOT EXISTS (
      -- Another one of the generation was written meanwhile: what is noted of parts is of that.
      SELECT FROM table_snapshot AS later
      WHERE later.dataset_id = %(dataset)s::uuid AND later.generation = %(generation)s::uuid
        AND later.manifest_list IS NOT NULL AND later.id > %(base)s)
  AND (%(base)s = 0 OR EXISTS (
      -- What it goes on from was purged meanwhile.
      SELECT FROM table_snapshot AS base
      WHERE base.dataset_id = %(dataset)s::uuid AND base.id = %(base)s
        AND base.manifest_list IS NOT NULL))
RETURNING id

-- name: note_manifests
WITH left_behind AS (
    UPDATE table_manifest SET gone = %(snapshot)s
    WHERE dataset_id = %(dataset)s::uuid AND location = ANY (%(replaced)s::text[])
)
INSERT INTO table_manifest (dataset_id, location, generation, came)
SELECT %(dataset)s::uuid, written.location, %(generation)s::uuid, %(snapshot)s
FROM unnest(%(written)s::text[]) AS written(location)

-- name: note_moved
-- Parts whose manifests were put together as another one, among these: what was read of manifests does not
-- say which of the folders that a file lies in is that of its part.
UPDATE table_part
SET entries = ARRAY(
    SELECT one FROM unnest(entries) AS one WHERE one <> ALL (%(sources)s::text[])
) || %(written)s::text
WHERE ctid = ANY (ARRAY(
    SELECT held.ctid
    FROM unnest(%(keys)s::text[], %(folders)s::text[]) AS asked(partition_key, folder)
    CROSS JOIN LATERAL (
        SELECT one.ctid
        FROM table_part AS one
        WHERE one.dataset_id = %(dataset)s::uuid AND one.generation = %(generation)s::uuid
          AND one.partition_key = asked.partition_key
          AND one.location IN (asked.folder, asked.folder || '/')
          AND one.entries && %(sources)s::text[]
        OFFSET 0
    ) AS held))

-- name: note_entries
-- The parts of one manifest. Each is looked up by its key: a join would be planned for few of them.
UPDATE table_part
SET entries = array_append(coalesce(entries, '{}'), %(written)s)
WHERE ctid = ANY (ARRAY(
    SELECT held.ctid
    FROM unnest(%(keys)s::text[], %(locations)s::text[]) AS asked(partition_key, location)
    CROSS JOIN LATERAL (
        SELECT one.ctid
        FROM table_part AS one
        WHERE one.dataset_id = %(dataset)s::uuid AND one.generation = %(generation)s::uuid
          AND one.partition_key = asked.partition_key AND one.location = asked.location
          AND one.came <= %(snapshot)s AND (one.gone IS NULL OR one.gone > %(snapshot)s)
        OFFSET 0
    ) AS held))

-- name: note_unfit
UPDATE table_snapshot
SET unfit = %(why)s
WHERE dataset_id = %(dataset)s::uuid AND id = %(snapshot)s

-- name: snapshots_to_write
-- What is named and not written yet: the newest of each branch, and the last that `main` had of what was
-- left; of datasets that have columns.
SELECT DISTINCT dataset.name
FROM generation
CROSS JOIN LATERAL (
    SELECT made.schema_id, made.manifest_list, made.unfit
    FROM table_snapshot AS made
    WHERE made.dataset_id = generation.dataset_id AND made.generation = generation.version
      AND made.branch = CASE generation.state WHEN 'building' THEN 'building' ELSE 'main' END
      AND made.forgotten_at IS NULL
    ORDER BY made.id DESC
    LIMIT 1
) AS newest
JOIN dataset ON dataset.id = generation.dataset_id
JOIN table_schema ON table_schema.dataset_id = generation.dataset_id
    AND table_schema.id = newest.schema_id AND table_schema.columns <> '[]'
WHERE newest.manifest_list IS NULL AND newest.unfit IS NULL AND dataset.name > %(after)s
  AND (generation.state IN ('current', 'building')
       OR generation.dropped_at IS DISTINCT FROM generation.changed_at)
ORDER BY dataset.name
LIMIT %(limit)s

-- name: manifests_to_sweep
-- Of these files of a table those that a snapshot names, forgotten ones for a grace; others are
-- nobody's.
SELECT manifest_list AS location
FROM table_snapshot
WHERE dataset_id = %(dataset)s::uuid AND manifest_list = ANY (%(locations)s::text[])
UNION
SELECT written.location
FROM table_manifest AS written
WHERE written.dataset_id = %(dataset)s::uuid AND written.location = ANY (%(locations)s::text[])
  AND EXISTS (
      SELECT FROM table_snapshot AS kept
      WHERE kept.dataset_id = written.dataset_id AND kept.generation = written.generation
        AND kept.id >= written.came AND (written.gone IS NULL OR kept.id < written.gone))

-- name: forget_manifests
DELETE FROM table_manifest
WHERE dataset_id = %(dataset)s::uuid AND location = ANY (%(locations)s::text[])

-- name: note_anew
-- What is noted of the files of a generation is of a snapshot that is not kept any more.
WITH forgotten AS (
    UPDATE table_part SET entries = NULL
    WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
      AND entries IS NOT NULL
)
UPDATE table_manifest SET gone = %(snapshot)s
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid AND gone IS NULL

-- name: dataset_snapshots
-- The latest of a dataset, newest first.
SELECT made.id, made.generation::text, made.branch, made.operation, made.added, made.removed,
       made.partitions, made.files, made.rows, made.bytes, made.made_at
FROM table_snapshot AS made
JOIN dataset ON dataset.id = made.dataset_id
WHERE dataset.name = %(name)s AND made.forgotten_at IS NULL
ORDER BY made.id DESC
LIMIT %(limit)s

-- name: snapshot_at
-- The one of this id; or the latest of `main` that is not after a moment, which is its id as well.
SELECT made.id, made.generation::text, made.dataset_id::text AS dataset, table_schema.columns
FROM table_snapshot AS made
JOIN dataset ON dataset.id = made.dataset_id
JOIN table_schema ON table_schema.dataset_id = made.dataset_id
    AND table_schema.id = made.schema_id
WHERE dataset.name = %(name)s AND (
    (made.id = %(id)s::bigint AND (made.forgotten_at IS NULL OR isfinite(made.forgotten_at)))
    OR (made.branch = 'main' AND made.id <= %(moment_ms)s::bigint AND made.forgotten_at IS NULL))
ORDER BY made.id DESC
LIMIT 1

-- name: shown_parts
-- As `snapshot` has them, of a snapshot that is kept.
SELECT location, nullif(partition_key, '') AS partition_key, manifest, files, rows, bytes
FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
  AND came <= %(id)s AND (gone IS NULL OR gone > %(id)s)
  AND (%(partition_key)s::text IS NULL OR partition_key = %(partition_key)s)
ORDER BY partition_key COLLATE "C", came, task_id, location
LIMIT %(limit)s

-- name: changed_parts
-- What one snapshot shows and the other does not, whichever their generations are.
WITH before AS (
    SELECT partition_key, location, rows, bytes, task_id
    FROM table_part
    WHERE dataset_id = %(dataset)s::uuid AND generation = %(since_generation)s::uuid
      AND came <= %(since)s AND (gone IS NULL OR gone > %(since)s)
), after AS (
    SELECT partition_key, location, rows, bytes, task_id
    FROM table_part
    WHERE dataset_id = %(dataset)s::uuid AND generation = %(until_generation)s::uuid
      AND came <= %(until)s AND (gone IS NULL OR gone > %(until)s)
)
SELECT changed.change, nullif(changed.partition_key, '') AS partition_key, changed.location,
       changed.rows, changed.bytes, changed.task_id
FROM (
    SELECT 'removed' AS change, before.* FROM before
    WHERE NOT EXISTS (
        SELECT FROM after
        WHERE (after.partition_key, after.location) = (before.partition_key, before.location))
    UNION ALL
    SELECT 'put', after.* FROM after
    WHERE NOT EXISTS (
        SELECT FROM before
        WHERE (before.partition_key, before.location) = (after.partition_key, after.location))
) AS changed
ORDER BY changed.partition_key COLLATE "C", changed.change DESC, changed.location
LIMIT %(limit)s
