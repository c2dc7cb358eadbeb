-- What the services of the dispatcher need besides the tasks themselves.

-- What a worker says of an attempt while it runs, and where its log is.
ALTER TABLE attempt ADD COLUMN progress jsonb;
ALTER TABLE attempt ADD COLUMN log text;

-- Which earlier versions of the DAG name a generation.
CREATE INDEX dag_job_generation ON dag_job (generation);

-- Rebuilding takes the latest event of each partition; ranges are covered by events that overlap.
CREATE INDEX event_partition ON event (dataset_id, generation, partition_key, seq);
CREATE INDEX event_range ON event (dataset_id, generation, range_start)
    WHERE range_start IS NOT NULL;

-- What retention removes is found by its age; blocks of old rows are enough, and cheap to keep.
CREATE INDEX task_settled ON task USING brin (settled_at);
CREATE INDEX event_received ON event USING brin (received_at);

-- Who asked for a backfill says so once, however often the answer is lost.
ALTER TABLE backfill ADD COLUMN request_id text UNIQUE;
ALTER TABLE backfill ADD COLUMN settled_at timestamptz;
