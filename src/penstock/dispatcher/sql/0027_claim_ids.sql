-- The id of the claim that has begun the attempt of a running task, until its worker has acknowledged
-- it: a claim that is repeated finds the same attempts, and what nobody acknowledges is taken back.
ALTER TABLE task ADD COLUMN claim_id text;
CREATE INDEX task_claim ON task (claim_id) WHERE status = 'running' AND claim_id IS NOT NULL;

-- Until when reapers spare such attempts, since heartbeats may not have been heard.
ALTER TABLE reaper ADD COLUMN spares_until timestamptz NOT NULL DEFAULT '-infinity';

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
    -- Also where a dispatcher of before ends the attempt, which knows of no claim ids.
    IF OLD.status = 'running' AND NEW.status <> 'running' THEN
        NEW.claim_id := NULL;
    END IF;
    RETURN NEW;
END
$$;
