-- Carrying out what the outbox holds, for penstock.dispatcher.outbox. Every statement here may be
-- run by any number of dispatchers at once, and lost with its answer: the worst is that something
-- is sent again. So commits are not waited for to be on the disk.

-- name: take_outbox
-- Rows that are due, each lent to one relay for a while. Of those that say the same one is kept,
-- which stands for all.
WITH due AS MATERIALIZED (
    SELECT id, kind, target, body, tries
    FROM outbox
    WHERE sent_at IS NULL AND parked_at IS NULL AND due_at <= penstock_now()
      AND kind = ANY (%(kinds)s::text[])
      AND kind || ' ' || target <> ALL (%(left_alone)s::text[])
    ORDER BY due_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), kept AS MATERIALIZED (
    SELECT DISTINCT ON (kind, target, body) id
    FROM due
    ORDER BY kind, target, body, tries DESC, id
), merged AS (
    DELETE FROM outbox
    USING due
    WHERE outbox.id = due.id AND due.id NOT IN (SELECT id FROM kept)
)
UPDATE outbox
SET due_at = penstock_now() + %(lent_seconds)s * interval '1 second'
FROM kept
WHERE outbox.id = kept.id
RETURNING outbox.id, outbox.kind, outbox.target, outbox.body, outbox.tries,
          (SELECT count(*) FROM due) AS found, set_config('synchronous_commit', 'off', true)

-- name: look_ahead
-- In how many seconds the next row is due, and whether there are rows that nobody has carried
-- since long, because no dispatcher here knows their kind.
SELECT (
    SELECT extract(epoch FROM due_at - penstock_now())::double precision
    FROM outbox
    WHERE sent_at IS NULL AND parked_at IS NULL AND kind = ANY (%(kinds)s::text[])
      AND kind || ' ' || target <> ALL (%(left_alone)s::text[])
    ORDER BY due_at
    LIMIT 1
) AS next_seconds, EXISTS (
    SELECT FROM outbox
    WHERE sent_at IS NULL AND parked_at IS NULL AND kind <> ALL (%(kinds)s::text[])
      AND due_at <= penstock_now() - %(orphan_seconds)s * interval '1 second'
) AS has_orphans

-- name: park_orphans
WITH orphans AS MATERIALIZED (
    SELECT id
    FROM outbox
    WHERE sent_at IS NULL AND parked_at IS NULL AND kind <> ALL (%(kinds)s::text[])
      AND due_at <= penstock_now() - %(orphan_seconds)s * interval '1 second'
    ORDER BY due_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE outbox
SET parked_at = penstock_now(),
    last_error = 'No dispatcher knows how to carry out ' || quote_literal(kind) || '.'
FROM orphans
WHERE outbox.id = orphans.id
RETURNING outbox.id, outbox.kind, outbox.target, outbox.last_error

-- name: record_sent
-- What was sent also stands for rows that say the same and could not be sent before.
WITH sent AS (
    DELETE FROM outbox WHERE id = ANY (%(rows)s::bigint[])
    RETURNING id, kind, target, body, set_config('synchronous_commit', 'off', true)
)
DELETE FROM outbox AS parked
USING sent
WHERE parked.parked_at IS NOT NULL AND parked.id <> sent.id
  AND (parked.kind, parked.target, parked.body) = (sent.kind, sent.target, sent.body)

-- name: record_failed
UPDATE outbox
SET tries = outbox.tries + 1,
    last_error = failed.error,
    due_at = penstock_now() + penstock_backoff(
        %(first_ms)s, %(max_ms)s, 2, outbox.tries + 1, random()),
    parked_at = CASE WHEN outbox.tries + 1 >= %(tries_max)s THEN penstock_now() END
FROM unnest(%(rows)s::bigint[], %(errors)s::text[]) AS failed(id, error)
WHERE outbox.id = failed.id AND outbox.parked_at IS NULL
RETURNING outbox.id, outbox.kind, outbox.target, outbox.last_error,
          outbox.parked_at IS NOT NULL AS is_parked

-- name: drop_older_parked
-- One parked row that says something is enough to show it.
DELETE FROM outbox AS older
USING outbox AS newer
WHERE newer.id = ANY (%(rows)s::bigint[]) AND newer.parked_at IS NOT NULL
  AND older.parked_at IS NOT NULL AND older.id < newer.id
  AND (older.kind, older.target, older.body) = (newer.kind, newer.target, newer.body)

-- name: parked_outbox
SELECT id, kind, target, tries, last_error, created_at, parked_at
FROM outbox
WHERE parked_at IS NOT NULL
ORDER BY parked_at, id
LIMIT %(limit)s

-- name: retry_outbox
UPDATE outbox
SET parked_at = NULL, tries = 0, due_at = penstock_now()
WHERE id = ANY (%(rows)s::bigint[]) AND parked_at IS NOT NULL
RETURNING id

-- name: count_outbox
SELECT count(*) FILTER (WHERE parked_at IS NULL) AS pending,
       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked
FROM outbox
WHERE sent_at IS NULL

-- name: reconcile
-- Wake operators whose tasks could be claimed and have not been for too long; each of them at most
-- once in that time, whoever does it: by rows, or after the commit.
WITH waiting AS MATERIALIZED (
    SELECT operators.name AS operator, tier.priority
    FROM (SELECT DISTINCT definition.operator AS name FROM job_definition AS definition)
        AS operators
    CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    WHERE penstock_room(operators.name) > 0 AND EXISTS (
        SELECT FROM penstock_claimable(operators.name, tier.priority) AS claimable
        WHERE claimable.due_at <= penstock_now() - %(waited_seconds)s * interval '1 second')
), noted AS (
    INSERT INTO reconciled AS held (operator, priority, woken_at)
    SELECT operator, priority, penstock_now() FROM waiting ORDER BY operator, priority
    ON CONFLICT (operator, priority) DO UPDATE SET woken_at = excluded.woken_at
    WHERE held.woken_at <= excluded.woken_at - %(waited_seconds)s * interval '1 second'
    RETURNING operator, priority
), written AS (
    INSERT INTO outbox (kind, target, body)
    SELECT 'wake', operator || '/' || priority,
           jsonb_build_object('operator', operator, 'priority', priority)
    FROM noted
    WHERE %(by_rows)s
    ORDER BY operator, priority
)
SELECT operator, priority, 1 AS tasks FROM noted ORDER BY operator, priority

-- name: retry_projections
-- What readers without Postgres are to be told is told when the store is there again, however long it
-- was away; one try each time, and it is parked again if that fails.
UPDATE outbox
SET parked_at = NULL, tries = greatest(0, tries - 1), due_at = penstock_now()
WHERE kind = 'project' AND parked_at <= penstock_now() - %(parked_seconds)s * interval '1 second'

-- name: drop_parked_invocations
-- Of tasks that wait no more.
DELETE FROM outbox
WHERE kind = 'invoke' AND parked_at IS NOT NULL AND NOT EXISTS (
    SELECT FROM task
    WHERE task.id = (outbox.body ->> 'task_id')::bigint AND task.status IN ('queued', 'retrying'))

-- name: invoke_next
-- What a wake-up means for functions: invocations of the next tasks, as many as could be claimed,
-- but for those that have one. An invocation that was parked lately is not tried again yet.
WITH next AS MATERIALIZED (
    SELECT found.id
    FROM (
        SELECT claimable.job_id, claimable.room
        FROM penstock_claimable(%(operator)s, %(priority)s) AS claimable
        ORDER BY claimable.due_at, claimable.job_id
    ) AS jobs
    CROSS JOIN LATERAL (
        SELECT task.id
        FROM task
        JOIN job_definition AS definition ON definition.id = task.definition_id
        WHERE task.operator = %(operator)s AND task.job_id = jobs.job_id
          AND task.priority = %(priority)s AND task.status IN ('queued', 'retrying')
          AND task.due_at <= penstock_now() AND definition.runtime = 'lambda'
        ORDER BY task.due_at, task.id
        LIMIT least(jobs.room, %(limit)s)
    ) AS found
    LIMIT least(%(limit)s, penstock_room(%(operator)s))
), made AS (
    INSERT INTO outbox (kind, target, body)
    SELECT 'invoke', %(operator)s::text, jsonb_build_object('task_id', next.id)
    FROM next
    WHERE NOT EXISTS (
        SELECT FROM outbox AS open
        WHERE open.kind = 'invoke' AND open.body ->> 'task_id' = next.id::text
          AND (open.parked_at IS NULL
               OR open.parked_at > penstock_now() - %(parked_seconds)s * interval '1 second'))
    ORDER BY next.id
    RETURNING id
)
SELECT (SELECT count(*) FROM made) AS made, NOT EXISTS (
           SELECT FROM job_definition AS definition
           WHERE definition.operator = %(operator)s AND definition.runtime = 'lambda')
       OR EXISTS (
           SELECT FROM job_definition AS definition
           WHERE definition.operator = %(operator)s AND definition.runtime <> 'lambda')
       AS has_workers

-- name: drop_invocations
DELETE FROM outbox WHERE id = ANY (%(rows)s::bigint[]) AND kind = 'invoke'

-- name: tasks_to_invoke
-- Of these tasks those that could be claimed now. The others need no invocation: they are over, or
-- whatever makes them claimable (their time, the end of a pause, room) brings the next one.
WITH asked AS MATERIALIZED (
    SELECT task.id, task.attempt, task.job_id, task.operator, task.generation, task.payload,
           row_number() OVER (PARTITION BY task.job_id ORDER BY task.due_at, task.id) AS in_job,
           row_number() OVER (PARTITION BY task.operator ORDER BY task.due_at, task.id)
               AS in_operator
    FROM task
    WHERE task.id = ANY (%(tasks)s::bigint[]) AND task.status IN ('queued', 'retrying')
      AND task.due_at <= penstock_now() AND NOT penstock_is_paused(task.job_id, task.priority)
), jobs AS MATERIALIZED (
    SELECT job_id, penstock_job_room(job_id) AS room
    FROM (SELECT DISTINCT job_id FROM asked) AS each
), operators AS MATERIALIZED (
    SELECT operator, penstock_room(operator) AS room
    FROM (SELECT DISTINCT operator FROM asked) AS each
)
SELECT asked.id AS task_id, asked.attempt + 1 AS attempt, job.name AS job, asked.operator,
       asked.generation::text, asked.payload
FROM asked
JOIN job ON job.id = asked.job_id
JOIN jobs ON jobs.job_id = asked.job_id AND asked.in_job <= jobs.room
JOIN operators ON operators.operator = asked.operator AND asked.in_operator <= operators.room
ORDER BY asked.id
