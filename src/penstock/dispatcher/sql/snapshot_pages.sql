-- One snapshot of a dataset as people look at it: for penstock.dispatcher.views.snapshots. What it has
-- changed and what it shows is asked as clients ask that plan scans themselves.

-- name: about_snapshot
-- With the one before it, of its generation and of its branch; 0 and null where there is none.
SELECT made.id, made.dataset_id::text AS dataset, made.generation::text, made.branch, made.operation,
       made.added, made.removed, made.partitions, made.parts, made.files, made.rows, made.bytes,
       made.made_at, generation.state,
       coalesce((
           SELECT max(earlier.id)
           FROM table_snapshot AS earlier
           WHERE earlier.dataset_id = made.dataset_id AND earlier.generation = made.generation
             AND earlier.id < made.id AND earlier.forgotten_at IS NULL), 0) AS base,
       (SELECT max(earlier.id)
        FROM table_snapshot AS earlier
        WHERE earlier.dataset_id = made.dataset_id AND earlier.branch = made.branch
          AND earlier.id < made.id AND earlier.forgotten_at IS NULL) AS before
FROM table_snapshot AS made
JOIN dataset ON dataset.id = made.dataset_id
JOIN generation ON generation.dataset_id = made.dataset_id AND generation.version = made.generation
WHERE dataset.name = %(name)s AND made.id = %(id)s AND made.forgotten_at IS NULL
