-- The DAG in force as people look at it: for penstock.dispatcher.views.jobs.

-- name: edges_in_force
-- Who reads what of whom.
SELECT reader.name AS reader, edge.input, dataset.name AS dataset, writer.name AS writer,
       edge.is_trigger, edge.reads
FROM dag_current
JOIN edge USING (dag_version_id)
JOIN job AS reader ON reader.id = edge.job_id
JOIN dataset ON dataset.id = edge.dataset_id
JOIN dag_job ON dag_job.dag_version_id = dag_current.dag_version_id
JOIN generation ON generation.dataset_id = dataset.id AND generation.version = dag_job.generation
JOIN job AS writer ON writer.id = dag_job.job_id
ORDER BY reader.name, edge.input

-- name: recent_endings
-- What has ended in the last minutes, by job: some thousand rows of the newest attempts at most.
SELECT job.name AS job, count(*) FILTER (WHERE recent.outcome = 'completed') AS completed,
       count(*) FILTER (WHERE recent.outcome = 'failed') AS failed,
       max(recent.ended_at) AS last_at
FROM (
    SELECT attempt.task_id, attempt.outcome, attempt.ended_at
    FROM attempt
    WHERE attempt.ended_at > penstock_now() - %(minutes)s * interval '1 minute'
    ORDER BY attempt.ended_at DESC
    LIMIT 5000
) AS recent
JOIN task ON task.id = recent.task_id
JOIN job ON job.id = task.job_id
GROUP BY job.name
