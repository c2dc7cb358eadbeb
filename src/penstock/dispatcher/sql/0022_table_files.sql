-- What readers of tables may still be at, and what stands in the way of others. See
-- penstock.dispatcher.catalog.snapshots and writing.

-- Why no files are written of a snapshot, for clients that plan themselves: it shows something that
-- Iceberg's clients cannot read.
ALTER TABLE table_snapshot ADD COLUMN unfit text;
-- Since when a snapshot is told of no more. Its row goes a grace later, and with it what only it shows.
ALTER TABLE table_snapshot ADD COLUMN forgotten_at timestamptz;
CREATE INDEX table_snapshot_forgotten ON table_snapshot (forgotten_at)
    WHERE forgotten_at IS NOT NULL;
CREATE INDEX table_snapshot_written ON table_snapshot (dataset_id, generation, id)
    WHERE manifest_list IS NOT NULL;
-- Rows of the log that a snapshot has are forgotten by their age.
DROP INDEX publication_log_shown;
CREATE INDEX publication_log_assigned ON publication_log (logged_at) WHERE snapshot IS NOT NULL;
