"""IAM policies, as text: of the session of one attempt, and of the bucket. Pure.

`session_policy` is an allow-list; what it does not name is denied, and it can only take away
from what the role of tasks may do. It holds:

- of each folder to read: `s3:GetObject` of what lies below it;
- of each folder to write: `s3:PutObject` of what lies below it, and the two actions that
  writers of
  large objects need besides, `s3:AbortMultipartUpload` and `s3:ListMultipartUploadParts`;
- of both: `s3:ListBucket` of their bucket, if `s3:prefix` is the folder or lies below it.

A folder is `PREFIX/*` and never `PREFIX*`. What means more in a policy than it says (`*`, `?`,
`$`) is in no scope; it is checked here once more and refused. A folder below another of its
kind is left out. STS takes 2,048 characters at most: more is a refusal that says so.

`bucket_policy` is defence in depth: set once, by people, and only denies. Of the role of tasks
it denies, in every session:

- everything outside of the folders `datasets/` and `scratch/` of the store: the queue, above
  all;
- every action but those that sessions are ever for, so also each way to delete or to open up;
- lists that are not of a folder below those two;
- if a VPC endpoint is named, every request that does not come through it, so that credentials
  that
  were carried out of the network are worth nothing.

Of everybody it denies what does not come over TLS. A role is named by the condition
`aws:PrincipalArn`, which is that of the role for all its sessions, and not as a principal, which
AWS would bind to the role that has the name today. Called by `credentials` and `penstock keys`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.datasets.layout import DATASETS, SCRATCH
from penstock.kernel.errors import CredentialsRefused, InvalidInput
from penstock.tokens.scopes import S3, Root, Scope, without_covered

POLICY_CHARACTERS_MAX: Final = 2_048
"""What STS takes as the policy of a session."""

READ_ACTIONS: Final = ("s3:GetObject",)
WRITE_ACTIONS: Final = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
LIST_ACTION: Final = "s3:ListBucket"
VERSION: Final = "2012-10-17"

_LITERAL: Final = re.compile(r"[A-Za-z0-9_.=~:@,!()/-]+")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def session_policy(*, read: Iterable[Scope], write: Iterable[Scope], partition: str = "aws") -> str:
    """The policy for these folders, as text. Raises `CredentialsRefused` if there can be none.

    `partition` is the one of the role's ARN: `aws`, `aws-cn` or `aws-us-gov`.
    """
    reads, writes = without_covered(read), without_covered(write)
    lists = without_covered((*reads, *writes))
    if not lists:
        # Without a policy a session may do all that its role may.
        raise CredentialsRefused(
            "The request matches no folder.",
            hint="The task reads nothing that is published, and was asked to write nothing.",
        )
    for each in (*reads, *writes):
        _check(each)
    statements = [
        *_of_objects(READ_ACTIONS, reads, partition),
        *_of_objects(WRITE_ACTIONS, writes, partition),
        *_of_lists(lists, partition),
    ]
    text = _encode({"Version": VERSION, "Statement": statements})
    if len(text) > POLICY_CHARACTERS_MAX:
        raise CredentialsRefused(
            f"A policy for {_counted(len(reads), 'folder')} to read and"
            f" {_counted(len(writes), 'folder')} to write has {len(text):,} characters, and STS"
            f" takes {POLICY_CHARACTERS_MAX:,}.",
            kind="too many folders",
            hint="Ask for fewer of them at a time, by task.credentials_for or with `read` and"
            " `write`; or declare the input with `read: all`, or compact its dataset.",
        )
    return text


def _of_objects(
    actions: Sequence[str], scopes: Sequence[Scope], partition: str
) -> list[Mapping[str, object]]:
    if not scopes:
        return []
    below = [f"arn:{partition}:s3:::{each.bucket}/{each.prefix}*" for each in scopes]
    return [{"Effect": "Allow", "Action": _short(actions), "Resource": _short(below)}]


def _of_lists(scopes: Sequence[Scope], partition: str) -> list[Mapping[str, object]]:
    """A statement for each bucket: the folders of one are not looked for in another."""
    buckets: dict[str, list[str]] = {}
    for each in scopes:
        buckets.setdefault(each.bucket, []).append(f"{each.prefix}*")
    return [
        {
            "Effect": "Allow",
            "Action": LIST_ACTION,
            "Resource": f"arn:{partition}:s3:::{bucket}",
            "Condition": {"StringLike": {"s3:prefix": _short(below)}},
        }
        for bucket, below in buckets.items()
    ]


def _short(values: Sequence[str]) -> str | Sequence[str]:
    """One value needs no list, and every character counts."""
    return values[0] if len(values) == 1 else list(values)


def _check(scope: Scope) -> None:
    """Look once more at what goes into a policy as it is."""
    is_literal = _LITERAL.fullmatch(scope.bucket) and _LITERAL.fullmatch(scope.prefix)
    if scope.scheme != S3 or not is_literal or not scope.prefix.endswith("/"):
        raise CredentialsRefused(f"{str(scope)[:200]!r} is not a folder that a policy can name.")


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


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
