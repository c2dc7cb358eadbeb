"""What has to be known of commands on pages that cannot be read there.

Names between `<` and `>` are facts of the world that a command runs in; see `worlds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Reason:
    """Why lines of a form are not run here: a file runs them and has the proof in it, or nobody."""

    form: str
    why: str
    file: str = ""
    proof: str = ""


TYPED: Final[Sequence[tuple[str, str, str]]] = (
    (
        "docs/getting-started.md",
        "Five minutes: the queue alone",
        "tests/e2e/test_getting_started.py",
    ),
    ("docs/getting-started.md", "Five minutes: a pipeline", "tests/e2e/test_getting_started.py"),
    ("docs/spark.md", "Ten minutes: a pipeline of two SQL files", "tests/e2e/test_spark_page.py"),
    ("docs/spark.md", "What is written", "tests/e2e/test_spark_page.py"),
    ("docs/tables.md", "On S3", "tests/e2e/test_tables.py"),
    ("docs/tables.md", "Snapshots", "tests/e2e/test_tables.py"),
    ("docs/tables.md", "Erasing", "tests/e2e/test_tables.py"),
    ("docs/tables.md", "Who may read", "tests/e2e/test_tables.py"),
    ("docs/buffers.md", "From a webhook to a table", "tests/e2e/test_buffers.py"),
    ("docs/pipeline.md", "Five minutes", "tests/e2e/documented/worlds.py"),
    (
        "docs/deployment.md",
        "Separate processes on one machine",
        "tests/e2e/documented/test_separate_processes.py",
    ),
)
"""Sections whose blocks a file types as they stand. The same line elsewhere is run by that."""

REASONS: Final[Sequence[Reason]] = (
    Reason(
        r"penstock demo",
        "It runs for a minute.",
        "tests/e2e/test_demo_stays.py",
        '"demo", "--days"',
    ),
    Reason(
        r"penstock demo --chaos",
        "It runs for minutes.",
        "tests/e2e/test_flights.py",
        'penstock("demo", "--chaos"',
    ),
    Reason(
        r"penstock dataset cut-over NAME --keep",
        "It would leave nothing to cut over to the line with --force.",
        "tests/integration/dispatcher/api/test_deploying.py",
        'json={"keep": True}',
    ),
    Reason(
        r"penstock dataset maintain NAME",
        "It is for what jobs on Spark have made.",
        "tests/e2e/test_maintain.py",
        '"dataset", "maintain"',
    ),
    Reason(
        r"penstock dataset rebuild-table \S+",
        "It needs a dataset with a table in Postgres, and there is one there.",
        "tests/e2e/test_hot_table.py",
        '"dataset", "rebuild-table"',
    ),
    Reason(
        r"penstock dataset purge NAME",
        "What it forgets others look at here.",
        "tests/e2e/test_tables.py",
        '"Erasing"',
    ),
    Reason(
        r"penstock rejected (list|show|drop) alerts.*",
        "It needs a buffered dataset with a rejected row, and there is one there.",
        "tests/e2e/test_buffers.py",
        '"rejected", "drop", "alerts"',
    ),
    Reason(
        r"penstock rejected (mend|replay) alerts.*",
        "It needs a buffered dataset with a rejected row, and there is one there.",
        "tests/integration/dispatcher/api/test_buffers.py",
        "give_back(",
    ),
    Reason(
        r"curl .*/v1/task/buffer-publish .*",
        "It needs the token of a task, and there are some there.",
        "tests/integration/dispatcher/api/test_buffers.py",
        "/v1/task/buffer-publish",
    ),
    Reason(
        r"penstock demo queue",
        "It has a test of its own.",
        "tests/e2e/test_command_line.py",
        'penstock("demo", "queue", seconds=380)',
    ),
    Reason(
        r"penstock sim( --seeds \d+)?",
        "Hundreds of worlds take minutes; there it runs a few.",
        "tests/e2e/test_sim_command.py",
        'penstock("sim", "--seeds"',
    ),
    Reason(
        r"penstock cost( --.*)?",
        "It simulates fifty workers for a minute; there it simulates two.",
        "tests/e2e/test_cost_command.py",
        'penstock("cost", *SMALL',
    ),
    Reason(
        r"penstock doctor s3://.*",
        "It needs a bucket, and there is one there.",
        "tests/e2e/test_command_line.py",
        'penstock("doctor", "s3://',
    ),
    Reason(
        r"penstock up",
        "It is run with a file: what is kept is the same.",
        "tests/e2e/test_up.py",
        '[PENSTOCK, "up"',
    ),
    Reason(
        r"penstock up \S+ --spark spark://\S+",
        "It needs a cluster, and there is one there.",
        "tests/e2e/test_cluster.py",
        '"--spark", spark',
    ),
    Reason(
        r"\$SPARK_HOME/bin/spark-class .*",
        "It is started there, on free ports.",
        "tests/e2e/spark_cluster.py",
        '"spark-class", _MASTER',
    ),
    Reason(
        r"\$SPARK_HOME/sbin/start-connect-server\.sh .*",
        "It leaves a daemon behind; there the same class is started without.",
        "tests/e2e/spark_cluster.py",
        "SparkConnectServer",
    ),
    Reason(r"make [-\w]+( ARGS=.*)?", "It installs into .venv, and it runs these very tests."),
    Reason(r"\. \.venv/bin/activate", "The tests run in that environment already."),
    Reason(r"pip install .*", "It installs from a registry."),
    Reason(r"docker .*", "No container engine runs in tests, which only read the files."),
    Reason(
        r"aws cloudformation .*",
        "The server of AWS's protocols that tests have knows no Application Auto Scaling.",
        "tests/unit/cli/test_deploy.py",
        "AWS::{kind}",
    ),
    Reason(r"kubectl .*", "No cluster of containers runs in tests, which only read the files."),
    Reason(r"export .*", "It says where the queue is, which the world of queues says as well."),
)

_ROLE: Final = "arn:aws:iam::123456789012:role/penstock-task"
_VPC: Final = "vpce-1a2b3c4d"
ENDINGS: Final[Sequence[tuple[str, str]]] = (
    (r"dag (check|show|diff|apply)( --json)?", "FILE"),
    (r"dataset (show|files|preview|verify|refresh|snapshots)", "NAME"),
    (r"dataset purge", "NAME --yes"),
    (r"dataset rebuild-table", "NAME"),
    (r"rejected mend", "alerts 17:3 row.json"),
    (r"token create", "dashboards"),
    (r"task (show|logs|cancel|replay)", "ID"),
    (r"pause", "JOB"),
    (r"query", "--log"),
    (r"task list --partition", "KEY"),
    (r"task (cancel|replay) --job .*", "--yes"),
    (r"trigger --payload", "@payload.json ingest"),
    (r"backfill start \S+", "--key 2026-01-01T00"),
    (r"keys bucket-policy", f"--store s3://my-lake/penstock --role {_ROLE} --vpc-endpoint {_VPC}"),
    (r"deploy ecs", "--store s3://my-lake/penstock --dispatcher http://penstock-internal:7071"),
    (r"keys revoke", "KID --yes"),
    (r"doctor", "URL"),
    (r"dispatcher", "--postgres DSN --store s3://BUCKET/PREFIX"),
    (r"worker", "--dispatcher http://HOST:7071 --concurrency 8"),
    (r"sink", "--dispatcher http://HOST:7071"),
    (r"source (cron|webhook)", "--dispatcher http://HOST:7071"),
    (r"queue submit( --.*)?", """resize '{"n": 1}'"""),
    (r"queue (get|history|cancel|replay|batch( --wait)?)", "ID"),
    (r"queue worker", "MODULE:WORKER"),
    (r"queue console(?! --port).*", "--port 0"),
    (r"queue reshard", "--shards 128"),
    (r"queue (list|cancel|replay --failed) --tag", "env=prod"),
    (r"queue limits (show|remove)", "KEY"),
    (r"queue limits set", "KEY --concurrency 2"),
    (r"queue schedule add", "nightly '0 3 * * *' report"),
    (r"queue schedule (show|pause|resume|remove|run)", "nightly"),
    (r"queue purge", "--status failed --older-than 30d --yes"),
    (r"queue purge --status .*", "--yes"),
)
"""What is to be said besides, where a page only names a verb, or asks where nobody can answer."""

_BY_SHOP: Final = "select shop, sum(amount) as total from orders group by shop"
_OF_A_DAY: Final = "select * from orders where partition_key = '2026-01-01'"
FILLS: Final[Mapping[str, str]] = {
    "VERB": "status",
    "query SELECT shop, sum(total) AS total FROM totals GROUP BY shop": _BY_SHOP,
    "query SELECT day, sum(amount) AS total FROM sales GROUP BY day ORDER BY day": _BY_SHOP,
    "query SELECT * FROM sales WHERE partition_key = '2026-01-01'": _OF_A_DAY,
    "query SELECT count(*) FROM sales": "select count(*) from orders",
    "query 2026-01-31T12:00:00Z": "2126-01-31T12:00:00Z",
    "task ID": "<completed>",
    "task cancel ID": "<waiting>",
    "task replay ID": "<dead>",
    "audit ID": "<completed>",
    "outbox retry ID": "<parked>",
    "task cancel JOB": "later",
    "task replay JOB": "broken",
    "JOB": "totals",
    "dag FILE": "next.yaml",
    "backfill start FILE": "keys.txt",
    "dag apply URL": "<url>",
    "dataset NAME": "orders",
    "dataset cut-over NAME": "outliers",
    # Where there are manifests, that is: on Spark, by the test of its page.
    "dataset verify NAME": "totals",
    "dataset preview KEY": "2026-01-01",
    "task list KEY": "2026-01-01",
    "keys revoke KID": "<kid>",
    "operator limit m:f": "five_jobs:totals",
    "doctor URL": "<bucket>",
    "doctor file:///srv/penstock": "<bucket>",
    "DSN": "<dsn>",
    "s3://BUCKET/PREFIX": "<store>",
    "http://HOST:7071": "<internal>",
    "http://DISPATCHER:7071": "<internal>",
    "sc://HOST:15002": "sc://127.0.0.1:15002",
    "queue ID": "<succeeded>",
    "queue cancel ID": "<ready>",
    "queue replay ID": "<failed>",
    "queue batch ID": "<batch>",
    "queue KEY": "api",
    "queue TYPE": "resize",
    "queue FOLDER": "fetched",
    "queue submit FILE": "lines.jsonl",
    "queue MODULE:WORKER": "images:worker",
    "queue tasks:worker": "images:worker",
    "queue 9100": "0",
    "queue console URL": "<bucket>",
    "queue console NAME": "images",
    "queue console 7075": "0",
    "http://127.0.0.1:7070": "<url>",
    "http://127.0.0.1:7072": "<webhooks>",
}
"""What stands for what, by the verb or the group that says it; the longest that fits counts."""

STAYS: Final[Mapping[str, str]] = {
    "dispatcher": "for people and programs, and http://",
    "worker": "Working for http://",
    "source cron": "Emitting the events of cron sources",
    "source webhook": "Taking webhooks at http://",
    "queue worker": "Working on resize of the queue 'images'",
    "queue tail": "Following 'images'",
    "queue monitor": "Z  ",
    "queue console": "The console is at http://",
    "query-service": "Serving queries at http://",
    "sink": "Working for http://",
}
"""Verbs that go on until they are told to stop, and what they say when they are ready."""

CODES: Final[Mapping[str, Sequence[int]]] = {
    "dag diff": (1,),
    # It exits with 1 while an alert is open, and one is opened after ten seconds.
    "alerts --check": (0, 1),
    # It may be told to stop before it has begun to work.
    "queue worker": (0, 143),
}
"""Exit codes that a page tells of; all others are 0."""

FIRST: Final = ("queue limits set", "queue schedule add", "keys bucket-policy")
LAST: Final = (
    # While all jobs are paused nothing runs that would change what the next one finds.
    *("task cancel", "pause", "keys rotate", "operator limit", "outbox retry", "task replay"),
    *("backfill start", "dataset cut-over", "dag apply", "dag rollback", "resume"),
    *("queue replay", "queue cancel", "queue pause", "queue drain", "queue resume"),
    *("queue schedule pause", "queue schedule resume", "queue schedule run"),
    *("queue schedule remove", "queue limits remove", "queue archive flush"),
    *("queue archive retain", "queue reshard", "queue config set", "queue purge"),
)
"""What others need comes first, what others would miss comes last."""

SAYS: Final[Mapping[str, str]] = {
    "--help": "Commands:",
    "status --help": "Exit code 0",
    "completion": "_penstock_completion",
    "settings": "penstock-data",
    "settings --reference": "# Settings",
    "settings --changed --port 8080": "8080",
    "doctor": "keeps every promise",
    "deploy": "Print manifests of Kubernetes.",
    "deploy kubernetes": "kind: ScaledObject",
    "deploy ecs": "AWS::ECS::Service",
    "keys bucket-policy": "TasksStayInTheirFolders",
    "status": "outliers",
    "logs": "worker",
    "task list --partition 2026-01-01": "completed",
    "task list --status dead": "there is no file of the day",
    "task show": "shop:orders",
    "task logs": "counting the orders",
    "task cancel": "cancelled",
    "task replay": "queued again",
    "dag check": "No problems",
    "dag check --json next.yaml": "[]",
    "dag show": "shop:orders",
    "dag diff": "changed  totals",
    "dag list": "in force",
    "dag apply next.yaml --dry-run": "Dry run: this would put",
    "dag apply": "in force",
    "dag rollback": "is in force",
    "dataset show": "current",
    "dataset files": "orders.parquet",
    "dataset preview": "north",
    "dataset cut-over": "Readers of outliers read",
    "trigger": "is new",
    "trigger ingest --from keys.txt --event-id delivery-17": "2 events are new",
    "backfill start": "is planned",
    "operator list": "five_jobs:clean",
    "operator limit": "At most 4 tasks",
    "outbox list": "the bucket is away",
    "outbox retry": "1 message of 1",
    "pressure": "clean",
    "keys list": "signing",
    "keys rotate": "New keys sign",
    "queue": "Commands:",
    "queue submit": ".resize",
    "queue get": '{"ok": 1}',
    "queue history": "succeeded",
    "queue list": "report",
    "queue list --status failed": "KeyError",
    "queue batch": "ended",
    "queue submit resize lines.jsonl --many --batch": "",
    "queue stats --json": '"queue": "images"',
    "queue limits list": "api",
    "queue limits show": "2 at a time",
    "queue schedule list": "nightly",
    "queue schedule show": "nightly",
    "queue schedule run": ".report",
    "queue pause": "is paused",
    "queue drain": "is drained",
    "queue drain --wait": "The queue is empty",
    "queue archive retain --days 30 --dead-days 365": "for 30 days",
    "queue reshard": "128 shards",
    "queue config show": "keys are kept",
    "queue config set --key-seconds 7d": "7d",
    "queue purge": "0 deleted",
}
"""What a command says, among other things: by all of its words, or by its verb or program."""
