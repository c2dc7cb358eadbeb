-- Queries over what is published, for penstock.dispatcher.catalog.queries.

-- name: queried_now
-- What is published now of all these datasets, in one statement, and so of one moment. Of those in
-- `pruned` the partitions whose keys are in `ranges`; of others, and of those where the column
-- `partition_key` is none of partitions, all (`whole`).
WITH exact AS (
    SELECT needed.name, needed.low AS key
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low = needed.high
), spans AS (
    SELECT needed.name, needed.low, needed.high
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low IS DISTINCT FROM needed.high OR needed.low IS NULL
)
SELECT dataset.name, dataset.id::text AS uuid, current.version::text AS generation,
       coalesce(schema.columns, '[]'::jsonb) AS columns, NULL::bigint AS snapshot,
       coalesce(held.parts, '[]'::jsonb) AS parts, penstock_now() AS moment,
       EXISTS (
           SELECT FROM publication
           WHERE publication.dataset_id = dataset.id AND publication.generation = current.version
             AND publication.partition_key <> ''
       ) AS is_partitioned
FROM dataset
LEFT JOIN generation AS current ON current.dataset_id = dataset.id AND current.state = 'current'
LEFT JOIN generation_schema AS schema ON schema.dataset_id = dataset.id
    AND schema.version = current.version
CROSS JOIN LATERAL (
    SELECT NOT dataset.name = ANY(%(pruned)s::text[])
        OR coalesce(jsonb_array_length(schema.columns), 0) = 0
        OR EXISTS (
            SELECT FROM jsonb_array_elements(schema.columns) AS one(said)
            WHERE lower(one.said ->> 'name') = 'partition_key'
        ) AS is_so
) AS whole
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
        'location', coalesce(piece.location, publication.location),
        'partition_key', publication.partition_key,
        'manifest', CASE WHEN publication.mode = 'append' THEN piece.manifest
                    ELSE publication.manifest END)
        ORDER BY publication.range_start, publication.partition_key COLLATE "C",
                 piece.appended_at, piece.task_id, piece.append_key) AS parts
    FROM publication
    LEFT JOIN part AS piece ON publication.mode = 'append'
        AND piece.dataset_id = publication.dataset_id
        AND piece.generation = publication.generation
        AND piece.partition_key = publication.partition_key
    WHERE publication.dataset_id = dataset.id AND publication.generation = current.version
      AND NOT starts_with(publication.location, 'range:')
      AND (whole.is_so OR publication.partition_key = ''
           OR (dataset.name, publication.partition_key) IN (SELECT exact.name, exact.key FROM exact)
           OR EXISTS (
               SELECT FROM spans
               WHERE spans.name = dataset.name
                 AND (spans.low IS NULL OR publication.partition_key COLLATE "C" >= spans.low)
                 AND (spans.high IS NULL OR publication.partition_key COLLATE "C" <= spans.high)
           ))
) AS held ON true
WHERE dataset.name = ANY(%(names)s)
ORDER BY dataset.name

-- name: queried_then
-- What the latest snapshot of each showed that is not after a moment, which is its id as well; of
-- the same partitions.
WITH exact AS (
    SELECT needed.name, needed.low AS key
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low = needed.high
), spans AS (
    SELECT needed.name, needed.low, needed.high
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low IS DISTINCT FROM needed.high OR needed.low IS NULL
)
SELECT dataset.name, dataset.id::text AS uuid, made.generation::text AS generation,
       coalesce(table_schema.columns, '[]'::jsonb) AS columns, made.id AS snapshot,
       coalesce(held.parts, '[]'::jsonb) AS parts, penstock_now() AS moment,
       EXISTS (
           SELECT FROM table_part AS shown
           WHERE shown.dataset_id = dataset.id AND shown.generation = made.generation
             AND shown.came <= made.id AND (shown.gone IS NULL OR shown.gone > made.id)
             AND shown.partition_key <> ''
       ) AS is_partitioned
FROM dataset
LEFT JOIN LATERAL (
    SELECT snapshot.id, snapshot.generation, snapshot.schema_id
    FROM table_snapshot AS snapshot
    WHERE snapshot.dataset_id = dataset.id AND snapshot.branch = 'main'
      AND snapshot.id <= %(moment_ms)s AND snapshot.forgotten_at IS NULL
    ORDER BY snapshot.id DESC
    LIMIT 1
) AS made ON true
LEFT JOIN table_schema ON table_schema.dataset_id = dataset.id AND table_schema.id = made.schema_id
CROSS JOIN LATERAL (
    SELECT NOT dataset.name = ANY(%(pruned)s::text[])
        OR coalesce(jsonb_array_length(table_schema.columns), 0) = 0
        OR EXISTS (
            SELECT FROM jsonb_array_elements(table_schema.columns) AS one(said)
            WHERE lower(one.said ->> 'name') = 'partition_key'
        ) AS is_so
) AS whole
LEFT JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
        'location', shown.location, 'partition_key', shown.partition_key,
        'manifest', shown.manifest)
        ORDER BY shown.partition_key COLLATE "C", shown.came, shown.task_id, shown.location)
        AS parts
    FROM table_part AS shown
    WHERE shown.dataset_id = dataset.id AND shown.generation = made.generation
      AND shown.came <= made.id AND (shown.gone IS NULL OR shown.gone > made.id)
      AND (whole.is_so OR shown.partition_key = ''
           OR (dataset.name, shown.partition_key) IN (SELECT exact.name, exact.key FROM exact)
           OR EXISTS (
               SELECT FROM spans
               WHERE spans.name = dataset.name
                 AND (spans.low IS NULL OR shown.partition_key COLLATE "C" >= spans.low)
                 AND (spans.high IS NULL OR shown.partition_key COLLATE "C" <= spans.high)
           ))
) AS held ON true
WHERE dataset.name = ANY(%(names)s)
ORDER BY dataset.name

-- name: queried_claim
-- The parts that an attempt was granted: those whose folders its token names, also if they were
-- replaced since; and of a folder of a whole generation, what is published of it now. Of the same
-- partitions.
WITH exact AS (
    SELECT needed.name, needed.low AS key
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low = needed.high
), spans AS (
    SELECT needed.name, needed.low, needed.high
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS needed(name text, low text, high text)
    WHERE needed.low IS DISTINCT FROM needed.high OR needed.low IS NULL
), granted AS (
    SELECT grants.dataset, grants.version, grants.prefix
    FROM jsonb_to_recordset(%(grants)s) AS grants(dataset uuid, version uuid, prefix text)
), found AS (
    SELECT granted.dataset, granted.version, coalesce(piece.location, publication.location)
               AS location, publication.partition_key,
           CASE WHEN publication.mode = 'append' THEN piece.manifest ELSE publication.manifest END
               AS manifest
    FROM granted
    JOIN publication ON publication.dataset_id = granted.dataset
        AND publication.generation = granted.version
        AND NOT starts_with(publication.location, 'range:')
    LEFT JOIN part AS piece ON publication.mode = 'append'
        AND piece.dataset_id = publication.dataset_id
        AND piece.generation = publication.generation
        AND piece.partition_key = publication.partition_key
    WHERE starts_with(
        rtrim(coalesce(piece.location, publication.location), '/') || '/', granted.prefix)
    UNION
    SELECT granted.dataset, granted.version, earlier.location, earlier.partition_key,
           earlier.manifest
    FROM granted
    JOIN publication_log AS earlier ON earlier.dataset_id = granted.dataset
        AND earlier.change = 'put' AND earlier.location = rtrim(granted.prefix, '/')
    UNION
    SELECT granted.dataset, granted.version, earlier.location, earlier.partition_key,
           earlier.manifest
    FROM granted
    JOIN table_part AS earlier ON earlier.dataset_id = granted.dataset
        AND earlier.location = rtrim(granted.prefix, '/')
)
SELECT dataset.name, dataset.id::text AS uuid, inputs.version::text AS generation,
       coalesce(schema.columns, '[]'::jsonb) AS columns, NULL::bigint AS snapshot,
       coalesce((
           SELECT jsonb_agg(jsonb_build_object(
               'location', found.location, 'partition_key', found.partition_key,
               'manifest', found.manifest) ORDER BY found.partition_key COLLATE "C", found.location)
           FROM found
           WHERE found.dataset = dataset.id AND found.version = inputs.version
             AND (whole.is_so OR found.partition_key = ''
                  OR (dataset.name, found.partition_key) IN (SELECT exact.name, exact.key FROM exact)
                  OR EXISTS (
                      SELECT FROM spans
                      WHERE spans.name = dataset.name
                        AND (spans.low IS NULL OR found.partition_key COLLATE "C" >= spans.low)
                        AND (spans.high IS NULL OR found.partition_key COLLATE "C" <= spans.high)
                  ))
       ), '[]'::jsonb) AS parts, penstock_now() AS moment,
       EXISTS (
           SELECT FROM found
           WHERE found.dataset = dataset.id AND found.version = inputs.version
             AND found.partition_key <> ''
       ) AS is_partitioned
FROM (SELECT DISTINCT dataset, version FROM granted) AS inputs
JOIN dataset ON dataset.id = inputs.dataset
LEFT JOIN generation_schema AS schema ON schema.dataset_id = dataset.id
    AND schema.version = inputs.version
CROSS JOIN LATERAL (
    SELECT NOT dataset.name = ANY(%(pruned)s::text[])
        OR coalesce(jsonb_array_length(schema.columns), 0) = 0
        OR EXISTS (
            SELECT FROM jsonb_array_elements(schema.columns) AS one(said)
            WHERE lower(one.said ->> 'name') = 'partition_key'
        ) AS is_so
) AS whole
WHERE dataset.name = ANY(%(names)s)
ORDER BY dataset.name

-- name: dataset_uuids
SELECT id::text AS uuid FROM dataset WHERE name = ANY(%(names)s)

-- name: dataset_names
SELECT name FROM dataset WHERE id = ANY(%(uuids)s::uuid[])

-- name: queryable_datasets
-- Datasets by name, with the columns of what is current of them.
SELECT dataset.name, coalesce(schema.columns, '[]'::jsonb) AS columns,
       EXISTS (
           SELECT FROM publication
           WHERE publication.dataset_id = dataset.id AND publication.generation = current.version
             AND publication.partition_key <> ''
       ) AS is_partitioned
FROM dataset
JOIN generation AS current ON current.dataset_id = dataset.id AND current.state = 'current'
LEFT JOIN generation_schema AS schema ON schema.dataset_id = dataset.id
    AND schema.version = current.version
ORDER BY dataset.name
LIMIT %(limit)s

-- name: begin_query
-- The same ticket of the same caller again is the same query, as long as that runs. With a token that
-- has expired a refusal is noted soon after, and not later.
INSERT INTO query_log (
    ticket, caller, task_id, attempt, sql, datasets, service, ends_by, ended_at, outcome, reason)
SELECT %(ticket)s, %(caller)s, %(task_id)s::bigint, %(attempt)s::integer, %(sql)s, %(datasets)s::jsonb,
       nullif(%(service)s, ''), penstock_now() + %(seconds)s * interval '1 second',
       CASE WHEN %(reason)s::text IS NOT NULL THEN penstock_now() END,
       CASE WHEN %(reason)s::text IS NOT NULL THEN 'refused' END, %(reason)s::text
WHERE %(expired)s::bigint IS NULL
   OR to_timestamp(%(expired)s::bigint) > penstock_now() - interval '5 minutes'
ON CONFLICT (ticket) DO UPDATE SET datasets = excluded.datasets
WHERE query_log.caller = excluded.caller AND query_log.ended_at IS NULL
RETURNING id

-- name: end_query
-- Once; the same again is nothing.
UPDATE query_log
SET ended_at = penstock_now(), outcome = %(outcome)s, rows = %(rows)s, bytes = %(bytes)s,
    reason = %(reason)s
WHERE ticket = %(ticket)s AND caller = %(caller)s AND ended_at IS NULL
RETURNING id

-- name: list_queries
-- What has no end by its time was lost: its service was killed, or reaches no dispatcher. Should it
-- report the end all the same, that counts.
SELECT id, caller, task_id, attempt, sql, datasets, began_at, coalesce(ended_at, lost.at) AS ended_at,
       CASE WHEN lost.at IS NULL THEN outcome ELSE 'lost' END AS outcome, rows, bytes,
       CASE WHEN lost.at IS NULL THEN reason
            ELSE format('The query service %%s has reported no end: it was killed, or could not reach a'
                        ' dispatcher.', coalesce(service, 'of an earlier release')) END AS reason,
       service
FROM query_log
LEFT JOIN LATERAL (
    SELECT coalesce(ends_by, began_at + interval '2 hours') AS at
    WHERE ended_at IS NULL
      AND coalesce(ends_by, began_at + interval '2 hours') < penstock_now()
) AS lost ON true
WHERE (%(before)s::bigint IS NULL OR id < %(before)s)
ORDER BY id DESC
LIMIT %(limit)s

-- name: forget_queries
WITH looked_at AS MATERIALIZED (
    SELECT query_log.id, query_log.began_at
    FROM query_log
    WHERE query_log.id > %(after)s
    ORDER BY query_log.id
    LIMIT %(limit)s
), gone AS (
    DELETE FROM query_log
    USING looked_at
    WHERE query_log.id = looked_at.id
      AND query_log.began_at < penstock_now() - %(days)s * interval '1 day'
    RETURNING query_log.id
)
SELECT (SELECT max(id) FROM looked_at) AS reached,
       (SELECT count(*) = %(limit)s
            AND max(began_at) < penstock_now() - %(days)s * interval '1 day'
        FROM looked_at) AS is_more,
       (SELECT count(*) FROM gone) AS gone
