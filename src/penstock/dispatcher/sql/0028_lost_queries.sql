-- Which query service runs a query, and by when it has reported the end, or is taken to be gone with the
-- query. Of rows from before both are unknown.
ALTER TABLE query_log ADD COLUMN service text, ADD COLUMN ends_by timestamptz;
