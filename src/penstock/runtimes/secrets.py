"""What one attempt is given that no other may see: its token, its credentials and its secrets.

The worker makes a folder for the attempt that only its process can read, and replaces the files
in it by renaming (`penstock.worker.sandbox`). So a reader finds a whole file, and the newest:

    token               the capability token
    credentials.json    credentials for the attempt's own prefixes, as `credential_process` of
                        AWS's tools prints them; where credentials are minted
    aws.config          tells AWS's tools to read that file

`AttemptFiles` says where they are, and which variables the process has while it runs the
attempt. Read by `penstock.runtimes.task`.

`Secrets` has the values of a job's `secrets`, which the worker resolves just before the work
begins (`penstock.worker.secrets`). They go over a socket to the process that runs the work, and
into `task.secrets` or `context.secrets`. No value of this module is in a repr, and nothing is
written.

`hidden` redacts values from a text that leaves the work, such as why it failed: as they are, as
they look in a repr, in JSON and in a URL, line by line, and of a JSON document each of its
texts. What is shorter than `HIDDEN_CHARACTERS_MIN` stays, for it would be found everywhere. It
never makes a text longer, and takes time by the length of it: so texts are cut before, and the
beginning of a value that is cut off is found as well. It is a net for accidents: code that
wants to leak a secret can always write it in another way.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus

TOKEN: Final = "token"  # noqa: S105 - the name of a file
CREDENTIALS: Final = "credentials.json"
CONFIG: Final = "aws.config"
OUTPUTS: Final = "outputs"
"""A folder with one for each output that is in a bucket."""
TEMPORARY: Final = "tmp"
"""A folder of untrusted work for what it needs on this machine."""
TOKEN_VARIABLE: Final = "PENSTOCK_TASK_TOKEN_FILE"  # noqa: S105 - the name of a variable
VARIABLES: Final = frozenset(
    {
        TOKEN_VARIABLE,
        "AWS_CONFIG_FILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
    }
)
"""The variables that trusted work may be handed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFiles:
    """Where the files of an attempt are, and the variables that its process has meanwhile."""

    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    region: str = ""
    endpoint: str = ""
    """Where the store is, if it is not AWS's own."""
    has_credentials: bool = False
    lacks: str = ""
    """What the credentials do not hold, in words; empty if they hold all of the attempt's."""
    dispatchers: tuple[str, ...] = ()
    """The internal listeners that the token may be shown to."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Folders of this machine for outputs that are in a bucket, by their names: what is in them
    when the work has ended well is sent there."""

    @property
    def token(self) -> str:
        """The capability token as it is now."""
        return Path(self.folder, TOKEN).read_text("ascii").strip()

    @property
    def credentials(self) -> TaskCredentials | None:
        """The credentials as they are now; None where none are minted."""
        if not self.has_credentials:
            return None
        said: dict[str, Any] = json.loads(Path(self.folder, CREDENTIALS).read_text("utf-8"))
        return TaskCredentials(
            access_key=said["AccessKeyId"],
            secret_key=said["SecretAccessKey"],
            session_token=said["SessionToken"],
            expires_at=datetime.fromisoformat(said["Expiration"]),
            region=self.region,
            endpoint=self.endpoint,
            lacks=self.lacks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCredentials:
    """Credentials for prefixes that an attempt reads and writes, and for nothing else."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime
    """When they end; by then the task's are others, so read them anew when you need them."""
    region: str = ""
    endpoint: str = ""
    lacks: str = ""
    """Which of the attempt's prefixes they are not for, and what to do, in words; most often
    nothing. There is no room for many of them in one policy of STS."""

    def for_boto3(self) -> dict[str, str]:
        """What a client of boto3 is made with: `boto3.client("s3", **credentials.for_boto3())`."""
        said = {
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_session_token": self.session_token,
            "region_name": self.region,
            "endpoint_url": self.endpoint,
        }
        return {name: value for name, value in said.items() if value}


HIDDEN_CHARACTERS_MIN: Final = 6
"""A value that is shorter than this is not looked for in texts."""
HIDDEN: Final = "***"
_FORMS_MAX: Final = 1000


class Secrets(Mapping[str, str]):
    """Values by name; for any other name it is told which there are. Shows no values."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(sorted((values or {}).items()))

    def __getitem__(self, name: str) -> str:
        if name not in self._values:
            there = f"it has {', '.join(self)}" if self else "it has none"
            raise KeyError(f"The job has no secret {name!r}; {there}.")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self)})"


def hidden(text: str, values: Iterable[str]) -> str:
    """The text with `***` where one of these values was."""
    forms = sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)
    for form in forms[:_FORMS_MAX]:
        text = text.replace(form, HIDDEN)
    for form in forms[:_FORMS_MAX]:
        text = _without_beginning(text, form)
    return text


def print_error(error: BaseException, values: Iterable[str]) -> None:
    """Print an error with its traceback, as Python does, without these values."""
    said = "".join(traceback.format_exception(error))
    sys.stderr.write(hidden(said, values))


def _forms(value: str) -> Iterator[str]:
    """A value in all forms that are looked for."""
    for piece in {value, value.strip(), *value.splitlines(), *_leaves(value)}:
        forms = (piece, repr(piece)[1:-1], json.dumps(piece)[1:-1], quote(piece), quote_plus(piece))
        for form in forms:
            if len(form) >= HIDDEN_CHARACTERS_MIN and not form.isspace():
                yield form


def _leaves(value: str) -> Iterator[str]:
    """The texts of a JSON object, which is how several secrets are kept in one."""
    if not value.lstrip().startswith("{"):
        return
    try:
        waiting: list[object] = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as fields:
                waiting.extend(fields.values())
            case list() as items:
                waiting.extend(items)


def _without_beginning(text: str, form: str) -> str:
    """The text without the beginning of a value that was cut off with the end of the text."""
    first = form[:HIDDEN_CHARACTERS_MIN]
    place = text.find(first, max(0, len(text) - len(form) + 1))
    while place >= 0:
        if form.startswith(text[place:]):
            return f"{text[:place]}{HIDDEN}"
        place = text.find(first, place + 1)
    return text
