-- Keys that were revoked, and what the token of an attempt grants.

-- Since when nothing that the key has signed is worth anything. The row stays, so that no copy of the
-- private half is ever published again.
ALTER TABLE signing_key ADD COLUMN revoked_at timestamptz;
ALTER TABLE signing_key ADD CONSTRAINT revoked_is_retired
    CHECK (revoked_at IS NULL OR retired_at IS NOT NULL);

-- The attempt, a colon and the digest of the grants that its token was issued with: whoever has a
-- signing key can sign a token with others, and is refused all the same.
ALTER TABLE task ADD COLUMN grants text;

-- Whether a token shows the grants that were issued. Null was shown by nobody who has a token; and an
-- attempt that a dispatcher of an earlier release has begun has none that are known.
CREATE FUNCTION penstock_has_grants(issued text, attempt integer, shown text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT shown IS NULL OR issued IS NULL OR NOT starts_with(issued, attempt || ':')
        OR issued = attempt || ':' || shown
$$;
