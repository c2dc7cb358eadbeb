-- Alerts: what is the matter, who was told of it, and who judges. See penstock.dispatcher.alerts.

CREATE TABLE alert (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule text NOT NULL CHECK (length(rule) BETWEEN 1 AND 100),
    kind text NOT NULL,
    -- What the rule holds for: a job, a dataset.
    subject text NOT NULL CHECK (octet_length(subject) <= 1000),
    summary text NOT NULL CHECK (summary <> ''),
    -- Where the console shows it.
    path text NOT NULL CHECK (starts_with(path, '/')),
    detail jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(detail) = 'object'),
    opened_at timestamptz NOT NULL DEFAULT penstock_now(),
    -- Since when the rule does not hold any more; when that has lasted, it is over.
    clear_since timestamptz,
    over_at timestamptz,
    over_why text,
    CHECK ((over_at IS NULL) = (over_why IS NULL))
);
CREATE UNIQUE INDEX alert_open ON alert (rule, subject) WHERE over_at IS NULL;
CREATE INDEX alert_over ON alert (over_at) WHERE over_at IS NOT NULL;

CREATE FUNCTION alert_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'alert % is over', OLD.id USING ERRCODE = 'check_violation';
END
$$;
CREATE TRIGGER alert_guard BEFORE UPDATE ON alert FOR EACH ROW
    WHEN (OLD.over_at IS NOT NULL) EXECUTE FUNCTION alert_guard();

-- One message about an alert for one destination, and what has become of it. What it says, and its
-- id, never change: a receiver that has seen the id has seen it.
CREATE TABLE alert_notice (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    alert_id bigint NOT NULL REFERENCES alert ON DELETE CASCADE,
    what text NOT NULL CHECK (what IN ('opened', 'over')),
    destination text NOT NULL CHECK (destination <> ''),
    body jsonb NOT NULL CHECK (jsonb_typeof(body) = 'object'),
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    due_at timestamptz NOT NULL DEFAULT penstock_now(),
    tries integer NOT NULL DEFAULT 0 CHECK (tries >= 0),
    last_error text,
    sent_at timestamptz,
    given_up_at timestamptz,
    UNIQUE (alert_id, destination, what),
    CHECK (sent_at IS NULL OR given_up_at IS NULL),
    CHECK (given_up_at IS NULL OR last_error IS NOT NULL)
);
CREATE INDEX alert_notice_due ON alert_notice (due_at)
    WHERE sent_at IS NULL AND given_up_at IS NULL;

-- Who judges, when it did so last, until when it opens nothing about silence, and by which rules.
CREATE TABLE alert_judge (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    name text NOT NULL,
    ran_at timestamptz NOT NULL,
    quiet_until timestamptz NOT NULL,
    said jsonb NOT NULL CHECK (jsonb_typeof(said) = 'object')
);

-- What was last told of a dataset. By the text of its id, so that no statement that looks for other
-- events takes it for the index that it should use.
CREATE INDEX event_told ON event ((dataset_id::text), seq);
