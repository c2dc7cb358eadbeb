"""What one attempt is given that no other may see: its token and its credentials, in files.

The worker makes a folder for the attempt that only its process can read, and replaces the files in
it by renaming (`penstock.worker.handing`). So whoever reads one finds a whole one, and the newest:

    token               the capability token
    credentials.json    credentials for the attempt's own prefixes, as `credential_process` of
                        AWS's tools prints them; where credentials are minted
    aws.config          tells AWS's tools to read that file

`Handed` says where they are, and which variables the process has while it runs the attempt. Read
by `penstock.runtimes.task`. Nothing is kept here, and no value is in a repr.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

TOKEN: Final = "token"  # noqa: S105 - the name of a file
CREDENTIALS: Final = "credentials.json"
CONFIG: Final = "aws.config"
OUTPUTS: Final = "outputs"
"""A folder with one for each output that is in a bucket."""
TEMPORARY: Final = "tmp"
"""A folder of untrusted work for what it needs on this machine."""
TOKEN_VARIABLE: Final = "PENSTOCK_TASK_TOKEN_FILE"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """Where the files of an attempt are, and the variables that its process has meanwhile."""

    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    region: str = ""
    endpoint: str = ""
    """Where the store is, if it is not AWS's own."""
    has_credentials: bool = False
    lacks: str = ""
    """What the credentials do not hold, in words; empty if they hold all of the attempt's."""
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
