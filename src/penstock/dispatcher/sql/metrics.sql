-- Figures for people, autoscalers and alarms, for penstock.dispatcher.metrics. Whatever can be long
-- is counted to 10,000.

-- name: operator_loads
-- Operators of the DAG in force, those with tasks, and those with a limit.
WITH served AS MATERIALIZED (
    SELECT DISTINCT definition.operator, definition.job_id
    FROM job_definition AS definition
    WHERE definition.operator <> ''
), in_force AS MATERIALIZED (
    SELECT DISTINCT definition.operator
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN job_definition AS definition ON definition.id = dag_job.definition_id
), work AS MATERIALIZED (
    SELECT served.operator, running.count AS running, waiting.count AS waiting,
           least(waiting.count, greatest(0, coalesce(job.max_concurrency - (
               SELECT count(*) FROM task
               WHERE task.job_id = served.job_id AND task.status = 'running'),
               waiting.count))) AS startable
    FROM served
    JOIN job ON job.id = served.job_id
    CROSS JOIN LATERAL (
        SELECT count(*)
        FROM task
        WHERE task.operator = served.operator AND task.job_id = served.job_id
          AND task.status = 'running'
    ) AS running
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(counted.count), 0)::bigint AS count
        FROM unnest(ARRAY['normal', 'bulk']) AS tier(priority)
        CROSS JOIN LATERAL (
            SELECT count(*)
            FROM (
                SELECT
                FROM task
                WHERE task.operator = served.operator AND task.job_id = served.job_id
                  AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
                  AND task.due_at <= penstock_now()
                LIMIT 10000
            ) AS due
        ) AS counted
        WHERE NOT penstock_is_paused(served.job_id, tier.priority)
    ) AS waiting
), loads AS (
    SELECT operator, sum(running)::bigint AS running, sum(waiting)::bigint AS waiting,
           sum(startable)::bigint AS startable
    FROM work
    GROUP BY operator
)
SELECT loads.operator AS name, loads.running AS in_flight, operator.in_flight_max,
       least(loads.waiting, 10000) AS waiting,
       least(loads.running + least(loads.startable, 10000),
             coalesce(operator.in_flight_max, 9223372036854775807)) AS desired
FROM loads
LEFT JOIN operator ON operator.name = loads.operator
WHERE loads.running + loads.waiting > 0 OR operator.in_flight_max IS NOT NULL
   OR loads.operator IN (SELECT in_force.operator FROM in_force)
ORDER BY loads.operator

-- name: operator_names
-- All that there ever were.
SELECT DISTINCT operator AS name FROM job_definition WHERE operator <> '' ORDER BY operator

-- name: job_figures
-- The jobs of the DAG in force that run something.
SELECT job.name, waiting.normal, waiting.bulk, waiting.oldest_seconds, running.count AS running,
       dead.count AS dead,
       EXISTS (SELECT FROM pause WHERE pause.job_id = job.id) AS is_paused,
       coalesce((SELECT pressed FROM pressure WHERE pressure.job_id = job.id), false) AS is_pressed
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
CROSS JOIN LATERAL (
    SELECT coalesce(sum(counted.count) FILTER (WHERE tier.priority = 'normal'), 0)::bigint
               AS normal,
           coalesce(sum(counted.count) FILTER (WHERE tier.priority = 'bulk'), 0)::bigint AS bulk,
           greatest(0, coalesce(
               extract(epoch FROM penstock_now() - min(counted.due_at)), 0))::double precision
               AS oldest_seconds
    FROM (
        SELECT DISTINCT definition.operator
        FROM job_definition AS definition
        WHERE definition.job_id = job.id AND definition.operator <> ''
    ) AS named
    CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
    CROSS JOIN LATERAL (
        SELECT count(*), min(first.due_at) AS due_at
        FROM (
            SELECT task.due_at
            FROM task
            WHERE task.operator = named.operator AND task.job_id = job.id
              AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
            ORDER BY task.due_at, task.id
            LIMIT 10000
        ) AS first
    ) AS counted
) AS waiting
CROSS JOIN LATERAL (
    SELECT count(*) FROM task WHERE task.job_id = job.id AND task.status = 'running'
) AS running
CROSS JOIN LATERAL (
    SELECT count(*)
    FROM (
        SELECT FROM task WHERE task.job_id = job.id AND task.status = 'dead'
            AND NOT EXISTS (SELECT FROM generation
                            WHERE generation.version = task.generation
                              AND generation.state IN ('retired', 'abandoned'))
        LIMIT 10000
    ) AS first
) AS dead
WHERE EXISTS (
    SELECT
    FROM job_definition AS definition
    WHERE definition.job_id = job.id AND definition.operator <> '')
ORDER BY job.name

-- name: overall_figures
SELECT penstock_now() AS now,
       (SELECT count(*) FROM (
            (SELECT FROM event WHERE routed = 'pending' LIMIT 10000)
            UNION ALL (SELECT FROM event WHERE routed = 'held' LIMIT 10000)
            UNION ALL (SELECT FROM event WHERE routed = 'applying' LIMIT 10000)
            LIMIT 10000) AS first) AS events_pending,
       coalesce((
            SELECT extract(epoch FROM penstock_now() - event.received_at)
            FROM event WHERE routed = 'pending' ORDER BY seq LIMIT 1), 0)::double precision
           AS events_oldest_seconds,
       (SELECT count(*) FROM event
        WHERE received_at > penstock_now() - interval '1 minute') AS events_last_minute,
       (SELECT count(*) FROM (
            SELECT FROM outbox
            WHERE sent_at IS NULL AND parked_at IS NULL AND due_at <= penstock_now()
            LIMIT 10000) AS first) AS outbox_pending,
       (SELECT count(*) FROM (
            SELECT FROM outbox WHERE parked_at IS NOT NULL LIMIT 10000) AS first) AS outbox_parked,
       (SELECT count(*) FROM hot_table
        WHERE NOT is_served OR problem IS NOT NULL OR EXISTS (
            SELECT FROM hot_partition
            WHERE hot_partition.dataset_id = hot_table.dataset_id AND applied < wanted))
           AS hot_tables_behind,
       coalesce((
            SELECT extract(epoch FROM penstock_now() - min(since))
            FROM hot_partition WHERE applied < wanted), 0)::double precision
           AS hot_tables_behind_seconds,
       (SELECT count(*) FROM worker
        WHERE last_seen_at > penstock_now() - interval '90 seconds'
          AND about -> 'has_left' IS NULL) AS workers

-- name: settled_figures
-- What has ended in the last minute.
SELECT status, count(*)
FROM task
WHERE settled_at > penstock_now() - interval '1 minute'
GROUP BY status

-- name: limit_operator
INSERT INTO operator (name, in_flight_max)
SELECT %(name)s, %(in_flight_max)s
WHERE EXISTS (SELECT FROM job_definition WHERE operator = %(name)s)
   OR EXISTS (SELECT FROM operator WHERE name = %(name)s)
ON CONFLICT (name) DO UPDATE SET in_flight_max = excluded.in_flight_max
RETURNING name

-- name: jobs_of_operator
SELECT DISTINCT job_id FROM job_definition WHERE operator = %(name)s

-- name: take_turn
-- Of any number of dispatchers one does it, once in so many seconds.
INSERT INTO turn_taken AS held (name, taken_at) VALUES (%(name)s, penstock_now())
ON CONFLICT (name) DO UPDATE SET taken_at = excluded.taken_at
WHERE held.taken_at + %(seconds)s * interval '1 second' <= excluded.taken_at
RETURNING name
