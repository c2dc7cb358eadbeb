-- Tables of Postgres data that follow what is published: see penstock.dispatcher.datasets.applier.

-- What the DAG in force says of a generation whose rows are in such a table: its columns, how it is
-- published, and the columns that identify a row. Null for one that is files alone.
ALTER TABLE generation ADD COLUMN hot jsonb CHECK (jsonb_typeof(hot) = 'object');
CREATE INDEX generation_hot ON generation (dataset_id, version) WHERE hot IS NOT NULL;

-- An event of such a generation is `applying` until the table has what it tells of.
ALTER TABLE event DROP CONSTRAINT event_routed_check;
ALTER TABLE event ADD CONSTRAINT event_routed_check
    CHECK (routed IN ('pending', 'held', 'applying', 'routed', 'audited')) NOT VALID;
CREATE INDEX event_applying ON event (dataset_id, generation, seq) WHERE routed = 'applying';

-- Of each partition the revision that its table is to have, and the one that it is known to have. One
-- that is to be loaded anew may be there in a revision that nobody knows: after a restore.
CREATE TABLE hot_partition (
    dataset_id uuid NOT NULL REFERENCES dataset,
    generation uuid NOT NULL,
    partition_key text NOT NULL,
    wanted bigint NOT NULL,
    applied bigint NOT NULL DEFAULT 0,
    is_anew boolean NOT NULL DEFAULT false,
    -- Since when it is behind.
    since timestamptz NOT NULL DEFAULT penstock_now(),
    PRIMARY KEY (dataset_id, generation, partition_key)
);
CREATE INDEX hot_partition_behind ON hot_partition (dataset_id, generation, since)
    WHERE applied < wanted;

-- What is known of the tables of a dataset: what its last transaction there was called, what the next
-- may be called, whether all of it is to be loaded anew, and why it is behind, if it is.
CREATE TABLE hot_table (
    dataset_id uuid PRIMARY KEY REFERENCES dataset,
    position text,
    intended text,
    is_served boolean NOT NULL DEFAULT false,
    problem text,
    changed_at timestamptz NOT NULL DEFAULT penstock_now()
);

-- Whether the rows of a generation are kept in a table now.
CREATE FUNCTION penstock_is_hot(wanted_dataset uuid, wanted_generation uuid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM generation
        WHERE dataset_id = wanted_dataset AND version = wanted_generation AND hot IS NOT NULL
          AND state IN ('building', 'current'))
$$;

-- Notes that partitions have moved. Where nothing is hot it is one look at an empty index.
-- Revisions come in their order, as publications are locked: a lower one is of a state that was restored,
-- and what the table has of the later ones is to be replaced.
CREATE FUNCTION penstock_apply(
    datasets uuid[], generations uuid[], keys text[], revisions bigint[]
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO hot_partition AS held (dataset_id, generation, partition_key, wanted)
    SELECT moved.dataset_id, moved.generation, moved.partition_key, max(moved.revision)
    FROM unnest(datasets, generations, keys, revisions)
        AS moved(dataset_id, generation, partition_key, revision)
    WHERE penstock_is_hot(moved.dataset_id, moved.generation)
    GROUP BY moved.dataset_id, moved.generation, moved.partition_key
    ORDER BY moved.dataset_id, moved.generation, moved.partition_key
    ON CONFLICT (dataset_id, generation, partition_key) DO UPDATE
    SET wanted = excluded.wanted,
        applied = CASE WHEN excluded.wanted < held.wanted THEN 0 ELSE held.applied END,
        is_anew = held.is_anew OR excluded.wanted < held.wanted,
        since = CASE WHEN held.applied < held.wanted THEN held.since ELSE excluded.since END
$$;

CREATE FUNCTION publication_applies() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM generation WHERE hot IS NOT NULL) THEN
        IF TG_OP = 'DELETE' THEN
            -- As `removed` counts it.
            PERFORM penstock_apply(
                array_agg(dataset_id), array_agg(generation), array_agg(partition_key),
                array_agg(edition + 1))
            FROM moved HAVING count(*) > 0;
        ELSE
            PERFORM penstock_apply(
                array_agg(dataset_id), array_agg(generation), array_agg(partition_key),
                array_agg(revision))
            FROM moved HAVING count(*) > 0;
        END IF;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER publication_applies_first AFTER INSERT ON publication
    REFERENCING NEW TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION publication_applies();
CREATE TRIGGER publication_applies_next AFTER UPDATE ON publication
    REFERENCING NEW TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION publication_applies();
CREATE TRIGGER publication_applies_last AFTER DELETE ON publication
    REFERENCING OLD TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION publication_applies();
