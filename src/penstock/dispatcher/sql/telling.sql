-- What readers without Postgres are to be told now, whatever they were told before. For
-- penstock.dispatcher.datasets.projector.

-- name: partition_now
-- One partition, as `unprojected_partitions` has it, whether or not it is known to be written.
SELECT dataset.name AS dataset, found.partition_key, found.range_start AS start,
       found.range_end AS end, found.revision,
       CASE
           WHEN found.mode = 'append' THEN (
               SELECT coalesce(jsonb_agg(jsonb_build_object(
                          'location', part.location, 'manifest', part.manifest,
                          'rows', part.rows, 'bytes', part.bytes)
                      ORDER BY part.appended_at, part.task_id, part.append_key), '[]')
               FROM part
               WHERE (part.dataset_id, part.generation, part.partition_key)
                   = (dataset.id, found.generation, found.partition_key))
           WHEN found.mode IS NOT NULL THEN jsonb_build_array(jsonb_build_object(
               'location', found.location, 'manifest', found.manifest, 'rows', found.rows,
               'bytes', found.bytes))
           ELSE '[]'
       END AS parts
FROM dataset
CROSS JOIN LATERAL (
    SELECT generation, partition_key, range_start, range_end, edition AS revision, mode, location,
           manifest, rows, bytes, true AS is_published
    FROM publication
    WHERE publication.dataset_id = dataset.id
      AND publication.generation = %(generation)s::uuid
      AND publication.partition_key = %(partition_key)s
    UNION ALL
    SELECT generation, partition_key, range_start, range_end, revision, NULL, NULL, NULL, NULL,
           NULL, false
    FROM removed
    WHERE removed.dataset_id = dataset.id AND removed.generation = %(generation)s::uuid
      AND removed.partition_key = %(partition_key)s
) AS found
WHERE dataset.id = %(dataset)s::uuid
ORDER BY found.is_published DESC
LIMIT 1

-- name: dataset_now
-- Likewise of a dataset that has a current generation.
SELECT dataset.name AS dataset, dataset.revision, generation.version::text AS generation
FROM dataset
JOIN generation ON generation.dataset_id = dataset.id AND generation.state = 'current'
WHERE dataset.id = %(dataset)s::uuid

-- name: told_partitions
-- Of a dataset, in order: every partition that readers may have been told of.
SELECT found.generation::text, found.partition_key
FROM (
    (SELECT generation, partition_key
     FROM publication
     WHERE dataset_id = %(dataset)s::uuid AND NOT starts_with(location, 'range:')
       AND (%(generation)s::uuid IS NULL
            OR (generation, partition_key) > (%(generation)s::uuid, %(partition_key)s::text))
     ORDER BY generation, partition_key
     LIMIT %(limit)s)
    UNION
    (SELECT generation, partition_key
     FROM removed
     WHERE dataset_id = %(dataset)s::uuid
       AND (%(generation)s::uuid IS NULL
            OR (generation, partition_key) > (%(generation)s::uuid, %(partition_key)s::text))
     ORDER BY generation, partition_key
     LIMIT %(limit)s)
) AS found
ORDER BY found.generation, found.partition_key
LIMIT %(limit)s
