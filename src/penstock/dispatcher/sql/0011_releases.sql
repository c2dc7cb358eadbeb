-- Attempts that a worker hands back end as `released`: the task is queued again, and the attempt does
-- not count against `max_attempts`, because `attempt_limit` grows with it.

-- How many attempts were handed back without being counted, since the task was made or replayed.
ALTER TABLE task ADD COLUMN releases integer NOT NULL DEFAULT 0 CHECK (releases >= 0);

ALTER TABLE attempt DROP CONSTRAINT attempt_outcome_check;
ALTER TABLE attempt ADD CONSTRAINT attempt_outcome_check CHECK (
    outcome IN ('completed', 'failed', 'expired', 'cancelled', 'released')) NOT VALID;

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
        OR (OLD.status = 'dead' AND NEW.status = 'queued')) THEN
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
    RETURN NEW;
END
$$;

-- JSON that people are to see, within a bound also in the form in which Postgres writes it: 1e300 has
-- 301 digits here.
CREATE FUNCTION penstock_bounded(said jsonb, bytes_max integer) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN octet_length(said::text) <= bytes_max THEN said
        WHEN said IS NULL THEN NULL
        ELSE jsonb_build_object('omitted', 'It has more than ' || bytes_max || ' bytes.')
    END
$$;
