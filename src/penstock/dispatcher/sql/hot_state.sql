-- What the tables of Postgres data have to have, for penstock.dispatcher.datasets.applier. These are
-- statements of the state; those of Postgres data are in hot_tables.sql.

-- name: declare_hot
-- What a version of the DAG says of the generations that it names.
WITH said AS MATERIALIZED (
    SELECT generation.dataset_id, generation.version,
           CASE WHEN output.said ->> 'storage' = 'postgres' THEN jsonb_build_object(
               'columns', output.said -> 'columns', 'mode', definition.update_mode,
               'keys', coalesce(definition.body -> 'unique_key', '[]')) END AS hot
    FROM dag_job
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    JOIN generation ON generation.version = dag_job.generation
    JOIN dataset ON dataset.id = generation.dataset_id
    CROSS JOIN LATERAL jsonb_array_elements(definition.body -> 'outputs') AS output(said)
    WHERE dag_job.dag_version_id = %(version)s
      AND coalesce(output.said ->> 'dataset', output.said ->> 'name') = dataset.name
)
UPDATE generation SET hot = said.hot
FROM said
WHERE (generation.dataset_id, generation.version) = (said.dataset_id, said.version)
  AND generation.hot IS DISTINCT FROM said.hot

-- name: begin_hot
-- Of generations that have become hot, or are again, all that is published is to be in a table; and
-- what is not hot any more holds no event back. What was removed while another generation was current is
-- to leave. Also now and then: what was about to be published when that changed has not seen it.
WITH tables AS (
    INSERT INTO hot_table (dataset_id)
    SELECT DISTINCT dataset_id FROM generation
    WHERE hot IS NOT NULL AND state IN ('building', 'current')
    ORDER BY dataset_id
    ON CONFLICT DO NOTHING
), partitions AS (
    INSERT INTO hot_partition AS old (dataset_id, generation, partition_key, wanted)
    SELECT publication.dataset_id, publication.generation, publication.partition_key,
           publication.revision
    FROM generation
    JOIN publication ON publication.dataset_id = generation.dataset_id
        AND publication.generation = generation.version
    LEFT JOIN hot_partition AS held ON held.dataset_id = publication.dataset_id
        AND held.generation = publication.generation
        AND held.partition_key = publication.partition_key
    WHERE generation.hot IS NOT NULL AND generation.state IN ('building', 'current')
      AND coalesce(held.wanted, 0) < publication.revision
    UNION ALL
    SELECT held.dataset_id, held.generation, held.partition_key, removed.revision
    FROM generation
    JOIN hot_partition AS held ON held.dataset_id = generation.dataset_id
        AND held.generation = generation.version
    JOIN removed ON removed.dataset_id = held.dataset_id AND removed.generation = held.generation
        AND removed.partition_key = held.partition_key AND removed.revision > held.wanted
    WHERE generation.hot IS NOT NULL AND generation.state IN ('building', 'current')
      AND NOT EXISTS (
          SELECT FROM publication AS back
          WHERE back.dataset_id = held.dataset_id AND back.generation = held.generation
            AND back.partition_key = held.partition_key)
    ORDER BY 1, 2, 3
    ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
    SET wanted = greatest(old.wanted, excluded.wanted)
)
UPDATE event SET routed = 'pending'
WHERE routed = 'applying' AND NOT penstock_is_hot(dataset_id, generation)

-- name: await_serving
-- After a change of what is current, until readers are sent there.
UPDATE hot_table SET is_served = false WHERE is_served

-- name: held_columns
-- What is published, by dataset, of generations.
SELECT dataset.name AS dataset, said.columns
FROM generation_schema AS said
JOIN dataset ON dataset.id = said.dataset_id
WHERE said.version = ANY (%(versions)s::uuid[])

-- name: hot_datasets
-- Every dataset that has tables, or had some that are still to be removed, those first that have been
-- behind longest.
SELECT hot_table.dataset_id::text AS dataset, dataset.name, hot_table.position, hot_table.problem,
       behind.since IS NOT NULL OR held.is_any OR NOT hot_table.is_served AS is_due
FROM hot_table
JOIN dataset ON dataset.id = hot_table.dataset_id
CROSS JOIN LATERAL (
    SELECT min(since) AS since FROM hot_partition
    WHERE hot_partition.dataset_id = hot_table.dataset_id
      AND hot_partition.applied < hot_partition.wanted
) AS behind
CROSS JOIN LATERAL (
    SELECT EXISTS (SELECT FROM event
                   WHERE routed = 'applying' AND event.dataset_id = hot_table.dataset_id) AS is_any
) AS held
ORDER BY behind.since NULLS LAST, dataset.name

-- name: hot_generations
-- The generations of a dataset that have tables, and what is known of them.
SELECT generation.version::text AS generation, generation.state, generation.hot,
       generation.changed_at
FROM generation
WHERE generation.dataset_id = %(dataset)s::uuid AND generation.hot IS NOT NULL
  AND generation.state IN ('building', 'current')
ORDER BY generation.state DESC, generation.version

-- name: hot_position
SELECT position, intended FROM hot_table WHERE dataset_id = %(dataset)s::uuid

-- name: unapplied_partitions
-- Those of the current generation first. What they are to have: their parts after the revision that is
-- applied, if they are appended to, no part has been put together with one before it, and the partition
-- was not removed since; else all. One that is not published has no parts, and is to have no rows.
SELECT behind.generation::text AS generation, behind.partition_key, behind.applied, behind.is_anew,
       coalesce(head.revision, behind.wanted) AS revision,
       coalesce(head.revision || ':' || head.task_id || ':'
                || (extract(epoch FROM head.published_at) * 1000000)::bigint, 'removed') AS stamp,
       coalesce(head.bytes, 0) AS bytes,
       coalesce(head.mode = 'append', false) AND NOT behind.is_anew AND behind.applied > 0 AND NOT EXISTS (
           SELECT FROM part
           WHERE part.dataset_id = behind.dataset_id AND part.generation = behind.generation
             AND part.partition_key = behind.partition_key
             AND part.first_revision <= behind.applied AND part.revision > behind.applied
       ) AND NOT EXISTS (
           SELECT FROM removed
           WHERE removed.dataset_id = behind.dataset_id AND removed.generation = behind.generation
             AND removed.partition_key = behind.partition_key AND removed.revision > behind.applied
       ) AS is_added,
       CASE WHEN head.mode = 'append' THEN coalesce((
           SELECT jsonb_agg(
               jsonb_build_object(
                   'location', part.location, 'manifest', part.manifest,
                   'first_revision', part.first_revision)
               ORDER BY part.revision, part.task_id, part.append_key)
           FROM part
           WHERE part.dataset_id = behind.dataset_id AND part.generation = behind.generation
             AND part.partition_key = behind.partition_key), '[]')
       WHEN head.revision IS NULL THEN '[]'
       ELSE jsonb_build_array(jsonb_build_object(
           'location', head.location, 'manifest', head.manifest, 'first_revision', 0))
       END AS parts, penstock_now() AS planned_at
FROM (
    SELECT hot_partition.*
    FROM hot_partition
    JOIN generation ON generation.dataset_id = hot_partition.dataset_id
        AND generation.version = hot_partition.generation AND generation.hot IS NOT NULL
        AND generation.state IN ('building', 'current')
    WHERE hot_partition.dataset_id = %(dataset)s::uuid AND hot_partition.applied < hot_partition.wanted
    ORDER BY generation.state = 'building', hot_partition.since, hot_partition.partition_key
    LIMIT %(limit)s
) AS behind
LEFT JOIN publication AS head ON head.dataset_id = behind.dataset_id
    AND head.generation = behind.generation AND head.partition_key = behind.partition_key

-- name: intend_position
-- What the transaction that is about to be committed in Postgres data will be called.
UPDATE hot_table SET intended = %(position)s WHERE dataset_id = %(dataset)s::uuid

-- name: confirm_applied
-- What a transaction of Postgres data has applied, once. What has moved meanwhile is behind since then.
WITH done AS (
    UPDATE hot_table
    SET position = intended, intended = NULL, problem = NULL, changed_at = penstock_now()
    WHERE dataset_id = %(dataset)s::uuid AND intended = %(position)s
    RETURNING dataset_id
), said AS MATERIALIZED (
    SELECT * FROM unnest(%(generations)s::uuid[], %(keys)s::text[], %(revisions)s::bigint[])
        AS said(generation, partition_key, revision)
), locked AS MATERIALIZED (
    -- In the order in which they are noted: see penstock_apply.
    SELECT held.generation, held.partition_key
    FROM hot_partition AS held
    JOIN done USING (dataset_id)
    JOIN said USING (generation, partition_key)
    ORDER BY held.generation, held.partition_key
    FOR NO KEY UPDATE OF held
)
UPDATE hot_partition
SET applied = said.revision, wanted = greatest(wanted, said.revision),
    is_anew = false,
    since = CASE WHEN wanted > said.revision THEN coalesce(%(planned_at)s::timestamptz, since)
                 ELSE since END
FROM said
JOIN locked USING (generation, partition_key)
WHERE hot_partition.dataset_id = %(dataset)s::uuid
  AND hot_partition.generation = said.generation
  AND hot_partition.partition_key = said.partition_key

-- name: release_applied
-- The events of a dataset whose partitions its table has, if readers are sent to it, or if it is being
-- built still: it may have become current since the applier looked.
WITH released AS (
    UPDATE event SET routed = 'pending'
    WHERE routed = 'applying' AND dataset_id = %(dataset)s::uuid
      AND (NOT penstock_is_hot(dataset_id, generation)
           OR generation = ANY (%(generations)s::uuid[])
           AND (generation = %(served)s::uuid OR EXISTS (
               SELECT FROM generation AS own
               WHERE own.dataset_id = event.dataset_id AND own.version = event.generation
                 AND own.state = 'building'))
           AND NOT EXISTS (
               SELECT FROM hot_partition AS held
               WHERE held.dataset_id = event.dataset_id AND held.generation = event.generation
                 AND held.partition_key = coalesce(event.partition_key, '')
                 AND held.applied < event.revision))
    RETURNING seq
)
SELECT count(*) AS released FROM released

-- name: note_served
UPDATE hot_table SET is_served = %(is_served)s, problem = NULL
WHERE dataset_id = %(dataset)s::uuid AND (is_served IS DISTINCT FROM %(is_served)s OR problem IS NOT NULL)

-- name: note_hot_problem
UPDATE hot_table SET problem = %(problem)s
WHERE dataset_id = ANY (%(datasets)s::uuid[]) AND problem IS DISTINCT FROM %(problem)s

-- name: is_behind
-- Whether a generation lacks something in its table that was published by a moment, or that has to be
-- loaded anew.
SELECT EXISTS (
    SELECT FROM hot_partition
    WHERE dataset_id = %(dataset)s::uuid AND generation = %(generation)s::uuid
      AND applied < wanted AND (since <= %(moment)s::timestamptz OR is_anew)) AS is_so

-- name: compare_applied
-- After a restore of either database: what the table has is compared with what is published, and what
-- is not the same is to be loaded anew.
WITH held AS MATERIALIZED (
    SELECT held.* FROM unnest(
        %(generations)s::uuid[], %(keys)s::text[], %(revisions)s::bigint[], %(stamps)s::text[])
        AS held(generation, partition_key, revision, stamp)
    JOIN generation ON generation.dataset_id = %(dataset)s::uuid
        AND generation.version = held.generation AND generation.hot IS NOT NULL
        AND generation.state IN ('building', 'current')
), known AS MATERIALIZED (
    SELECT publication.generation, publication.partition_key, publication.revision,
           publication.revision || ':' || publication.task_id || ':'
               || (extract(epoch FROM publication.published_at) * 1000000)::bigint AS stamp
    FROM generation
    JOIN publication ON publication.dataset_id = generation.dataset_id
        AND publication.generation = generation.version
    WHERE generation.dataset_id = %(dataset)s::uuid AND generation.hot IS NOT NULL
      AND generation.state IN ('building', 'current')
), cleared AS (
    UPDATE hot_table SET position = %(position)s, intended = NULL
    WHERE dataset_id = %(dataset)s::uuid
)
INSERT INTO hot_partition AS old (
    dataset_id, generation, partition_key, wanted, applied, is_anew)
SELECT %(dataset)s::uuid, coalesce(known.generation, held.generation),
       coalesce(known.partition_key, held.partition_key),
       coalesce(known.revision, held.revision, 1),
       CASE WHEN known.stamp = held.stamp THEN known.revision
            WHEN known.stamp IS NULL AND held.stamp = 'removed' THEN held.revision ELSE 0 END,
       known.stamp IS DISTINCT FROM held.stamp
FROM known
FULL JOIN held ON held.generation = known.generation AND held.partition_key = known.partition_key
ORDER BY 2, 3
ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
SET wanted = CASE
        WHEN excluded.applied = 0 OR old.wanted IS DISTINCT FROM (
            -- As it was when this began: what has moved since is still to be applied.
            SELECT seen.wanted FROM hot_partition AS seen
            WHERE seen.dataset_id = old.dataset_id AND seen.generation = old.generation
              AND seen.partition_key = old.partition_key)
        THEN greatest(old.wanted, excluded.wanted) ELSE excluded.wanted END,
    applied = excluded.applied, is_anew = excluded.is_anew, since = excluded.since

-- name: load_anew
-- All that is published of a dataset is to be loaded again, one partition after the other. No row: it
-- has no table.
WITH partitions AS (
    UPDATE hot_partition SET applied = 0, is_anew = true, since = penstock_now()
    WHERE dataset_id = %(dataset)s::uuid
    RETURNING partition_key
)
UPDATE hot_table SET is_served = false
WHERE dataset_id = %(dataset)s::uuid
RETURNING (SELECT count(*) FROM partitions) AS partitions

-- name: forget_hot
-- What tables that were removed had. A dataset without any is looked after no more.
WITH partitions AS (
    DELETE FROM hot_partition
    WHERE dataset_id = %(dataset)s::uuid AND NOT penstock_is_hot(dataset_id, generation)
)
DELETE FROM hot_table
WHERE dataset_id = %(dataset)s::uuid AND NOT EXISTS (
    SELECT FROM generation
    WHERE generation.dataset_id = %(dataset)s::uuid AND generation.hot IS NOT NULL
      AND generation.state IN ('building', 'current'))

-- name: hot_status
-- How far the table of each dataset is, and how long it has been behind.
SELECT dataset.name AS dataset, hot_table.problem, hot_table.changed_at, hot_table.is_served,
       count(held.*) AS partitions,
       count(held.*) FILTER (WHERE held.applied < held.wanted) AS behind,
       coalesce(extract(epoch FROM penstock_now()
           - min(held.since) FILTER (WHERE held.applied < held.wanted)), 0)::double precision
           AS behind_seconds,
       (SELECT count(*) FROM event
        WHERE event.routed = 'applying' AND event.dataset_id = hot_table.dataset_id) AS events
FROM hot_table
JOIN dataset ON dataset.id = hot_table.dataset_id
LEFT JOIN generation ON generation.dataset_id = dataset.id AND generation.state = 'current'
LEFT JOIN hot_partition AS held ON held.dataset_id = dataset.id
    AND held.generation = generation.version
WHERE %(dataset)s::uuid IS NULL OR dataset.id = %(dataset)s::uuid
GROUP BY dataset.id, hot_table.dataset_id
ORDER BY dataset.name
