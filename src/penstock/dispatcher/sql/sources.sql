-- Always-on sources, for penstock.dispatcher.sources.monitor. A task of such a source has the key
-- `source:` and a number that counts them, for each generation.

-- name: standing_sources
-- Each source that should run, its latest task, and the pause before the next one if that is over:
-- longer with each that has ended within the last hour, the last ten of them.
SELECT job.name AS job, wanted.definition_id, wanted.generation::text, latest.id AS task_id,
       latest.status, latest.attempt, coalesce(latest.cancel_asked, false) AS cancel_asked,
       latest.reason, latest.due_at > penstock_now() AS is_early,
       coalesce(substr(latest.dedupe_key, 8)::bigint, 0) AS number,
       CASE
           WHEN latest.status IN ('dead', 'completed') THEN greatest(0, ceil(1000 * extract(
               epoch FROM latest.settled_at - penstock_now() + penstock_backoff(
                   definition.retry_first_ms, definition.retry_max_ms, definition.retry_backoff,
                   greatest(1, ended.count)::integer, random()))))::bigint
           ELSE 0
       END AS delay_ms
FROM penstock_sources_wanted() AS wanted
JOIN job ON job.id = wanted.job_id
JOIN job_definition AS definition ON definition.id = wanted.definition_id
LEFT JOIN LATERAL (
    SELECT task.*
    FROM task
    WHERE task.job_id = wanted.job_id AND task.generation = wanted.generation
      AND starts_with(task.dedupe_key, 'source:')
    ORDER BY task.id DESC
    LIMIT 1
) AS latest ON true
CROSS JOIN LATERAL (
    SELECT count(*)
    FROM (
        SELECT task.status, task.settled_at
        FROM task
        WHERE task.job_id = wanted.job_id AND task.generation = wanted.generation
          AND starts_with(task.dedupe_key, 'source:')
        ORDER BY task.id DESC
        LIMIT 10
    ) AS recent
    WHERE recent.status IN ('dead', 'completed')
      AND recent.settled_at > penstock_now() - interval '1 hour'
) AS ended
ORDER BY job.name, wanted.generation

-- name: unwanted_sources
-- What still waits or runs for a source that should not, or not as it was defined, or beside a later
-- task: one that was dead, and that somebody has replayed.
SELECT job.name AS job, task.generation::text, task.id AS task_id, task.attempt, task.reason,
       task.cancel_asked, later.is_doubled
FROM task
JOIN job ON job.id = task.job_id
CROSS JOIN LATERAL (
    SELECT EXISTS (
        SELECT
        FROM task AS newer
        WHERE newer.job_id = task.job_id AND newer.id > task.id
          AND newer.generation = task.generation AND starts_with(newer.dedupe_key, 'source:')
    ) AS is_doubled
) AS later
WHERE task.generation IN (
        SELECT dag_job.generation
        FROM dag_job
        JOIN job_definition AS definition ON definition.id = dag_job.definition_id
        WHERE definition.body -> 'source' ->> 'kind' = 'always_on')
  AND task.status IN ('queued', 'retrying', 'running')
  AND starts_with(task.dedupe_key, 'source:')
  AND (later.is_doubled OR NOT EXISTS (
      SELECT
      FROM penstock_sources_wanted() AS wanted
      WHERE wanted.job_id = task.job_id AND wanted.generation = task.generation
        AND wanted.definition_id = task.definition_id))
ORDER BY task.id
LIMIT %(limit)s
