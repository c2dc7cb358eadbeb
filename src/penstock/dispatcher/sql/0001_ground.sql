-- The state of the dispatcher. Every time is the database's; every status and every transition that
-- the code relies on is also kept by a constraint, an index or a trigger of this file.

-- The only clock. The offset is for tests, which move time instead of waiting; nothing else sets it.
CREATE FUNCTION penstock_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT now() + coalesce(nullif(current_setting('penstock.offset', true), ''), '0')::interval
$$;

-- Jobs, their definitions, and the DAG -----------------------------------------------------------

CREATE TABLE dag_version (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash text NOT NULL UNIQUE,
    source text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT penstock_now()
);

CREATE TABLE dag_current (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    dag_version_id bigint NOT NULL REFERENCES dag_version,
    since timestamptz NOT NULL DEFAULT penstock_now()
);

CREATE TABLE operator (
    name text PRIMARY KEY,
    in_flight_max integer CHECK (in_flight_max > 0)
);

CREATE TABLE job (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    max_concurrency integer CHECK (max_concurrency > 0),
    created_at timestamptz NOT NULL DEFAULT penstock_now()
);

-- What a job was in some version of the DAG. Never changes; a task keeps the one it was made for.
CREATE TABLE job_definition (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id integer NOT NULL REFERENCES job,
    hash text NOT NULL,
    body jsonb NOT NULL,
    runtime text NOT NULL,
    operator text NOT NULL,
    priority text NOT NULL CHECK (priority IN ('normal', 'bulk')),
    update_mode text NOT NULL CHECK (update_mode IN ('replace', 'append')),
    max_attempts integer NOT NULL CHECK (max_attempts BETWEEN 1 AND 1000),
    timeout_ms bigint NOT NULL CHECK (timeout_ms > 0),
    heartbeat_ms bigint NOT NULL CHECK (heartbeat_ms BETWEEN 1 AND 86400000),
    retry_first_ms bigint NOT NULL CHECK (retry_first_ms BETWEEN 0 AND retry_max_ms),
    retry_max_ms bigint NOT NULL CHECK (retry_max_ms <= 366 * 86400000::bigint),
    retry_backoff double precision NOT NULL CHECK (retry_backoff BETWEEN 1 AND 1000),
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    UNIQUE (job_id, hash),
    UNIQUE (id, job_id)
);
CREATE INDEX job_definition_operator ON job_definition (operator, job_id);

-- Why a job starts nothing now. A job is paused as long as it has a row.
CREATE TABLE pause (
    job_id integer NOT NULL REFERENCES job,
    cause text NOT NULL,
    scope text NOT NULL CHECK (scope IN ('bulk', 'all')),
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (job_id, cause)
);

CREATE TABLE pressure (
    job_id integer PRIMARY KEY REFERENCES job,
    pressed boolean NOT NULL,
    depth bigint NOT NULL CHECK (depth >= 0),
    oldest_seconds double precision NOT NULL CHECK (oldest_seconds >= 0),
    reason text CHECK (pressed = (reason IS NOT NULL)),
    since timestamptz NOT NULL DEFAULT penstock_now(),
    measured_at timestamptz NOT NULL DEFAULT penstock_now()
);

-- Datasets, generations, events ------------------------------------------------------------------

CREATE TABLE dataset (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL UNIQUE,
    -- The job that writes it; none for a dataset that comes from outside.
    job_id integer REFERENCES job,
    created_at timestamptz NOT NULL DEFAULT penstock_now()
);
CREATE INDEX dataset_job ON dataset (job_id);

-- The outputs of one job move together: they share the version.
CREATE TABLE generation (
    dataset_id uuid NOT NULL REFERENCES dataset,
    version uuid NOT NULL,
    state text NOT NULL CHECK (state IN ('building', 'current', 'retired', 'abandoned')),
    lineage text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    changed_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, version)
);
CREATE UNIQUE INDEX generation_current ON generation (dataset_id) WHERE state = 'current';
CREATE UNIQUE INDEX generation_building ON generation (dataset_id) WHERE state = 'building';

CREATE TABLE dag_job (
    dag_version_id bigint NOT NULL REFERENCES dag_version,
    job_id integer NOT NULL REFERENCES job,
    definition_id bigint NOT NULL,
    generation uuid NOT NULL,
    PRIMARY KEY (dag_version_id, job_id),
    FOREIGN KEY (definition_id, job_id) REFERENCES job_definition (id, job_id)
);

CREATE TABLE edge (
    dag_version_id bigint NOT NULL,
    dataset_id uuid NOT NULL REFERENCES dataset,
    job_id integer NOT NULL,
    input text NOT NULL,
    filter jsonb,
    PRIMARY KEY (dag_version_id, job_id, input),
    FOREIGN KEY (dag_version_id, job_id) REFERENCES dag_job
);
CREATE INDEX edge_dataset ON edge (dag_version_id, dataset_id);

CREATE TABLE event (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dataset_id uuid NOT NULL REFERENCES dataset,
    -- Not a reference: an event of a generation that we do not know is kept too.
    generation uuid NOT NULL,
    cursor bigint,
    partition_key text CHECK (partition_key <> '' AND octet_length(partition_key) <= 500),
    range_start bigint,
    range_end bigint,
    dedupe text NOT NULL CHECK (octet_length(dedupe) <= 1000),
    task_id bigint,
    -- Of the publication that the event tells of; none for an event that somebody else sent.
    revision bigint,
    routed text NOT NULL DEFAULT 'pending' CHECK (routed IN ('pending', 'routed', 'audited')),
    why_not text,
    received_at timestamptz NOT NULL DEFAULT penstock_now(),
    UNIQUE (dataset_id, generation, dedupe),
    CHECK ((revision IS NOT NULL) = starts_with(dedupe, 'publication:')),
    CHECK ((cursor IS NULL) <> (partition_key IS NULL)),
    CHECK ((range_start IS NULL) = (range_end IS NULL)),
    CHECK (range_start IS NULL OR (range_start < range_end AND partition_key IS NOT NULL)),
    CHECK ((routed = 'audited') = (why_not IS NOT NULL))
);
CREATE INDEX event_pending ON event (seq) WHERE routed = 'pending';

-- Tasks ------------------------------------------------------------------------------------------

-- A plan, and how much of it has become tasks.
CREATE TABLE backfill (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    definition_id bigint NOT NULL REFERENCES job_definition,
    generation uuid NOT NULL,
    plan jsonb NOT NULL,
    partitions bigint NOT NULL CHECK (partitions >= 0),
    position bigint NOT NULL DEFAULT 0 CHECK (position BETWEEN 0 AND partitions),
    concurrency_max integer NOT NULL CHECK (concurrency_max > 0),
    state text NOT NULL DEFAULT 'running'
        CHECK (state IN ('running', 'paused', 'done', 'cancelled')),
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    CHECK (state <> 'done' OR position = partitions)
);
CREATE INDEX backfill_open ON backfill (id) WHERE state IN ('running', 'paused');

CREATE TABLE task (
    -- Also the task sequence: a later task has a higher one.
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id integer NOT NULL,
    definition_id bigint NOT NULL,
    generation uuid NOT NULL,
    dedupe_key text NOT NULL CHECK (octet_length(dedupe_key) <= 1000),
    operator text NOT NULL,
    priority text NOT NULL CHECK (priority IN ('normal', 'bulk')),
    payload jsonb NOT NULL,
    event_seq bigint,
    backfill_id bigint REFERENCES backfill,
    status text NOT NULL DEFAULT 'queued' CHECK (
        status IN ('queued', 'running', 'retrying', 'completed', 'dead', 'cancelled')),
    attempt integer NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    -- The number of the last attempt that this task may have. A replay raises it.
    attempt_limit integer NOT NULL CHECK (attempt_limit >= 1),
    due_at timestamptz NOT NULL,
    lease_token text,
    lease_expires_at timestamptz,
    worker text CHECK (worker <> ''),
    claimed_at timestamptz,
    cancel_asked boolean NOT NULL DEFAULT false,
    -- Why it is retrying, dead or cancelled.
    reason text,
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    settled_at timestamptz,
    UNIQUE (job_id, generation, dedupe_key),
    FOREIGN KEY (definition_id, job_id) REFERENCES job_definition (id, job_id),
    CONSTRAINT a_lease_iff_running CHECK (
        (status = 'running') = (lease_token IS NOT NULL)
        AND (status = 'running') = (lease_expires_at IS NOT NULL)
        AND (status = 'running') = (worker IS NOT NULL)
        AND (status = 'running') = (claimed_at IS NOT NULL)),
    CONSTRAINT attempts_are_counted CHECK (
        attempt <= attempt_limit AND (attempt >= 1 OR status IN ('queued', 'cancelled'))),
    CONSTRAINT settled_iff_over CHECK (
        (status IN ('completed', 'dead', 'cancelled')) = (settled_at IS NOT NULL)),
    CONSTRAINT a_reason_where_due CHECK (
        reason IS NOT NULL OR status NOT IN ('retrying', 'dead', 'cancelled')),
    CONSTRAINT cancel_asked_of_running CHECK (
        NOT cancel_asked OR status IN ('running', 'cancelled'))
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX task_claimable ON task (operator, job_id, priority, due_at, id)
    WHERE status IN ('queued', 'retrying');
CREATE INDEX task_running ON task (operator, job_id) WHERE status = 'running';
CREATE INDEX task_running_job ON task (job_id) WHERE status = 'running';
CREATE INDEX task_lease ON task (lease_expires_at) WHERE status = 'running';
CREATE INDEX task_dead ON task (job_id, settled_at) WHERE status = 'dead';
CREATE INDEX task_generation_open ON task (generation, id)
    WHERE status IN ('queued', 'retrying', 'running');
CREATE INDEX task_backfill_open ON task (backfill_id)
    WHERE backfill_id IS NOT NULL AND status IN ('queued', 'retrying', 'running');

CREATE FUNCTION task_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.id, OLD.job_id, OLD.definition_id, OLD.generation, OLD.dedupe_key, OLD.created_at)
        IS DISTINCT FROM
       (NEW.id, NEW.job_id, NEW.definition_id, NEW.generation, NEW.dedupe_key, NEW.created_at) THEN
        RAISE EXCEPTION 'what task % is never changes', OLD.id USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.status IS DISTINCT FROM OLD.status AND NOT (
        (OLD.status IN ('queued', 'retrying') AND NEW.status IN ('running', 'cancelled'))
        OR (OLD.status = 'running'
            AND NEW.status IN ('completed', 'retrying', 'dead', 'cancelled'))
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
CREATE TRIGGER task_guard BEFORE UPDATE ON task FOR EACH ROW EXECUTE FUNCTION task_guard();

CREATE TABLE attempt (
    task_id bigint NOT NULL REFERENCES task ON DELETE CASCADE,
    number integer NOT NULL CHECK (number >= 1),
    worker text NOT NULL,
    lease_token text NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz,
    outcome text CHECK (outcome IN ('completed', 'failed', 'expired', 'cancelled')),
    reason text,
    -- What the worker said when it ended the attempt, as a digest, and what it was told: saying
    -- the same again gets the same answer.
    said text,
    answer jsonb,
    PRIMARY KEY (task_id, number),
    CHECK ((ended_at IS NULL) = (outcome IS NULL)),
    CHECK ((said IS NULL) = (answer IS NULL) AND (said IS NULL OR ended_at IS NOT NULL))
);
CREATE UNIQUE INDEX attempt_open ON attempt (task_id) WHERE ended_at IS NULL;

CREATE FUNCTION attempt_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'attempt % of task % is over', OLD.number, OLD.task_id
        USING ERRCODE = 'check_violation';
END
$$;
CREATE TRIGGER attempt_guard BEFORE UPDATE ON attempt FOR EACH ROW
    WHEN (OLD.ended_at IS NOT NULL) EXECUTE FUNCTION attempt_guard();

CREATE TABLE worker (
    name text PRIMARY KEY,
    operators text[] NOT NULL DEFAULT '{}',
    about jsonb NOT NULL DEFAULT '{}',
    first_seen_at timestamptz NOT NULL DEFAULT penstock_now(),
    last_seen_at timestamptz NOT NULL DEFAULT penstock_now()
);

-- When any reaper last ran, and until when all of them hold still after an outage.
CREATE TABLE reaper (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    ran_at timestamptz NOT NULL,
    quiet_until timestamptz NOT NULL
);
INSERT INTO reaper VALUES (true, '-infinity', '-infinity');

-- Publications and side effects ------------------------------------------------------------------

-- What a partition is now. A dataset without partitions has one, with an empty key.
CREATE TABLE publication (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL CHECK (octet_length(partition_key) <= 500),
    range_start bigint,
    range_end bigint,
    mode text NOT NULL CHECK (mode IN ('replace', 'append')),
    task_id bigint NOT NULL,
    attempt integer NOT NULL,
    location text NOT NULL,
    revision bigint NOT NULL DEFAULT 1 CHECK (revision >= 1),
    published_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, generation, partition_key),
    FOREIGN KEY (dataset_id, generation) REFERENCES generation
);

CREATE FUNCTION publication_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revision <= OLD.revision OR NEW.task_id < OLD.task_id
        OR (NEW.mode = 'replace' AND NEW.task_id = OLD.task_id) THEN
        RAISE EXCEPTION 'partition % of dataset % does not go back', OLD.partition_key,
            OLD.dataset_id USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER publication_guard BEFORE UPDATE ON publication FOR EACH ROW
    EXECUTE FUNCTION publication_guard();

-- The parts of partitions that are appended to.
CREATE TABLE appended (
    dataset_id uuid NOT NULL,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    append_key text NOT NULL CHECK (octet_length(append_key) <= 1000),
    task_id bigint NOT NULL,
    attempt integer NOT NULL,
    location text NOT NULL,
    appended_at timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, generation, partition_key, append_key),
    FOREIGN KEY (dataset_id, generation) REFERENCES generation
);

CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL CHECK (kind <> ''),
    target text NOT NULL,
    body jsonb NOT NULL DEFAULT '{}',
    due_at timestamptz NOT NULL DEFAULT penstock_now(),
    tries integer NOT NULL DEFAULT 0 CHECK (tries >= 0),
    last_error text,
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    sent_at timestamptz,
    parked_at timestamptz,
    CHECK (sent_at IS NULL OR parked_at IS NULL),
    CHECK (parked_at IS NULL OR last_error IS NOT NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX outbox_due ON outbox (due_at, id) WHERE sent_at IS NULL AND parked_at IS NULL;
CREATE INDEX outbox_parked ON outbox (parked_at) WHERE parked_at IS NOT NULL;
