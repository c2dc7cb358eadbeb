-- Whether a task could not be made again: as before, but the events that it was made of are found
-- first, whatever the plan. A plan that asked it of all events, and then took those of the task, went
-- from the event that a task had published to that task, and round for ever.
CREATE OR REPLACE FUNCTION penstock_is_lost(old_task bigint, replaced uuid[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    old task;
    is_appending boolean;
    is_merged boolean;
BEGIN
    SELECT * INTO old FROM task WHERE task.id = old_task;
    IF old.id IS NULL THEN
        RETURN true;
    END IF;
    IF starts_with(old.dedupe_key, 'backfill:') THEN
        RETURN false;
    END IF;
    SELECT definition.update_mode <> 'replace' AND definition.runtime <> 'dispatcher',
           definition.update_mode = 'merge'
    INTO is_appending, is_merged
    FROM job_definition AS definition
    WHERE definition.id = old.definition_id;
    RETURN NOT EXISTS (
        WITH made_of AS MATERIALIZED (
            SELECT event AS said
            FROM event
            WHERE event.seq IN (
                SELECT old.event_seq
                UNION
                SELECT coalesced.event_seq FROM coalesced WHERE coalesced.task_id = old_task))
        SELECT
        FROM made_of
        WHERE
          -- As for a generation that has nothing yet.
          (NOT is_appending OR penstock_is_news(said, old.job_id, NULL, false, is_merged))
          AND CASE
              WHEN (said).generation <> ALL (replaced) THEN true
              WHEN (said).revision IS NULL THEN false
              ELSE NOT penstock_is_lost((said).task_id, replaced)
          END);
END
$$;
