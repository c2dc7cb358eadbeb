"""The policy of a session: what credentials of an attempt allow, and nothing else.

An allow-list in the language of IAM. Whatever it does not name is denied, and it can only take away
from what the role of tasks may do. It holds:

- of each folder to read: `s3:GetObject` of what lies below it;
- of each folder to write: `s3:PutObject` of what lies below it, and the two actions that writers of
  large objects need besides, `s3:AbortMultipartUpload` and `s3:ListMultipartUploadParts`;
- of both: `s3:ListBucket` of their bucket, if `s3:prefix` is the folder or lies below it.

A folder is `PREFIX/*` and never `PREFIX*`: it ends with a slash. What would mean more in a policy
than it says, which is `*`, `?` and the `$` of variables, is in no scope; it is looked for here once
more, and what has one is refused. A folder below another one of its kind is left out, since nothing
more is granted with it; nothing else is ever merged. So the size grows with the number of folders,
and STS takes 2,048 characters at most: more is a refusal that says so.

Pure: no requests, no state. Called by `minting`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.kernel.errors import CredentialsRefused
from penstock.tokens.scopes import S3, Scope, without_covered

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
            "There is no folder that these credentials would be for.",
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
