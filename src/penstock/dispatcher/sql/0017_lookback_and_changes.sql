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

-- As before; and what came before anybody looked back at it may be given the range of its key.
CREATE OR REPLACE FUNCTION publication_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revision = OLD.revision AND NEW.projected > OLD.projected
        AND NEW.projected <= NEW.revision
        AND (NEW.task_id, NEW.attempt, NEW.location, NEW.mode, NEW.published_at)
            = (OLD.task_id, OLD.attempt, OLD.location, OLD.mode, OLD.published_at) THEN
        RETURN NEW;
    END IF;
    IF NEW.revision = OLD.revision AND OLD.range_start IS NULL AND NEW.range_start IS NOT NULL
        -- `place` is generated, and not there yet.
        AND to_jsonb(NEW) - '{range_start,range_end,place}'::text[]
            = to_jsonb(OLD) - '{range_start,range_end,place}'::text[] THEN
        RETURN NEW;
    END IF;
    IF NEW.revision <= OLD.revision OR NEW.task_id < OLD.task_id
        OR (NEW.mode = 'replace' AND NEW.task_id = OLD.task_id)
        OR NEW.projected <> OLD.projected THEN
        RAISE EXCEPTION 'partition % of dataset % does not go back', OLD.partition_key,
            OLD.dataset_id USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;

-- An event may be news for several partitions of a job that looks back, and so part of several tasks.
ALTER TABLE coalesced DROP CONSTRAINT coalesced_pkey;
ALTER TABLE coalesced ADD PRIMARY KEY (event_seq, job_id, generation, task_id);

-- The partitions of a job that looks back, by where they begin; such jobs merge updates.
CREATE INDEX task_window ON task (job_id, generation, ((payload ->> 'start')::bigint))
    WHERE coalesce_key IS NOT NULL;

-- Of an input with `read: changes` a task is given what its job has not consumed ------------------

ALTER TABLE edge DROP CONSTRAINT edge_reads_check;
ALTER TABLE edge ADD CONSTRAINT edge_reads_check CHECK (reads IN ('partition', 'all', 'changes'));

-- The revision of its partition by which a part was appended. It is given under the lock of the
-- partition, so who has seen a revision has seen all parts up to it; a sequence would not say that.
ALTER TABLE appended ADD COLUMN revision bigint;
UPDATE appended
SET revision = publication.revision
FROM publication
WHERE (publication.dataset_id, publication.generation, publication.partition_key)
    = (appended.dataset_id, appended.generation, appended.partition_key);
CREATE INDEX appended_unnumbered ON appended (dataset_id, generation, partition_key)
    WHERE revision IS NULL;
CREATE FUNCTION appended_numbered() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM moved WHERE moved.mode = 'append') THEN
        UPDATE appended
        SET revision = moved.revision
        FROM moved
        WHERE appended.revision IS NULL AND appended.dataset_id = moved.dataset_id
          AND appended.generation = moved.generation
          AND appended.partition_key = moved.partition_key;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER appended_numbered_first AFTER INSERT ON publication
    REFERENCING NEW TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION appended_numbered();
CREATE TRIGGER appended_numbered_next AFTER UPDATE ON publication
    REFERENCING NEW TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION appended_numbered();

-- Up to which revision a generation of a job has consumed a partition of an input.
CREATE TABLE consumed (
    job_id integer NOT NULL REFERENCES job,
    generation uuid NOT NULL,
    input text NOT NULL,
    -- The generation of the input. Of another one nothing is consumed.
    fed uuid NOT NULL,
    partition_key text NOT NULL,
    revision bigint NOT NULL CHECK (revision >= 1),
    PRIMARY KEY (job_id, generation, input, fed, partition_key)
);
CREATE INDEX consumed_generation ON consumed (generation);
CREATE INDEX consumed_fed ON consumed (fed);

-- What an attempt was given: of each partition, after which revision and up to which. It is consumed
-- when the attempt completes, and else it was only read.
CREATE TABLE consumption (
    task_id bigint NOT NULL REFERENCES task ON DELETE CASCADE,
    attempt integer NOT NULL,
    input text NOT NULL,
    fed uuid NOT NULL,
    partition_keys text[] NOT NULL,
    after bigint[] NOT NULL,
    upto bigint[] NOT NULL,
    -- How many parts these are, and how many of the partitions were removed before they were read.
    parts integer NOT NULL,
    missed integer NOT NULL,
    is_consumed boolean NOT NULL DEFAULT false,
    PRIMARY KEY (task_id, attempt, input)
);

-- A generation that is dropped is built anew when it is needed again, of everything.
CREATE FUNCTION consumed_dropped() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM consumed WHERE generation = NEW.version OR fed = NEW.version;
    RETURN NULL;
END
$$;
CREATE TRIGGER consumed_dropped AFTER UPDATE OF dropped_at ON generation FOR EACH ROW
    WHEN (NEW.dropped_at IS DISTINCT FROM OLD.dropped_at) EXECUTE FUNCTION consumed_dropped();
