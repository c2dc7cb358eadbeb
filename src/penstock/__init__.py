"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""
