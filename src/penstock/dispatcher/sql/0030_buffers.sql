-- Buffered datasets: batches of rows that many tasks publish and one sink job writes. See
-- penstock.dispatcher.tasks.batches.

CREATE TABLE buffer_batch (
    -- Also the sequence of the batch: of two rows with one key that of the later batch counts.
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dataset_id uuid NOT NULL REFERENCES dataset,
    partition_key text NOT NULL CHECK (octet_length(partition_key) <= 500),
    -- Ids of batches are told apart by the task that has published them, and by its attempt as long as
    -- that decides whether they count. Number 0 is none: they count whatever becomes of the attempt.
    task_id bigint NOT NULL,
    attempt integer NOT NULL CHECK (attempt >= 0),
    batch_id text NOT NULL CHECK (octet_length(batch_id) BETWEEN 1 AND 500),
    -- The SHA-256 of its body.
    digest text NOT NULL CHECK (octet_length(digest) = 64),
    format text NOT NULL CHECK (format IN ('jsonl', 'arrow', 'parquet')),
    location text NOT NULL,
    -- The folder of an attempt that the body lies in.
    place text NOT NULL,
    bytes bigint NOT NULL CHECK (bytes >= 0),
    -- Null if nobody has counted them yet.
    rows bigint CHECK (rows >= 0),
    state text NOT NULL CHECK (state IN ('held', 'released', 'done')),
    -- The task of the sink job that writes it, whichever of its attempts does. None if the task that
    -- had it is gone: then the next one gets it.
    sink_task bigint REFERENCES task ON DELETE SET NULL,
    -- When its rows were made, as its source says, of those whose ids are kept by time.
    made_at timestamptz,
    accepted_at timestamptz NOT NULL DEFAULT penstock_now(),
    released_at timestamptz,
    done_at timestamptz,
    UNIQUE (dataset_id, task_id, attempt, batch_id),
    CONSTRAINT held_by_an_attempt CHECK (state <> 'held' OR attempt > 0),
    CONSTRAINT taken_when_released CHECK (state <> 'held' OR sink_task IS NULL),
    CONSTRAINT released_iff_not_held CHECK ((state = 'held') = (released_at IS NULL)),
    CONSTRAINT done_iff_done CHECK ((state = 'done') = (done_at IS NOT NULL))
);
CREATE INDEX buffer_batch_available ON buffer_batch (dataset_id, partition_key, seq)
    WHERE state = 'released' AND sink_task IS NULL;
CREATE INDEX buffer_batch_held ON buffer_batch (task_id, attempt) WHERE state = 'held';
CREATE INDEX buffer_batch_taken ON buffer_batch (sink_task) WHERE sink_task IS NOT NULL;
CREATE INDEX buffer_batch_open ON buffer_batch (dataset_id, seq) WHERE state = 'released';
CREATE INDEX buffer_batch_place ON buffer_batch (place) WHERE state <> 'done';

CREATE FUNCTION buffer_batch_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.seq, OLD.dataset_id, OLD.partition_key, OLD.task_id, OLD.attempt, OLD.batch_id,
        OLD.digest, OLD.location)
        IS DISTINCT FROM
       (NEW.seq, NEW.dataset_id, NEW.partition_key, NEW.task_id, NEW.attempt, NEW.batch_id,
        NEW.digest, NEW.location) THEN
        RAISE EXCEPTION 'what batch % is never changes', OLD.seq USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.state IS DISTINCT FROM OLD.state AND NOT (
        (OLD.state = 'held' AND NEW.state = 'released')
        OR (OLD.state = 'released' AND NEW.state = 'done')) THEN
        RAISE EXCEPTION 'batch % cannot go from % to %', OLD.seq, OLD.state, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    -- Who has it keeps it, until its task is over without having written it.
    IF OLD.sink_task IS NOT NULL AND NEW.sink_task IS NOT NULL
        AND NEW.sink_task <> OLD.sink_task THEN
        RAISE EXCEPTION 'batch % is that of task %', OLD.seq, OLD.sink_task
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER buffer_batch_guard BEFORE UPDATE ON buffer_batch
    FOR EACH ROW EXECUTE FUNCTION buffer_batch_guard();

-- What people have done about rows that a sink has rejected; those without a row here wait for them.
CREATE TABLE rejected_mark (
    -- The buffered dataset, the batch that the row came in, and its place in that.
    dataset_id uuid NOT NULL REFERENCES dataset,
    sequence bigint NOT NULL,
    place bigint NOT NULL,
    deed text NOT NULL CHECK (deed IN ('mended', 'replayed', 'dropped')),
    -- The batch that it was given back in.
    batch_seq bigint CHECK ((deed = 'dropped') = (batch_seq IS NULL)),
    marked_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, sequence, place)
);

-- The dataset, by its uuid, that a sink puts rejected rows into: its output that is not buffered.
CREATE FUNCTION penstock_aside(definition jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT definition -> 'datasets' ->> coalesce(said ->> 'dataset', said ->> 'name')
    FROM jsonb_array_elements(definition -> 'outputs') AS said
    WHERE NOT said ? 'buffered'
    LIMIT 1
$$;

CREATE OR REPLACE FUNCTION task_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.id, OLD.job_id, OLD.definition_id, OLD.generation, OLD.dedupe_key, OLD.created_at)
        IS DISTINCT FROM
       (NEW.id, NEW.job_id, NEW.definition_id, NEW.generation, NEW.dedupe_key, NEW.created_at) THEN
        RAISE EXCEPTION 'what task % is never changes', OLD.id USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.status IS DISTINCT FROM OLD.status AND NOT (
        (OLD.status IN ('queued', 'retrying') AND NEW.status IN ('running', 'cancelled'))
        OR (OLD.status = 'running'
            AND NEW.status IN ('completed', 'queued', 'retrying', 'dead', 'cancelled'))
        OR (OLD.status = 'dead' AND NEW.status = 'queued')
        -- A dead task of a sink gives its batches back.
        OR (OLD.status = 'dead' AND NEW.status = 'cancelled' AND OLD.payload ? 'buffer')) THEN
        RAISE EXCEPTION 'task % cannot go from % to %', OLD.id, OLD.status, NEW.status
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.status = OLD.status AND OLD.status IN ('completed', 'dead', 'cancelled')
        AND NEW IS DISTINCT FROM OLD THEN
        RAISE EXCEPTION 'task % is %', OLD.id, OLD.status USING ERRCODE = 'check_violation';
    END IF;
    -- A claim is the next attempt, with a token of its own; nothing else is.
    IF NEW.attempt <> OLD.attempt + (NEW.status = 'running' AND OLD.status <> 'running')::integer
        OR (NEW.status = 'running' AND OLD.status = 'running'
            AND (NEW.lease_token, NEW.worker) IS DISTINCT FROM (OLD.lease_token, OLD.worker)) THEN
        RAISE EXCEPTION 'attempt % of task % is not to be changed', OLD.attempt, OLD.id
            USING ERRCODE = 'check_violation';
    END IF;
    -- Also where a dispatcher of before ends the attempt, which knows of no claim ids.
    IF OLD.status = 'running' AND NEW.status <> 'running' THEN
        NEW.claim_id := NULL;
    END IF;
    RETURN NEW;
END
$$;
