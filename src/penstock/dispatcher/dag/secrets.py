"""What a job may write as the place of a secret: `env:NAME`, `file:NAME`, `aws:ID`, `aws:ID#field`.

A DAG names places and never has values. Whoever writes a value by mistake must not find it in a
message, a log or the database: a reference that cannot be read is refused without repeating it.
The grammar is judged here when a DAG is applied, and again by the worker, which looks the secret
up (`penstock.worker.secrets`). Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SECRETS_MAX: Final = 32
NAME_CHARACTERS_MAX: Final = 64

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{NAME_CHARACTERS_MAX - 1}}}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ID = re.compile(r"[A-Za-z0-9/_+=.@-]{1,512}")
_FIELD = re.compile(r"[^#\s](?:[^#\x00-\x1f\x7f]{0,126}[^#\s])?")
_OURS: Final = ("PENSTOCK_", "AWS_")

HOW: Final = "write env:VARIABLE, file:NAME, aws:ID or aws:ID#field"


class SecretKind(StrEnum):
    """Where a worker looks for a secret."""

    ENV = "env"
    """In its environment."""
    FILE = "file"
    """In a file of its folder of secrets."""
    AWS = "aws"
    """In AWS Secrets Manager."""


@dataclass(frozen=True, slots=True)
class SecretReference:
    """The place of a secret."""

    kind: SecretKind
    name: str
    """Of a variable, of a file, or of a secret of AWS."""
    field: str = ""
    """Which field of a JSON document it is; empty for all of it."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f"#{self.field}" if self.field else "")


def secret_name(text: str) -> str:
    """A name by which an operator asks for a secret; a `ValueError` if it cannot be one."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            "cannot be the name of a secret; write letters, digits and _, not beginning with a"
            f" digit, at most {NAME_CHARACTERS_MAX} characters"
        )
    return text


def secret_reference(text: str) -> SecretReference:
    """The place that a text names; a `ValueError` that does not repeat the text if it names none.

    The sentence of the error goes on after "It".
    """
    kind, separator, rest = text.partition(":")
    if not separator or kind not in list(SecretKind):
        raise ValueError(
            f"does not say where the secret is; {HOW}, and never the secret itself, which would"
            " be stored with the DAG"
        )
    match SecretKind(kind):
        case SecretKind.ENV:
            return SecretReference(SecretKind.ENV, _variable(rest))
        case SecretKind.FILE:
            return SecretReference(SecretKind.FILE, _file(rest))
        case SecretKind.AWS:
            return _aws(rest)


def _variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError("names no variable after env:; write its name, as in env:API_KEY")
    if text.upper().startswith(_OURS):
        raise ValueError(
            "names a variable that begins with PENSTOCK_ or AWS_; those are the worker's own, and"
            " no job gets them; give the secret a variable of its own"
        )
    return text


def _file(text: str) -> str:
    if not _FILE.fullmatch(text):
        raise ValueError(
            "names no file after file:; write the name of a file in the worker's folder of"
            " secrets, in letters, digits, _ . and -, without a folder, as in file:api-key"
        )
    return text


def _aws(text: str) -> SecretReference:
    name, separator, field = text.partition("#")
    if name.startswith("arn:"):
        raise ValueError(
            "has an ARN after aws:; write the name of the secret, as in aws:penstock/db"
        )
    if not _ID.fullmatch(name):
        raise ValueError(
            "names no secret of AWS Secrets Manager after aws:; write its name, in letters,"
            " digits and / _ + = . @ -, as in aws:penstock/db"
        )
    if separator and not _FIELD.fullmatch(field):
        raise ValueError("names no field after #; write one, as in aws:penstock/db#password")
    return SecretReference(SecretKind.AWS, name, field)
