-- How many of the releases of a task are because its worker was killed before the attempt had begun.
-- They are bounded by themselves, and never more than the releases that are not counted.
ALTER TABLE task ADD COLUMN losses integer NOT NULL DEFAULT 0 CHECK (losses >= 0);
