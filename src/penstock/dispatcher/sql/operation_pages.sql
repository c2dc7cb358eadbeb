-- What people look at to operate: workers and sources. For penstock.dispatcher.views.status.

-- name: shown_workers
-- Those that were heard of in the last day, with what runs on them. Those that have left are shown
-- for an hour.
SELECT worker.name, worker.operators, worker.about, worker.first_seen_at, worker.last_seen_at,
       gone.is_gone,
       NOT gone.is_gone AND worker.last_seen_at > penstock_now() - interval '90 seconds' AS is_heard,
       coalesce(work.running, 0) AS running
FROM worker
CROSS JOIN LATERAL (SELECT worker.about -> 'has_left' IS NOT NULL AS is_gone) AS gone
LEFT JOIN (
    SELECT few.worker, count(*) AS running
    FROM (SELECT task.worker FROM task WHERE task.status = 'running' LIMIT 10000) AS few
    GROUP BY few.worker
) AS work ON work.worker = worker.name
WHERE worker.last_seen_at > penstock_now()
        - CASE WHEN gone.is_gone THEN interval '1 hour' ELSE interval '1 day' END
ORDER BY is_heard DESC, gone.is_gone, worker.name
LIMIT %(limit)s

-- name: source_news
-- When each source was last heard of, as far as indexes and the latest events tell, and how many of
-- those came within the hour. An event that is older than the latest, and has neither a cursor nor an
-- interval, is not found.
WITH latest AS MATERIALIZED (
    SELECT event.seq, event.dataset_id, event.received_at
    FROM event
    ORDER BY event.seq DESC
    LIMIT %(window)s
), news AS MATERIALIZED (
    SELECT dataset_id, max(received_at) AS heard_at,
           count(*) FILTER (WHERE received_at > penstock_now() - interval '1 hour') AS lately
    FROM latest
    GROUP BY dataset_id
)
SELECT job.name AS job, max(greatest(news.heard_at, indexed.heard_at)) AS heard_at,
       coalesce(sum(news.lately), 0)::bigint AS lately
FROM dag_current
JOIN dag_job USING (dag_version_id)
JOIN job ON job.id = dag_job.job_id
JOIN job_definition AS definition ON definition.id = dag_job.definition_id
LEFT JOIN dataset ON dataset.job_id = job.id
LEFT JOIN news ON news.dataset_id = dataset.id
LEFT JOIN LATERAL (
    SELECT max(found.received_at) AS heard_at
    FROM generation
    CROSS JOIN LATERAL (
        (SELECT event.received_at
         FROM event
         WHERE event.dataset_id = generation.dataset_id AND event.generation = generation.version
           AND event.cursor IS NOT NULL
         ORDER BY event.cursor DESC
         LIMIT 1)
        UNION ALL
        (SELECT event.received_at
         FROM event
         WHERE event.dataset_id = generation.dataset_id AND event.generation = generation.version
           AND event.range_end IS NOT NULL AND starts_with(event.dedupe, 'source:cron:')
         ORDER BY event.range_end DESC
         LIMIT 1)
    ) AS found
    WHERE generation.dataset_id = dataset.id AND generation.state IN ('current', 'building')
) AS indexed ON true
WHERE definition.body ->> 'activation' = 'source'
GROUP BY job.name
ORDER BY job.name
