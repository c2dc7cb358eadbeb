-- What people look at in the console.

-- What has ended lately.
CREATE INDEX attempt_ended ON attempt (ended_at) WHERE ended_at IS NOT NULL;

-- What was published last of a dataset, and when.
CREATE INDEX publication_published ON publication (dataset_id, generation, published_at);
