-- Every query that was begun or refused: who asked what, which datasets it has read as of when, and
-- what became of it. The ticket is the digest of what the query service ends it by. One that never
-- ended was lost with its service.
CREATE TABLE query_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ticket text NOT NULL UNIQUE,
    caller text NOT NULL,
    task_id bigint,
    attempt integer,
    sql text NOT NULL CHECK (octet_length(sql) <= 400000),
    datasets jsonb NOT NULL DEFAULT '[]',
    began_at timestamptz NOT NULL DEFAULT penstock_now(),
    ended_at timestamptz,
    outcome text CHECK (outcome IN ('completed', 'failed', 'cancelled', 'refused')),
    rows bigint CHECK (rows >= 0),
    bytes bigint CHECK (bytes >= 0),
    reason text,
    CHECK ((ended_at IS NULL) = (outcome IS NULL))
);
