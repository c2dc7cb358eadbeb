-- Statements about the server and the connection, for penstock.dispatcher.database.

-- name: missing_database
-- The statement that makes the database, if there is none of this name.
SELECT format('CREATE DATABASE %%I', %(name)s::text)
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = %(name)s)

-- name: missing_roles
-- The statements that make the roles of the database for tables of data. Who reads has a bound for how
-- long a transaction is left open: some changes of tables wait for it.
SELECT format(statement, role.name)
FROM (VALUES (%(data)s::text, ARRAY['CREATE ROLE %%I LOGIN']),
             (%(reader)s::text, ARRAY[
                 'CREATE ROLE %%I LOGIN',
                 'ALTER ROLE %%I SET idle_in_transaction_session_timeout = 600000',
                 'ALTER ROLE %%I SET default_transaction_read_only = on',
                 'ALTER ROLE %%I SET search_path = hot']))
    AS role(name, statements)
CROSS JOIN LATERAL unnest(role.statements) AS statement
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role.name)

-- name: data_privileges
-- Once: the database for tables of data is its owner's, and only its reader may look into it.
SELECT format(statement, %(data)s::text, %(data)s::text, %(reader)s::text)
FROM unnest(ARRAY[
    'ALTER DATABASE %%1$I OWNER TO %%2$I',
    'REVOKE ALL ON DATABASE %%1$I FROM PUBLIC',
    'GRANT CONNECT ON DATABASE %%1$I TO %%3$I']) AS statement
WHERE EXISTS (
    SELECT FROM pg_database
    JOIN pg_roles ON pg_roles.oid = pg_database.datdba
    WHERE datname = %(data)s AND %(name)s = %(data)s AND rolname <> %(data)s)

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
