"""All pages and actions of the console."""

from __future__ import annotations

from typing import Final

from penstock.console.pages import (
    alerts,
    backfill,
    dataset,
    datasets,
    events,
    job,
    jobs,
    keys,
    operations,
    partition,
    pipeline,
    queue,
    queue_rules,
    queue_tasks,
    sources,
    task,
    tasks,
    versions,
)
from penstock.console.pages.base import Site
from penstock.dispatcher.api.parts import Parts

SITE: Final[Site[Parts]] = Site(
    pages=(
        pipeline.PAGE,
        jobs.PAGE,
        job.PAGE,
        datasets.PAGE,
        dataset.PARTITIONS,
        partition.CONTENTS,
        partition.ODD,
        partition.PAGE,
        # Last of them: what is no other page of a dataset is taken for a name.
        dataset.PAGE,
        tasks.PAGE,
        task.PAGE,
        queue.PAGE,
        *queue_tasks.PAGES,
        *queue_rules.PAGES,
        operations.PAGE,
        *sources.PAGES,
        *backfill.PAGES,
        *events.PAGES,
        versions.PAGE,
        keys.PAGE,
        alerts.PAGE,
    ),
    actions=(
        *dataset.ACTIONS,
        *tasks.ACTIONS,
        *task.ACTIONS,
        *queue.ACTIONS,
        *queue_tasks.ACTIONS,
        *queue_rules.ACTIONS,
        *operations.ACTIONS,
        *sources.ACTIONS,
        *backfill.ACTIONS,
        *versions.ACTIONS,
        *keys.ACTIONS,
    ),
    sections={
        "pipeline": "/",
        "datasets": "/datasets",
        "tasks": "/tasks",
        "queue": "/queue",
        "operations": "/operations",
        "alerts": "/alerts",
    },
)
