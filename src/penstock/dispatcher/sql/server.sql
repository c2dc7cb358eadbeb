-- Statements about the server and the connection, for penstock.dispatcher.database.

-- name: missing_database
-- The statement that makes the database, if there is none of this name.
SELECT format('CREATE DATABASE %%I', %(name)s::text)
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = %(name)s)

-- name: set_up_connection
-- The statements are few, and planning one anew costs more than running it.
SELECT set_config('application_name', %(application)s, false),
       set_config('statement_timeout', %(statement_ms)s, false),
       set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s, false),
       set_config('plan_cache_mode', 'force_generic_plan', false),
       set_config('timezone', 'UTC', false)

-- name: take_migration_lock
-- Held until the connection lets it go or ends. The number is ours alone: "penstock" in letters.
SELECT pg_advisory_lock(8098122302937395051)

-- name: release_migration_lock
SELECT pg_advisory_unlock(8098122302937395051)

-- name: make_migration_table
CREATE TABLE IF NOT EXISTS migration (
    number integer PRIMARY KEY CHECK (number > 0),
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)

-- name: applied_migrations
SELECT number, name, checksum FROM migration ORDER BY number

-- name: record_migration
INSERT INTO migration (number, name, checksum) VALUES (%(number)s, %(name)s, %(checksum)s)
