-- A queue with a limit is filled in windows. What of its input there is no room for is held: an event
-- that is 'held' has been looked at by a router and waits for room, in the order in which it came.

ALTER TABLE event DROP CONSTRAINT event_routed_check;
ALTER TABLE event ADD CONSTRAINT event_routed_check
    CHECK (routed IN ('pending', 'held', 'routed', 'audited')) NOT VALID;
CREATE INDEX event_held ON event (dataset_id, seq) WHERE routed = 'held';

-- As the DAG in force has it, like max_concurrency.
ALTER TABLE job ADD COLUMN max_queue_depth bigint CHECK (max_queue_depth > 0);
UPDATE job
SET max_queue_depth = (definition.body ->> 'max_queue_depth')::bigint
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
WHERE dag_job.job_id = job.id;

-- How many tasks may be made for a job before its queue is counted again, and when it was counted.
CREATE TABLE queue_room (
    job_id integer PRIMARY KEY REFERENCES job,
    room bigint NOT NULL,
    counted_at timestamptz NOT NULL
);

-- The most tasks that routing lets wait for a job: its limit and one window, of half the limit. At so
-- many everything upstream is paused, not only what is bulk.
CREATE FUNCTION penstock_depth_max(max_queue_depth bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT max_queue_depth + (max_queue_depth + 1) / 2
$$;

-- Datasets of which no tasks are made of what their sources send: the source is paused. Where it is
-- paused for a queue that reads the dataset itself, and that is filled in windows, the windows are
-- enough.
CREATE FUNCTION penstock_paused_datasets() RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    SELECT dataset.id
    FROM pause
    JOIN dataset ON dataset.job_id = pause.job_id
    JOIN dag_current ON true
    JOIN dag_job ON dag_job.job_id = pause.job_id
        AND dag_job.dag_version_id = dag_current.dag_version_id
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
    WHERE definition.body ->> 'activation' = 'source'
      AND (pause.scope = 'all' OR definition.priority = 'bulk')
      AND NOT EXISTS (
          SELECT
          FROM job AS pressed
          JOIN edge ON edge.job_id = pressed.id AND edge.is_trigger
              AND edge.dag_version_id = dag_current.dag_version_id
          WHERE pause.cause = 'pressure:' || pressed.name AND pressed.max_queue_depth IS NOT NULL
            AND edge.dataset_id = dataset.id)
$$;
