"""A policy of the bucket, for defence in depth: what no session of a task may do, whatever it says.

The policy of a session is made for each attempt, and a mistake in one would be a hole. This one is
set once, by people, and only denies. Of the role of tasks it denies, in every session:

- everything outside of the folders `datasets/` and `scratch/` of the store: the queue, above all;
- every action but those that sessions are ever for, so also each way to delete or to open up;
- lists that are not of a folder below those two;
- if a VPC endpoint is named, every request that does not come through it, so that credentials that
  were carried out of the network are worth nothing.

Of everybody it denies what does not come over TLS. It cannot know which folders belong to which
attempt: that is what the policies of sessions are for.

A role is named by the condition `aws:PrincipalArn`, which is that of the role for all its sessions,
and not as a principal, which AWS would bind to the role that has the name today.

Pure. Called by `penstock keys bucket-policy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.datasets.layout import DATASETS, SCRATCH
from penstock.dispatcher.capabilities.policies import (
    LIST_ACTION,
    READ_ACTIONS,
    VERSION,
    WRITE_ACTIONS,
)
from penstock.kernel.errors import InvalidInput
from penstock.tokens.scopes import S3, Root

Statement = dict[str, Any]

_ROLE: Final = re.compile(r"arn:(aws[a-z-]*):iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]+")
_VPC_ENDPOINT: Final = re.compile(r"vpce-[0-9a-f]{8,32}")


def bucket_policy(*, store_url: str, role: str, vpc_endpoint: str = "") -> Mapping[str, Any]:
    """The policy for the bucket of a store; `role` is the ARN of the role of tasks."""
    root = _root(store_url)
    partition = partition_of(role)
    bucket = f"arn:{partition}:s3:::{root.bucket}"
    everything = [bucket, f"{bucket}/*"]
    folders = [f"{root.prefix}{each}*" for each in (DATASETS, SCRATCH)]
    of_tasks = {"ArnEquals": {"aws:PrincipalArn": role}}
    statements = [
        _denial(
            "TasksStayInTheirFolders",
            {"Action": "s3:*", "NotResource": [bucket, *(f"{bucket}/{each}" for each in folders)]},
            of_tasks,
        ),
        _denial(
            "TasksReadAndWriteOnly",
            {"NotAction": [*READ_ACTIONS, *WRITE_ACTIONS, LIST_ACTION], "Resource": everything},
            of_tasks,
        ),
        _denial(
            "TasksListTheirFoldersOnly",
            {"Action": LIST_ACTION, "Resource": bucket},
            {**of_tasks, "StringNotLike": {"s3:prefix": folders}},
        ),
    ]
    if vpc_endpoint:
        if not _VPC_ENDPOINT.fullmatch(vpc_endpoint):
            raise InvalidInput(
                f"{vpc_endpoint[:200]!r} is not the id of a VPC endpoint.",
                hint="Write it as vpce-1a2b3c4d.",
            )
        statements.append(
            _denial(
                "TasksComeThroughTheEndpoint",
                {"Action": "s3:*", "Resource": everything},
                {**of_tasks, "StringNotEquals": {"aws:SourceVpce": vpc_endpoint}},
            )
        )
    statements.append(
        _denial(
            "EverybodyComesOverTls",
            {"Action": "s3:*", "Resource": everything},
            {"Bool": {"aws:SecureTransport": "false"}},
        )
    )
    return {"Version": VERSION, "Statement": statements}


def partition_of(role: str) -> str:
    """The part of AWS that a role is in, as in `aws`; buckets are named with the same."""
    found = _ROLE.fullmatch(role)
    if found is None:
        raise InvalidInput(
            f"{role[:200]!r} is not the ARN of a role.",
            hint="Write PENSTOCK_TASK_ROLE as arn:aws:iam::ACCOUNT:role/NAME.",
        )
    return found[1]


def _denial(sid: str, what: Statement, condition: Statement) -> Statement:
    return {"Sid": sid, "Effect": "Deny", "Principal": "*", **what, "Condition": condition}


def _root(store_url: str) -> Root:
    root = Root.parse(store_url.partition("?")[0])
    if root.scheme != S3:
        raise InvalidInput(
            "Only a bucket has a policy, and the store is none.",
            hint="Name it with --store s3://BUCKET/PREFIX.",
        )
    return root
