-- Sessions of the console that people have ended, for penstock.console.sessions.

-- name: end_session
INSERT INTO ended_session (number, forget_at)
VALUES (%(number)s, penstock_now() + %(seconds)s * interval '1 second')
ON CONFLICT DO NOTHING

-- name: forget_ended_sessions
DELETE FROM ended_session
WHERE number IN (
    SELECT old.number
    FROM ended_session AS old
    WHERE old.forget_at < penstock_now()
    ORDER BY old.forget_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)

-- name: ended_sessions
SELECT number FROM ended_session WHERE number = ANY (%(numbers)s::text[])
