-- What the log of publications costs whoever publishes. See penstock.dispatcher.catalog.snapshots.

-- What was replaced is found by its location; what is told of its files stands where it was put in place.
CREATE OR REPLACE FUNCTION publication_moved_logged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- What was only noted as written has its edition still, and editions only grow.
    IF (SELECT sum(edition) FROM old_rows) IS NOT DISTINCT FROM (
        SELECT sum(edition) FROM new_rows) THEN
        RETURN NULL;
    END IF;
    INSERT INTO publication_log (
        dataset_id, generation, change, partition_key, task_id, location, manifest, files, rows,
        bytes)
    SELECT dataset_id, generation, 'removed', partition_key, NULL, location, NULL, NULL, NULL, NULL
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

-- A folder that was put in place is held by what is published; the row of the log that takes it away is
-- what holds it after that, until a snapshot has that row.
DROP INDEX publication_log_held;
CREATE INDEX publication_log_held ON publication_log (place)
    WHERE snapshot IS NULL AND place IS NOT NULL AND change = 'removed';

CREATE OR REPLACE FUNCTION penstock_is_shown(wanted_place text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM publication_log AS log
        WHERE log.place = wanted_place AND log.snapshot IS NULL AND log.change = 'removed'
    ) OR EXISTS (
        SELECT
        FROM table_part AS held
        WHERE held.place = wanted_place AND (held.gone IS NULL OR EXISTS (
            SELECT FROM table_snapshot AS kept
            WHERE kept.dataset_id = held.dataset_id AND kept.generation = held.generation
              AND kept.id >= held.came AND kept.id < held.gone)))
$$;
