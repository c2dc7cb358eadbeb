-- Rules judged, and notices sent, for penstock.dispatcher.alerts; and alerts as people look at them.

-- name: take_alert_lock
-- Until the end of the transaction; whoever does not get it leaves the judging to who has. The
-- number is ours alone: "alerting" in letters.
SELECT pg_try_advisory_xact_lock(7020097461417504359) AS is_ours

-- name: take_alert_turn
-- The judge of the last turn goes on; another one only if nothing was heard of it for a while. After
-- a time without any judge nothing is opened for a while that is about silence.
INSERT INTO alert_judge AS held (name, ran_at, quiet_until, said)
VALUES (%(name)s, penstock_now(), penstock_now() + %(quiet_seconds)s * interval '1 second', %(said)s)
ON CONFLICT (single) DO UPDATE
SET name = excluded.name, ran_at = excluded.ran_at, said = excluded.said,
    quiet_until = CASE
        WHEN held.ran_at <= excluded.ran_at - %(outage_seconds)s * interval '1 second'
            THEN excluded.quiet_until
        ELSE held.quiet_until END
WHERE held.name = excluded.name
   OR held.ran_at <= excluded.ran_at - %(away_seconds)s * interval '1 second'
RETURNING held.ran_at AS now, held.quiet_until > held.ran_at AS is_quiet

-- name: dead_tasks_of_jobs
-- Not those of always-on sources, which have a rule of their own, nor those that nobody misses.
SELECT job.name AS subject, dead.count, last.id AS task_id, last.reason
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
CROSS JOIN LATERAL (
    SELECT count(*)
    FROM (
        SELECT
        FROM task
        WHERE task.job_id = job.id AND task.status = 'dead'
          AND (%(within)s::double precision IS NULL
               OR task.settled_at > penstock_now() - %(within)s * interval '1 second')
          AND NOT starts_with(task.dedupe_key, 'source:')
          AND NOT EXISTS (SELECT FROM generation
                          WHERE generation.version = task.generation
                            AND generation.state IN ('retired', 'abandoned'))
        LIMIT 10000
    ) AS first
) AS dead
CROSS JOIN LATERAL (
    SELECT task.id, task.reason
    FROM task
    WHERE task.job_id = job.id AND task.status = 'dead'
      AND NOT starts_with(task.dedupe_key, 'source:')
      AND NOT EXISTS (SELECT FROM generation
                      WHERE generation.version = task.generation
                        AND generation.state IN ('retired', 'abandoned'))
    ORDER BY task.settled_at DESC, task.id DESC
    LIMIT 1
) AS last
WHERE dead.count >= %(at_least)s
ORDER BY job.name

-- name: failure_rates_of_jobs
-- By the latest 20,000 attempts of all jobs that have ended within the time: no more are ever read.
-- What was cancelled, or given back, says nothing of the job.
WITH ended AS MATERIALIZED (
    SELECT attempt.task_id, attempt.reason, attempt.ended_at,
           attempt.outcome <> 'completed' AS is_failed
    FROM attempt
    WHERE attempt.ended_at > penstock_now() - %(within)s * interval '1 second'
      AND attempt.outcome IN ('completed', 'failed', 'expired')
    ORDER BY attempt.ended_at DESC
    LIMIT 20000
)
SELECT job.name AS subject, count(*), count(*) FILTER (WHERE ended.is_failed) AS failed,
       (array_agg(task.id ORDER BY ended.ended_at DESC, task.id DESC)
            FILTER (WHERE ended.is_failed))[1]
           AS task_id,
       (array_agg(ended.reason ORDER BY ended.ended_at DESC, task.id DESC)
            FILTER (WHERE ended.is_failed))[1]
           AS reason
FROM ended
JOIN task ON task.id = ended.task_id
JOIN job ON job.id = task.job_id
WHERE EXISTS (SELECT FROM dag_current JOIN dag_job USING (dag_version_id)
              WHERE dag_job.job_id = job.id)
GROUP BY job.name
HAVING count(*) >= %(at_least)s
   AND count(*) FILTER (WHERE ended.is_failed) * 100 >= %(percent)s * count(*)
ORDER BY job.name

-- name: parked_messages
-- One row if so many are parked.
SELECT parked.count, last.kind, last.target, last.last_error AS reason
FROM (
    SELECT count(*)
    FROM (SELECT FROM outbox WHERE parked_at IS NOT NULL LIMIT 10000) AS first
) AS parked
CROSS JOIN LATERAL (
    SELECT outbox.kind, outbox.target, outbox.last_error
    FROM outbox
    WHERE outbox.parked_at IS NOT NULL
    ORDER BY outbox.parked_at DESC, outbox.id DESC
    LIMIT 1
) AS last
WHERE parked.count >= %(at_least)s

-- name: tables_behind
-- Tables of Postgres data that have lacked something for so long: see hot_state.sql.
SELECT dataset.name AS subject, hot_table.problem,
       (SELECT count(*) FROM event
        WHERE event.routed = 'applying' AND event.dataset_id = dataset.id) AS events
FROM hot_table
JOIN dataset ON dataset.id = hot_table.dataset_id
WHERE EXISTS (
    SELECT FROM hot_partition
    WHERE hot_partition.dataset_id = dataset.id
      AND hot_partition.applied < hot_partition.wanted
      AND hot_partition.since
          <= penstock_now() - %(longer_than)s::double precision * interval '1 second')
ORDER BY dataset.name

-- name: ages_of_datasets
-- When each dataset of the DAG in force was last published; one that a source writes is published by
-- nobody, and its events tell. What has none yet is as old as its generation.
SELECT dataset.name AS subject, latest.at, live.created_at AS made_at,
       coalesce(latest.at, live.created_at)
           <= penstock_now() - %(longer_than)s * interval '1 second' AS is_stale
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
JOIN generation AS live ON live.version = dag_job.generation
JOIN dataset ON dataset.id = live.dataset_id
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN definition.body ->> 'activation' = 'source' THEN (
            SELECT event.received_at
            FROM event
            WHERE event.dataset_id::text = dataset.id::text
            ORDER BY event.seq DESC
            LIMIT 1)
        ELSE (
            SELECT max(newest.published_at)
            FROM generation AS read
            CROSS JOIN LATERAL (
                SELECT publication.published_at
                FROM publication
                WHERE publication.dataset_id = read.dataset_id
                  AND publication.generation = read.version
                ORDER BY publication.published_at DESC
                LIMIT 1
            ) AS newest
            WHERE read.dataset_id = dataset.id AND read.state IN ('current', 'building'))
        END AS at
) AS latest
ORDER BY dataset.name

-- name: ages_of_sources
-- When each source of the DAG in force was last heard of, and whether it was told to be silent.
SELECT job.name AS subject, heard.at, heard.made_at,
       coalesce(heard.at, heard.made_at)
           <= penstock_now() - %(longer_than)s * interval '1 second' AS is_silent,
       EXISTS (SELECT FROM pause
               WHERE pause.job_id = job.id
                 AND (pause.scope = 'all' OR definition.priority = 'bulk')) AS is_paused
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL (
    SELECT max(told.received_at) AS at, max(live.created_at) AS made_at
    FROM generation AS live
    LEFT JOIN LATERAL (
        SELECT event.received_at
        FROM event
        WHERE event.dataset_id::text = live.dataset_id::text
        ORDER BY event.seq DESC
        LIMIT 1
    ) AS told ON true
    WHERE live.version = dag_job.generation
) AS heard
WHERE definition.body ->> 'activation' = 'source' AND heard.made_at IS NOT NULL
ORDER BY job.name

-- name: deaths_of_sources
-- Always-on sources whose last task that is over has died, unless another one runs since a while.
SELECT job.name AS subject, died.id AS task_id, died.reason
FROM penstock_sources_wanted() AS wanted
JOIN job ON job.id = wanted.job_id
CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.reason, task.claimed_at
    FROM task
    WHERE task.job_id = wanted.job_id AND task.generation = wanted.generation
      AND starts_with(task.dedupe_key, 'source:')
    ORDER BY task.id DESC
    LIMIT 1
) AS latest
CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.reason
    FROM task
    WHERE task.job_id = wanted.job_id AND task.generation = wanted.generation
      AND starts_with(task.dedupe_key, 'source:')
      AND task.status IN ('completed', 'dead', 'cancelled')
    ORDER BY task.id DESC
    LIMIT 1
) AS died
WHERE died.status = 'dead' AND NOT (
    latest.status = 'running'
    AND latest.claimed_at <= penstock_now() - %(steady)s * interval '1 second')
ORDER BY job.name, died.id DESC

-- name: lasting_pressure
SELECT job.name AS subject, pressure.reason, pressure.since
FROM pressure
JOIN job ON job.id = pressure.job_id
WHERE pressure.pressed
  AND pressure.since <= penstock_now() - %(longer_than)s * interval '1 second'
ORDER BY job.name

-- name: missing_workers
-- A row if the DAG in force has jobs that workers run, since long, and none was heard of; else one for
-- tasks that wait since long in a queue whose workers were not heard of.
(SELECT heard.at, NULL AS operator
FROM dag_current
CROSS JOIN LATERAL (SELECT max(worker.last_seen_at) AS at FROM worker) AS heard
WHERE greatest(heard.at, dag_current.since)
        <= penstock_now() - %(longer_than)s * interval '1 second'
  AND EXISTS (
      SELECT
      FROM dag_job
      JOIN job_definition AS definition ON definition.id = dag_job.definition_id
      WHERE dag_job.dag_version_id = dag_current.dag_version_id AND definition.operator <> ''
        AND definition.runtime <> ALL (%(others)s::text[])
        AND (NOT %(if_waiting)s OR EXISTS (
            SELECT
            FROM task
            WHERE task.operator = definition.operator AND task.job_id = definition.job_id
              AND task.status IN ('queued', 'retrying') AND task.due_at <= penstock_now()))))
UNION ALL
(SELECT heard.at, definition.operator
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
CROSS JOIN LATERAL (
    SELECT max(worker.last_seen_at) AS at
    FROM worker
    WHERE definition.operator = ANY (worker.operators)
       OR worker.about -> 'served' ? definition.operator
) AS heard
WHERE definition.operator <> '' AND definition.runtime <> ALL (%(others)s::text[])
  AND coalesce(heard.at <= penstock_now() - %(longer_than)s * interval '1 second', true)
  AND EXISTS (
      SELECT
      FROM task
      WHERE task.operator = definition.operator AND task.job_id = definition.job_id
        AND task.status IN ('queued', 'retrying')
        AND task.due_at <= penstock_now() - %(longer_than)s * interval '1 second')
  AND NOT EXISTS (SELECT FROM pause WHERE pause.job_id = definition.job_id)
ORDER BY definition.operator
LIMIT 1)

-- name: standing_alerts
SELECT id, rule, subject, summary, path, detail, clear_since
FROM alert
WHERE over_at IS NULL
ORDER BY id

-- name: open_alerts
INSERT INTO alert (rule, kind, subject, summary, path, detail)
SELECT asked.rule, asked.kind, asked.subject, asked.summary, asked.path, asked.detail
FROM jsonb_to_recordset(%(alerts)s)
    AS asked(rule text, kind text, subject text, summary text, path text, detail jsonb)
ORDER BY asked.rule, asked.subject
ON CONFLICT (rule, subject) WHERE over_at IS NULL DO NOTHING

-- name: change_alerts
UPDATE alert
SET summary = asked.summary, path = asked.path, detail = asked.detail, clear_since = NULL
FROM jsonb_to_recordset(%(alerts)s)
    AS asked(id bigint, summary text, path text, detail jsonb)
WHERE alert.id = asked.id AND alert.over_at IS NULL

-- name: clear_alerts
UPDATE alert
SET clear_since = penstock_now()
WHERE id = ANY (%(alerts)s::bigint[]) AND over_at IS NULL AND clear_since IS NULL

-- name: end_alerts
UPDATE alert
SET over_at = penstock_now(), over_why = asked.why
FROM unnest(%(alerts)s::bigint[], %(whys)s::text[]) AS asked(id, why)
WHERE alert.id = asked.id AND alert.over_at IS NULL
RETURNING alert.id

-- name: tell_of_opened
-- Of everything that is open: a destination that is new is told of what there is.
INSERT INTO alert_notice (alert_id, what, destination, body)
SELECT alert.id, 'opened', named.destination, jsonb_build_object(
    'id', alert.id, 'rule', alert.rule, 'kind', alert.kind, 'subject', alert.subject,
    'summary', alert.summary, 'detail', alert.detail, 'path', alert.path,
    'opened_at', alert.opened_at)
FROM alert
CROSS JOIN unnest(%(destinations)s::text[]) AS named(destination)
WHERE alert.over_at IS NULL AND NOT EXISTS (
    SELECT FROM alert_notice AS told
    WHERE told.alert_id = alert.id AND told.destination = named.destination)
ORDER BY alert.id
ON CONFLICT DO NOTHING
RETURNING id

-- name: tell_of_over
-- Whoever was to be told that it is open.
INSERT INTO alert_notice (alert_id, what, destination, body)
SELECT alert.id, 'over', told.destination, jsonb_build_object(
    'id', alert.id, 'rule', alert.rule, 'kind', alert.kind, 'subject', alert.subject,
    'summary', alert.summary, 'detail', alert.detail, 'path', alert.path,
    'opened_at', alert.opened_at, 'over_at', alert.over_at, 'over_why', alert.over_why)
FROM alert
JOIN alert_notice AS told ON told.alert_id = alert.id AND told.what = 'opened'
WHERE alert.id = ANY (%(alerts)s::bigint[])
  AND told.destination = ANY (%(destinations)s::text[])
ORDER BY alert.id
ON CONFLICT DO NOTHING
RETURNING id

-- name: give_up_orphans
-- What is for a destination that the settings do not have any more.
UPDATE alert_notice
SET given_up_at = penstock_now(),
    last_error = coalesce(last_error, 'The settings have no such destination any more.')
WHERE sent_at IS NULL AND given_up_at IS NULL AND due_at <= penstock_now()
  AND created_at <= penstock_now() - %(give_up_seconds)s * interval '1 second'
  AND destination <> ALL (%(destinations)s::text[])

-- name: forget_alerts
DELETE FROM alert
WHERE id IN (
    SELECT old.id
    FROM alert AS old
    WHERE old.over_at < penstock_now() - %(days)s * interval '1 day'
    ORDER BY old.over_at
    LIMIT %(limit)s)

-- name: take_notices
-- What is due, lent to one teller for a while. That something is over is not told before that it was.
WITH due AS MATERIALIZED (
    SELECT notice.id
    FROM alert_notice AS notice
    WHERE notice.sent_at IS NULL AND notice.given_up_at IS NULL
      AND notice.due_at <= penstock_now()
      AND notice.destination = ANY (%(destinations)s::text[])
      AND NOT (notice.what = 'over' AND EXISTS (
          SELECT FROM alert_notice AS first
          WHERE first.alert_id = notice.alert_id AND first.destination = notice.destination
            AND first.what = 'opened' AND first.sent_at IS NULL AND first.given_up_at IS NULL))
    ORDER BY notice.due_at, notice.alert_id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE alert_notice AS lent
SET due_at = penstock_now() + %(lent_seconds)s * interval '1 second'
FROM due
WHERE lent.id = due.id
RETURNING lent.id::text, lent.destination, lent.what, lent.body, lent.tries,
          extract(epoch FROM penstock_now())::double precision AS now

-- name: record_notice_sent
UPDATE alert_notice
SET sent_at = penstock_now(), given_up_at = NULL, tries = tries + 1, last_error = %(note)s
WHERE id = %(id)s::uuid AND sent_at IS NULL
RETURNING id

-- name: record_notice_failed
UPDATE alert_notice
SET tries = tries + 1, last_error = %(why)s,
    due_at = penstock_now() + penstock_backoff(
        %(first_ms)s, %(max_ms)s, 2, tries + 1, random()),
    given_up_at = CASE
        WHEN created_at <= penstock_now() - %(give_up_seconds)s * interval '1 second'
            THEN penstock_now() END
WHERE id = %(id)s::uuid AND tries = %(tries)s AND sent_at IS NULL AND given_up_at IS NULL
RETURNING given_up_at IS NOT NULL AS is_given_up

-- name: return_notices
-- What was lent and not tried.
UPDATE alert_notice
SET due_at = penstock_now() + %(pause_seconds)s * interval '1 second'
FROM unnest(%(ids)s::uuid[], %(tries)s::integer[]) AS lent(id, tries)
WHERE alert_notice.id = lent.id AND alert_notice.tries = lent.tries
  AND alert_notice.sent_at IS NULL AND alert_notice.given_up_at IS NULL

-- name: list_alerts
-- Those that are open first, then those that are over, each the newest first.
SELECT alert.id, alert.rule, alert.kind, alert.subject, alert.summary, alert.path, alert.detail,
       alert.opened_at, alert.clear_since, alert.over_at, alert.over_why
FROM alert
WHERE (%(is_open)s::boolean IS NULL OR (alert.over_at IS NULL) = %(is_open)s)
  AND (%(before)s::bigint IS NULL OR alert.id < %(before)s)
ORDER BY alert.id DESC
LIMIT %(limit)s

-- name: notices_of_alerts
SELECT alert_id, id::text, what, destination, created_at, due_at, tries, last_error, sent_at,
       given_up_at
FROM alert_notice
WHERE alert_id = ANY (%(alerts)s::bigint[])
ORDER BY alert_id, what, destination

-- name: alert_judge
SELECT ran_at, quiet_until > penstock_now() AS is_quiet, said FROM alert_judge

-- name: count_open_alerts
-- Not those whose cause is gone, which only wait to be over.
SELECT count(*)
FROM (SELECT FROM alert WHERE over_at IS NULL AND clear_since IS NULL LIMIT 1000) AS first
