-- Merges into what is published, for penstock.dispatcher.tasks.completion.

-- name: merge_heads
-- What is published of these partitions now, and which other attempt has its turn there.
SELECT asked.place, dataset.name AS dataset, coalesce(held.revision, 0) AS revision,
       held.part,
       EXISTS (
           SELECT
           FROM merge_lease AS lease
           JOIN task ON task.id = lease.task_id AND task.attempt = lease.attempt
               AND task.status = 'running'
           WHERE lease.dataset_id = asked.dataset_id AND lease.generation = asked.generation
             AND lease.partition_key = asked.partition_key AND lease.task_id <> asked.task_id
       ) AS is_held
FROM unnest(
    %(places)s::bigint[], %(tasks)s::bigint[], %(datasets)s::uuid[], %(generations)s::uuid[],
    %(keys)s::text[])
    AS asked(place, task_id, dataset_id, generation, partition_key)
JOIN dataset ON dataset.id = asked.dataset_id
-- Looked up by its key, also by a plan that was made when there were few: of the indexes that begin with the
-- dataset and the generation, only the one that goes on with the partition has this order.
LEFT JOIN LATERAL (
    SELECT publication.partition_key, publication.revision, penstock_head(publication) AS part
    FROM publication
    WHERE publication.dataset_id = asked.dataset_id AND publication.generation = asked.generation
      AND publication.partition_key >= asked.partition_key
    ORDER BY publication.partition_key
    LIMIT 1
) AS held ON held.partition_key = asked.partition_key
ORDER BY asked.place

-- name: count_conflicts
UPDATE attempt
SET conflicts = attempt.conflicts + 1
FROM unnest(%(tasks)s::bigint[], %(attempts)s::integer[]) AS asked(task_id, number)
WHERE attempt.task_id = asked.task_id AND attempt.number = asked.number
RETURNING attempt.task_id, attempt.conflicts

-- name: take_merge_leases
-- Of partitions that nobody else has the turn of: this transaction has looked, under the lock.
INSERT INTO merge_lease (dataset_id, generation, partition_key, task_id, attempt)
SELECT *
FROM unnest(
    %(datasets)s::uuid[], %(generations)s::uuid[], %(keys)s::text[], %(tasks)s::bigint[],
    %(attempts)s::integer[])
ORDER BY 1, 2, 3
ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
SET task_id = excluded.task_id, attempt = excluded.attempt

-- name: end_merge_leases
DELETE FROM merge_lease WHERE task_id = ANY (%(tasks)s::bigint[])
