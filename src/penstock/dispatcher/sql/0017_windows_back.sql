-- What a task reads beyond its own partition: what lies before it, and only what has changed.

-- How many seconds before its own range a task reads of an input.
ALTER TABLE edge ADD COLUMN lookback bigint CHECK (lookback > 0);

-- A bound of a range, so much later or earlier, as far as there are numbers.
CREATE FUNCTION penstock_shifted(bound bigint, seconds bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT least(9223372036854775807, greatest(-9223372036854775808, bound::numeric + seconds))::bigint
    WHERE bound IS NOT NULL
$$;

-- As before, and how far back an input is read.
DROP FUNCTION penstock_inputs(integer, uuid);
CREATE FUNCTION penstock_inputs(reading_job integer, reading_generation uuid)
RETURNS TABLE (
    input text, dataset_id uuid, generation uuid, filter jsonb, is_trigger boolean, reads text,
    lookback bigint)
LANGUAGE sql STABLE AS $$
    SELECT edge.input, edge.dataset_id, fed.version, edge.filter, edge.is_trigger, edge.reads,
           edge.lookback
    FROM edge
    JOIN dag_job AS writer ON writer.dag_version_id = edge.dag_version_id
    JOIN generation AS fed
        ON fed.dataset_id = edge.dataset_id AND fed.version = writer.generation
    WHERE edge.job_id = reading_job AND edge.dag_version_id = (
        SELECT max(dag_job.dag_version_id)
        FROM dag_job
        WHERE dag_job.generation = reading_generation AND dag_job.job_id = reading_job)
$$;

-- An event may be news for several partitions of a job that looks back, and so part of several tasks.
ALTER TABLE coalesced DROP CONSTRAINT coalesced_pkey;
ALTER TABLE coalesced ADD PRIMARY KEY (event_seq, job_id, generation, task_id);

-- The partitions of a job that looks back, by where they begin; such jobs merge updates.
CREATE INDEX task_window ON task (job_id, generation, ((payload ->> 'start')::bigint))
    WHERE coalesce_key IS NOT NULL;
