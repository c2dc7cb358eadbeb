-- What the services of the dispatcher need besides the tasks themselves.

-- What a worker says of an attempt while it runs, and where its log is.
ALTER TABLE attempt ADD COLUMN progress jsonb;
ALTER TABLE attempt ADD COLUMN log text;

-- Which earlier versions of the DAG name a generation.
CREATE INDEX dag_job_generation ON dag_job (generation);

-- Rebuilding takes the latest event of each partition.
-- The partition comes first: an index that begins as the unique one does would be taken for it.
CREATE INDEX event_partition ON event (partition_key, dataset_id, generation, seq);

-- What retention removes is found by its age; blocks of old rows are enough, and cheap to keep.
CREATE INDEX task_settled ON task USING brin (settled_at);
CREATE INDEX event_received ON event USING brin (received_at);

-- Who asked for a backfill says so once, however often the answer is lost.
ALTER TABLE backfill ADD COLUMN request_id text UNIQUE;
ALTER TABLE backfill ADD COLUMN settled_at timestamptz;

-- What of its upstream a pressed job makes pause: nothing that is not bulk as long as that helps.
ALTER TABLE pressure ADD COLUMN scope text CHECK (scope IN ('bulk', 'all'));
ALTER TABLE pressure ADD CHECK (pressed = (scope IS NOT NULL));

-- The figures of the last minute look at blocks that are not summarized row by row.
ALTER INDEX task_settled SET (autosummarize = on);
ALTER INDEX event_received SET (autosummarize = on);

-- The always-on sources that should run: of each job of the DAG in force what it names, and what is
-- current until that is built, as the last version had it that names it.
CREATE FUNCTION penstock_sources_wanted()
RETURNS TABLE (job_id integer, definition_id bigint, generation uuid) LANGUAGE sql STABLE AS $$
    WITH in_force AS MATERIALIZED (
        SELECT dag_job.job_id, dag_job.definition_id, dag_job.generation
        FROM dag_current
        JOIN dag_job USING (dag_version_id)
    ), replaced AS (
        SELECT DISTINCT ON (earlier.generation)
               earlier.job_id, earlier.definition_id, earlier.generation
        FROM in_force
        JOIN generation AS next ON next.version = in_force.generation AND next.state = 'building'
        JOIN generation AS served
            ON served.dataset_id = next.dataset_id AND served.state = 'current'
        JOIN dag_job AS earlier
            ON earlier.generation = served.version AND earlier.job_id = in_force.job_id
        ORDER BY earlier.generation, earlier.dag_version_id DESC
    )
    SELECT live.job_id, live.definition_id, live.generation
    FROM (SELECT * FROM in_force UNION SELECT * FROM replaced) AS live
    JOIN job_definition AS definition ON definition.id = live.definition_id
    WHERE definition.body -> 'source' ->> 'kind' = 'always_on'
$$;

-- When what one dispatcher does for all was last done.
CREATE TABLE turn_taken (
    name text PRIMARY KEY,
    taken_at timestamptz NOT NULL
);

-- The highest cursor of a source, by which it goes on; and the tasks of a job as people page them.
CREATE INDEX event_cursor ON event (dataset_id, generation, cursor) WHERE cursor IS NOT NULL;
CREATE INDEX task_job ON task (job_id, id);

-- The outbox: whether a task has an invocation that is open, and when an operator whose tasks waited
-- too long was last woken because of it, by whichever dispatcher.
CREATE INDEX outbox_invocation ON outbox ((body ->> 'task_id')) WHERE kind = 'invoke';
CREATE TABLE reconciled (
    operator text NOT NULL,
    priority text NOT NULL CHECK (priority IN ('normal', 'bulk')),
    woken_at timestamptz NOT NULL,
    PRIMARY KEY (operator, priority)
);

-- Backfills, rebuilds, ranges, coalescing --------------------------------------------------------

-- The partitions of a plan that names them one by one.
CREATE TABLE backfill_key (
    backfill_id bigint NOT NULL REFERENCES backfill ON DELETE CASCADE,
    position bigint NOT NULL CHECK (position >= 0),
    partition_key text NOT NULL CHECK (octet_length(partition_key) <= 500),
    PRIMARY KEY (backfill_id, position)
);

-- Up to which event a rebuild has made tasks, and up to which it has counted what there is to make.
ALTER TABLE backfill ADD COLUMN walked bigint NOT NULL DEFAULT 0;
ALTER TABLE backfill ADD COLUMN counted bigint NOT NULL DEFAULT 0;
ALTER TABLE backfill ADD CHECK (walked <= counted);
CREATE INDEX task_backfill_dead ON task (backfill_id)
    WHERE backfill_id IS NOT NULL AND status = 'dead';

-- What updates have in common that may become one task, for jobs that coalesce. Settled tasks are
-- in the index too: only the newest task of all may take more, for it alone is not superseded.
ALTER TABLE task ADD COLUMN coalesce_key text;
CREATE INDEX task_coalesce ON task (job_id, generation, coalesce_key, id)
    WHERE coalesce_key IS NOT NULL;

-- The events that have become part of a task that another event had made.
CREATE TABLE coalesced (
    event_seq bigint NOT NULL,
    job_id integer NOT NULL,
    generation uuid NOT NULL,
    task_id bigint NOT NULL REFERENCES task ON DELETE CASCADE,
    PRIMARY KEY (event_seq, job_id, generation)
);
CREATE INDEX coalesced_task ON coalesced (task_id);

-- How many bits the length of a range has: it is shorter than two to the power of that, which bounds
-- where the ranges begin that overlap another.
CREATE FUNCTION penstock_bits(range_start bigint, range_end bigint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN range_end::numeric - range_start > 9223372036854775807 THEN 64
        ELSE length(ltrim((range_end - range_start)::bit(64)::text, '0'))
    END
$$;
-- By the text of the generation, for the same reason as above: no other index begins with it.
CREATE INDEX event_range
    ON event ((generation::text), penstock_bits(range_start, range_end), range_start)
    WHERE range_start IS NOT NULL;

-- Whether the filter of an edge lets an event pass. Its comparisons are data, and its path is made
-- of numbers only: see penstock.dispatcher.routing.filters.
CREATE FUNCTION penstock_passes(
    filter jsonb, partition_key text, range_start bigint, range_end bigint, cursor_at bigint
) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT filter IS NULL OR jsonb_path_match(
        '{}', (filter ->> 'path')::jsonpath, (
            SELECT jsonb_object_agg('c' || term.place, coalesce(
                CASE
                    WHEN term.said ->> 'field' = 'partition_key' THEN
                        CASE term.said ->> 'operation'
                            WHEN '=' THEN partition_key = term.said ->> 'value'
                            WHEN '!=' THEN partition_key <> term.said ->> 'value'
                            WHEN 'glob' THEN partition_key LIKE term.said ->> 'value'
                            WHEN 'not glob' THEN partition_key NOT LIKE term.said ->> 'value'
                        END
                    ELSE
                        CASE term.said ->> 'operation'
                            WHEN '=' THEN field.number = term.number
                            WHEN '!=' THEN field.number <> term.number
                            WHEN '<' THEN field.number < term.number
                            WHEN '<=' THEN field.number <= term.number
                            WHEN '>' THEN field.number > term.number
                            WHEN '>=' THEN field.number >= term.number
                        END
                END, false))
            FROM (
                SELECT said, place,
                       CASE WHEN jsonb_typeof(said -> 'value') = 'number'
                            THEN (said ->> 'value')::bigint END AS number
                FROM jsonb_array_elements(filter -> 'terms') WITH ORDINALITY
                    AS listed(said, place)
            ) AS term
            CROSS JOIN LATERAL (
                SELECT CASE term.said ->> 'field'
                    WHEN 'start' THEN range_start
                    WHEN 'end' THEN range_end
                    WHEN 'cursor' THEN cursor_at
                END AS number
            ) AS field))
$$;

-- What a generation of a job reads, and by which generation each input is fed: the one of the job
-- that writes it, in the newest version of the DAG that names both.
CREATE FUNCTION penstock_inputs(reading_job integer, reading_generation uuid)
RETURNS TABLE (input text, dataset_id uuid, generation uuid, filter jsonb)
LANGUAGE sql STABLE AS $$
    SELECT edge.input, edge.dataset_id, fed.version, edge.filter
    FROM edge
    JOIN dag_job AS writer ON writer.dag_version_id = edge.dag_version_id
    JOIN generation AS fed
        ON fed.dataset_id = edge.dataset_id AND fed.version = writer.generation
    WHERE edge.job_id = reading_job AND edge.dag_version_id = (
        SELECT max(dag_job.dag_version_id)
        FROM dag_job
        WHERE dag_job.generation = reading_generation AND dag_job.job_id = reading_job)
$$;

-- The elements of two lists, each once, in order.
CREATE FUNCTION penstock_union(one jsonb, other jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(jsonb_agg(DISTINCT element ORDER BY element), '[]')
    FROM (
        SELECT jsonb_array_elements(one) AS element
        UNION
        SELECT jsonb_array_elements(other)
    ) AS elements
$$;

-- The jobs that a job reads from, in a version of the DAG.
CREATE FUNCTION penstock_feeders(named_version bigint, reading_job integer)
RETURNS TABLE (job_id integer) LANGUAGE sql STABLE AS $$
    SELECT writer.job_id
    FROM edge
    JOIN dag_job AS writer ON writer.dag_version_id = edge.dag_version_id
    JOIN generation AS fed
        ON fed.dataset_id = edge.dataset_id AND fed.version = writer.generation
    WHERE edge.dag_version_id = named_version AND edge.job_id = reading_job
$$;

-- Which version of the DAG was in force when: what a rollback goes back to ----------------------

CREATE TABLE dag_in_force (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dag_version_id bigint NOT NULL REFERENCES dag_version,
    since timestamptz NOT NULL DEFAULT penstock_now()
);
CREATE INDEX dag_in_force_version ON dag_in_force (dag_version_id, seq);
INSERT INTO dag_in_force (dag_version_id, since) SELECT dag_version_id, since FROM dag_current;

-- What comes with an event -----------------------------------------------------------------------

-- A JSON object from its source; a publication has none. The bound is for what is stored, written
-- out, which is longer than what was sent: see penstock.dispatcher.payloads.
ALTER TABLE event ADD COLUMN payload jsonb
    CHECK (jsonb_typeof(payload) = 'object')
    CHECK (octet_length(payload::text) <= 131072);
ALTER TABLE event ADD CHECK (payload IS NULL OR revision IS NULL);

-- Where the last interval of a cron source ends, by which it goes on.
CREATE INDEX event_interval ON event (dataset_id, generation, range_end)
    WHERE range_end IS NOT NULL AND starts_with(dedupe, 'source:cron:');

-- The tasks of one partition, as people look for them.
CREATE INDEX task_partition ON task ((payload ->> 'partition_key'), id)
    WHERE payload ->> 'partition_key' IS NOT NULL;
