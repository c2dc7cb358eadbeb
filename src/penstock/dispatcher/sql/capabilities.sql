-- The keys that sign capability tokens, and the audit, for penstock.dispatcher.capabilities.

-- name: lock_keys
-- Whoever publishes a key has looked at all others, and nobody else publishes meanwhile.
SELECT pg_advisory_xact_lock(1885693817, 0)

-- name: signing_keys
-- The newest first, as `choose` takes them, each with the rotation that was asked for last; there is
-- a row with that if there is no key.
SELECT asked.number AS asked_number, asked.asked_at, asked.kms_key AS asked_kms_key, kid, signer, holder, reference, jwk, rotation, created_at, signs_from, seen_at, retired_at,
       revoked_at,
       revoked_at IS NULL AND (
           retired_at IS NULL
           OR retired_at > penstock_now() - %(told_seconds)s * interval '1 second') AS is_told,
       retired_at IS NULL AND signs_from <= penstock_now() AS may_sign,
       retired_at IS NULL
           AND seen_at > penstock_now() - %(tended_seconds)s * interval '1 second' AS is_tended,
       retired_at IS NULL
           AND seen_at > penstock_now() - %(live_seconds)s * interval '1 second' AS is_live
FROM (SELECT) AS one
LEFT JOIN key_rotation AS asked ON true
LEFT JOIN signing_key ON true
ORDER BY signs_from DESC, kid DESC

-- name: publish_key
-- Signs from the moment on at which all who verify may know it. At once if nobody verifies yet, or
-- if the one before was revoked: then there is nothing else to sign with. One that was retired, as a
-- key of KMS may have been, begins anew.
INSERT INTO signing_key AS held (kid, signer, holder, reference, jwk, rotation, signs_from)
SELECT %(kid)s, %(signer)s, %(holder)s, %(reference)s, %(jwk)s, %(rotation)s,
       penstock_now() + interval '1 second' * CASE
           WHEN EXISTS (
               SELECT FROM signing_key AS own
               WHERE own.kid = ANY (%(held)s::text[]) AND own.retired_at IS NULL
                 AND own.signs_from <= penstock_now()) THEN %(publish_seconds)s
           WHEN EXISTS (
               SELECT FROM signing_key AS own
               WHERE own.holder = %(holder)s AND own.revoked_at IS NOT NULL) THEN 0
           WHEN EXISTS (
               SELECT FROM signing_key AS other
               WHERE other.retired_at IS NULL
                 AND other.seen_at > penstock_now() - %(live_seconds)s * interval '1 second')
               THEN %(join_seconds)s
           ELSE 0 END
ON CONFLICT (kid) DO UPDATE
SET holder = excluded.holder, reference = excluded.reference, rotation = excluded.rotation,
    created_at = excluded.created_at, signs_from = excluded.signs_from,
    seen_at = excluded.seen_at, retired_at = NULL, idle_since = NULL
WHERE held.retired_at IS NOT NULL AND held.revoked_at IS NULL
RETURNING kid

-- name: publish_lost_key
-- A key whose private half is there and whose row is not: retired, it verifies what it has signed.
INSERT INTO signing_key (kid, signer, holder, reference, jwk, signs_from, retired_at)
VALUES (%(kid)s, %(signer)s, %(holder)s, %(reference)s, %(jwk)s, penstock_now(), penstock_now())
ON CONFLICT (kid) DO NOTHING

-- name: keep_key
-- The key of a rotation is the one that was there: KMS has no other of this name.
UPDATE signing_key SET rotation = %(rotation)s
WHERE kid = %(kid)s AND rotation < %(rotation)s
RETURNING kid

-- name: see_keys
UPDATE signing_key SET seen_at = penstock_now()
WHERE kid = ANY (%(held)s::text[]) AND retired_at IS NULL AND seen_at < penstock_now()

-- name: retire_keys
-- By a later key of its holder that signs; by the key of KMS that a rotation has named; or because
-- nobody who has it was heard of for as long as somebody was before, within bounds.
UPDATE signing_key AS old
SET retired_at = penstock_now()
WHERE old.retired_at IS NULL
  AND (
      EXISTS (
          SELECT FROM signing_key AS later
          WHERE later.holder = old.holder AND later.retired_at IS NULL
            AND later.signs_from <= penstock_now()
            AND (later.signs_from, later.kid) > (old.signs_from, old.kid))
      OR old.signer = 'kms' AND EXISTS (
          SELECT FROM signing_key AS later
          JOIN key_rotation ON key_rotation.kms_key = later.holder
          WHERE later.signer = 'kms' AND later.holder <> old.holder AND later.retired_at IS NULL
            AND later.signs_from <= penstock_now())
      OR old.seen_at < penstock_now() - least(
          greatest(old.seen_at - old.created_at, %(away_seconds_min)s * interval '1 second'),
          %(away_seconds)s * interval '1 second'))
RETURNING old.kid

-- name: note_idle_keys
-- Who signs may not know for a moment that its key is retired: what began within that moment after
-- it may have been signed by the key as well.
UPDATE signing_key AS old
SET idle_since = penstock_now()
WHERE old.retired_at <= penstock_now() - %(slack_seconds)s * interval '1 second'
  AND old.idle_since IS NULL
  AND NOT EXISTS (
      SELECT FROM task
      WHERE task.status = 'running'
        AND task.claimed_at <= old.retired_at + %(slack_seconds)s * interval '1 second')

-- name: remove_keys
-- One that was revoked stays for long: a copy of it that is found would be published again.
DELETE FROM signing_key
WHERE revoked_at IS NULL AND idle_since <= penstock_now() - %(kept_seconds)s * interval '1 second'
   OR revoked_at <= penstock_now() - interval '400 days'
RETURNING kid

-- name: revoke_key
-- Again is the same. The key of KMS that signs has to be rotated away first: nobody here makes another.
-- A key that its holder has published since, as after a rotation, signs at once if nothing else does.
WITH held AS (
    SELECT kid, holder, revoked_at IS NULL AS is_new,
           signer = 'kms' AND retired_at IS NULL AS is_needed
    FROM signing_key
    WHERE kid = %(kid)s
    FOR NO KEY UPDATE
), revoked AS (
    UPDATE signing_key AS one
    SET revoked_at = coalesce(one.revoked_at, penstock_now()),
        retired_at = coalesce(one.retired_at, penstock_now())
    FROM held
    WHERE one.kid = held.kid AND NOT held.is_needed
    RETURNING one.kid, one.revoked_at
), advanced AS (
    UPDATE signing_key AS later
    SET signs_from = penstock_now()
    FROM held
    WHERE later.holder = held.holder AND later.kid <> held.kid AND NOT held.is_needed
      AND later.retired_at IS NULL AND later.signs_from > penstock_now()
      AND NOT EXISTS (
          SELECT FROM signing_key AS other
          WHERE other.holder = held.holder AND other.kid <> held.kid
            AND other.retired_at IS NULL AND other.signs_from <= penstock_now())
)
SELECT held.is_new, held.is_needed, revoked.revoked_at
FROM held
LEFT JOIN revoked USING (kid)

-- name: ask_rotation
-- Asked again before the new keys sign, it is the same rotation, unless it names another key.
INSERT INTO key_rotation AS held (number, kms_key) VALUES (1, %(kms_key)s)
ON CONFLICT (single) DO UPDATE
SET number = held.number + 1, asked_at = excluded.asked_at,
    kms_key = coalesce(excluded.kms_key, held.kms_key)
WHERE held.asked_at <= excluded.asked_at - %(publish_seconds)s * interval '1 second'
   OR excluded.kms_key <> coalesce(held.kms_key, '')
RETURNING number, asked_at, kms_key

-- name: database_seconds
SELECT extract(epoch FROM penstock_now())::double precision AS seconds

-- name: judge_key
-- The time, and what has become of a key meanwhile: nobody remembers that.
SELECT extract(epoch FROM penstock_now())::double precision AS seconds,
       extract(epoch FROM key.retired_at)::double precision AS retired_at,
       key.revoked_at IS NOT NULL AS is_revoked
FROM (SELECT) AS once
LEFT JOIN signing_key AS key ON key.kid = %(kid)s

-- name: write_audit
INSERT INTO audit AS held (
    what, outcome, task_id, attempt, caller, address, reason, detail, times)
SELECT what, outcome, task_id, attempt, caller, address, reason, detail, times
FROM jsonb_to_recordset(%(notes)s) AS noted(
    what text, outcome text, task_id bigint, attempt integer, caller text, address text,
    reason text, detail jsonb, times integer)
-- In one order, whoever writes.
ORDER BY what, outcome, task_id, attempt, caller, address, reason
ON CONFLICT (minute, what, outcome, task_id, attempt, caller, address, reason) DO UPDATE
SET times = held.times + excluded.times, last_at = excluded.last_at,
    detail = CASE WHEN excluded.detail = '{}' THEN held.detail ELSE excluded.detail END

-- name: audit
SELECT id, first_at, last_at, times, what, outcome, task_id, attempt, caller, address, reason,
       detail
FROM audit
WHERE (%(task)s::bigint IS NULL OR task_id = %(task)s)
  AND (%(outcome)s::text IS NULL OR outcome = %(outcome)s)
  AND (%(before)s::bigint IS NULL OR id < %(before)s)
ORDER BY id DESC
LIMIT %(limit)s
