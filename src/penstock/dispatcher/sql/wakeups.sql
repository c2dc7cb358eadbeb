-- Telling other dispatchers that operators have work, for penstock.dispatcher.wakeups.

-- name: notify_wakeups
SELECT pg_notify('penstock_wakeups', payload) FROM unnest(%(payloads)s::text[]) AS payload

-- name: listen_for_wakeups
LISTEN penstock_wakeups

-- name: claimable_channels
-- The operators and priorities of which something can be claimed now.
SELECT operators.name AS operator, tier.priority
FROM (SELECT DISTINCT definition.operator AS name FROM job_definition AS definition) AS operators
CROSS JOIN unnest(ARRAY['normal', 'bulk']) AS tier(priority)
WHERE penstock_room(operators.name) > 0
  AND EXISTS (SELECT FROM penstock_claimable(operators.name, tier.priority))
