-- Whether an attempt may have credentials: for penstock.dispatcher.api.worker_endpoints.

-- name: running_attempt
-- Attempts are numbered and never again: without its lease token, too, this is the one.
SELECT task.cancel_asked,
       penstock_has_grants(task.grants, task.attempt, %(grants)s) AS has_grants
FROM task
WHERE task.id = %(task)s AND task.attempt = %(attempt)s AND task.status = 'running'
