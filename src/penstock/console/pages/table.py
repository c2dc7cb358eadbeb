"""All pages and actions of the console."""

from __future__ import annotations

from typing import Final

from penstock.console.pages import (
    backfill,
    dataset,
    events,
    jobs,
    keys,
    operations,
    partition,
    pipeline,
    query,
    queue,
    queue_tasks,
    sources,
    tasks,
    versions,
)
from penstock.console.pages.base import ConsoleSite
from penstock.dispatcher.api.context import ApiContext

SITE: Final[ConsoleSite[ApiContext]] = ConsoleSite(
    pages=(
        pipeline.PAGE,
        jobs.PAGE,
        jobs.JOB_PAGE,
        dataset.DATASETS_PAGE,
        dataset.PARTITIONS,
        dataset.SNAPSHOT,
        dataset.REJECTED,
        partition.CONTENTS,
        partition.ODD,
        partition.PAGE,
        # Last of them: what is no other page of a dataset is taken for a name.
        dataset.PAGE,
        tasks.PAGE,
        tasks.TASK_PAGE,
        queue.PAGE,
        *queue_tasks.PAGES,
        *queue.RULE_PAGES,
        operations.PAGE,
        *sources.PAGES,
        *backfill.PAGES,
        *events.PAGES,
        versions.PAGE,
        keys.PAGE,
        operations.ALERTS_PAGE,
        query.PAGE,
    ),
    query="/v1/query",
    actions=(
        *dataset.ACTIONS,
        *tasks.ACTIONS,
        *tasks.TASK_ACTIONS,
        *queue.ACTIONS,
        *queue_tasks.ACTIONS,
        *queue.RULE_ACTIONS,
        *operations.ACTIONS,
        *sources.ACTIONS,
        *backfill.ACTIONS,
        *versions.ACTIONS,
        *keys.ACTIONS,
    ),
    sections={
        "pipeline": "/",
        "datasets": "/datasets",
        "query": query.PATH,
        "tasks": "/tasks",
        "queue": "/queue",
        "operations": "/operations",
        "alerts": "/alerts",
    },
)
