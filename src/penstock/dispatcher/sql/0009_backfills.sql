-- Backfills count what was cancelled of them, as they count what is dead.

CREATE INDEX task_backfill_cancelled ON task (backfill_id)
    WHERE backfill_id IS NOT NULL AND status = 'cancelled';
