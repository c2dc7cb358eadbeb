-- What is forgotten of a dataset because somebody says so. For penstock.dispatcher.catalog.purging.

-- name: purge_outputs
-- The datasets of the same job, which have the same generations.
SELECT other.id::text AS dataset
FROM dataset
JOIN dataset AS other ON other.id = dataset.id OR other.job_id = dataset.job_id
WHERE dataset.id = %(dataset)s::uuid

-- name: purge_generations
-- Those that have left, or all; until the end of the transaction nobody publishes in them.
SELECT version::text AS generation, pg_advisory_xact_lock(1885695604, hashtext(version::text))
FROM generation
WHERE dataset_id = %(dataset)s::uuid
  AND (state IN ('retired', 'abandoned') OR %(is_current)s)
ORDER BY version

-- name: purge_snapshots
-- All but what is shown now; with keys those that show another state of these partitions.
WITH newest AS (
    SELECT max(made.id) AS id
    FROM table_snapshot AS made
    JOIN generation ON generation.dataset_id = made.dataset_id
        AND generation.version = made.generation
    WHERE made.dataset_id = %(dataset)s::uuid
      AND (made.branch = 'main' OR generation.state = 'building')
    GROUP BY made.branch
)
DELETE FROM table_snapshot
WHERE dataset_id = %(dataset)s::uuid AND id NOT IN (SELECT newest.id FROM newest)
  AND (%(keys)s::text[] IS NULL OR EXISTS (
      SELECT FROM table_part AS held
      WHERE held.dataset_id = table_snapshot.dataset_id
        AND held.generation = table_snapshot.generation
        AND held.partition_key = ANY (%(keys)s::text[])
        AND held.came <= table_snapshot.id AND held.gone > table_snapshot.id))

-- name: purge_parts
-- What no snapshot shows that is left.
DELETE FROM table_part
WHERE dataset_id = %(dataset)s::uuid AND gone IS NOT NULL AND NOT EXISTS (
    SELECT FROM table_snapshot AS kept
    WHERE kept.dataset_id = table_part.dataset_id AND kept.generation = table_part.generation
      AND kept.id >= table_part.came AND kept.id < table_part.gone)

-- name: purge_lists
-- What clients read who plan themselves has bounds of what is gone. It is written anew.
UPDATE table_snapshot SET manifest_list = NULL
WHERE dataset_id = %(dataset)s::uuid AND manifest_list IS NOT NULL

-- name: purge_manifests
DELETE FROM table_manifest WHERE dataset_id = %(dataset)s::uuid

-- name: generations_left
-- How many have left and have their data still.
SELECT count(*) AS generations
FROM generation
WHERE dataset_id = %(dataset)s::uuid AND state IN ('retired', 'abandoned')
  AND dropped_at IS DISTINCT FROM changed_at
