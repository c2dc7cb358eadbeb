-- Which generations may be cut over, for penstock.dispatcher.deployment.

-- name: building_jobs
-- What the DAG in force names and readers are not served yet: a dataset of each job, whether a job
-- downstream is being built too, and whether it is complete: its backfills and their tasks are over,
-- and so are the rebuilds upstream and what they have led to. A dataset that has one partition
-- for all would else be covered by the first that comes of a rebuild. Partitions that are missing
-- are looked for under the locks of the cut-over, for what the others leave.
WITH RECURSIVE building AS MATERIALIZED (
    SELECT dag_job.job_id, dag_job.dag_version_id, generation.version,
           (array_agg(generation.dataset_id ORDER BY generation.dataset_id))[1] AS dataset_id
    FROM dag_current
    JOIN dag_job USING (dag_version_id)
    JOIN generation ON generation.version = dag_job.generation AND generation.state = 'building'
    GROUP BY dag_job.job_id, dag_job.dag_version_id, generation.version
), upstream AS (
    SELECT building.job_id AS root, building.job_id, building.dag_version_id FROM building
    UNION
    SELECT upstream.root, writer.job_id, upstream.dag_version_id
    FROM upstream
    JOIN penstock_feeders(upstream.dag_version_id, upstream.job_id) AS writer ON true
), feeding AS MATERIALIZED (
    -- What is built of what is being built too, and itself.
    SELECT upstream.root, building.version
    FROM upstream
    JOIN building ON building.job_id = upstream.job_id
), rebuilds AS MATERIALIZED (
    SELECT feeding.root, bool_or(backfill.state IN ('running', 'paused')) AS is_open,
           max(backfill.settled_at) AS settled_at
    FROM feeding
    JOIN backfill ON backfill.generation = feeding.version AND backfill.plan ->> 'kind' = 'rebuild'
    GROUP BY feeding.root
)
SELECT building.dataset_id::text AS dataset, building.version::text,
       building.job_id NOT IN (SELECT job_id FROM upstream WHERE job_id <> root) AS is_last,
       NOT EXISTS (
           SELECT FROM backfill
           WHERE backfill.generation = building.version AND backfill.state IN ('running', 'paused'))
       AND NOT EXISTS (
           SELECT FROM task
           WHERE task.generation = building.version AND task.backfill_id IS NOT NULL
             AND task.status IN ('queued', 'retrying', 'running'))
       AND NOT EXISTS (
           SELECT FROM rebuilds WHERE rebuilds.root = building.job_id AND rebuilds.is_open)
       AND NOT EXISTS (
           SELECT
           FROM rebuilds
           WHERE rebuilds.root = building.job_id AND NOT penstock_has_caught_up(
               building.version,
               ARRAY (SELECT feeding.version FROM feeding WHERE feeding.root = building.job_id),
               rebuilds.settled_at)) AS is_ready
FROM building
ORDER BY building.job_id
