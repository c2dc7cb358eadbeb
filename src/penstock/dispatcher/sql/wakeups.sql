-- Telling other dispatchers that operators have work, for penstock.dispatcher.wakeups.

-- name: notify_wakeups
SELECT pg_notify('penstock_wakeups', payload) FROM unnest(%(payloads)s::text[]) AS payload

-- name: listen_for_wakeups
LISTEN penstock_wakeups

-- name: claimable_tasks
-- How many tasks of these operators, or of all, can be claimed now, by priority and up to a bound.
SELECT each.operator, tier.priority,
       least(sum(found.tasks), penstock_room(each.operator), %(tasks_max)s)::integer AS tasks
FROM unnest(coalesce(
         %(operators)s::text[], ARRAY(SELECT DISTINCT operator FROM job_definition)
     )) AS each(operator)
CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
CROSS JOIN LATERAL penstock_claimable(each.operator, tier.priority) AS claimable
CROSS JOIN LATERAL (
    SELECT count(*) AS tasks
    FROM (
        SELECT
        FROM task
        WHERE task.operator = each.operator AND task.job_id = claimable.job_id
          AND task.priority = tier.priority AND task.status IN ('queued', 'retrying')
          AND task.due_at <= penstock_now()
        LIMIT least(claimable.room, %(tasks_max)s)
    ) AS first
) AS found
WHERE penstock_room(each.operator) > 0
GROUP BY each.operator, tier.priority
