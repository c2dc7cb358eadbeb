-- Snapshots that cost what has changed, whatever the size of the table. See
-- penstock.dispatcher.catalog.snapshots.

-- What came since a snapshot. Only for those who say so (`came > 0`): before a table is analyzed the planner
-- takes it to be as good for finding a part by its key, and then each look is at all parts.
CREATE INDEX table_part_came ON table_part (dataset_id, generation, came) WHERE came > 0;
-- Parts that were put together have the rows that they had.
ALTER TABLE table_snapshot DROP CONSTRAINT table_snapshot_operation_check;
ALTER TABLE table_snapshot ADD CONSTRAINT table_snapshot_operation_check
    CHECK (operation IN ('append', 'overwrite', 'delete', 'replace'));
