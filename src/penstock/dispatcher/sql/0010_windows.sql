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
    -- The limit that it was counted for; of another one it says nothing.
    max_queue_depth bigint NOT NULL,
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

-- Numbers that people see: one after the other. A sequence of Postgres is up to 32 numbers further
-- after a crash, and one further after what was not committed. Whoever takes a number holds it until
-- the end of the transaction, so this is for what is rare.
CREATE TABLE numbering (
    name text PRIMARY KEY,
    latest bigint NOT NULL
);
INSERT INTO numbering
SELECT 'dag_version', coalesce(max(id), 0) FROM dag_version
UNION ALL SELECT 'backfill', coalesce(max(id), 0) FROM backfill
UNION ALL SELECT 'alert', coalesce(max(id), 0) FROM alert;
CREATE FUNCTION penstock_number(named text) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    INSERT INTO numbering VALUES (named, 1)
    ON CONFLICT (name) DO UPDATE SET latest = numbering.latest + 1
    RETURNING latest
$$;
ALTER TABLE dag_version ALTER COLUMN id DROP IDENTITY;
ALTER TABLE dag_version ALTER COLUMN id SET DEFAULT penstock_number('dag_version');
ALTER TABLE backfill ALTER COLUMN id DROP IDENTITY;
ALTER TABLE backfill ALTER COLUMN id SET DEFAULT penstock_number('backfill');
ALTER TABLE alert ALTER COLUMN id DROP IDENTITY;
ALTER TABLE alert ALTER COLUMN id SET DEFAULT penstock_number('alert');

-- What became of the tasks of a backfill that are not kept any more.
ALTER TABLE backfill
    ADD COLUMN dead_gone bigint NOT NULL DEFAULT 0,
    ADD COLUMN cancelled_gone bigint NOT NULL DEFAULT 0;
CREATE FUNCTION backfill_count_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE backfill
    SET dead_gone = dead_gone + counted.dead, cancelled_gone = cancelled_gone + counted.cancelled
    FROM (
        SELECT gone.backfill_id, count(*) FILTER (WHERE gone.status = 'dead') AS dead,
               count(*) FILTER (WHERE gone.status = 'cancelled') AS cancelled
        FROM gone
        WHERE gone.backfill_id IS NOT NULL AND gone.status IN ('dead', 'cancelled')
        GROUP BY gone.backfill_id
    ) AS counted
    WHERE backfill.id = counted.backfill_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER task_gone AFTER DELETE ON task REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION backfill_count_gone();

-- The range that the key of a partition implies, where nothing was ever told of it.
ALTER TABLE backfill_key
    ADD COLUMN range_start bigint,
    ADD COLUMN range_end bigint;
