"""The table of all verbs: where each is, and what it is for, in the order of the help.

A verb is imported when it is asked for. What is said here of its purpose is what its own help says;
a test compares them.
"""

from __future__ import annotations

from typing import Final

from penstock.cli.groups import Place

_HERE: Final = "penstock.cli"

PLACES: Final = {
    # To try it, and to run an installation or a part of it.
    "demo": Place(f"{_HERE}.demo", "demo", "See a pipeline run on Spark."),
    "up": Place(f"{_HERE}.up", "up", "Run everything, on one data folder."),
    "dispatcher": Place(f"{_HERE}.dispatcher", "dispatcher", "Run a dispatcher."),
    "worker": Place(f"{_HERE}.worker", "worker", "Run a worker of the pipeline."),
    "source": Place(f"{_HERE}.source", "source", "Run what emits events: cron and webhooks."),
    "deploy": Place(f"{_HERE}.deploy", "deploy", "Print the workers of each runtime."),
    # To look at it and to steer it; these talk to a dispatcher.
    "status": Place(f"{_HERE}.status", "status", "Show jobs, queues, workers and backfills."),
    "logs": Place(f"{_HERE}.logs", "logs", "Show what the processes of an installation say."),
    "dag": Place(f"{_HERE}.dag", "dag", "Check, compare and deploy DAG files."),
    "task": Place(f"{_HERE}.task", "task", "Look at tasks, cancel or replay them."),
    "dataset": Place(f"{_HERE}.dataset", "dataset", "Look at what is published."),
    "trigger": Place(f"{_HERE}.trigger", "trigger", "Tell that a source has something new."),
    "backfill": Place(f"{_HERE}.backfill", "backfill", "Compute a range or a list of partitions."),
    "pause": Place(f"{_HERE}.pause", "pause", "Let a job start nothing for now."),
    "resume": Place(f"{_HERE}.pause", "resume", "Let a paused job go on."),
    "pressure": Place(f"{_HERE}.pressure", "pressure", "Show full queues and what they pause."),
    "operator": Place(f"{_HERE}.operator", "operator", "See and limit what runs of operators."),
    "outbox": Place(f"{_HERE}.outbox", "outbox", "See messages that could not be sent."),
    "keys": Place(f"{_HERE}.keys", "keys", "The keys that sign the tokens of tasks."),
    "alerts": Place(f"{_HERE}.alerts", "alerts", "Show what people have to look at."),
    "audit": Place(f"{_HERE}.audit", "audit", "See who was refused, and what was allowed."),
    # The queue alone needs a bucket and nothing else.
    "queue": Place(f"{_HERE}.queue", "queue", "A task queue that needs a bucket and nothing else."),
    # To look after it.
    "doctor": Place(f"{_HERE}.doctor", "doctor", "Tell whether a store can be trusted."),
    "settings": Place(f"{_HERE}.settings", "settings", "Show what is set, and where it came from."),
    "cost": Place(f"{_HERE}.cost", "cost", "Tell what a queue costs a month."),
    "sim": Place(f"{_HERE}.sim", "sim", "Run the queue in simulated worlds."),
    "completion": Place(f"{_HERE}.completion", "completion", "Have the shell complete words."),
}
