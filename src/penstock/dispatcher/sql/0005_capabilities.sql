-- Capability tokens: the keys that sign them, and who was refused.

-- The public halves, of all dispatchers: each verifies what any other has signed. A key is published
-- before it signs, and stays until nothing that it has signed can be shown any more. Private halves
-- are in files or in KMS, never here.
CREATE TABLE signing_key (
    kid text PRIMARY KEY CHECK (length(kid) BETWEEN 1 AND 200),
    signer text NOT NULL CHECK (signer IN ('pem', 'kms')),
    -- Whose it is: a folder of keys by the random name in it, or KMS by what its key is called there.
    holder text NOT NULL,
    -- Where the private half is: the name of a file, or the ARN of a key.
    reference text NOT NULL,
    jwk jsonb NOT NULL CHECK (jsonb_typeof(jwk) = 'object' AND NOT jwk ? 'd'),
    -- The rotation that it was made for.
    rotation integer NOT NULL DEFAULT 0 CHECK (rotation >= 0),
    created_at timestamptz NOT NULL DEFAULT penstock_now(),
    signs_from timestamptz NOT NULL,
    -- When somebody who has the private half has last said so.
    seen_at timestamptz NOT NULL DEFAULT penstock_now(),
    retired_at timestamptz,
    -- Since when no attempt runs that began before it was retired.
    idle_since timestamptz,
    CHECK (signs_from >= created_at),
    CHECK (idle_since IS NULL OR retired_at IS NOT NULL)
);
CREATE INDEX signing_key_holder ON signing_key (holder, signs_from);

-- How often all holders were asked to make a new key. One that was away does so when it is back.
CREATE TABLE key_rotation (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    number integer NOT NULL CHECK (number >= 1),
    asked_at timestamptz NOT NULL DEFAULT penstock_now(),
    -- The key of KMS that signs from then on, whatever the settings say.
    kms_key text
);

-- Who was refused, and what was minted. The same again within a minute is counted, not written.
CREATE TABLE audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    minute timestamptz NOT NULL DEFAULT date_trunc('minute', penstock_now()),
    first_at timestamptz NOT NULL DEFAULT penstock_now(),
    last_at timestamptz NOT NULL DEFAULT penstock_now(),
    times integer NOT NULL DEFAULT 1 CHECK (times >= 1),
    what text NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('allowed', 'refused')),
    task_id bigint,
    attempt integer,
    caller text NOT NULL DEFAULT '',
    address text NOT NULL DEFAULT '',
    reason text NOT NULL DEFAULT '',
    detail jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(detail) = 'object'),
    UNIQUE NULLS NOT DISTINCT (minute, what, outcome, task_id, attempt, caller, address, reason)
);
CREATE INDEX audit_task ON audit (task_id, id) WHERE task_id IS NOT NULL;
