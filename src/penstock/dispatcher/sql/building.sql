-- Which generations may be cut over, for penstock.dispatcher.building.

-- name: building_jobs
-- What the DAG in force names and readers are not served yet: a dataset of each job, whether a job
-- downstream is being built too, and whether a rebuild and its tasks are over. Partitions that are
-- missing are looked for under the locks of the cut-over, for what the others leave.
WITH RECURSIVE building AS MATERIALIZED (
    SELECT dag_job.job_id, dag_job.dag_version_id, generation.version,
           (array_agg(generation.dataset_id ORDER BY generation.dataset_id))[1] AS dataset_id
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN generation ON generation.version = dag_job.generation AND generation.state = 'building'
    GROUP BY dag_job.job_id, dag_job.dag_version_id, generation.version
), upstream AS (
    SELECT building.job_id, building.dag_version_id FROM building
    UNION
    SELECT writer.job_id, upstream.dag_version_id
    FROM upstream
    JOIN penstock_feeders(upstream.dag_version_id, upstream.job_id) AS writer ON true
), feeding AS (
    -- Whoever is upstream of something that is being built, and not only itself.
    SELECT DISTINCT writer.job_id
    FROM upstream
    JOIN penstock_feeders(upstream.dag_version_id, upstream.job_id) AS writer ON true
)
SELECT building.dataset_id::text AS dataset, building.version::text,
       building.job_id NOT IN (SELECT job_id FROM feeding) AS is_last,
       NOT EXISTS (
           SELECT FROM backfill
           WHERE backfill.generation = building.version AND backfill.state IN ('running', 'paused'))
       AND NOT EXISTS (
           SELECT FROM task
           WHERE task.generation = building.version AND task.backfill_id IS NOT NULL
             AND task.status IN ('queued', 'retrying', 'running')) AS is_ready
FROM building
ORDER BY building.job_id
