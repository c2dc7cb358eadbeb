-- Tasks whose process has died while others ran in it: every worker runs them with nothing beside
-- them from then on. The first such death is not counted; so this says that it was had, too.
ALTER TABLE task ADD COLUMN runs_alone boolean NOT NULL DEFAULT false;
