-- Which loops of a dispatcher have work, for penstock.dispatcher.poller. Every part is a probe of an
-- index, or of a table of a few rows.

-- name: poll
SELECT EXISTS (
           SELECT FROM event
           WHERE routed = 'pending' AND (
               revision IS NOT NULL OR dataset_id NOT IN (SELECT penstock_paused_datasets()))
       ) AS is_pending,
       EXISTS (SELECT FROM event WHERE routed = 'held') AS is_held,
       EXISTS (SELECT FROM hot_partition WHERE applied < wanted)
           OR EXISTS (SELECT FROM hot_table WHERE NOT is_served) AS is_applying,
       EXISTS (SELECT FROM backfill WHERE state = 'running') AS is_backfilling,
       EXISTS (
           SELECT
           FROM unnest(%(operators)s::text[]) AS own(operator)
           CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
           CROSS JOIN LATERAL penstock_claimable(own.operator, tier.priority)
       ) AS is_ranging,
       EXISTS (
           SELECT FROM task WHERE status = 'running' AND lease_expires_at <= penstock_now()
       ) AS is_expired,
       EXISTS (SELECT FROM task WHERE status = 'running') AS is_running,
       EXISTS (SELECT FROM generation WHERE state = 'building') AS is_building,
       EXISTS (SELECT FROM task WHERE status IN ('queued', 'retrying'))
           OR EXISTS (SELECT FROM pressure WHERE depth > 0 OR reason IS NOT NULL) AS is_waiting,
       EXISTS (SELECT FROM buffer_batch WHERE state = 'released') AS is_buffered,
       EXISTS (SELECT FROM outbox WHERE parked_at IS NOT NULL) AS is_parked,
       (SELECT extract(epoch FROM due_at - penstock_now())::double precision
        FROM outbox
        WHERE sent_at IS NULL AND parked_at IS NULL
        ORDER BY due_at
        LIMIT 1) AS outbox_seconds,
       (SELECT dag_version_id FROM dag_current) AS dag_version
