-- Pausing and resuming everything at once, for penstock.dispatcher.backpressure.

-- name: pause_everything
-- By a person: all jobs of the DAG in force, and those of earlier ones that something waits for. What
-- somebody has paused before stays as it was.
INSERT INTO pause (job_id, cause, scope, reason)
SELECT job.id, 'operator', 'all', %(reason)s
FROM job
WHERE EXISTS (
        SELECT
        FROM dag_current
        JOIN dag_job USING (dag_version_id)
        WHERE dag_job.job_id = job.id)
   OR EXISTS (
        SELECT
        FROM (SELECT DISTINCT operator FROM job_definition WHERE job_id = job.id) AS had
        JOIN task ON task.operator = had.operator AND task.job_id = job.id
            AND task.status IN ('queued', 'retrying'))
ORDER BY job.id
ON CONFLICT (job_id, cause) DO NOTHING
RETURNING job_id, (SELECT job.name FROM job WHERE job.id = pause.job_id) AS name

-- name: resume_everything
-- Ends all pauses that people have made.
WITH held AS MATERIALIZED (
    SELECT job_id FROM pause WHERE cause = 'operator' ORDER BY job_id FOR UPDATE
)
DELETE FROM pause
USING held, job
WHERE pause.job_id = held.job_id AND pause.cause = 'operator' AND job.id = pause.job_id
RETURNING pause.job_id, job.name

-- name: count_paused
-- How many jobs are paused, by people and by pressure.
SELECT count(*) FILTER (WHERE cause = 'operator') AS by_people,
       count(DISTINCT job_id) FILTER (WHERE cause <> 'operator') AS by_pressure
FROM pause
