"""`penstock keys bucket-policy`: a policy for the bucket, for defence in depth."""

from __future__ import annotations

import json
from typing import Any

import click

from penstock.cli.installation import settings_of, wiring
from penstock.kernel.errors import InvalidInput


@click.command(
    "bucket-policy",
    short_help="Print a policy for the bucket.",
    epilog="Example: penstock keys bucket-policy --store s3://lake --role ARN > policy.json",
)
@click.option("--store", metavar="URL", help="s3://BUCKET/PREFIX.  [default: PENSTOCK_STORE]")
@click.option(
    "--role",
    "task_role",
    metavar="ARN",
    help="The role whose credentials tasks are given.  [default: PENSTOCK_TASK_ROLE]",
)
@click.option(
    "--vpc-endpoint",
    metavar="ID",
    default="",
    help="The VPC endpoint that tasks have to come through, as in vpce-1a2b3c4d.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it on one line.")
def bucket_policy(*, vpc_endpoint: str, as_json: bool, **given: Any) -> None:
    """Print a policy for the bucket that denies to tasks what no task is for.

    The credentials of a task are limited by a policy of their own. This one is set on the bucket,
    once, and holds even if one of those were wrong: tasks stay in the folders of datasets and of
    scratch, delete nothing, and open nothing to others. It denies, and allows nothing; merge its
    statements into the policy that the bucket has. Nothing is asked or changed here.

    Exit code 2: there is no role or no bucket.
    """
    settings = settings_of(given)
    if not settings.task_role:
        raise InvalidInput(
            "There is no role of tasks to make a policy for.",
            hint="Name it with --role, or set PENSTOCK_TASK_ROLE.",
        )
    made = wiring("penstock.dispatcher.capabilities.bucket_policies").bucket_policy(
        store_url=settings.store_url, role=settings.task_role, vpc_endpoint=vpc_endpoint
    )
    click.echo(json.dumps(made) if as_json else json.dumps(made, indent=2))
